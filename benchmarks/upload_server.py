"""The agent's side of saves: `python -m benchmarks.upload_server SOCKET FOLDER`, until its input ends.

Follows the staging of shards, uploads them and commits, with the agent's own code, at normal priority: nothing else
runs beside it here. Like an agent it is one process for all ranks and loads no torch. Each request is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from orchestrator.agent import uploads
from orchestrator.checkpoint.save import ShardPlace, commit
from orchestrator.checkpoint.slots import ControlBlock, SlotState
from orchestrator.clock import SystemClock
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import StoreError
from orchestrator.storage.opening import open_store

RANKS_MAX = 8


class Server:
    """Answers the ranks of one job."""

    def __init__(self, folder: str) -> None:
        uploads.UPLOAD_NICE = 0
        self._store = open_store(folder)
        self._uploads = uploads.Uploads(self._store, SystemClock(), RANKS_MAX)
        self._controls: dict[str, ControlBlock] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One rank, for as long as it lives."""
        while line := await reader.readline():
            request = json.loads(line)
            answer = await (self._commit(request) if "commit" in request else self._upload(request))
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async def _commit(self, request: dict[str, Any]) -> bool:
        checkpoint = CheckpointId(generation=request["generation"], step=request["commit"])
        return await asyncio.to_thread(commit, self._store, checkpoint)

    async def _upload(self, request: dict[str, Any]) -> int:
        control = self._controls.get(request["control"])
        if control is None:
            control = self._controls[request["control"]] = ControlBlock.open(Path(request["control"]))
        index, step = request["index"], request["step"]
        place = ShardPlace(
            job=request["job"],
            checkpoint=CheckpointId(generation=control.generation, step=step),
            rank=control.rank,
            world_size=control.world_size,
            absent=(),
        )

        def there() -> tuple[int, bool]:
            slot, there_bytes = control.slot(index), control.there_bytes(index, step)
            if slot.step != step or slot.state is SlotState.FREE:
                raise StoreError(place.shard_key, "its slot was used again")
            return (slot.size_bytes, True) if slot.state is SlotState.STAGED else (there_bytes, False)

        made = await self._uploads.start(place, Path(request["slot"]), there)
        return made.size_bytes


async def serve(socket: str, folder: str) -> None:
    """Says when it listens."""
    server = await asyncio.start_unix_server(Server(folder).serve, socket)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

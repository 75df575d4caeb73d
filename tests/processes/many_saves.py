"""Fifty saves of a `fully_shard` model and how much memory each process has after each: `python -m … FOLDER`.

Two ranks over gloo and, in a third process without torch, the agent's uploads and commits. Prints a JSON object: the
state that a rank holds, in bytes, and for each process its resident memory after each save.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from orchestrator.agent.uploads import Uploads
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.save import ShardPlace, commit
from orchestrator.clock import SystemClock
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.filesystem import FolderStore
from tests.processes import forks

SAVES = 50
RANKS = 2
WIDTH = 512
LAYERS = 4


def resident_bytes() -> int:
    """Of this process, the mapped files in memory among them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def staged(size_bytes: int) -> tuple[int, bool]:
    """All of the shard is there."""
    return size_bytes, True


def agent(folder: Path, asked: list[TextIO], answers: list[TextIO]) -> dict[str, Any]:
    """Uploads what the ranks have staged, commits, and deletes the checkpoint before; as an agent does, in its way."""
    store = FolderStore(folder / "store")
    uploads = Uploads(store, SystemClock(), RANKS)
    seen: list[int] = []

    async def save(step: int) -> None:
        checkpoint = CheckpointId(generation=1, step=step)
        running = []
        for rank, lines in enumerate(asked):
            path, size_bytes = json.loads(lines.readline())
            place = ShardPlace(job="job", checkpoint=checkpoint, rank=rank, world_size=RANKS, absent=())
            running.append(uploads.start(place, Path(path), partial(staged, size_bytes)))
        await asyncio.gather(*running)
        assert commit(store, checkpoint)
        before = fmt.folder_key(CheckpointId(generation=1, step=step - 1)) + "/"
        for entry in list(store.entries(before)):
            store.delete(entry.key)

    async def all_saves() -> None:
        for step in range(1, SAVES + 1):
            await save(step)
            seen.append(resident_bytes())
            for lines in answers:
                print("done", file=lines, flush=True)

    asyncio.run(all_saves())
    uploads.close()
    return {"agent": seen}


def worker(rank: int, folder: Path, ask: TextIO, answer: TextIO) -> dict[str, Any]:
    """Trains and stages, beside the next step where that is safe."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from orchestrator.checkpoint.layout import local_part
    from orchestrator.training.boundary import Order
    from tests.training import states

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        torch.autograd.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    place = states.launch(folder, rank=rank, world_size=RANKS, local_world_size=RANKS)
    stager = states.state_of(place, model=model, optimizer=optimizer).stager
    stager.plan()
    seen, sizes = list[int](), list[int]()

    def finish(size_bytes: int | None, copy_ns: int) -> None:
        assert size_bytes
        sizes.append(size_bytes)

    for number in range(1, SAVES + 1):
        stager.stage(Order(slot=number % 2, step=number, absent=(), may_overlap=True), finish, lambda there_bytes: None)
        step()
        stager.join()
        print(json.dumps([str(place.slot_paths[number % 2]), sizes.pop()]), file=ask, flush=True)
        assert answer.readline() == "done\n"
        seen.append(resident_bytes())
    dist.destroy_process_group()
    return {"state": 3 * sum(local_part(one).nbytes for one in model.parameters()), f"rank {rank}": seen}


def import_torch() -> None:
    """Once for both ranks: that is much of what this takes."""
    for module in ("torch.distributed.fsdp", "tests.training.states"):
        importlib.import_module(module)


def fork(act: Callable[[], dict[str, Any]], result: TextIO) -> int:
    """A process that writes its result as one line; 1 if it fails."""
    return forks.fork(lambda: print(json.dumps(act()), file=result, flush=True))


def pipe() -> tuple[TextIO, TextIO]:
    """Where to read and where to write."""
    reading, writing = os.pipe()
    return os.fdopen(reading), os.fdopen(writing, "w")


def main(folder: Path) -> int:
    """All three processes; if one fails, all end."""
    asks, answers, results = [pipe() for _ in range(RANKS)], [pipe() for _ in range(RANKS)], pipe()
    acts: list[Callable[[], dict[str, Any]]] = [
        partial(agent, folder, [reading for reading, _ in asks], [writing for _, writing in answers]),
        *(partial(worker, rank, folder, asks[rank][1], answers[rank][0]) for rank in range(RANKS)),
    ]
    left = {fork(acts.pop(0), results[1])}
    import_torch()
    left |= {fork(act, results[1]) for act in acts}
    results[1].close()
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            return 1
    merged: dict[str, Any] = {}
    for line in results[0]:
        merged |= json.loads(line)
    print(json.dumps(merged))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

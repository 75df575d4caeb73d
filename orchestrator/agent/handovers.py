"""The peer's side of a hand-over: copy a shard out of the memory of a node that will go, upload it in that rank's name.

The other side is `agent.staged`; who takes what is decided in `core.handovers`. Used by `agent.node`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from orchestrator.agent.ports import AgentPorts
from orchestrator.agent.settings import AgentSettings
from orchestrator.agent.staged import copy_shard
from orchestrator.agent.uploads import Uploads
from orchestrator.checkpoint.save import ShardPlace
from orchestrator.core.messages import CheckpointId, Event, HandedOver, HandOver, Uploaded, UploadFailed
from orchestrator.errors import FormatError, StoreError


class HandOvers:
    """Takes shards of other nodes' ranks; what it copied is removed once it is durable, or has failed."""

    def __init__(
        self, settings: AgentSettings, ports: AgentPorts, uploads: Uploads, post: Callable[[Event], None]
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._uploads = uploads
        self._post = post

    async def take(self, action: HandOver) -> None:
        """Copy, say that this node holds the shard, upload it."""
        checkpoint = CheckpointId(generation=action.generation, step=action.step)
        path = self._settings.staging / f"held-{checkpoint}-r{action.rank:05d}"
        started = self._ports.clock.monotonic()
        try:
            with self._ports.open_peer(action.source_url, self._settings.token) as peer:
                size_bytes = await asyncio.to_thread(copy_shard, peer, action, path)
        except (StoreError, FormatError, OSError) as error:
            self._failed(action, f"it could not be copied from {action.source_url}: {error}")
            return
        self._post(
            HandedOver(
                node=self._settings.node,
                generation=action.generation,
                step=action.step,
                rank=action.rank,
                size_bytes=size_bytes,
                seconds=self._ports.clock.monotonic() - started,
            )
        )
        try:
            await self._upload(action, checkpoint, path, size_bytes)
        finally:
            path.unlink(missing_ok=True)

    async def _upload(self, action: HandOver, checkpoint: CheckpointId, path: Path, size_bytes: int) -> None:
        place = ShardPlace(
            job=self._settings.job,
            checkpoint=checkpoint,
            rank=action.rank,
            world_size=action.world_size,
            absent=action.absent,
        )
        try:
            made = await self._uploads.start(place, path, lambda: (size_bytes, True))
        except (StoreError, FormatError, OSError) as error:
            self._failed(action, str(error))
            return
        self._post(
            Uploaded(
                node=self._settings.node,
                generation=action.generation,
                step=action.step,
                rank=action.rank,
                size_bytes=made.size_bytes,
                seconds=made.seconds,
            )
        )

    def _failed(self, action: HandOver, reason: str) -> None:
        self._post(
            UploadFailed(
                node=self._settings.node,
                generation=action.generation,
                step=action.step,
                rank=action.rank,
                reason=reason,
            )
        )

"""Copy a rank's part of the state into a slot: a file in memory laid out as the safetensors file it will become.

Blocking: the copy is complete when `stage` returns. Called by `training.session` at a step boundary.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.layout import TORCH_DTYPES, ShardPlan
from orchestrator.checkpoint.save import METADATA_KEY
from orchestrator.checkpoint.slots import build_header
from orchestrator.errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What travels in the shard's header beside the tensors."""

    values: Any
    rank_values: Any
    gate: Mapping[str, Any]

    def text(self, plan: ShardPlan) -> str:
        """The JSON text of the header's metadata entry."""
        return json.dumps(
            {
                "parts": plan.parts(),
                "values": self.values,
                "rank_values": self.rank_values,
                "gate": self.gate,
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    def size_bytes(self) -> int:
        """Room that the values need inside a JSON string."""
        return len(json.dumps(json.dumps([self.values, self.rank_values, self.gate])))


class SlotFile:
    """One slot's file, mapped. The space is reserved before training needs it; the file outlives the worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None

    @property
    def capacity_bytes(self) -> int:
        """Reserved bytes."""
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, size_bytes: int) -> None:
        """Make the slot at least that large. Raises RefusedError saying how much memory is missing where."""
        if size_bytes <= self.capacity_bytes:
            return
        self._bytes = None
        self._memory = None
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size_bytes)
            self._memory = mmap.mmap(handle, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            folder, needed = self.path.parent, size_bytes / 2**20
            free = shutil.disk_usage(folder).free / 2**20
            raise RefusedError(
                f"{folder} has {free:.0f} MiB left, a staging slot needs {needed:.0f} MiB: give it more "
                "(for /dev/shm: mount -o remount,size=…, or a memory volume) or name another folder with --staging"
            ) from error
        finally:
            os.close(handle)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def stage(self, plan: ShardPlan, tensors: Mapping[str, torch.Tensor], metadata: Metadata) -> None:
        """Write header and tensors. Raises ProtocolError if the header outgrew its reserved room: plan anew."""
        header = build_header(plan.entries(), {METADATA_KEY: metadata.text(plan)}, plan.header_bytes)
        self.reserve(plan.size_bytes)
        assert self._memory is not None
        assert self._bytes is not None
        self._memory[: plan.header_bytes] = header
        targets, sources = [], []
        for chunk in plan.chunks:
            if chunk.start == chunk.stop:
                continue
            first, last = plan.header_bytes + chunk.first_byte, plan.header_bytes + chunk.last_byte
            targets.append(self._bytes[first:last].view(TORCH_DTYPES[chunk.spec.dtype]))
            sources.append(tensors[chunk.spec.name].detach().reshape(-1)[chunk.start : chunk.stop])
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

"""What a new gang takes over from the one before on its node: slot files, whose memory is warm, and shards in them.

A shard of the base stays in its slot until the new gang trains, so that a restart reads memory and not the store; every
other file becomes a free slot. Used by `agent.gang`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.checkpoint.launch import HeldShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """Slot files of a gang that has ended."""

    held: tuple[HeldShard, ...] = ()
    spare: tuple[Path, ...] = ()

    def move(self, slots: Iterable[tuple[Path, Path]]) -> Iterator[HeldShard | None]:
        """Give each pair of slots a spare file for the first and, if there is one, a held shard for the second.

        Yields for each pair what its second slot holds. What is left over is removed.
        """
        held, spare = list(self.held), list(self.spare)
        for first, second in slots:
            shard = held.pop(0) if held else None
            if shard is not None:
                shard.path.rename(second)
                shard = HeldShard(
                    checkpoint=shard.checkpoint, rank=shard.rank, path=second, size_bytes=shard.size_bytes
                )
            for path in (first,) if shard is not None else (first, second):
                if spare:
                    spare.pop(0).rename(path)
            yield shard
        for path in (*(shard.path for shard in held), *spare):
            os.unlink(path)

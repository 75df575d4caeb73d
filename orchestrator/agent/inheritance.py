"""What a new gang takes over from the one before on its node: slot files, whose memory is warm, and shards in them.

A shard of the base stays in its slot until the new gang trains, so that a restart reads memory and not the store; every
other file becomes a free slot. Used by `agent.gang`.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
        held = [shard for shard in self.held if is_file(shard.path)]
        spare = [path for path in self.spare if is_file(path)]
        for first, second in slots:
            shard = held.pop(0) if held else None
            if shard is not None:
                shard.path.rename(second)
                shard = replace(shard, path=second)
            for path in (first,) if shard is not None else (first, second):
                if spare:
                    spare.pop(0).rename(path)
            yield shard
        for path in (*(shard.path for shard in held), *spare):
            remove(path)


def is_file(path: Path) -> bool:
    """Whether there is a file as a slot must be: somebody may have tidied it away, or put something else there."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def remove(path: Path) -> None:
    """Whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

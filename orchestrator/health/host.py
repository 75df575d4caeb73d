"""The host under the workers: room on the disks that the job writes to, and whether memory is short.

`read_host` may wait for a file system that hangs: call it in a thread. `judge` is pure, and remembers by what it is
given: what was troubled has to get well by a margin, so that a value at the limit is not told again and again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.health.trouble import Trouble

FREE_SHARE_MIN = 0.05
FREE_BYTES_ENOUGH = 20 << 30
"""So much room is enough however large the disk is."""
STALLED_PERCENT_MAX = 10.0
"""Of the last minute, in which all processes stood still for want of memory."""
WELL_FACTOR = 2.0
MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A folder's file system."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """What was seen; None and missing folders: it could not be."""

    rooms: Mapping[str, Room]
    stalled_percent: float | None


def read_host(folders: Sequence[Path], pressure: Path = Path("/proc/pressure/memory")) -> HostReading:
    """Look once."""
    rooms: dict[str, Room] = {}
    for folder in folders:
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            continue
        rooms[str(folder)] = Room(free_bytes=usage.free, total_bytes=usage.total)
    return HostReading(rooms=rooms, stalled_percent=_stalled_percent(pressure))


def _stalled_percent(path: Path) -> float | None:
    """The line "full" of the kernel's pressure information; absent in kernels that are built or started without it."""
    try:
        lines = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    values = (
        word.removeprefix("avg60=") for line in lines if line[:1] == ["full"] for word in line if "avg60=" in word
    )
    found = next(values, "")
    return float(found) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?", found) else None


def judge(reading: HostReading, troubled: Collection[str]) -> dict[str, Trouble]:
    """What is wrong, by its name (a folder, or "memory"); `troubled` are those of last time."""
    problems: dict[str, Trouble] = {}
    for folder, room in reading.rooms.items():
        least = min(FREE_SHARE_MIN * room.total_bytes, FREE_BYTES_ENOUGH)
        if room.free_bytes < least * (WELL_FACTOR if folder in troubled else 1.0):
            share = 100 * room.free_bytes / max(room.total_bytes, 1)
            free = f"{room.free_bytes / 2**30:.1f} GiB are free ({share:.1f} %)"
            problems[folder] = Trouble(words=f"{folder} is nearly full: {free}")
    stalled = reading.stalled_percent
    most = STALLED_PERCENT_MAX / (WELL_FACTOR if MEMORY in troubled else 1.0)
    if stalled is not None and stalled > most:
        words = f"memory is short: in {stalled:.0f} % of the last minute every process waited for it"
        problems[MEMORY] = Trouble(words=words)
    return problems

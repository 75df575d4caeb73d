"""Did the kernel kill for want of memory? What a process's memory cgroup counts; cgroup v2 and v1.

Each kill is counted in the victim's own cgroup before the victim is gone, whether the limit was the cgroup's, one
above it, or the machine's.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def counter_of(pid: int, root: Path = ROOT) -> Path | None:
    """The file that counts kills in the process's memory cgroup; None where there is none to be seen."""
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    base = root / "sys/fs/cgroup"
    candidates = [
        *(base / "memory" / path.lstrip("/") / "memory.oom_control" for _, names, path in groups if names == "memory"),
        *(base / path.lstrip("/") / "memory.events" for _, names, path in groups if names == ""),
        base / "memory.events",  # a container sees its own cgroup as the root, under a path of the host's
        base / "memory" / "memory.oom_control",
    ]
    return next((path for path in candidates if kills(path) is not None), None)


def kills(counter: Path) -> int | None:
    """Processes of this cgroup that were killed for want of memory, so far."""
    try:
        pairs = [line.split() for line in counter.read_text().splitlines()]
    except OSError:
        return None
    return next(
        (int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill" and pair[1].isdigit()), None
    )

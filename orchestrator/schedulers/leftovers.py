"""Nodes of this host that outlive their supervisor: what is written down of them, and what is left of them later.

One small file in the job's state folder, rewritten whenever a node comes or goes. `schedulers.local` writes it; the
next supervisor of the job takes the nodes back if they were started on the same terms, or ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

END_SECONDS = 5.0


def node_name(number: int) -> str:
    """What the node with this number is called."""
    return f"node-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedNode:
    """A node as it was when it was started; pid and start time together name one process for ever."""

    number: int
    pid: int
    started_ticks: int | None
    staging: str

    @property
    def name(self) -> str:
        """The node's name."""
        return node_name(self.number)

    def is_alive(self) -> bool:
        """Whether that very agent still runs."""
        return self.started_ticks is not None and start_ticks(self.pid) == self.started_ticks

    def end(self) -> None:
        """Kill what is left of it and remove its memory; waits for a limited time."""
        if self.is_alive():
            kill_session(self.pid)
            until = time.monotonic() + END_SECONDS
            while self.is_alive() and time.monotonic() < until:
                time.sleep(0.01)
        shutil.rmtree(self.staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # the run's folder, if this was the last of its nodes
            Path(self.staging).parent.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """All nodes of one supervisor: who claimed generations through them, and on which terms they were started."""

    claimant: str
    terms: str
    nodes: tuple[StartedNode, ...]


def read_leftovers(path: Path) -> Leftovers:
    """What the file says; nothing at all if it is not there or not whole."""
    try:
        found = json.loads(path.read_text())
        nodes = tuple(_started_node(**node) for node in found["nodes"])
        return Leftovers(claimant=str(found["claimant"]), terms=str(found["terms"]), nodes=nodes)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Leftovers(claimant="", terms="", nodes=())


def _started_node(*, number: object, pid: object, started_ticks: object, staging: object) -> StartedNode:
    """Raises ValueError for what was never written here: folders are removed and processes killed by it."""
    if not (isinstance(number, int) and isinstance(pid, int) and isinstance(started_ticks, int | None)):
        raise ValueError("a node's number, pid and start are numbers")
    if number < 0 or pid <= 1 or not isinstance(staging, str) or not Path(staging).is_absolute():
        raise ValueError("a node has a number, a process and a folder")
    return StartedNode(number=number, pid=pid, started_ticks=started_ticks, staging=staging)


def write_leftovers(path: Path, *, claimant: str, terms: str, nodes: Iterable[StartedNode]) -> None:
    """Replace the file. A full disk does not matter: only the next supervisor would miss it."""
    draft = path.with_suffix(".draft")
    with contextlib.suppress(OSError):
        body = {"claimant": claimant, "terms": terms, "nodes": [asdict(node) for node in nodes]}
        draft.write_text(json.dumps(body))
        draft.rename(path)


def kill_session(leader: int) -> None:
    """SIGKILL to every process of a node: workers and what they started are in groups of their own, in one session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(path.parent.name), signal.SIGKILL)


def start_ticks(pid: int) -> int | None:
    """When a process was started (clock ticks since boot); None if there is no such process. Tells a reused pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])

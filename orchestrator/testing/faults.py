"""Faults at named points of real processes: `at("after-shard-upload").rank(1).step(40).kill(once=marker)`.

`stop` instead of `kill` makes the process stand still there until somebody sends it SIGCONT.

Points are where the code calls `telemetry.reached`. A fault is counted in its marker file, so that a restarted
process does not meet it again. Users test their own scripts with it; nothing in the package installs a fault.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.telemetry import set_point_hook

POINTS = (
    "before-stage",
    "while-staging",
    "after-stage",
    "before-shard-upload",
    "after-shard-upload",
    "after-receipt",
    "before-index",
    "after-index",
    "after-base",
    "after-retired",
    "after-delete",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Kill or stop this process when it reaches a point with these values, once."""

    point: str
    where: Mapping[str, int] = field(default_factory=dict)
    marker: Path | None = None
    signal: int = signal.SIGKILL

    def rank(self, rank: int) -> Fault:
        """Only for this rank."""
        return replace(self, where={**self.where, "rank": rank})

    def step(self, step: int) -> Fault:
        """Only at this step."""
        return replace(self, where={**self.where, "step": step})

    def kill(self, *, once: Path) -> None:
        """From now on: SIGKILL to this process when the point is reached; the marker file says that it happened."""
        set_point_hook(replace(self, marker=once).act)

    def stop(self, *, once: Path) -> None:
        """From now on: SIGSTOP to this process when the point is reached; the marker file says that it happened."""
        set_point_hook(replace(self, marker=once, signal=signal.SIGSTOP).act)

    def act(self, point: str, where: Mapping[str, int]) -> None:
        """Called at every named point."""
        if point != self.point or any(where.get(name) != value for name, value in self.where.items()):
            return
        assert self.marker is not None
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        signal.pthread_kill(threading.get_ident(), self.signal)  # this very thread does nothing more


def at(point: str) -> Fault:
    """A fault at a named point. Raises ValueError for a point that does not exist."""
    if point not in POINTS:
        raise ValueError(f"{point!r} is not one of {POINTS}")
    return Fault(point=point)


def parse(text: str) -> Fault:
    """A fault from text, as a command line carries it: "after-shard-upload rank=1 step=40"."""
    point, *conditions = text.split()
    fault = at(point)
    for condition in conditions:
        name, _, value = condition.partition("=")
        fault = replace(fault, where={**fault.where, name: int(value)})
    return fault

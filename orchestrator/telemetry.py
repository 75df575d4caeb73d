"""What happened, as typed records: one JSON line each, and a line for people. Also the named points for rehearsals.

Sinks are plain callables, so that the supervisor, the demo and tests can listen. No prometheus here: counters are
kept by `supervisor.server` from the same records.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

LINE_CHARACTERS_MAX = 2000
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One event of a job's life."""

    wall_seconds: float
    monotonic_seconds: float
    job: str
    kind: str
    reason: str
    node: str | None = None
    generation: int | None = None
    step: int | None = None
    rank: int | None = None
    facts: Mapping[str, Value] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Fields for JSON; those that do not apply are left out."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in plain.items() if value is not None and value != {}}

    def line(self, start_seconds: float) -> str:
        """One line for people: when, where, what, why."""
        where = " ".join(
            part
            for part in (
                f"g{self.generation}" if self.generation is not None else "",
                f"step {self.step}" if self.step is not None else "",
                self.node or "",
            )
            if part
        )
        since = self.monotonic_seconds - start_seconds
        return f"{since:8.2f} s  {self.kind:<18} {where:<22} {one_line(self.reason)}"


Sink = Callable[[EventRecord], None]


def one_line(text: str) -> str:
    """Text from outside (a worker's last words, a name in a store) as one line that cannot steer a terminal."""
    short = text if len(text) <= LINE_CHARACTERS_MAX else text[:LINE_CHARACTERS_MAX] + "…"
    return "".join(character if character.isprintable() else " " for character in short)


class EventLog:
    """Hands every record to every sink, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)

    def emit(self, record: EventRecord) -> None:
        """Record one event."""
        for sink in self._sinks:
            sink(record)


def json_lines_sink(path: Path) -> Sink:
    """Append each record as one JSON line, flushed, so a crash loses none. A full disk ends the file, not the job."""
    stream: TextIO | None = None
    broken = False

    def write(record: EventRecord) -> None:
        nonlocal stream, broken
        try:
            if stream is None and not broken:
                stream = path.open("a", encoding="utf-8", buffering=1)
            if stream is not None and not broken:
                stream.write(json.dumps(record.as_dict(), separators=(",", ":")) + "\n")
        except OSError as error:
            broken = True
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{path}: {error.strerror}; events are not written there any more\n")

    return write


def text_sink(stream: TextIO, start_seconds: float) -> Sink:
    """One line for people for each record."""

    def write(record: EventRecord) -> None:
        stream.write(record.line(start_seconds) + "\n")
        stream.flush()

    return write


PointHook = Callable[[str, Mapping[str, int]], None]
_point_hook: PointHook | None = None


def set_point_hook(hook: PointHook | None) -> None:
    """Let `orchestrator.testing.faults` act at named points of this process; None takes it away."""
    global _point_hook  # noqa: PLW0603 (one hook for the process is the point)
    _point_hook = hook


def reached(point: str, **where: int) -> None:
    """A named point was reached, for instance `reached("after-shard-upload", rank=1, step=40)`."""
    if _point_hook is not None:
        _point_hook(point, where)

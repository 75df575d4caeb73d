"""Spot traces: when which node was there. Two formats of text become one list of changes.

What it is not: it decides nothing about jobs. Called by `cli.simulate`; `model` and `periodic` replay what it returns.

- **events**: one line `ms,add|remove,node` per change, times in milliseconds from any start.
- **counts**: one line `date, time, nodes` per observation (`2021-12-11, 11:11:30, 55`). Counts name no nodes, so nodes
  are made up: a higher count adds new ones, a lower one takes those that have been there longest. Those are members of
  the running gang, so each loss interrupts it: the pessimistic reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.errors import ConfigError

MICROSECONDS = 1_000_000
"""Per second. The simulation counts time in whole microseconds, so that sums are exact."""

SIZE_BYTES_MAX = 64 << 20
LINES_MAX = 1_000_000
NODES_MAX = 4096
DURATION_DAYS_MAX = 366
_NAME_CHARACTERS_MAX = 200
_DIGITS_MAX = 15
_COUNT_LINE = re.compile(r"(\d{4}-\d{2}-\d{2})\s*,\s*(\d{2}:\d{2}:\d{2})\s*,\s*(\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A node appears, or is gone. `at_us`: microseconds since the trace began."""

    at_us: int
    node: str
    appears: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Changes in order of time; those of one instant in the file's order."""

    name: str
    changes: tuple[Change, ...]
    duration_us: int

    @property
    def loss_instants(self) -> int:
        """Different times at which at least one node went."""
        return len({change.at_us for change in self.changes if not change.appears})

    @property
    def losses(self) -> int:
        """Nodes that went."""
        return sum(not change.appears for change in self.changes)

    @property
    def mean_seconds_between_losses(self) -> float | None:
        """Duration over loss instants; None if nothing was ever lost."""
        return self.duration_us / MICROSECONDS / self.loss_instants if self.loss_instants else None

    @property
    def peak_nodes(self) -> int:
        """The most nodes that were there at one time."""
        live, peak = 0, 0
        for change in self.changes:
            live += 1 if change.appears else -1
            peak = max(peak, live)
        return peak

    def node_us(self, nodes_max: int) -> int:
        """Node-microseconds of which a job of at most `nodes_max` nodes can make use."""
        total, live, since = 0, 0, 0
        for change in self.changes:
            total += min(live, nodes_max) * (change.at_us - since)
            live, since = live + (1 if change.appears else -1), change.at_us
        return total + min(live, nodes_max) * (self.duration_us - since)


def read_trace(path: Path) -> Trace:
    """Read a trace of either format. Raises ConfigError, with the number of the first bad line."""
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > SIZE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {SIZE_BYTES_MAX >> 20} MiB, the most that a trace may be")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8 (byte {error.start})") from error
    try:
        return parse_trace(text, name=path.name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_trace(text: str, *, name: str) -> Trace:
    """Parse a trace; the first line that is not empty tells the format. Raises ConfigError."""
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError("holds no lines: expected ms,add|remove,node or date, time, nodes")
    if len(lines) > LINES_MAX:
        raise ConfigError(f"holds {len(lines)} lines, more than the {LINES_MAX} that a trace may have")
    parse: Callable[[Iterable[tuple[int, str]]], tuple[list[Change], int]]
    parse = _counts if _COUNT_LINE.fullmatch(lines[0][1]) else _events
    changes, duration_us = parse(lines)
    if duration_us <= 0:
        raise ConfigError("covers no time: all lines are of one instant")
    return Trace(name=name, changes=tuple(changes), duration_us=duration_us)


def _events(lines: Iterable[tuple[int, str]]) -> tuple[list[Change], int]:
    live: set[str] = set()
    changes: list[Change] = []
    start_ms, last_ms = -1, -1
    for number, line in lines:
        at_ms, appears, node = _event(number, line)
        if at_ms < last_ms:
            raise _bad(number, line, f"goes back in time, the line before is of {last_ms} ms")
        start_ms, last_ms = (at_ms if start_ms < 0 else start_ms), at_ms
        if appears == (node in live):
            raise _bad(number, line, f"{node} is {'already' if appears else 'not'} there")
        (live.add if appears else live.remove)(node)
        _check_size(number, line, len(live), (at_ms - start_ms) // 1000)
        changes.append(Change(at_us=(at_ms - start_ms) * 1000, node=node, appears=appears))
    return changes, (last_ms - start_ms) * 1000


def _event(number: int, line: str) -> tuple[int, bool, str]:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3:
        raise _bad(number, line, "expected ms,add|remove,node")
    at, kind, node = fields
    if not (at.isascii() and at.isdigit() and len(at) <= _DIGITS_MAX):
        raise _bad(number, line, f"{at!r} is no time in whole milliseconds")
    if kind not in ("add", "remove"):
        raise _bad(number, line, f"{kind!r} is neither add nor remove")
    if not node or len(node) > _NAME_CHARACTERS_MAX or not node.isprintable():
        raise _bad(number, line, f"a node's name has 1 to {_NAME_CHARACTERS_MAX} printable characters")
    return int(at), kind == "add", node


def _counts(lines: Iterable[tuple[int, str]]) -> tuple[list[Change], int]:
    live: list[str] = []
    changes: list[Change] = []
    start: datetime | None = None
    named, last_us = 0, 0
    for number, line in lines:
        when, count = _count(number, line)
        start = start or when
        at_us = round((when - start).total_seconds()) * MICROSECONDS
        if at_us < last_us:
            raise _bad(number, line, "goes back in time")
        last_us = at_us
        _check_size(number, line, count, at_us // MICROSECONDS)
        gone, live = live[: max(0, len(live) - count)], live[max(0, len(live) - count) :]
        new = [f"node{named + index}" for index in range(1, count - len(live) + 1)]
        named, live = named + len(new), live + new
        changes += [Change(at_us=at_us, node=node, appears=False) for node in gone]
        changes += [Change(at_us=at_us, node=node, appears=True) for node in new]
    return changes, last_us


def _count(number: int, line: str) -> tuple[datetime, int]:
    match = _COUNT_LINE.fullmatch(line)
    if match is None:
        raise _bad(number, line, "expected date, time, nodes, such as 2021-12-11, 11:11:30, 55")
    try:
        when = datetime.strptime(f"{match[1]} {match[2]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError as error:
        raise _bad(number, line, "there is no such date or time") from error
    return when, int(match[3])


def _check_size(number: int, line: str, nodes: int, seconds: int) -> None:
    if nodes > NODES_MAX:
        raise _bad(number, line, f"{nodes} nodes at one time, more than the {NODES_MAX} that a job may have")
    if seconds > DURATION_DAYS_MAX * 86_400:
        raise _bad(number, line, f"more than {DURATION_DAYS_MAX} days after the first line")


def _bad(number: int, line: str, problem: str) -> ConfigError:
    shown = line if len(line) <= 60 else line[:59] + "…"
    return ConfigError(f"line {number}: {problem}: {shown!r}")


def removal_times(changes: Sequence[Change]) -> dict[int, int]:
    """For each change that brings a node (by its place in the list): when that node goes, if it does."""
    open_at: dict[str, int] = {}
    found: dict[int, int] = {}
    for index, change in enumerate(changes):
        if change.appears:
            open_at[change.node] = index
        else:
            found[open_at.pop(change.node)] = change.at_us
    return found

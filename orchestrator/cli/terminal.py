"""How verbs talk: data on standard output, everything else on standard error.

Text from outside (reasons, node names, problems) may hold anything: control characters are replaced, markup is off.
Used by the verbs only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 4096
"""Width of tables that nobody looks at: lines that a program reads are never wrapped."""


def output() -> Console:
    """Standard output, as it is now."""
    return _console(stderr=False)


def talk() -> Console:
    """Standard error, as it is now."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_COLUMNS
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def say(text: str) -> None:
    """One line for people on standard error."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def print_json(value: Any) -> None:
    """Data as JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    sys.stdout.flush()


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of plain text; None becomes a dash, numbers go to the right."""
    lines = [[_cell(value) for value in row] for row in rows]
    found = Table()
    for column, header in enumerate(headers):
        right = _right(line[column] for line in lines)
        found.add_column(header, justify="right" if right else "left", overflow="fold")
    for line in lines:
        found.add_row(*line)
    return found


def facts(pairs: Iterable[tuple[str, object]]) -> Text:
    """One line for each name and value."""
    rows = [(name, _cell(value)) for name, value in pairs]
    width = max((len(name) for name, _ in rows), default=0)
    return Text("\n").join(Text.assemble((name.ljust(width), "bold"), "  ", value) for name, value in rows)


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    return Text("—" if value is None else printable(str(value)))


def _right(column: Iterable[Text]) -> bool:
    words = [cell.plain for cell in column]
    return any(words) and all(word[:1].isdigit() or word in ("", "—") for word in words)


def printable(text: str) -> str:
    """The text in one line, without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split()))


def size_text(size_bytes: float) -> str:
    """A number of bytes for people."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration_text(seconds: float | None) -> str | None:
    """A duration for people; None stays None."""
    if seconds is None:
        return None
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"

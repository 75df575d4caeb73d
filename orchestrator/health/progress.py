"""What a process does, as the kernel sees it: its state, who holds it, and the processor time of all it started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STATE, _PARENT, _USER, _SYSTEM, _REAPED_USER, _REAPED_SYSTEM = 0, 1, 11, 12, 13, 14
"""Fields of /proc/PID/stat after the name's closing bracket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """One process at one moment."""

    state: str
    """The kernel's letter for its main thread: R, S, D, T (stopped), t (traced); empty: it is gone."""
    traced: bool
    processor_seconds: float
    """Of the process, of its living descendants and of those that it has waited for."""


GONE = ProcessReading(state="", traced=False, processor_seconds=0.0)


def read_processes(pids: Sequence[int]) -> list[ProcessReading]:
    """Look once at each. Reads all of /proc: for a suspicion, not for every step."""
    numbers = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    table = {number: fields for number in numbers if (fields := _stat(number)) is not None}
    return [_reading(pid, table) for pid in pids]


def _reading(pid: int, table: Mapping[int, list[str]]) -> ProcessReading:
    if pid not in table:
        return GONE
    family, found = {pid}, True
    while found:
        children = {number for number, fields in table.items() if int(fields[_PARENT]) in family} - family
        family |= children
        found = bool(children)
    ticks = sum(int(table[member][field]) for member in family for field in (_USER, _SYSTEM))
    ticks += int(table[pid][_REAPED_USER]) + int(table[pid][_REAPED_SYSTEM])
    return ProcessReading(
        state=table[pid][_STATE], traced=_traced(pid), processor_seconds=ticks / os.sysconf("SC_CLK_TCK")
    )


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()


def _traced(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)

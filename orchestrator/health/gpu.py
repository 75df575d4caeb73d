"""NVIDIA devices: memory errors, rows that could not be replaced, heat, and whether they are still there.

Read through `nvidia-smi`, in a process of its own with a limit: the driver may hang. The judgement is pure. Written
from nvidia-smi's documentation and never run on a device; what a driver does not report is not judged.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ANSWER_SECONDS_MAX = 30.0
STATE = (
    "uuid",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_thermal_slowdown",
)
ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
Run = Callable[[Sequence[str]], str]
"""Runs a command; its output. Raises OSError or subprocess.SubprocessError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as its driver reports it; None: not reported."""

    uuid: str
    celsius: int | None
    uncorrected_errors: int | None
    """Since the driver was loaded."""
    too_hot: bool
    """The hardware has slowed it down for its heat."""
    rows_pending: bool = False
    rows_failed: bool = False


def run_command(command: Sequence[str]) -> str:
    """See `Run`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS_MAX, check=True)
    return done.stdout


def read_devices(run: Run = run_command) -> tuple[Device, ...] | None:
    """All devices; None where nvidia-smi does not answer."""
    try:
        lines = _table(run(["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader,nounits"]))
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        rows = _table(run(["nvidia-smi", f"--query-remapped-rows={','.join(ROWS)}", "--format=csv,noheader"]))
    except (OSError, subprocess.SubprocessError):
        rows = []  # drivers and devices before Ampere
    remapped = {row[0]: row for row in rows if len(row) == len(ROWS)}
    return tuple(_device(line, remapped.get(line[0])) for line in lines if len(line) == len(STATE))


def _table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _device(line: list[str], row: list[str] | None) -> Device:
    uuid, celsius, errors, hot = line
    return Device(
        uuid=uuid,
        celsius=int(celsius) if celsius.isdigit() else None,
        uncorrected_errors=int(errors) if errors.isdigit() else None,
        too_hot=hot == "Active",
        rows_pending=row is not None and row[1] not in ("0", "No", "N/A", "[N/A]"),
        rows_failed=row is not None and row[2] not in ("0", "No", "N/A", "[N/A]"),
    )


def judge_devices(now: tuple[Device, ...] | None, first: tuple[Device, ...]) -> dict[str, str]:
    """What is wrong, by the device, in words, against what was there at first."""
    if now is None:
        return (
            {"nvidia-smi": "nvidia-smi does not answer any more: the driver hangs, or a device is lost"}
            if first
            else {}
        )
    known = {device.uuid: device for device in now}
    problems: dict[str, str] = {}
    for before in first:
        device = known.get(before.uuid)
        problem = "is not there any more" if device is None else _problem(device, before)
        if problem is not None:
            problems[before.uuid] = f"device {before.uuid} {problem}"
    return problems


def _problem(device: Device, before: Device) -> str | None:
    """The worst of it."""
    errors = (device.uncorrected_errors or 0) - (before.uncorrected_errors or 0)
    if device.rows_failed:
        return "could not replace a row of its memory: it has to be exchanged"
    if errors > 0:
        return f"has had uncorrected memory errors ({errors} since this agent was started)"
    if device.rows_pending:
        return "has to be reset before a bad row of its memory is replaced"
    if device.too_hot:
        return f"was slowed down for its heat ({device.celsius} °C)"
    return None

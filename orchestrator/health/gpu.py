"""NVIDIA devices: memory errors, rows that could not be replaced, heat, and whether they are still there.

Read through `nvidia-smi`, in a process of its own with a limit: the driver may hang. The judgement is pure. Written
from nvidia-smi's documentation and never run on a device; what a driver does not report is not judged.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.health.trouble import Trouble
from orchestrator.health.xid import bus_address, needs_reset

ANSWER_SECONDS_MAX = 30.0
GIVE_UP_SECONDS = 1.0
"""A process that a driver holds does not even end by SIGKILL: nobody waits for it any longer."""
STATE = (
    "uuid",
    "pci.bus_id",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_thermal_slowdown",
)
ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
ACTION = ("uuid", "gpu_recovery_action")
GPU_IS_LOST = 15
"""nvidia-smi's exit status (NVML's error) where a device has fallen off the bus or cannot be reached."""
NO_DEVICES = "No devices were found"
_UUID = re.compile(r"GPU-\S+")
_NUMBER = re.compile(r"[0-9]{1,18}")
_LOST = re.compile(r"GPU is lost|Unable to determine the device handle for GPU|fallen off the bus")
NVIDIA_SMI = "nvidia-smi"
NO_ACTION = ("0", "No", "None", "N/A", "[N/A]", "[Not Supported]", "")
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
    action: str = ""
    """What the driver asks for to recover the device, in its words; drivers since R565."""
    address: str = ""
    """On the bus, see `xid.bus_address`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """nvidia-smi says nothing of any device."""

    words: str
    lost: bool = False
    """For the reason that a device is lost."""


Devices = tuple[Device, ...]
Answer = Devices | NoAnswer


def run_command(command: Sequence[str]) -> str:
    """See `Run`. A process that does not end within the limit is killed, and left alone if that does not help."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        output, _ = process.communicate(timeout=ANSWER_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GIVE_UP_SECONDS)
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output


def read_devices(run: Run = run_command) -> Answer:
    """All devices. Lines that are about none, such as warnings, are passed over, unless there is nothing else."""
    try:
        text = run(_query("--query-gpu", STATE))
    except (OSError, subprocess.SubprocessError) as error:
        return _no_answer(error)
    lines = [line for line in _table(text) if _UUID.fullmatch(line[0])]
    if not lines and text.strip() and NO_DEVICES not in text:
        return NoAnswer(words=f"nvidia-smi's answer is not understood: {_said(text)}")
    rows = _by_device(run, "--query-remapped-rows", ROWS)  # not for devices before Ampere
    actions = _by_device(run, "--query-gpu", ACTION)  # not by drivers before R565
    return tuple(_device(line, rows.get(line[0], ()), actions.get(line[0], ())) for line in lines)


def _query(kind: str, fields: Sequence[str]) -> list[str]:
    return [NVIDIA_SMI, f"{kind}={','.join(fields)}", "--format=csv,noheader,nounits"]


def _by_device(run: Run, kind: str, fields: Sequence[str]) -> dict[str, Sequence[str]]:
    """What only some drivers know: by the device's uuid, which is the first field."""
    try:
        lines = _table(run(_query(kind, fields)))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {line[0]: line[1:] for line in lines if len(line) == len(fields)}


def _no_answer(error: Exception) -> NoAnswer:
    if isinstance(error, subprocess.TimeoutExpired):
        return NoAnswer(words=f"nvidia-smi does not answer within {error.timeout:.0f} s: the driver may hang")
    if not isinstance(error, subprocess.CalledProcessError):
        return NoAnswer(words=f"nvidia-smi cannot be run: {error}")
    said = _said(str(error.output or ""))
    how = f"nvidia-smi exits with status {error.returncode}" + (f": {said}" if said else "")
    return NoAnswer(words=how, lost=error.returncode == GPU_IS_LOST or _LOST.search(said) is not None)


def _said(text: str) -> str:
    return " ".join(text.split())[:200]


def _table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _device(line: Sequence[str], rows: Sequence[str], action: Sequence[str]) -> Device:
    uuid, address, celsius, errors, hot = line if len(line) == len(STATE) else (line[0], "", "", "", "")
    pending, failed = rows or ("", "")
    asked = action[0] if action else ""
    return Device(
        uuid=uuid,
        celsius=_number(celsius),
        uncorrected_errors=_number(errors),
        too_hot=hot == "Active",
        rows_pending=_is_yes(pending),
        rows_failed=_is_yes(failed),
        action="" if asked in NO_ACTION else asked,
        address=bus_address(address) or "",
    )


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _is_yes(text: str) -> bool:
    """A number counts rows. What is neither yes nor a number ("[Unknown Error]") condemns nobody."""
    return text.lower() == "yes" or (_number(text) or 0) > 0


def visible(devices: Devices, names: str | None) -> Devices:
    """Those that CUDA_VISIBLE_DEVICES leaves to the workers; all, where it is not set or names parts of devices (MIG).

    Numbers are taken as nvidia-smi's, which they are where all devices are of a kind.
    """
    if names is None:
        return devices
    known: list[str] = []
    for name in (name.strip() for name in names.split(",")):
        if name in ("", "-1", "NoDevFiles"):
            break  # CUDA reads no further either
        known.append(name)
    numbers = [_number(name) for name in known]
    if None not in numbers:
        return tuple(devices[number] for number in numbers if number is not None and number < len(devices))
    if all(name.startswith("GPU-") for name in known):
        return tuple(device for device in devices if device.uuid.startswith(tuple(known)))
    return devices


def judge_devices(now: Answer, first: Devices, before: Mapping[str, Trouble]) -> dict[str, Trouble]:
    """What is wrong, by the device, against what was there at first; `before` is the judgement of last time."""
    if isinstance(now, NoAnswer):
        if not first:
            return {}
        return {**before, NVIDIA_SMI: Trouble(words=now.words, condemns=now.lost)}
    known = {device.uuid: device for device in now}
    troubles: dict[str, Trouble] = {}
    for then in first:
        trouble = _trouble(known.get(then.uuid), then)
        if trouble is not None:
            troubles[then.uuid] = trouble
    return troubles


def condemned_at_first(first: Answer) -> str | None:
    """Why no worker should even be started: what a driver says at the first look."""
    if isinstance(first, NoAnswer):
        return first.words if first.lost else None
    troubles = (_trouble(device, device) for device in first)
    return "; ".join(trouble.words for trouble in troubles if trouble is not None and trouble.condemns) or None


def _trouble(device: Device | None, then: Device) -> Trouble | None:
    """The worst of it."""
    name = f"device {then.uuid}"
    if device is None:
        return Trouble(words=f"{name} is not there any more", condemns=True)
    errors = (device.uncorrected_errors or 0) - (then.uncorrected_errors or 0)
    if device.rows_failed:
        return Trouble(words=f"{name} could not replace a row of its memory: it has to be exchanged", condemns=True)
    if errors > 0:
        since = f"({errors} since this agent was started)"
        return Trouble(words=f"{name} has had uncorrected memory errors {since}", condemns=True)
    if device.action:
        return Trouble(words=f"{name}: the driver asks for {device.action}", condemns=needs_reset(device.action))
    if device.rows_pending:
        return Trouble(words=f"{name} has to be reset before a bad row of its memory is replaced")
    if device.too_hot:
        return Trouble(words=f"{name} was slowed down for its heat ({device.celsius} °C)")
    return None

"""May this node join? Its NVIDIA devices are looked at once, before its first worker: the driver's word, then a test.

The test runs torch in a process of its own (`device_check`), so the agent loads none, and can give it up. Where there
is no device nothing is started. What speaks against a device speaks against the node; that there is no torch, or none
for CUDA, does not. Blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.health.gpu import GIVE_UP_SECONDS, NVIDIA_SMI, Answer, condemned_at_first, read_devices, visible

COMMAND = (sys.executable, "-m", "orchestrator.health.device_check")
LOAD_SECONDS_MAX = 300.0
"""Until torch is loaded, from a file system that may be slow: longer than that speaks against nobody."""
PART_BYTES_MAX = 1 << 16
OUTPUT_BYTES_MAX = 4 << 20
"""Who prints more has gone wrong."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the test printed, and how it ended; `status` None: it did not, in time."""

    lines: Sequence[str]
    status: int | None


def has_devices(root: Path = Path("/dev")) -> bool:
    """Whether there may be NVIDIA devices here. Costs nothing."""
    return shutil.which(NVIDIA_SMI) is not None or any(root.glob("nvidia[0-9]*"))


def reason_not_to_join(
    device_seconds_max: float,
    read: Callable[[], Answer] = read_devices,
    test: Callable[[float], Trial] | None = None,
) -> str | None:
    """Why no worker may be started here, with the evidence; None: nothing speaks against it.

    Each device has so long to pass the test, which takes about a second after its context is made.
    """
    found = read()
    if isinstance(found, tuple):
        found = visible(found, os.environ.get(VISIBLE_DEVICES))
        if not found:
            return None
    return condemned_at_first(found) or judge_test((test or run_test)(device_seconds_max), device_seconds_max)


def run_test(
    device_seconds_max: float,
    command: Sequence[str] = COMMAND,
    load_seconds_max: float = LOAD_SECONDS_MAX,
) -> Trial:
    """Run it to its end, or until no line has come for too long."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    except OSError as error:
        return Trial(lines=(str(error),), status=1)
    assert process.stdout is not None
    with process.stdout as output:
        text, over = _read(output.fileno(), load_seconds_max, device_seconds_max)
    if not over:
        process.kill()
    status: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds does not even end by SIGKILL
        status = process.wait(GIVE_UP_SECONDS)
    return Trial(lines=text.decode(errors="replace").splitlines(), status=status if over else None)


def _read(file: int, first_seconds_max: float, next_seconds_max: float) -> tuple[bytes, bool]:
    """What is written, and whether that is all: else nothing came for too long after the last line."""
    text, read, until = bytearray(), 0, time.monotonic() + first_seconds_max
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0 and len(text) < OUTPUT_BYTES_MAX and selector.select(left):
            part = os.read(file, PART_BYTES_MAX)
            if not part:
                return bytes(text), True
            text += part
            end = text.rfind(b"\n") + 1
            if end > read:
                if _answers(text[read:end].decode(errors="replace").splitlines()):
                    until = time.monotonic() + next_seconds_max
                read = end
    return bytes(text), False


def _answers(lines: Sequence[str]) -> list[dict[str, object]]:
    """The test's own lines among what libraries print."""
    found: list[dict[str, object]] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict) and ("devices" in value or "device" in value):
                found.append(value)
    return found


def judge_test(trial: Trial, device_seconds_max: float) -> str | None:
    """What the test says against the devices. Pure."""
    answers = _answers(trial.lines)
    count = answers[0].get("devices") if answers else None
    if not isinstance(count, int):
        return None  # torch could not be loaded, or not in time: no device was touched
    devices = answers[1:]
    problems = [f"device {one.get('device')}: {one['problem']}" for one in devices if one.get("problem")]
    if problems:
        return "; ".join(problems)
    if len(devices) >= count:
        return None
    name = f"device cuda:{len(devices)}"
    if trial.status is None:
        return f"{name} gave no answer to the test within {device_seconds_max:.0f} s"
    said = trial.lines[-1].strip() if trial.lines else ""
    return f"the test of {name} ended with status {trial.status}: {said}"

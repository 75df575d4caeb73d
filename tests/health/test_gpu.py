"""What nvidia-smi says of devices, and what is wrong with them; with answers as its documentation has them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.health.gpu import Device, judge_devices, read_devices

STATE = "GPU-aa, 35, 0, Not Active\nGPU-bb, 91, 2, Active\n"
OLD = "GPU-aa, 35, [N/A], [N/A]\n"
ROWS = "GPU-aa, No, No\nGPU-bb, Yes, 0\n"
WELL = Device(uuid="GPU-aa", celsius=35, uncorrected_errors=0, too_hot=False)


def answers(state: str | None, rows: str | None) -> tuple[Device, ...] | None:
    def run(command: Sequence[str]) -> str:
        text = rows if any("remapped" in word for word in command) else state
        if text is None:
            raise subprocess.CalledProcessError(15, command)
        return text

    return read_devices(run)


def test_what_is_read() -> None:
    assert answers(STATE, ROWS) == (
        WELL,
        Device(uuid="GPU-bb", celsius=91, uncorrected_errors=2, too_hot=True, rows_pending=True),
    )
    assert answers(STATE, None) is not None
    assert answers(OLD, None) == (replace(WELL, uncorrected_errors=None),)
    assert answers(None, ROWS) is None
    assert answers("No devices were found\n", "") == ()


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (WELL, None),
        (replace(WELL, uncorrected_errors=None), None),
        (replace(WELL, uncorrected_errors=1), "uncorrected memory errors (1 since"),
        (replace(WELL, rows_failed=True, uncorrected_errors=1), "exchanged"),
        (replace(WELL, rows_pending=True), "reset"),
        (replace(WELL, too_hot=True, celsius=91), "heat (91 °C)"),
        (replace(WELL, uuid="GPU-cc"), "is not there any more"),
    ],
)
def test_what_is_wrong(now: Device, words: str | None) -> None:
    problems = judge_devices((now,), (WELL,))
    assert (words is None) == (problems == {})
    assert words is None or words in problems["GPU-aa"]


def test_errors_of_an_earlier_time_are_not_told() -> None:
    old = replace(WELL, uncorrected_errors=7)
    assert judge_devices((old,), (old,)) == {}


def test_a_driver_that_does_not_answer_any_more() -> None:
    assert judge_devices(None, (WELL,))
    assert judge_devices(None, ()) == {}

"""What nvidia-smi says of devices, and what is wrong with them; with answers as its documentation has them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.health import gpu
from orchestrator.health.gpu import (
    NVIDIA_SMI,
    Answer,
    Device,
    NoAnswer,
    condemned_at_first,
    judge_devices,
    read_devices,
    run_command,
    visible,
)
from orchestrator.health.trouble import Trouble

STATE = "GPU-aa, 00000000:3B:00.0, 35, 0, Not Active\nGPU-bb, 00000000:5E:00.0, 91, 2, Active\n"
OLD = "GPU-aa, 00000000:3B:00.0, 35, [N/A], [N/A]\n"
ROWS = "GPU-aa, No, No\nGPU-bb, Yes, 0\n"
ACTIONS = "GPU-aa, None\nGPU-bb, Drain P2P\n"
WELL = Device(uuid="GPU-aa", celsius=35, uncorrected_errors=0, too_hot=False, address="0000:3b:00")
LOST = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot the system to recover this GPU"


def answers(state: str | Exception, rows: str | None = None, actions: str | None = None) -> Answer:
    def run(command: Sequence[str]) -> str:
        asked = " ".join(command)
        text = rows if "remapped" in asked else actions if "recovery" in asked else state
        if text is None:
            raise subprocess.CalledProcessError(2, command, 'Field "…" is not a valid field to query.')
        if isinstance(text, Exception):
            raise text
        return text

    return read_devices(run)


def test_what_is_read() -> None:
    hot = Device(
        uuid="GPU-bb",
        celsius=91,
        uncorrected_errors=2,
        too_hot=True,
        rows_pending=True,
        action="Drain P2P",
        address="0000:5e:00",
    )
    assert answers(STATE, ROWS, ACTIONS) == (WELL, hot)
    assert answers(STATE) == (WELL, replace(hot, rows_pending=False, action=""))
    assert answers(OLD) == (replace(WELL, uncorrected_errors=None),)
    assert answers("No devices were found\n", "") == ()


@pytest.mark.parametrize(
    ("error", "lost", "words"),
    [
        (subprocess.CalledProcessError(15, "nvidia-smi", ""), True, "status 15"),
        (subprocess.CalledProcessError(255, "nvidia-smi", LOST), True, "GPU is lost"),
        (
            subprocess.CalledProcessError(9, "nvidia-smi", "couldn't communicate with the NVIDIA driver"),
            False,
            "driver",
        ),
        (subprocess.TimeoutExpired("nvidia-smi", 30), False, "within 30 s"),
        (FileNotFoundError("nvidia-smi"), False, "cannot be run"),
    ],
)
def test_no_answer(error: Exception, lost: bool, words: str) -> None:
    answer = answers(error)
    assert isinstance(answer, NoAnswer)
    assert answer.lost is lost
    assert words in answer.words


@pytest.mark.parametrize(
    ("now", "words", "condemns"),
    [
        (WELL, None, False),
        (replace(WELL, uncorrected_errors=None), None, False),
        (replace(WELL, uncorrected_errors=1), "uncorrected memory errors (1 since", True),
        (replace(WELL, rows_failed=True, uncorrected_errors=1), "exchanged", True),
        (replace(WELL, action="Reset", rows_pending=True), "asks for Reset", True),
        (replace(WELL, action="Node Reboot Required"), "asks for Node Reboot", True),
        (replace(WELL, action="Drain P2P"), "asks for Drain P2P", False),
        (replace(WELL, rows_pending=True), "reset", False),
        (replace(WELL, too_hot=True, celsius=91), "heat (91 °C)", False),
        (replace(WELL, uuid="GPU-cc"), "is not there any more", True),
    ],
)
def test_what_is_wrong(now: Device, words: str | None, condemns: bool) -> None:
    troubles = judge_devices((now,), (WELL,), {})
    assert (words is None) == (troubles == {})
    if words is not None:
        assert words in troubles["GPU-aa"].words
        assert troubles["GPU-aa"].condemns is condemns


def test_errors_of_an_earlier_time_are_not_told() -> None:
    old = replace(WELL, uncorrected_errors=7)
    assert judge_devices((old,), (old,), {}) == {}


def test_what_cannot_be_seen_is_as_it_was() -> None:
    """A driver that does not answer makes no device well, and condemns the node only if it says that one is lost."""
    before = {"GPU-aa": Trouble(words="has had errors", condemns=True)}
    hangs, lost = NoAnswer(words="within 30 s"), NoAnswer(words="GPU is lost", lost=True)
    assert judge_devices(hangs, (WELL,), before) == {**before, NVIDIA_SMI: Trouble(words="within 30 s")}
    assert judge_devices(lost, (WELL,), {}) == {NVIDIA_SMI: Trouble(words="GPU is lost", condemns=True)}
    assert judge_devices(lost, (), {}) == {}


def test_what_is_wrong_from_the_start() -> None:
    assert condemned_at_first((WELL, replace(WELL, uncorrected_errors=7, rows_pending=True))) is None
    assert "exchanged" in (condemned_at_first((WELL, replace(WELL, rows_failed=True))) or "")
    assert condemned_at_first(NoAnswer(words="within 30 s")) is None
    assert condemned_at_first(NoAnswer(words="GPU is lost", lost=True)) == "GPU is lost"


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (None, "abc"),
        ("", ""),
        ("-1", ""),
        ("2,0", "ca"),
        ("0, 7", "a"),
        ("1,-1,2", "b"),
        ("GPU-b", "b"),
        ("GPU-c,GPU-a", "ac"),
        ("MIG-0123", "abc"),
    ],
)
def test_the_devices_of_others_are_not_looked_at(names: str | None, left: str) -> None:
    devices = tuple(replace(WELL, uuid=f"GPU-{letter}") for letter in "abc")
    assert "".join(device.uuid[-1] for device in visible(devices, names)) == left


UNKNOWN = Device(uuid="GPU-aa", celsius=None, uncorrected_errors=None, too_hot=False)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ("WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n" + STATE.splitlines()[0], (WELL,)),
        ("GPU-aa, [Unknown Error]", (UNKNOWN,)),
        ("GPU-aa, not:an:address, x, y, z", (UNKNOWN,)),
        ("GPU-aa, 0.0:3B:00, ², ٣, \0", (UNKNOWN,)),
        (f"GPU-aa, ::, {'9' * 5000}, -1, ", (UNKNOWN,)),
        ("No devices were found\n", ()),
        ("", ()),
        ("\n \n", ()),
        ("a, b, c, d, e", NoAnswer(words="nvidia-smi's answer is not understood: a, b, c, d, e")),
        ("\ufffd" * 5000, NoAnswer(words="nvidia-smi's answer is not understood: " + "\ufffd" * 200)),
    ],
)
def test_answers_that_no_documentation_has(state: str, found: Answer) -> None:
    """They neither stop an agent nor condemn a node: a device with unknown values is there."""
    assert answers(state, "GPU-aa, [Unknown Error], [GPU requires reset]", "x, y, z") == found
    assert not [one for one in judge_devices(found, (WELL,), {}).values() if one.condemns] or found == ()


@pytest.mark.parametrize("names", ["²", "9" * 5000, "0,²", "-2"])
def test_visible_devices_that_nobody_has(names: str) -> None:
    visible((WELL,), names)


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ANSWER_SECONDS_MAX", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        run_command([sys.executable, "-c", "import time; print('x', flush=True); time.sleep(60)"])
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_command([sys.executable, "-c", "import sys; print('what it said'); sys.exit(15)"])
    assert caught.value.output == "what it said\n"

"""Whether a node may join: what the driver says, what the test says, and tests that hang, crash or do not start."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.health import joining
from orchestrator.health.gpu import Answer, Device, NoAnswer
from orchestrator.health.joining import Trial, has_devices, judge_test, reason_not_to_join, run_test

WELL = Device(uuid="GPU-aa", celsius=35, uncorrected_errors=0, too_hot=False, address="0000:3b:00")
GOOD = '{"device": "cuda:0", "problem": null, "skipped": null, "seconds": 0.9}'
WRONG = '{"device": "cuda:1", "problem": "3 of 9 results are wrong", "skipped": null, "seconds": 0.9}'
BUSY = '{"device": "cuda:1", "problem": null, "skipped": "CUDA out of memory", "seconds": 0.9}'


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        (['{"devices": 1}', GOOD], 0, None),
        (["a warning", '{"devices": 2}', GOOD, "[1, 2]", "{}", BUSY], 0, None),
        (['{"devices": 0}'], 0, None),
        (['{"devices": 2}', GOOD, WRONG], 0, "device cuda:1: 3 of 9 results are wrong"),
        (['{"devices": 2}', WRONG], None, "device cuda:1: 3 of 9 results are wrong"),
        (['{"devices": 2}', GOOD], None, "device cuda:1 gave no answer to the test within 60 s"),
        (['{"devices": 2}', GOOD, "a core dump"], -11, "the test of device cuda:1 ended with status -11: a core dump"),
        (["ModuleNotFoundError: No module named 'torch'"], 1, None),
        ([], None, None),
        ([], 0, None),
    ],
)
def test_what_the_test_says(lines: list[str], status: int | None, reason: str | None) -> None:
    assert judge_test(Trial(lines=lines, status=status), 60.0) == reason


def never(_: float) -> Trial:
    raise AssertionError("nothing is started")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((), None),
        ((replace(WELL, rows_failed=True),), "exchanged"),
        (NoAnswer(words="GPU is lost", lost=True), "GPU is lost"),
    ],
)
def test_what_needs_no_test(found: Answer, reason: str | None) -> None:
    told = reason_not_to_join(60.0, lambda: found, never)
    assert told is None if reason is None else reason in (told or "")


@pytest.mark.parametrize("found", [(WELL,), NoAnswer(words="nvidia-smi cannot be run")])
def test_else_the_devices_are_tested(found: Answer) -> None:
    wrong = Trial(lines=['{"devices": 2}', GOOD, WRONG], status=0)
    assert reason_not_to_join(60.0, lambda: found, lambda _: wrong) == "device cuda:1: 3 of 9 results are wrong"


def test_devices_that_no_worker_sees_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert reason_not_to_join(60.0, lambda: (replace(WELL, rows_failed=True),), never) is None


def test_where_there_are_no_devices_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidiactl").touch()
    assert not has_devices(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_devices(tmp_path)


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_device_that_hangs_is_given_up() -> None:
    said = """import time; print('{"devices": 2}', flush=True); time.sleep(60)"""
    trial = run_test(0.3, script(said))
    assert trial == Trial(lines=['{"devices": 2}'], status=None)


def test_noise_is_no_answer() -> None:
    said = """import time; print('{"devices": 2}', flush=True)
while True: print("still trying", flush=True); time.sleep(0.05)"""
    trial = run_test(0.3, script(said))
    assert trial.status is None
    assert "gave no answer" in (judge_test(trial, 0.3) or "")


def test_noise_without_any_pause_is_no_answer_either() -> None:
    """A library that warns for ever, faster than it can be read: an end all the same, and no memory without bound."""
    trial = run_test(60.0, script("""while True: print("[" * 10_000)"""))
    assert trial.status is None
    assert judge_test(trial, 60.0) is None


def test_a_test_that_crashes() -> None:
    said = """import os; print('{"devices": 1}', flush=True); os.abort()"""
    trial = run_test(60.0, script(said))
    assert trial.status == -6
    assert "ended with status -6" in (judge_test(trial, 60.0) or "")


def test_a_torch_that_takes_too_long_to_load_blames_nobody() -> None:
    trial = run_test(60.0, script("import time; time.sleep(60)"), load_seconds_max=0.3)
    assert judge_test(trial, 60.0) is None


def test_a_test_that_cannot_be_started() -> None:
    assert judge_test(run_test(60.0, ("/nosuch/python",)), 60.0) is None


def test_the_real_one_on_this_machine() -> None:
    """Without CUDA it says that there is nothing to test."""
    trial = run_test(60.0)
    assert trial.status == 0
    assert judge_test(trial, 60.0) is None
    assert joining._answers(trial.lines)[0].keys() == {"devices"}

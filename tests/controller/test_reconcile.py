"""What is done about a TrainingJob in every state, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.controller.crd import TrainingJobSpec, read_spec
from orchestrator.controller.reconcile import (
    Act,
    Hosted,
    Seen,
    differs,
    reconcile,
    restart_seconds,
    state_after,
)
from orchestrator.core.messages import Outcome
from orchestrator.errors import ExitCode

NOW = 1_800_000_000.0
BASE = {"store": "s3://b/jobs", "command": ["python", "train.py"], "template": {"spec": {"containers": [{}]}}}


def spec(**fields: Any) -> TrainingJobSpec:
    return read_spec({**BASE, **fields})


SEEN = Seen(
    spec=spec(nodesMax=2),
    problems=(),
    suspend=False,
    cancel=False,
    edited=3,
    deleting=False,
    status={},
    rollback_to=None,
    hosted=None,
    pods_work=False,
)
HOSTED = Hosted(wanted_nodes=2, ending=False, cancelling=False)


def at_rest(**changes: Any) -> Seen:
    wanted = changes.get("spec")
    said = {} if wanted is None else {"suspend": wanted.suspend, "cancel": wanted.cancel}
    return replace(SEEN, **{**said, **changes})


def hosted(about: dict[str, Any] | None = None, **changes: Any) -> Seen:
    return at_rest(hosted=replace(HOSTED, **(about or {})), pods_work=True, **changes)


def ended(state: str, edited: int = 3) -> dict[str, Any]:
    return {"state": state, "endedGeneration": edited}


@pytest.mark.parametrize(
    ("seen", "act", "state"),
    [
        # nothing of it runs
        (at_rest(), Act.HOST, None),
        (at_rest(pods_work=True), Act.HOST, None),
        (at_rest(pods_work=True, deleting=True), Act.HOST, None),
        (at_rest(pods_work=True, spec=None, problems=("bad",)), Act.HOST, None),
        (at_rest(pods_work=True, spec=spec(suspend=True)), Act.HOST, None),
        (at_rest(pods_work=True, status=ended("Done")), Act.CLEAR, None),
        (at_rest(pods_work=True, status=ended("Failed")), Act.CLEAR, None),
        (at_rest(pods_work=True, status=ended("Failed", 2)), Act.HOST, None),
        (at_rest(pods_work=True, status=ended("Suspended"), spec=spec(suspend=True)), Act.CLEAR, None),
        (at_rest(pods_work=True, status=ended("Suspended")), Act.HOST, None),
        (at_rest(pods_work=True, deleting=True, status=ended("Suspended")), Act.LET_GO, None),
        (at_rest(deleting=True), Act.LET_GO, None),
        (at_rest(deleting=True, spec=None), Act.LET_GO, None),
        (at_rest(spec=None, problems=("bad",)), Act.NOTHING, "Invalid"),
        (at_rest(spec=None, problems=("bad",), status=ended("Done", 2)), Act.NOTHING, None),
        (at_rest(spec=None, problems=("bad",), status=ended("Failed")), Act.NOTHING, None),
        (at_rest(spec=spec(suspend=True)), Act.NOTHING, "Suspended"),
        (at_rest(spec=spec(cancel=True)), Act.NOTHING, "Cancelled"),
        (at_rest(spec=spec(cancel=True), status=ended("Done")), Act.NOTHING, None),
        (at_rest(spec=spec(cancel=True), status=ended("Failed", 2)), Act.NOTHING, None),
        (at_rest(spec=spec(cancel=True), status=ended("Suspended")), Act.NOTHING, "Cancelled"),
        (at_rest(status=ended("Done")), Act.NOTHING, None),
        (at_rest(status=ended("Done", 2)), Act.NOTHING, None),
        (at_rest(status=ended("Done", 2), spec=spec(takeOver=True)), Act.HOST, None),
        (at_rest(status=ended("Done"), spec=spec(takeOver=True)), Act.NOTHING, None),
        (at_rest(status=ended("Failed")), Act.NOTHING, None),
        (at_rest(status=ended("Failed", 2)), Act.HOST, None),
        (at_rest(status=ended("Cancelled")), Act.NOTHING, None),
        (at_rest(status=ended("Cancelled", 2)), Act.HOST, None),
        (at_rest(status=ended("Suspended")), Act.HOST, None),
        (at_rest(status=ended("Pending")), Act.HOST, None),
        (at_rest(status={"state": "Invalid"}), Act.HOST, None),
        (at_rest(rollback_to="10"), Act.HOST, None),
        # this process supervises it
        (hosted(), Act.NOTHING, None),
        (hosted(spec=spec(nodesMax=3)), Act.RESIZE, None),
        (hosted(spec=spec(nodesMax=1)), Act.RESIZE, None),
        (hosted(spec=spec(nodesMax=2, suspend=True)), Act.DRAIN, None),
        (hosted(spec=spec(nodesMax=3, suspend=True), rollback_to="10"), Act.DRAIN, None),
        (hosted(spec=spec(suspend=True, cancel=True)), Act.CANCEL, None),
        (hosted(spec=spec(cancel=True), deleting=True), Act.CANCEL, None),
        (hosted({"ending": True}, spec=spec(cancel=True)), Act.CANCEL, None),
        (hosted({"ending": True, "cancelling": True}, spec=spec(cancel=True)), Act.NOTHING, None),
        (hosted({"ending": True}, spec=spec(nodesMax=3)), Act.NOTHING, None),
        (hosted({"ending": True}, deleting=True), Act.NOTHING, None),
        (hosted(deleting=True), Act.DRAIN, None),
        (hosted(deleting=True, spec=None), Act.DRAIN, None),
        (hosted(spec=None, problems=("bad",)), Act.NOTHING, None),
        (hosted(spec=None, problems=("bad",), suspend=True), Act.DRAIN, None),
        (hosted(spec=None, problems=("bad",), cancel=True), Act.CANCEL, None),
        (hosted(rollback_to="10"), Act.ROLL_BACK, None),
        (hosted(rollback_to="ten"), Act.ROLL_BACK, None),
        (hosted({"waits_for": ("template",)}), Act.NOTHING, None),
        (hosted({"waits_for": ("template",), "pods_run": False}), Act.DRAIN, None),
        (hosted({"pods_run": False}), Act.NOTHING, None),
    ],
)
def test_acts(seen: Seen, act: Act, state: str | None) -> None:
    decision = reconcile(seen)
    assert (decision.act, decision.state) == (act, state)
    assert decision.reason or seen.status


@pytest.mark.parametrize(
    ("text", "step"), [("0", 0), ("120", 120), ("ten", None), ("-1", None), ("1.5", None), ("", None), ("9" * 30, None)]
)
def test_the_step_of_a_rollback(text: str, step: int | None) -> None:
    assert reconcile(hosted(rollback_to=text)).number == step


def test_every_act_is_in_the_table() -> None:
    cases = next(mark for mark in test_acts.pytestmark if mark.name == "parametrize").args[1]  # type: ignore[attr-defined]
    assert {act for _, act, _ in cases} == set(Act)


def test_what_waits_for_the_next_run() -> None:
    before = {**BASE, "nodesMax": 2, "saveEvery": 10}
    assert differs(before, before) == ()
    live = {"nodesMax": 3, "suspend": True, "cancel": True, "takeOver": True}
    assert differs({**before, **live}, before) == ()
    after = {**before, "saveEvery": 20, "keepLast": 3}
    del after["store"]
    assert differs(after, before) == ("keepLast", "saveEvery", "store")


@pytest.mark.parametrize(
    ("outcome", "code", "goes_on", "state"),
    [
        (Outcome.DONE, ExitCode.DONE, True, "Done"),
        (Outcome.CANCELLED, ExitCode.FAILED, True, "Cancelled"),
        (Outcome.DRAINED, ExitCode.RESUMABLE, False, "Suspended"),
        (Outcome.DRAINED, ExitCode.RESUMABLE, True, "Pending"),
        (Outcome.FAILED, ExitCode.FAILED, True, "Failed"),
        (None, ExitCode.FENCED, True, "Failed"),
        (Outcome.FAILED, ExitCode.NEVER_RESTART, False, "Failed"),
    ],
)
def test_the_state_after_a_run(outcome: Outcome | None, code: ExitCode, goes_on: bool, state: str) -> None:
    assert state_after(outcome, code, goes_on=goes_on) == state


def test_a_supervisor_that_fails_again_and_again_is_started_ever_later() -> None:
    assert [restart_seconds(crashes) for crashes in (0, 1, 2, 3, 50)] == [0, 5, 10, 20, 300]

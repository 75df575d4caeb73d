"""What a TrainingJob's status says, for what was seen."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.controller.reconcile import Act, reconcile
from orchestrator.controller.status import (
    Running,
    duration,
    ended_status,
    goodput_of,
    iso,
    resting_status,
    running_status,
    steady,
)
from orchestrator.errors import KubernetesError
from orchestrator.schedulers.kubernetes.pods import Pod, read_pod
from tests.controller.test_reconcile import BASE, NOW, at_rest, spec

SAID = {
    "phase": "running",
    "generation": 4,
    "world_size": 2,
    "step": 120,
    "until": 1000,
    "progress": 0.12,
    "eta_seconds": 880.0,
    "step_seconds": 1.0,
    "seconds_without_step": 0.1,
    "hang": None,
    "newest_committed": "g00000004-s0000000100",
    "newest_committed_step": 100,
    "commit_age_seconds": 20.0,
    "nodes": [{"node": "a", "going": False, "ranks": [0]}, {"node": "b", "going": False, "ranks": [0]}],
}


def running(said: dict[str, Any] | None = None, **changes: Any) -> Running:
    usual: dict[str, Any] = {
        "supervisor": {**SAID, **(said or {})},
        "run": "0a1b",
        "run_spec": BASE,
        "waiting": (),
        "refusal": None,
        "staging_bytes": None,
        "nodes": 2,
    }
    return Running(**{**usual, **changes})


def status_of(found: Running, before: dict[str, Any] | None = None, now: float = NOW) -> dict[str, Any]:
    return running_status(before or {}, found, BASE, job="small", edited=3, now_wall=now)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [one for one in status["conditions"] if one["type"] == kind]
    return dict(found)


def pod(**status: Any) -> Pod:
    return read_pod({"metadata": {"name": "p"}, "status": {"phase": "Pending", **status}})


def test_a_job_that_trains() -> None:
    status = status_of(running())
    assert status["state"] == "Running"
    assert status["reason"] == "training on 2 nodes"
    assert (status["step"], status["until"], status["progress"], status["eta"]) == (120, 1000, "12.0 %", "14m")
    assert (status["generation"], status["worldSize"], status["nodes"]) == (4, 2, 2)
    assert status["newestCheckpoint"] == "g00000004-s0000000100"
    assert status["committedAt"] == iso(NOW - 20)
    assert status["selector"] == "orchestrator.dev/job=small"
    assert status["observedGeneration"] == 3
    assert [condition(status, kind)["status"] for kind in ("Training", "PodsReady", "SpecApplied")] == ["True"] * 3


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("gathering", "Pending"),
        ("opening", "Pending"),
        ("starting", "Pending"),
        ("running", "Running"),
        ("leaving", "Saving"),
        ("clearing", "Saving"),
        ("ending", "Saving"),
    ],
)
def test_states(phase: str, state: str) -> None:
    assert status_of(running({"phase": phase}))["state"] == state


@pytest.mark.parametrize("phase", ["gathering", "opening", "starting"])
def test_one_that_has_trained_restarts(phase: str) -> None:
    assert status_of(running({"phase": phase}), {"startedStep": 0})["state"] == "Restarting"


def test_the_step_does_not_fall_while_a_gang_forms_anew() -> None:
    before = status_of(running())
    assert status_of(running({"phase": "starting", "step": 0}), before)["step"] == 120
    assert status_of(running({"step": 101}), before)["step"] == 101


def refused(status: int, reason: str, message: str) -> KubernetesError:
    return KubernetesError(f"refused: {message}", status=status, reason=reason, message=message)


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"refusal": refused(403, "Forbidden", "exceeded quota: few, used: 2")},
            "QuotaExceeded",
            "exceeded quota: few",
        ),
        ({"refusal": refused(422, "Invalid", "spec.containers[0].name: bad")}, "Invalid", "containers[0].name: bad"),
        ({"refusal": KubernetesError("it does not answer")}, "Unavailable", "it does not answer"),
        (
            {
                "waiting": [
                    pod(
                        containerStatuses=[
                            {"name": "t", "state": {"waiting": {"reason": "ErrImagePull", "message": "x"}}}
                        ]
                    )
                ]
            },
            "ErrImagePull",
            "container t: ErrImagePull: x",
        ),
        (
            {"waiting": [pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}])]},
            "Unschedulable",
            "1 pod finds no place: 0/3 nodes",
        ),
        ({"waiting": [pod(), pod()]}, "Starting", "2 pods start"),
    ],
)
def test_why_pods_do_not_run(changes: dict[str, Any], reason: str, words: str) -> None:
    status = status_of(running({"phase": "gathering"}, **changes))
    found = condition(status, "PodsReady")
    assert (found["status"], found["reason"]) == ("False", reason)
    assert words in found["message"]
    assert status["reason"] == found["message"]
    assert status_of(running(**changes))["reason"] == "training on 2 nodes"


def test_a_spec_that_waits_for_the_next_run() -> None:
    found = running(run_spec={**BASE, "saveEvery": 10})
    applied = condition(status_of(found), "SpecApplied")
    assert (applied["status"], applied["reason"]) == ("False", "WaitsForNextRun")
    assert applied["message"].startswith("saveEvery: ")


def test_a_transition_time_changes_with_the_conditions_status_only() -> None:
    first = status_of(running({"phase": "gathering"}, waiting=[pod()]))
    second = status_of(running({"phase": "starting"}, waiting=[pod()]), first, NOW + 10)
    third = status_of(running(), second, NOW + 20)
    times = [
        [condition(status, kind)["lastTransitionTime"] for status in (first, second, third)]
        for kind in ("Training", "PodsReady", "SpecApplied")
    ]
    assert times == [[iso(NOW), iso(NOW), iso(NOW + 20)]] * 2 + [[iso(NOW)] * 3]
    assert condition(second, "Training")["reason"] == "Starting"


def test_a_status_that_is_computed_again_is_the_same() -> None:
    """Else each look would be a write; but for when it was seen, which alone is no reason for one."""
    first = status_of(running())
    again = status_of(running({"commit_age_seconds": 21.2}), first, NOW + 1)
    assert again["observedAt"] == iso(NOW + 1)
    assert {**again, "goodput": None, "observedAt": None} == {**first, "goodput": None, "observedAt": None}


def test_hangs_and_those_that_go_are_told() -> None:
    said = {"hang": "rank 1 is blocked", "seconds_without_step": 300.0}
    assert status_of(running(said))["reason"] == "no step for 5m: rank 1 is blocked"
    going = [{"node": "a", "going": True, "ranks": [1]}, {"node": "b", "going": False, "ranks": [0]}]
    assert status_of(running({"nodes": going}))["reason"] == "training on 2 nodes; a will go"


def test_goodput_is_of_the_time_since_the_first_start() -> None:
    status = {"startedAt": iso(NOW), "stepSeconds": 2.0, "startedStep": 100, "step": 120}
    assert goodput_of(status, NOW + 50) == pytest.approx(0.8)
    assert goodput_of(status, NOW + 30) == 1.0
    assert goodput_of(status, NOW) is None
    assert goodput_of({**status, "step": 0}, NOW + 50) == 0.0
    for missing in ("startedAt", "stepSeconds", "startedStep"):
        assert goodput_of({name: value for name, value in status.items() if name != missing}, NOW + 50) is None


def test_the_step_that_a_run_began_at() -> None:
    """Steps that were committed before the first look count, too."""
    assert status_of(running(first_step=0))["startedStep"] == 0
    assert status_of(running(first_step=None))["startedStep"] == 100
    assert status_of(running(first_step=60), {"startedStep": 20})["startedStep"] == 20


def test_what_is_left_of_a_status_after_the_end() -> None:
    before = status_of(running())
    status = ended_status(
        before, state="Done", reason="all is done", exit_code=0, edited=3, has_spec=True, now_wall=NOW + 5
    )
    assert (status["state"], status["exitCode"], status["endedGeneration"]) == ("Done", 0, 3)
    assert (status["nodes"], status["worldSize"]) == (0, 0)
    assert not status.keys() & {"run", "eta", "generation", "observedAt"}
    assert status["newestCheckpoint"] == before["newestCheckpoint"]
    assert condition(status, "Complete")["status"] == "True"
    assert condition(status, "Training")["status"] == "False"
    failed = ended_status(before, state="Failed", reason="fenced", exit_code=3, edited=3, has_spec=True, now_wall=NOW)
    assert condition(failed, "Failed")["reason"] == "Fenced"


@pytest.mark.parametrize(("before", "state"), [({}, "Pending"), ({"startedStep": 0}, "Restarting")])
def test_between_two_runs(before: dict[str, Any], state: str) -> None:
    """A run that ended so that the next one goes on; of a job that has trained that is no beginning."""
    status = ended_status(
        before, state="Pending", reason="drained", exit_code=75, edited=3, has_spec=True, now_wall=NOW
    )
    assert status["state"] == state


def test_a_job_that_goes_on_after_its_end_has_not_ended_any_more() -> None:
    done = ended_status({}, state="Failed", reason="broken", exit_code=1, edited=3, has_spec=True, now_wall=NOW)
    again = status_of(running(), done, NOW + 5)
    assert condition(again, "Failed")["status"] == "False"
    assert not again.keys() & {"exitCode", "endedGeneration"}


@pytest.mark.parametrize(("state", "act"), [("Failed", Act.HOST), ("Cancelled", Act.NOTHING), ("Done", Act.NOTHING)])
def test_an_edit_that_waited_for_the_next_run_starts_a_failed_job_again(state: str, act: Act) -> None:
    """It was made while the run that has failed still trained: it counts as made after the end."""
    status = ended_status({}, state=state, reason="it", exit_code=1, edited=3, has_spec=False, now_wall=NOW)
    assert reconcile(at_rest(status=status)).act is act
    again = ended_status(status, state=state, reason="it", exit_code=1, edited=3, has_spec=True, now_wall=NOW)
    assert reconcile(at_rest(status=again)).act is Act.NOTHING


def test_resting_states() -> None:
    decision = reconcile(at_rest(spec=None, problems=("spec.nodesMin: no", "spec.store: no")))
    status = resting_status({"step": 7}, decision, edited=3, now_wall=NOW)
    assert status is not None
    assert (status["state"], status["step"]) == ("Invalid", 7)
    assert status["reason"] == "spec.nodesMin: no; spec.store: no"
    assert condition(status, "SpecApplied")["reason"] == "Invalid"
    assert resting_status(status, decision, edited=3, now_wall=NOW + 100) == status
    assert resting_status({}, reconcile(at_rest()), edited=3, now_wall=NOW) is None


def test_a_suspended_job_keeps_the_reason_of_its_suspension() -> None:
    before = {"state": "Suspended", "reason": "drained: saved step 120"}
    assert reconcile(at_rest(spec=spec(suspend=True), status=before)).reason == before["reason"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7260, "2h01m"), (172800, "2d0h"), (180000, "2d2h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_times_that_are_computed_stay() -> None:
    assert steady(iso(NOW), NOW + 1.4) == iso(NOW)
    assert steady(iso(NOW), NOW + 3) == iso(NOW + 3)
    assert steady(None, NOW) == iso(NOW)

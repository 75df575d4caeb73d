"""What edits of a TrainingJob mean once it has run, has ended, or says what cannot be. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.controller.crd import TrainingJobSpec, read_spec
from orchestrator.controller.keeper import spec_now
from orchestrator.controller.reconcile import may_take_over
from orchestrator.controller.status import Running, running_status
from orchestrator.schedulers.kubernetes.allocation import ended_quickly, pause_seconds
from orchestrator.schedulers.kubernetes.pods import Owner, read_pod, wall_seconds
from orchestrator.supervisor.kubernetes_job import new_run, read_run, render_secret

NOW = wall_seconds("2026-12-01T00:00:00Z") or 0.0
SUPERVISOR: dict[str, Any] = {
    "phase": "running",
    "step": 7,
    "world_size": 1,
    "nodes": [],
    "generation": 1,
    "until": None,
    "progress": None,
    "eta_seconds": None,
    "newest_committed": None,
    "newest_committed_step": None,
    "step_seconds": None,
    "commit_age_seconds": None,
    "hang": None,
    "seconds_without_step": None,
}


def spec_of(**more: Any) -> dict[str, Any]:
    return {"store": "/s", "command": ["x"], "template": {"spec": {"containers": [{"name": "trainer"}]}}, **more}


def test_a_run_that_was_resized_below_its_fewest_nodes_can_be_gone_on_with() -> None:
    found = spec_now(spec_of(nodesMin=2, nodesMax=4), spec_of(nodesMin=1, nodesMax=1, saveEvery=5))
    assert (found.nodes_min, found.nodes_max, found.save_every) == (1, 1, 1000)


def test_of_a_run_s_spec_only_the_most_nodes_change() -> None:
    found = spec_now(spec_of(nodesMin=2, nodesMax=4), spec_of(nodesMin=3, nodesMax=6))
    assert (found.nodes_min, found.nodes_max) == (2, 6)
    assert spec_now(spec_of(), {}).nodes_max == 1


@pytest.mark.parametrize(
    ("wanted", "status", "taken"),
    [
        (True, {}, True),
        (True, {"startedAt": "t", "state": "Pending"}, True),  # a wrong image, say, that was mended
        (True, {"startedAt": "t", "state": "Suspended"}, True),
        (True, {"startedAt": "t", "startedStep": 0, "state": "Suspended"}, False),
        (True, {"startedAt": "t", "startedStep": 0, "state": "Pending"}, False),
        (True, {"startedAt": "t", "startedStep": 0, "state": "Done"}, True),
        (True, {"startedAt": "t", "startedStep": 0, "state": "Cancelled"}, True),
        (False, {"startedAt": "t", "startedStep": 0, "state": "Done"}, False),
        (False, {}, False),
    ],
)
def test_taking_over_counts_until_it_has_trained_and_after_an_end(
    wanted: bool, status: dict[str, Any], taken: bool
) -> None:
    spec: TrainingJobSpec = read_spec(spec_of(takeOver=wanted))
    assert may_take_over(spec, status) is taken


def test_an_edit_that_cannot_be_is_told_while_the_run_goes_on() -> None:
    running = Running(
        supervisor=SUPERVISOR,
        run="r",
        run_spec=spec_of(),
        waiting=(),
        refusal=None,
        staging_bytes=None,
        nodes=1,
        problems=("spec.notices: there is no source 'x'",),
    )
    status = running_status({}, running, spec_of(notices="x"), job="j", edited=2, now_wall=NOW)
    (applied,) = [one for one in status["conditions"] if one["type"] == "SpecApplied"]
    assert (applied["status"], applied["reason"]) == ("False", "Invalid")
    assert "spec.notices: there is no source 'x'" in applied["message"]
    assert status["state"] == "Running"


def pod_of(phase: str, **spec: Any) -> dict[str, Any]:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
    created = {"name": "p", "creationTimestamp": "2026-12-01T00:00:00Z"}
    return {"metadata": created, "spec": spec, "status": {"phase": phase, "conditions": [scheduled]}}


def test_a_pod_behind_a_gate_is_told_from_one_without_a_place() -> None:
    assert read_pod(pod_of("Pending", schedulingGates=[{"name": "kueue.x-k8s.io/admission"}])).gated
    assert not read_pod(pod_of("Pending", schedulingGates=[])).gated


def test_pods_that_end_as_soon_as_they_start_are_made_again_ever_later() -> None:
    assert ended_quickly(read_pod(pod_of("Failed")), NOW + 5)
    assert not ended_quickly(read_pod(pod_of("Failed")), NOW + 120)
    assert not ended_quickly(read_pod(pod_of("Running")), NOW + 5)
    deleted = pod_of("Failed")
    deleted["metadata"]["deletionTimestamp"] = "2026-12-01T00:00:30Z"
    assert not ended_quickly(read_pod(deleted), NOW + 5)
    assert [pause_seconds(ends) for ends in (0, 2, 3, 4, 5, 99, 10_000)] == [0, 0, 1, 2, 4, 60, 60]


def test_a_run_whose_agents_trust_another_controller_is_not_gone_on_with() -> None:
    owner = Owner(namespace="n", name="j", uid="u")
    config = read_spec(spec_of()).config("j")
    words = {"job_url": "file:///s/j", "url": "https://c/jobs/n/j", "certificate": "mine", "take_over": False}
    run = read_run(render_secret(new_run(config, owner, spec_of(), **words), owner))  # type: ignore[arg-type]
    assert run is not None
    assert run.finds("https://c/jobs/n/j", "mine")
    assert not run.finds("https://c/jobs/n/j", "another's")
    assert not run.finds("https://d/jobs/n/j", "mine")

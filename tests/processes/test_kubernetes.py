"""TrainingJobs whose pods are processes: taken away in every way, with a controller that dies; the end is the same.

Each test has a cluster of its own: the API server double, simulated cluster controllers, process kubelets.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.catalog import survey
from orchestrator.controller.crd import ROLLBACK_ANNOTATION
from orchestrator.schedulers.kubernetes.watching import JOB_LABEL, path_of
from tests.kubernetes.cluster import running_cluster, why_not
from tests.kubernetes.cluster_controllers import Delays
from tests.processes.harness import check_store, final_digests
from tests.processes.kubernetes_jobs import JOB, Jobs, prepared

GPU = {"nvidia.com/gpu": "1"}
QUICK_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{word}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for word in ("unreachable", "not-ready")
]
Start = Callable[..., Jobs]

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a cluster of nodes with one GPU each, and a controller in it; all of it ends with the test."""
    with ExitStack() as stack:

        def begin(nodes: int, *, controller: bool = True) -> Jobs:
            folder = tmp_path / "cluster"
            folder.mkdir()
            delays = Delays(node_lost_seconds=2.0)
            cluster = stack.enter_context(running_cluster(folder, nodes=nodes, capacity=GPU, delays=delays))
            prepared(cluster)
            jobs = Jobs(cluster=cluster, folder=tmp_path)
            stack.callback(jobs.stop)
            if controller:
                jobs.start_controller()
            return jobs

        yield begin


def trainer_with(jobs: Jobs, env: dict[str, object] | None = None, **pod: Any) -> dict[str, Any]:
    """The usual template with more in the pods' spec."""
    template: dict[str, Any] = jobs.manifest(env=env)["spec"]["template"]
    template["spec"] |= pod
    return template


# ------------------------------------------------------------------------------------------- taken with notice


def taint(jobs: Jobs, pod: str) -> None:
    jobs.cluster.taint(jobs.host_of(pod), "maintenance.example.com/now")


def evict_all(jobs: Jobs, pod: str) -> None:
    """Whoever drains nodes asks for all pods at once; the budget lets one go."""
    assert jobs.cluster.evict(jobs.namespace, pod)[0] == 201
    for other in jobs.pods().keys() - {pod}:
        status, answer = jobs.cluster.evict(jobs.namespace, other)
        assert status == 429, answer


def preempt(jobs: Jobs, pod: str) -> None:
    """A pod of higher priority wants a place where there is none."""
    priorities = "/apis/scheduling.k8s.io/v1/priorityclasses"
    jobs.cluster.create(priorities, {"metadata": {"name": "urgent"}, "value": 1000})
    container = {"name": "x", "image": "x", "command": ["sleep", "1000"], "resources": {"limits": GPU}}
    spec = {
        "priorityClassName": "urgent",
        "containers": [container],
        "nodeSelector": {"kubernetes.io/hostname": jobs.host_of(pod)},
        "terminationGracePeriodSeconds": 1,
    }
    jobs.cluster.create(path_of("pods", jobs.namespace), {"metadata": {"name": "urgent"}, "spec": spec})


WAYS = {"taint": taint, "eviction": evict_all, "preemption": preempt}
SAID = {"taint": "DeletionByTaintManager", "eviction": "EvictionByEvictionAPI", "preemption": "PreemptionByScheduler"}


@pytest.mark.parametrize("way", WAYS)
def test_a_pod_that_is_taken_away_is_saved_and_replaced(start: Start, reference: dict[str, str], way: str) -> None:
    """No step is lost: what is saved under the notice is what the replacement and the survivor go on from."""
    jobs = start(3)
    jobs.create(nodesMin=2, saveEvery=1000, env={"STEP_SECONDS": 0.1})
    jobs.until_trained(5)
    first = set(jobs.pods())
    victim = min(first)
    began = time.time()
    WAYS[way](jobs, victim)
    saved = jobs.until_event("committed")
    again = jobs.until_event("first good step", 2)
    jobs.until_state("Done")
    seconds = [record["wall_seconds"] - began for record in (saved, again)]
    print(f"{way}: {seconds[0]:.1f} s to the commit, {seconds[1]:.1f} s to the first new step")
    assert final_digests(jobs.store) == reference
    check_store(jobs.store)
    assert saved["facts"]["mode"] == "leave"
    opened = jobs.events("generation opened")
    assert [record["step"] for record in opened] == [0, saved["step"]]
    members = set(opened[1]["facts"]["nodes"].split())
    assert first - members == {victim}
    assert any(SAID[way] in record["reason"] for record in jobs.events("notice received"))
    assert {record["node"] for record in jobs.events("notice received")} == {victim}


# ---------------------------------------------------------------------------------------- taken without notice


def test_a_node_that_is_lost_is_replaced_and_its_pod_blocks_nothing(start: Start, reference: dict[str, str]) -> None:
    """The pod stays Terminating for ever, as nobody says that it has ended; the replacement has another name."""
    jobs = start(3)
    jobs.create(nodesMin=2, env={"STEP_SECONDS": 0.1}, template=None)
    jobs.until_event("committed")
    victim = min(jobs.pods())
    host = jobs.host_of(victim)
    jobs.cluster.nodes[host].lose()
    jobs.until_state("Done")
    assert final_digests(jobs.store) == reference
    check_store(jobs.store)
    stuck = jobs.cluster.pod(victim, jobs.namespace)
    assert stuck is not None
    print(stuck["metadata"], jobs.events("node lost"))

"""TrainingJobs whose pods are processes: taken away in every way, with a controller that dies; the end is the same.

Each test has a cluster of its own: the API server double, simulated cluster controllers, process kubelets.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.catalog import survey
from orchestrator.controller.crd import ROLLBACK_ANNOTATION
from orchestrator.schedulers.kubernetes.names import JOB_LABEL, path_of
from tests.kubernetes.cluster import Kind, running_cluster, why_not
from tests.kubernetes.cluster_controllers import Delays
from tests.processes.harness import check_store, final_digests
from tests.processes.kubernetes_jobs import JOB, Jobs, prepared
from tests.slurm_cluster import free_ports

GPU = {"nvidia.com/gpu": "1"}
QUICK_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{word}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for word in ("unreachable", "not-ready")
]
Start = Callable[..., Jobs]

KIND: Kind = "real" if os.environ.get("ORCHESTRATOR_TEST_CLUSTER") == "real" else "double"
"""ORCHESTRATOR_TEST_CLUSTER=real: under a real control plane, where its programs are."""

pytestmark = pytest.mark.skipif(why_not(KIND) is not None, reason=str(why_not(KIND)))
only_the_double = pytest.mark.skipif(KIND == "real", reason="it looks at the double's requests, or makes it fail")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a cluster of nodes with one GPU each, and a controller in it; all of it ends with the test."""
    with ExitStack() as stack:

        def begin(nodes: int, *, controller: bool = True) -> Jobs:
            folder = tmp_path / "cluster"
            folder.mkdir()
            delays = Delays(node_lost_seconds=2.0)
            cluster = stack.enter_context(running_cluster(folder, nodes=nodes, capacity=GPU, delays=delays, kind=KIND))
            prepared(cluster)
            jobs = Jobs(cluster=cluster, folder=tmp_path)
            stack.callback(jobs.stop)
            if controller:
                jobs.start_controller()
            return jobs

        yield begin


def trainer_with(jobs: Jobs, env: Mapping[str, object] | None = None, **pod: Any) -> dict[str, Any]:
    """The usual template with more in the pods' spec."""
    template: dict[str, Any] = jobs.manifest(env=env)["spec"]["template"]
    template["spec"] |= pod
    return template


# ------------------------------------------------------------------------------------------- taken with notice


def taint(jobs: Jobs, pod: str) -> None:
    jobs.cluster.taint(jobs.host_of(pod), "maintenance.example.com/now")


def evict_all(jobs: Jobs, pod: str) -> None:
    """Whoever drains nodes asks for all pods at once; the budget lets one go."""
    others = jobs.pods().keys() - {pod}  # the replacement, which is there in a moment, is pending: no budget keeps it
    assert jobs.cluster.evict(jobs.namespace, pod)[0] == 201
    for other in others:
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


@pytest.mark.extended
def test_a_lost_node_is_done_without_until_there_is_another(start: Start) -> None:
    """Its pod stays Terminating for ever, as nobody says that it has ended; nothing waits for it."""
    jobs = start(2)
    env = {"STEPS": 100_000}
    jobs.create(gatherSeconds=1, template=trainer_with(jobs, env, tolerations=QUICK_TOLERATIONS))
    jobs.until_event("committed")
    victim = min(jobs.pods())
    jobs.cluster.nodes[jobs.host_of(victim)].lose()
    alone = jobs.until_event("first good step", 2)
    (waiting,) = jobs.pods().keys() - {victim} - {record["node"] for record in jobs.events("node joined")}
    jobs.until(lambda: jobs.condition("PodsReady").get("reason") == "Unschedulable", "the replacement has no place")
    stuck = jobs.cluster.pod(victim)
    assert stuck is not None
    assert "deletionTimestamp" in stuck["metadata"]
    jobs.cluster.add_node("node-new", capacity=GPU)
    jobs.until_event("first good step", 3)
    opened = jobs.events("generation opened")
    assert [record["facts"]["world_size"] for record in opened] == [2, 1, 2]
    assert waiting in opened[2]["facts"]["nodes"]
    assert alone["step"] > opened[1]["step"] >= 10
    jobs.edit(cancel=True)
    jobs.until_state("Cancelled")
    check_store(jobs.store)


@pytest.mark.extended
def test_a_twin_that_comes_back_changes_nothing_and_ends(start: Start, reference: dict[str, str]) -> None:
    """A machine that hangs, and goes on when the job has long gone on without it, out of reach of the API server."""
    jobs = start(3)
    env = {"STEP_SECONDS": 0.1}
    jobs.create(nodesMin=2, template=trainer_with(jobs, env, tolerations=QUICK_TOLERATIONS))
    jobs.until_event("committed")
    victim = min(jobs.pods())
    kubelet = jobs.cluster.nodes[jobs.host_of(victim)]
    kubelet.freeze()
    twins = kubelet.processes()
    jobs.until_event("first good step", 2)
    for pid in twins:
        os.kill(pid, signal.SIGCONT)
    jobs.until(lambda: not kubelet.processes(), "the twin has ended by itself")
    kubelet.heal()
    jobs.cluster.until(lambda: jobs.cluster.pod(victim) is None, "its pod is gone")
    jobs.until_state("Done")
    assert final_digests(jobs.store) == reference
    check_store(jobs.store)
    opened = jobs.events("generation opened")
    assert victim in opened[0]["facts"]["nodes"]
    assert victim not in opened[1]["facts"]["nodes"]
    assert len(opened) == 2


@only_the_double
def test_a_mass_loss_is_replaced_at_once_and_again_and_again(start: Start) -> None:
    """Three of four pods; then one after the other: no loss makes the next replacement wait longer."""
    jobs = start(4)
    jobs.create_idle(nodesMin=4, nodesMax=4)
    jobs.until(lambda: len(jobs.idle_ranks()) == 4, "four ranks")
    made = pod_times(jobs)
    assert len(made) == 4
    first = sorted(jobs.pods())
    for pod in first[1:]:
        jobs.cluster.request("DELETE", f"{path_of('pods', 'default', pod)}?gracePeriodSeconds=0")
    jobs.until(lambda: len(jobs.idle_ranks()) == 7, "three more")
    made = pod_times(jobs)
    assert len(made) == 7
    assert made[-1] - made[-3] < 2
    waits = []
    for count in range(8, 11):
        victim = max(jobs.pods().keys() & jobs.idle_ranks().keys())
        began = time.monotonic()
        jobs.cluster.request("DELETE", f"{path_of('pods', 'default', victim)}?gracePeriodSeconds=0")
        jobs.until(lambda count=count: len(jobs.idle_ranks()) >= count, "another one")  # type: ignore[misc]
        waits.append(pod_times(jobs)[count - 1] - began)
    print(f"from a loss to the request of its replacement: {', '.join(f'{wait:.2f} s' for wait in waits)}")
    assert jobs.status["state"] != "Failed"
    jobs.end_idle()
    jobs.until_state("Done")
    assert len(pod_times(jobs)) == 10


def pod_times(jobs: Jobs) -> list[float]:
    """When pods were made."""
    assert jobs.cluster.server is not None
    path = path_of("pods", jobs.namespace)
    requests = [seen for seen in jobs.cluster.server.requests if (seen.method, seen.path) == ("POST", path)]
    return [seen.at_seconds for seen in requests if seen.code == 201]


# ----------------------------------------------------------------------------------------------- the controller


@pytest.mark.extended
def test_another_controller_takes_a_running_gang_over(start: Start, reference: dict[str, str]) -> None:
    """The leader is killed; the other one waits for the lease to run out, and the pods train on meanwhile."""
    jobs = start(2, controller=False)
    with jobs.service():
        leader = jobs.start_controller(port=free_ports(1)[0])
        jobs.create(nodesMin=2, env={"STEP_SECONDS": 0.65})
        jobs.until_trained(1)
        jobs.start_controller(port=free_ports(1)[0])
        jobs.until_trained(4)
        leader.kill()
        jobs.until_event("taken back")
        there = jobs.trained()[-1]["step"]
        jobs.until_state("Done")
    print(f"taken back at step {there}")
    assert final_digests(jobs.store) == reference
    check_store(jobs.store)
    assert len(jobs.worker_pids()) == 2
    assert len(jobs.events("generation opened")) == 1
    assert there > 10


@pytest.mark.extended
@pytest.mark.parametrize("when", ["notice received", "step agreed"])
def test_a_controller_that_is_killed_is_followed_by_the_next(
    start: Start, reference: dict[str, str], when: str
) -> None:
    """Right after a notice, or with a save in flight: nothing of it is lost."""
    jobs = start(3)
    jobs.create(nodesMin=2, env={"STEP_SECONDS": 0.25})
    jobs.until_trained(3)
    victim = min(jobs.pods())
    if when == "notice received":
        jobs.cluster.taint(jobs.host_of(victim), "maintenance.example.com/now")
    jobs.until_event(when)
    jobs.kill_controller()
    jobs.start_controller()
    jobs.until_state("Done")
    assert final_digests(jobs.store) == reference
    check_store(jobs.store)
    if when != "notice received":
        assert len(jobs.events("taken back")) == 1
        assert len(jobs.worker_pids()) == 2
    else:
        opened = jobs.events("generation opened")
        assert len(opened) == 2
        assert opened[1]["step"] > 0


@pytest.mark.extended
def test_a_controller_that_was_stopped_and_goes_on_disturbs_nothing(start: Start) -> None:
    """It hosts the job as well, and believes for a moment that it leads: it writes nothing, and ends."""
    jobs = start(2, controller=False)
    with jobs.service():
        leader = jobs.start_controller(port=free_ports(1)[0])
        jobs.create_idle(nodesMin=2)
        jobs.until(lambda: len(jobs.idle_ranks()) == 2, "two ranks")
        pods = set(jobs.pods())
        leader.send_signal(signal.SIGSTOP)
        jobs.start_controller(port=free_ports(1)[0])
        jobs.until_event("taken back")
        leader.send_signal(signal.SIGCONT)
        jobs.until(lambda: leader.poll() is not None, "the first one has ended")
        jobs.end_idle()
        jobs.until_state("Done")
    assert set(jobs.idle_ranks()) == pods
    assert not jobs.events("node lost")
    assert len(jobs.events("generation opened")) == 1
    assert "lease" in jobs.output()


@pytest.mark.extended
@only_the_double
def test_an_api_server_that_is_away_disturbs_no_training(start: Start, reference: dict[str, str]) -> None:
    """Away for ten seconds, then overloaded, forgetful, and cutting watches; a controller that gave up is restarted."""
    jobs = start(2)
    server = jobs.cluster.server
    assert server is not None
    jobs.create(nodesMin=2, env={"STEP_SECONDS": 0.6})
    jobs.until_trained(2)
    server.stop()
    time.sleep(10)  # how long it is away: nothing is waited for
    server.fail_next("GET", "watch=1|limit=", 500, 6)
    server.fail_next("PATCH", "/trainingjobs/", 429, 3, retry_after=1)
    server.start()
    restarts = 0

    def watched() -> bool:
        nonlocal restarts
        if jobs.controllers[-1].poll() is not None:  # as a Deployment does
            jobs.start_controller()
            restarts += 1
        return any(line["step"] >= 24 for line in jobs.trained())

    jobs.until(watched, "step 24")
    server.fail_next("GET", "watch=1", 500, 4)
    server.break_watches()
    jobs.until_trained(30)
    server.compact()
    server.break_watches()
    jobs.until_state("Done")
    print(f"{restarts} restarts of the controller")
    assert final_digests(jobs.store) == reference
    check_store(jobs.store)
    assert len(jobs.worker_pids()) == 2
    assert len(jobs.events("generation opened")) == 1
    assert not jobs.events("node lost")


# ------------------------------------------------------------------------------------------- pods that cannot run


def test_a_quota_that_is_full_is_told_and_waited_out(start: Start) -> None:
    jobs = start(2)
    quotas = "/api/v1/namespaces/default/resourcequotas"
    jobs.cluster.create(quotas, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}})
    jobs.create_idle(nodesMin=2)
    jobs.until(lambda: jobs.condition("PodsReady").get("reason") == "QuotaExceeded", "the quota is told")
    condition = jobs.condition("PodsReady")
    assert condition["status"] == "False"
    assert "exceeded quota: few" in condition["message"]
    assert "exceeded quota: few" in jobs.status["reason"]
    jobs.cluster.request("PATCH", f"{quotas}/few", {"spec": {"hard": {"pods": "5"}}})
    jobs.until(lambda: len(jobs.idle_ranks()) == 2, "two ranks")
    jobs.until(lambda: jobs.condition("PodsReady").get("status") == "True", "all is well")
    jobs.end_idle()
    jobs.until_state("Done")


def test_an_image_that_cannot_be_fetched_is_told_and_mended_by_an_edit(start: Start) -> None:
    jobs = start(1)
    template = trainer_with(jobs)
    template["spec"]["containers"][0]["image"] = "missing/trainer:1"
    jobs.create_idle(nodesMax=1, template=template)
    jobs.until(
        lambda: jobs.condition("PodsReady").get("reason") in ("ErrImagePull", "ImagePullBackOff"), "the image is told"
    )
    assert "missing/trainer:1" in jobs.condition("PodsReady")["message"]
    first = set(jobs.pods())
    template["spec"]["containers"][0]["image"] = "trainer:2"
    jobs.edit(template=template)
    jobs.until(lambda: bool(jobs.idle_ranks()), "it runs")
    (pod,) = jobs.pods().values()
    assert pod["metadata"]["name"] not in first
    assert pod["spec"]["containers"][0]["image"] == "trainer:2"
    jobs.end_idle()
    jobs.until_state("Done")


@only_the_double
def test_a_template_that_the_api_server_refuses_is_told_and_mended_by_an_edit(start: Start) -> None:
    """Not tried again and again: with the same template the answer is the same."""
    jobs = start(1)
    template = trainer_with(jobs)
    template["spec"]["containers"][0]["name"] = "No Name"
    jobs.create_idle(nodesMax=1, template=template)
    jobs.until(lambda: jobs.condition("PodsReady").get("reason") == "Invalid", "the refusal is told")
    assert "spec.containers[0].name" in jobs.condition("PodsReady")["message"]
    time.sleep(4)  # for attempts that there should not be
    assert jobs.cluster.server is not None
    posts = [
        seen
        for seen in jobs.cluster.server.requests
        if (seen.method, seen.path, seen.code) == ("POST", path_of("pods", "default"), 422)
    ]
    assert 1 <= len(posts) <= 4
    template["spec"]["containers"][0]["name"] = "trainer"
    jobs.edit(template=template)
    jobs.until(lambda: bool(jobs.idle_ranks()), "it runs")
    jobs.end_idle()
    jobs.until_state("Done")


def test_pods_that_find_no_place_are_made_again_on_other_terms(start: Start) -> None:
    """Spot hosts are missing: after patienceSeconds a pod from `fallback` runs on demand."""
    jobs = start(0)
    jobs.cluster.add_node("on-demand", capacity=GPU, labels={"terms": "on-demand"})
    jobs.create_idle(
        nodesMax=1,
        pod={"nodeSelector": {"terms": "spot"}},
        patienceSeconds=2,
        fallback={"template": {"spec": {"nodeSelector": {"terms": "on-demand"}}}},
    )
    jobs.until(lambda: jobs.condition("PodsReady").get("reason") == "Unschedulable", "that it finds no place is told")
    first = set(jobs.pods())
    jobs.until(lambda: bool(jobs.idle_ranks()), "it runs")
    (pod,) = jobs.pods().values()
    assert pod["metadata"]["name"] not in first
    assert pod["spec"]["nodeSelector"] == {"terms": "on-demand"}
    jobs.end_idle()
    jobs.until_state("Done")


def test_pods_behind_a_gate_wait_for_whoever_queues_them(start: Start) -> None:
    """As Kueue does: a gate, labels by which it knows the pods, and a deletion with grace when it takes them back."""
    jobs = start(2)
    queue = {"kueue.x-k8s.io/queue-name": "gpus"}
    gate = [{"name": "kueue.x-k8s.io/admission"}]
    jobs.create_idle(labels=queue | {"team": "a"}, pod={"schedulingGates": gate}, gatherSeconds=1, nodesMin=2)
    jobs.until(lambda: len(jobs.pods()) == 2 and jobs.condition("PodsReady").get("reason") == "Unschedulable", "gated")
    pods = jobs.pods()
    assert all(pod["metadata"]["labels"] | queue == pod["metadata"]["labels"] for pod in pods.values())
    assert not any("team" in pod["metadata"]["labels"] for pod in pods.values())
    assert jobs.status["state"] == "Pending"
    for pod in pods:
        body = {"spec": {"schedulingGates": None}}
        assert jobs.cluster.request("PATCH", path_of("pods", "default", pod), body)[0] == 200
    jobs.until(lambda: jobs.idle_ranks().keys() == pods.keys(), "the same pods run")
    assert not jobs.events("node lost")
    victim = min(pods)
    jobs.cluster.request("DELETE", f"{path_of('pods', 'default', victim)}?gracePeriodSeconds=20")
    notice = jobs.until_event("notice received")
    assert notice["node"] == victim
    jobs.until(lambda: len(jobs.pods().keys() - pods.keys()) == 1, "a replacement waits behind its gate")
    jobs.edit(cancel=True)
    jobs.until_state("Cancelled")
    jobs.until_no_pods()


def test_ranks_of_a_zone_are_beside_each_other(start: Start) -> None:
    jobs = start(0)
    zones = {f"node-{number}": "ab"[number % 2] for number in range(4)}
    for name, zone in zones.items():
        jobs.cluster.add_node(name, capacity=GPU, labels={"topology.kubernetes.io/zone": zone})
    jobs.create_idle(nodesMin=4, nodesMax=4)
    jobs.until(lambda: len(jobs.idle_ranks()) == 4, "four ranks")
    by_rank = sorted((rank, zones[jobs.host_of(pod)]) for pod, rank in jobs.idle_ranks().items())
    assert "".join(zone for _, zone in by_rank) in ("aabb", "bbaa")
    jobs.end_idle()
    jobs.until_state("Done")


# --------------------------------------------------------------------------------------------------- what a user does


def test_a_job_is_suspended_resumed_resized_rolled_back_and_cancelled(start: Start) -> None:
    jobs = start(2)
    jobs.create(env={"STEPS": 100_000}, gatherSeconds=10)
    jobs.until_event("committed")
    jobs.edit(suspend=True)
    jobs.until_state("Suspended")
    saved = survey(jobs.store).newest()
    assert saved is not None
    assert saved.id.step >= 10
    assert jobs.status["exitCode"] == 75
    assert jobs.status["newestCheckpoint"] == str(saved.id)
    jobs.until_no_pods()
    jobs.edit(suspend=False, nodesMax=1)
    jobs.until_event("first good step", 2)
    path = path_of("trainingjobs", "default", JOB, "scale")
    jobs.until(lambda: jobs.cluster.request("GET", path)[1]["status"]["replicas"] == 1, "the scale is told")
    assert jobs.cluster.request("PATCH", path, {"spec": {"replicas": 2}})[0] == 200
    jobs.until_event("first good step", 3)
    jobs.edit(nodesMax=1)
    jobs.until_event("first good step", 4)
    body = {"metadata": {"annotations": {ROLLBACK_ANNOTATION: "10"}}}
    assert jobs.cluster.request("PATCH", path_of("trainingjobs", "default", JOB), body)[0] == 200
    jobs.until_event("first good step", 5)
    assert ROLLBACK_ANNOTATION not in (jobs.job()["metadata"].get("annotations") or {})
    opened = jobs.events("generation opened")
    assert [record["facts"]["world_size"] for record in opened] == [2, 1, 2, 1, 1]
    assert opened[1]["step"] == saved.id.step
    assert opened[4]["step"] == 10
    jobs.edit(cancel=True)
    jobs.until_state("Cancelled")
    jobs.until_no_pods()
    check_store(jobs.store)


def test_a_job_that_is_deleted_saves_first_and_goes_on_under_its_name(start: Start) -> None:
    jobs = start(1)
    settings: dict[str, Any] = {"nodesMax": 1, "saveEvery": 1000, "env": {"STEPS": 100_000}}
    jobs.create(**settings)
    jobs.until_trained(15)
    jobs.cluster.request("DELETE", path_of("trainingjobs", "default", JOB))
    jobs.until(lambda: jobs.cluster.request("GET", path_of("trainingjobs", "default", JOB))[0] == 404, "it is deleted")
    saved = survey(jobs.store).newest()
    assert saved is not None
    assert saved.id.step >= 15
    jobs.until(lambda: not left_of(jobs), "nothing of it is left")
    jobs.create(**settings)
    jobs.until_event("first good step", 2)
    assert jobs.events("generation opened")[1]["step"] == saved.id.step
    jobs.edit(cancel=True)
    jobs.until_state("Cancelled")
    check_store(jobs.store)


def left_of(jobs: Jobs) -> list[str]:
    """Names of all that belongs to the job."""
    kinds = ("pods", "secrets", "services", "poddisruptionbudgets")
    paths = [f"{path_of(kind, jobs.namespace)}?labelSelector={JOB_LABEL}={JOB}" for kind in kinds]
    return [found["metadata"]["name"] for path in paths for found in jobs.cluster.request("GET", path)[1]["items"]]

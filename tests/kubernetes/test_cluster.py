"""The simulated controllers and the process kubelets, on the double: placing, running, losing and ending pods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster import Cluster, running_cluster, why_not
from tests.kubernetes.cluster_controllers import Delays
from tests.kubernetes.rest import Object

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

PODS = "/api/v1/namespaces/default/pods"
SLEEP = "exec sleep 600"
NICE = 'trap "echo told; exit 3" TERM; echo up; while true; do sleep 0.05; done'
STUBBORN = 'trap "echo told" TERM; setsid sleep 600 & echo up; while true; do sleep 0.05; done'


@pytest.fixture(params=["double", "real"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    missing = why_not(request.param)
    if missing is not None:
        pytest.skip(missing)
    with running_cluster(tmp_path, nodes=2, kind=request.param, capacity={"nvidia.com/gpu": "2"}) as running:
        yield running


def pod(name: str, script: str, *, gpus: int = 0, labels: Object | None = None, **spec: Any) -> Object:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    container = {"name": "main", "image": "any", "command": ["sh", "-c", script], "resources": resources}
    containers = [{**container, **spec.pop("container", {})}]
    metadata = {"name": name, "labels": labels or {}}
    return {"metadata": metadata, "spec": {"restartPolicy": "Never", "containers": containers, **spec}}


def condition(found: Object | None, kind: str) -> Object:
    assert found is not None
    return {one["type"]: one for one in found["status"].get("conditions") or []}.get(kind, {})


def ended(found: Object) -> Object:
    state = found["status"]["containerStatuses"][0]["state"]
    return dict(state["terminated"])


def run(cluster: Cluster, body: Object) -> Object:
    """Create it and wait until it runs and has said that it is up."""
    cluster.create(PODS, body)
    name = body["metadata"]["name"]
    running = cluster.until_phase(name, "Running")
    if "echo up" in body["spec"]["containers"][0]["command"][-1]:
        cluster.until(lambda: "up" in cluster.logs(name), f"{name} is up")
    return running


def last_of(cluster: Cluster, name: str, version: str, path: str = PODS) -> Object:
    """A pod as it was when it vanished."""
    query = f"watch=1&resourceVersion={version}&timeoutSeconds=1&fieldSelector=metadata.name%3D{name}"
    _, text = cluster.request("GET", f"{path}?{query}")
    events = [text] if isinstance(text, dict) else [json.loads(line) for line in text.splitlines()]
    assert events[-1]["type"] == "DELETED"
    return dict(events[-1]["object"])


# -- processes -----------------------------------------------------------------------------------------------


def test_a_pod_runs_to_its_end(cluster: Cluster) -> None:
    cluster.create(PODS, pod("good", "echo hello"))
    cluster.create(PODS, pod("bad", "exit 7"))
    good, bad = cluster.until_phase("good", "Succeeded"), cluster.until_phase("bad", "Failed")
    assert (ended(good)["exitCode"], ended(good)["reason"]) == (0, "Completed")
    assert (ended(bad)["exitCode"], ended(bad)["reason"]) == (7, "Error")
    assert cluster.logs("good") == "hello\n"
    if cluster.server is not None:  # a real one would fetch it from the kubelet's own port
        assert cluster.request("GET", f"{PODS}/good/log") == (200, "hello\n")


def test_what_a_container_is_given(cluster: Cluster) -> None:
    config = {"metadata": {"name": "c"}, "data": {"word": "from the map"}}
    cluster.create("/api/v1/namespaces/default/configmaps", config)
    secret = {"metadata": {"name": "s"}, "stringData": {"settings.json": "{}", "password": "x"}}
    script = "echo $A,$B,$C,$D,$E; cat $F; stat -c %a $F; echo kept > /data/file; echo $(ls /dev/shm/own) $IN_ARGS"
    variables = [
        {"name": "A", "value": "a"},
        {"name": "B", "value": "$(A)b$(NONE)$$(A)"},
        {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['x']"}}},
        {"name": "E", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "word"}}},
        {"name": "F", "value": "/run/secret/settings.json"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "IN_ARGS", "value": "not /database, file:///data"},
    ]
    mounts = {"sec": "/run/secret", "data": "/data", "shm": "/dev/shm/own", "same": "/shm2"}
    container = {
        "command": ["sh", "-c"],
        "args": [f"{script}; test -d /shm2; echo $(IP) $IP"],
        "env": variables,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    volumes = [
        {"name": "sec", "secret": {"secretName": "s"}},
        {"name": "data", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "same", "hostPath": {"path": "/tmp"}},
    ]
    cluster.create(PODS, pod("a", "", labels={"x": "y"}, container=container, volumes=volumes))
    waits = lambda: "not found" in json.dumps((cluster.pod("a") or {})["status"].get("containerStatuses"))  # noqa: E731
    cluster.until(waits, "it waits for the secret")
    cluster.create("/api/v1/namespaces/default/secrets", secret)
    done = cluster.until_phase("a", "Succeeded")
    address = done["status"]["podIP"]
    words, *rest, addresses = cluster.logs("a").splitlines()
    assert words == "a,ab$(NONE)$(A),a,y,from the map"
    assert rest[0] == "{}644"
    assert rest[1].startswith("not /database, file:///tmp")
    assert addresses == f"{address} {address}"
    assert address.startswith("127.")


def test_a_container_that_cannot_start_says_why(cluster: Cluster) -> None:
    cluster.create(PODS, pod("a", "", container={"image": "missing/image:1"}))

    def waiting() -> str:
        statuses = (cluster.pod("a") or {})["status"].get("containerStatuses") or [
            {"state": {"waiting": {"reason": ""}}}
        ]
        return str(statuses[0]["state"]["waiting"]["reason"])

    cluster.until(lambda: waiting() == "ImagePullBackOff", "its image is missing")
    assert (cluster.pod("a") or {})["status"]["phase"] == "Pending"
    cluster.request("DELETE", f"{PODS}/a")
    cluster.until(lambda: cluster.pod("a") is None, "it is gone")


def test_containers_before_the_first(cluster: Cluster) -> None:
    before = {"name": "before", "image": "any", "command": ["sh", "-c", "echo before"]}
    cluster.create(PODS, pod("a", "echo then", initContainers=[before]))
    cluster.until_phase("a", "Succeeded")
    assert cluster.logs("a") == "before\nthen\n"
    cluster.create(PODS, pod("b", "echo then", initContainers=[{**before, "command": ["false"]}]))
    cluster.until_phase("b", "Failed")
    assert cluster.logs("b") == ""


def test_a_pod_ends_within_its_grace(cluster: Cluster) -> None:
    version = run(cluster, pod("a", NICE))["metadata"]["resourceVersion"]
    cluster.request("DELETE", f"{PODS}/a")
    cluster.until(lambda: cluster.pod("a") is None, "it is gone")
    last = last_of(cluster, "a", version)
    assert (last["status"]["phase"], ended(last)["exitCode"]) == ("Failed", 3)
    assert cluster.logs("a") == "up\ntold\n"


def test_who_does_not_end_is_killed_with_all_it_started(cluster: Cluster) -> None:
    made = run(cluster, pod("a", STUBBORN, terminationGracePeriodSeconds=600))
    kubelet = cluster.nodes[made["spec"]["nodeName"]]
    cluster.until(lambda: len(kubelet.processes(made["metadata"]["uid"])) >= 2, "a process in a session of its own")
    cluster.request("DELETE", f"{PODS}/a")
    cluster.until(lambda: "told" in cluster.logs("a"), "it was told")
    cluster.request("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 1})
    cluster.until(lambda: cluster.pod("a") is None, "a shorter grace is honoured")
    assert kubelet.processes(made["metadata"]["uid"]) == []
    assert ended(last_of(cluster, "a", made["metadata"]["resourceVersion"]))["exitCode"] == 137


def test_a_pod_that_was_deleted_by_force_ends_too(cluster: Cluster) -> None:
    made = run(cluster, pod("a", STUBBORN))
    cluster.request("DELETE", f"{PODS}/a?gracePeriodSeconds=0")
    assert cluster.pod("a") is None
    kubelet = cluster.nodes[made["spec"]["nodeName"]]
    cluster.until(lambda: not kubelet.processes(made["metadata"]["uid"]), "its processes end")


# -- scheduling ----------------------------------------------------------------------------------------------


def test_pods_go_where_they_may_and_fit(cluster: Cluster) -> None:
    cluster.add_node("special", labels={"kind": "special"}, taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}])
    toleration = {"key": "k", "operator": "Equal", "value": "v", "effect": "NoSchedule"}
    chosen = run(cluster, pod("a", SLEEP, nodeSelector={"kind": "special"}, tolerations=[toleration]))
    assert chosen["spec"]["nodeName"] == "special"
    nodes = {run(cluster, pod(name, SLEEP, gpus=2))["spec"]["nodeName"] for name in ("b", "c")}
    assert nodes == {"node-0", "node-1"}
    cluster.create(PODS, pod("d", SLEEP, gpus=1))
    cluster.until(lambda: condition(cluster.pod("d"), "PodScheduled").get("reason") == "Unschedulable", "no room")
    message = condition(cluster.pod("d"), "PodScheduled")["message"]
    reasons = "1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu"
    assert message.startswith(f"0/3 nodes are available: {reasons}.")
    cluster.create(PODS, pod("e", SLEEP, schedulingGates=[{"name": "example.org/wait"}]))
    assert condition(cluster.pod("e"), "PodScheduled")["reason"] == "SchedulingGated"
    cluster.request("PATCH", f"{PODS}/e", {"spec": {"schedulingGates": None}})
    cluster.until_phase("e", "Running")
    cluster.request("DELETE", f"{PODS}/b")
    cluster.until_phase("d", "Running")


def test_a_pod_of_higher_priority_takes_the_place_of_others(cluster: Cluster) -> None:
    for name, value in (("low", 1), ("high", 10)):
        cluster.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": value})
    for name in ("a", "b"):
        version = run(cluster, pod(name, NICE, gpus=2, priorityClassName="low"))["metadata"]["resourceVersion"]
    cluster.create(PODS, pod("c", SLEEP, gpus=2, priorityClassName="high"))
    where = cluster.until_phase("c", "Running")["spec"]["nodeName"]
    left = [name for name in ("a", "b") if cluster.pod(name)]
    assert len(left) == 1, "one victim is enough"
    victim = last_of(cluster, "b" if left == ["a"] else "a", version)
    assert victim["spec"]["nodeName"] == where
    assert condition(victim, "DisruptionTarget")["reason"] == "PreemptionByScheduler"


# -- disruptions ---------------------------------------------------------------------------------------------


def test_a_taint_drives_pods_away(cluster: Cluster) -> None:
    tolerations = [{"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600}]
    stays = run(cluster, pod("stays", SLEEP, tolerations=tolerations))
    version = run(cluster, pod("goes", NICE, nodeName=stays["spec"]["nodeName"]))["metadata"]["resourceVersion"]
    cluster.taint(stays["spec"]["nodeName"], "k")
    cluster.until(lambda: cluster.pod("goes") is None, "it is gone")
    gone = last_of(cluster, "goes", version)
    assert condition(gone, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    assert (gone["status"]["phase"], ended(gone)["exitCode"]) == ("Failed", 3)
    assert "deletionTimestamp" not in (cluster.pod("stays") or {})["metadata"]
    cluster.untaint(stays["spec"]["nodeName"], "k")


def test_an_eviction_respects_the_budget(cluster: Cluster) -> None:
    selector = {"matchLabels": {"app": "x"}}
    budget = {"metadata": {"name": "x"}, "spec": {"minAvailable": 1, "selector": selector}}
    cluster.create("/apis/policy/v1/namespaces/default/poddisruptionbudgets", budget)
    run(cluster, pod("a", NICE, labels={"app": "x"}))
    status, answer = cluster.evict("default", "a")
    assert (status, answer["reason"]) == (429, "TooManyRequests")
    assert answer["details"]["causes"][0]["reason"] == "DisruptionBudget"
    version = run(cluster, pod("b", NICE, labels={"app": "x"}))["metadata"]["resourceVersion"]
    assert cluster.evict("default", "a")[0] == 201
    cluster.until(lambda: cluster.pod("a") is None, "it is gone")
    assert condition(last_of(cluster, "a", version), "DisruptionTarget")["reason"] == "EvictionByEvictionAPI"


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, nodes=2, delays=Delays(node_lost_seconds=1.5, pod_garbage_seconds=0.2)) as running:
        yield running


NOT_LONG = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for key in ("unreachable", "not-ready")
]


def ready(cluster: Cluster, node: str) -> str:
    found = cluster.request("GET", f"/api/v1/nodes/{node}")[1]
    return str({one["type"]: one["status"] for one in found["status"]["conditions"]}["Ready"])


def test_a_lost_machine_s_pods_stay_until_its_node_is_deleted(hasty: Cluster) -> None:
    made = run(hasty, pod("a", NICE, tolerations=NOT_LONG))
    node = made["spec"]["nodeName"]
    assert len(hasty.nodes[node].processes()) >= 1
    hasty.nodes[node].lose()
    assert hasty.nodes[node].processes() == []
    hasty.until(lambda: ready(hasty, node) == "Unknown", "the node is lost")
    hasty.until(lambda: "deletionTimestamp" in (hasty.pod("a") or {})["metadata"], "its pod is to be deleted")
    stuck = hasty.pod("a")
    assert condition(stuck, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    assert stuck is not None
    assert stuck["status"]["phase"] == "Running"
    taints = hasty.request("GET", f"/api/v1/nodes/{node}")[1]["spec"]["taints"]
    assert {(one["key"], one["effect"]) for one in taints} == {
        ("node.kubernetes.io/unreachable", effect) for effect in ("NoSchedule", "NoExecute")
    }
    hasty.delete_node(node)
    hasty.until(lambda: hasty.pod("a") is None, "its pods go with the node")


def test_a_machine_that_boots_again_ends_its_old_pods(hasty: Cluster) -> None:
    node = run(hasty, pod("a", NICE))["spec"]["nodeName"]
    hasty.nodes[node].lose()
    hasty.nodes[node].start()
    assert ended(hasty.until_phase("a", "Failed"))["exitCode"] == 137
    run(hasty, pod("b", NICE, nodeSelector={"kubernetes.io/hostname": node}))


def test_behind_a_partition_pods_live_on(hasty: Cluster) -> None:
    made = run(hasty, pod("a", NICE, tolerations=NOT_LONG))
    node, uid = made["spec"]["nodeName"], made["metadata"]["uid"]
    hasty.nodes[node].partition()
    hasty.until(lambda: ready(hasty, node) == "Unknown", "the node is lost")
    hasty.until(lambda: "deletionTimestamp" in (hasty.pod("a") or {})["metadata"], "its pod is to be deleted")
    assert hasty.nodes[node].processes(uid)
    hasty.nodes[node].heal()
    hasty.until(lambda: hasty.pod("a") is None, "the kubelet hears of it")
    hasty.until(lambda: ready(hasty, node) == "True", "the node is back")
    hasty.until(lambda: not hasty.request("GET", f"/api/v1/nodes/{node}")[1]["spec"].get("taints"), "and untainted")
    assert hasty.logs("a") == "up\ntold\n"


def test_a_frozen_machine_does_nothing(cluster: Cluster) -> None:
    made = run(cluster, pod("a", "echo up; while true; do echo .; sleep 0.02; done"))
    kubelet = cluster.nodes[made["spec"]["nodeName"]]
    kubelet.freeze()
    states = {Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0] for one in kubelet.processes()}
    assert states == {"T"}
    written = len(cluster.logs("a"))
    kubelet.thaw()
    cluster.until(lambda: len(cluster.logs("a")) > written, "it goes on")


# -- garbage -------------------------------------------------------------------------------------------------


def test_what_is_owned_goes_with_its_owner(cluster: Cluster) -> None:
    maps = "/api/v1/namespaces/default/configmaps"
    owner = cluster.create(maps, {"metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    body = pod("a", NICE)
    body["metadata"]["ownerReferences"] = [reference]
    run(cluster, body)
    cluster.create(maps, {"metadata": {"name": "owned", "ownerReferences": [reference]}})
    assert cluster.request("DELETE", f"{maps}/owner")[0] == 200
    cluster.until(lambda: cluster.request("GET", f"{maps}/owned")[0] == 404, "the map goes")
    cluster.until(lambda: cluster.pod("a") is None, "the pod goes")
    assert cluster.logs("a") == "up\ntold\n"


def test_a_namespace_goes_with_what_is_in_it(cluster: Cluster) -> None:
    cluster.create("/api/v1/namespaces", {"metadata": {"name": "n"}})
    cluster.create("/api/v1/namespaces/n/pods", pod("a", NICE))
    cluster.until_phase("a", "Running", namespace="n")
    assert cluster.request("DELETE", "/api/v1/namespaces/n")[1]["status"]["phase"] == "Terminating"
    cluster.until(lambda: cluster.request("GET", "/api/v1/namespaces/n")[0] == 404, "the namespace is gone")


def test_everything_goes_on_after_the_server_was_away(cluster: Cluster) -> None:
    if cluster.server is None:
        pytest.skip("the real one is not stopped and started")
    run(cluster, pod("a", NICE))
    cluster.server.stop()
    cluster.server.start()
    run(cluster, pod("b", NICE))
    cluster.request("DELETE", f"{PODS}/a")
    cluster.until(lambda: cluster.pod("a") is None, "it is gone")


# -- others' clients -----------------------------------------------------------------------------------------


def test_the_official_client_works_with_it(cluster: Cluster) -> None:
    from kubernetes import client, config, watch

    configuration = client.Configuration()
    config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
    with client.ApiClient(configuration) as connection:
        core = client.CoreV1Api(connection)
        assert {node.metadata.name for node in core.list_node().items} == {"node-0", "node-1"}
        core.create_namespaced_pod("default", pod("a", "echo hi"))
        phases = []
        watching = watch.Watch()
        for event in watching.stream(core.list_namespaced_pod, "default", timeout_seconds=20):
            phases.append(event["object"].status.phase)
            if phases[-1] == "Succeeded":
                watching.stop()
        assert list(dict.fromkeys(phases))[-1] == "Succeeded"
        if cluster.server is not None:  # a real one would fetch it from the kubelet's own port
            assert core.read_namespaced_pod_log("a", "default", _preload_content=False).data == b"hi\n"
        core.create_namespaced_pod("default", pod("b", NICE, terminationGracePeriodSeconds=20))
        cluster.until(lambda: "up" in cluster.logs("b"), "it is up")
        deleted = core.delete_namespaced_pod("b", "default")
        assert deleted.metadata.deletion_grace_period_seconds == 20
        cluster.until(lambda: cluster.pod("b") is None, "it is gone")
        with pytest.raises(client.ApiException) as refused:
            core.read_namespaced_pod("b", "default")
        assert (refused.value.status, json.loads(refused.value.body)["reason"]) == (404, "NotFound")


def test_processes_end_with_the_process_that_tests(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from tests.kubernetes.cluster import running_cluster
from tests.kubernetes.test_cluster import pod, run
with running_cluster(Path({str(tmp_path)!r}), nodes=1) as cluster:
    run(cluster, pod("a", "echo up $$$$; exec sleep 600"))
    print(cluster.logs("a").split()[1], flush=True)
    time.sleep(600)
"""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            child = int(process.stdout.readline())
            assert _lives(child)
        finally:
            process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while _lives(child):
        assert time.monotonic() < end, "the pod outlives its kubelet"
        time.sleep(0.02)


def _lives(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:1]
    except OSError:
        return False

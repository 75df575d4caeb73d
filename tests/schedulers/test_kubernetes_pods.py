"""Pods as they are made from a template, and what is read from any object that calls itself a pod."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.schedulers.kubernetes.allocation import OVERDUE_SECONDS, is_overdue, pod_name
from orchestrator.schedulers.kubernetes.names import path_of
from orchestrator.schedulers.kubernetes.pods import (
    Owner,
    PodPlan,
    merged,
    place_of,
    read_pod,
    render_pod,
    template_problems,
)
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.servers import bare_cluster

OWNER = Owner(namespace="default", name="small", uid="11-22")
CONTAINER: dict[str, Any] = {"name": "t", "image": "i:1"}


def plan(template: dict[str, Any] | None = None, **changes: Any) -> PodPlan:
    usual: dict[str, Any] = {
        "owner": OWNER,
        "run": "0a1b",
        "secret": "small-0a1b",
        "template": template or {"spec": {"containers": [CONTAINER]}},
        "fallback": None,
        "labels": {},
        "grace_seconds": 30.0,
    }
    return PodPlan(**{**usual, **changes})


def rendered(spec: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    """The spec of a pod."""
    found: dict[str, Any] = render_pod(
        plan({"spec": {"containers": [CONTAINER], **(spec or {})}}), "small-abcde", **{"grace_seconds": 0.0, **how}
    )["spec"]
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server."""
    with bare_cluster(tmp_path_factory.mktemp("api")) as found:
        yield found


FULL: dict[str, Any] = {
    "priorityClassName": "",
    "nodeSelector": {"terms": "spot"},
    "runtimeClassName": "nvidia",
    "securityContext": {"fsGroup": 1000, "runAsNonRoot": True},
    "serviceAccountName": "trainer",
    "initContainers": [{"name": "fetch", "image": "f"}],
    "imagePullSecrets": [{"name": "registry"}],
    "hostNetwork": True,
    "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}],
    "somethingOfTheFuture": {"a": [1]},
}


def test_what_the_template_says_is_passed_on() -> None:
    spec = rendered(FULL)
    assert {name: spec[name] for name in FULL} == FULL


def test_metadata_is_the_templates_and_ours() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "orchestrator.dev/job": "x"}, "annotations": {"b": "c"}, "name": "no"},
        "spec": {"containers": [CONTAINER]},
    }
    pod = render_pod(plan(template, labels={"kueue.x-k8s.io/queue-name": "q"}), "small-abcde", grace_seconds=0)
    metadata = pod["metadata"]
    assert metadata["name"] == "small-abcde"
    assert metadata["annotations"] == {"b": "c"}
    assert metadata["labels"] == {
        "team": "a",
        "kueue.x-k8s.io/queue-name": "q",
        "orchestrator.dev/job": "small",
        "orchestrator.dev/run": "0a1b",
    }
    (owner,) = metadata["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("11-22", True, True)


def test_the_first_container_runs_the_agent() -> None:
    own = {
        **CONTAINER,
        "command": ["/opt/python"],
        "args": ["x"],
        "env": [{"name": "A", "value": "1"}],
        "workingDir": "/w",
    }
    first, second = rendered({"containers": [own, {"name": "side", "image": "s", "command": ["s"]}]})["containers"]
    assert first["command"] == ["/opt/python", "-m", "orchestrator.agent"]
    assert "x" not in first["args"]
    assert [one["name"] for one in first["env"]] == ["POD_NAME", "POD_IP", "A"]
    assert first["workingDir"] == "/w"
    assert {mount["mountPath"] for mount in first["volumeMounts"]} == {
        "/run/orchestrator",
        "/dev/shm",
        "/var/log/orchestrator",
    }
    assert second == {"name": "side", "image": "s", "command": ["s"]}


def test_names_that_we_need_cannot_be_taken() -> None:
    own = {**CONTAINER, "env": [{"name": "POD_NAME", "value": "x"}, {"name": "POD_IP", "value": "y"}]}
    (first,) = rendered({"containers": [own], "restartPolicy": "Always", "hostname": "h"})["containers"]
    assert [one["valueFrom"]["fieldRef"]["fieldPath"] for one in first["env"]] == ["metadata.name", "status.podIP"]
    spec = rendered({"restartPolicy": "Always", "hostname": "h"})
    assert (spec["restartPolicy"], spec["hostname"], spec["subdomain"]) == ("Never", "small-abcde", "small")


def test_volumes_of_ones_own_stay_and_a_mount_at_our_place_is_used() -> None:
    """Somebody gives /dev/shm a size of its own, or a disk for the logs."""
    own = {**CONTAINER, "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "data", "mountPath": "/d"}]}
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}, {"name": "data", "emptyDir": {}}]
    spec = rendered({"containers": [own], "volumes": volumes})
    assert spec["volumes"][:2] == volumes
    assert [volume["name"] for volume in spec["volumes"]] == [
        "shm",
        "data",
        "orchestrator-settings",
        "orchestrator-logs",
    ]
    places = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
    assert sorted(places) == sorted(set(places))


def test_memory_is_bounded_once_it_is_measured() -> None:
    def staging(spec: dict[str, Any]) -> Any:
        return next(one["emptyDir"] for one in spec["volumes"] if one["name"] == "orchestrator-staging")

    assert staging(rendered()) == {"medium": "Memory"}
    assert staging(rendered(staging_bytes=123)) == {"medium": "Memory", "sizeLimit": "123"}


@pytest.mark.parametrize(
    ("template", "measured", "grace"), [(None, 0.0, 30), (100, 0.0, 100), (100, 200.7, 200), (5, 0.0, 30)]
)
def test_the_grace_is_the_longest_that_anybody_wants(template: int | None, measured: float, grace: int) -> None:
    given = {} if template is None else {"terminationGracePeriodSeconds": template}
    spec = rendered(given, grace_seconds=measured)
    assert spec["terminationGracePeriodSeconds"] == grace
    assert f"--grace-seconds={grace - 5}" in spec["containers"][0]["args"]


def test_tolerations() -> None:
    lost = {"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"}
    assert {one["key"] for one in rendered()["tolerations"]} == lost
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}
    spot = {"key": "spot", "operator": "Exists"}
    found = rendered({"tolerations": [own, spot]})["tolerations"]
    assert found[:2] == [own, spot]
    assert [one["key"] for one in found[2:]] == ["node.kubernetes.io/not-ready"]
    assert all(one["tolerationSeconds"] == 30 for one in found[2:])


def test_pods_are_spread_over_zones_unless_the_template_knows_better() -> None:
    (constraint,) = rendered()["topologySpreadConstraints"]
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert "topologySpreadConstraints" not in rendered({"affinity": {"podAffinity": {}}})
    assert rendered({"topologySpreadConstraints": []})["topologySpreadConstraints"] == []


def test_other_terms_are_a_merge_patch() -> None:
    template = {
        "spec": {"containers": [CONTAINER], "nodeSelector": {"spot": "true", "gpu": "h100"}, "tolerations": [{}]}
    }
    fallback = {"spec": {"nodeSelector": {"spot": None}, "tolerations": [], "priorityClassName": "high"}}
    found = plan(template, fallback=fallback)
    first = render_pod(found, "a", grace_seconds=0)["spec"]
    other = render_pod(found, "a", grace_seconds=0, falls_back=True)["spec"]
    assert first["nodeSelector"] == {"spot": "true", "gpu": "h100"}
    assert "priorityClassName" not in first
    assert other["nodeSelector"] == {"gpu": "h100"}
    assert other["priorityClassName"] == "high"
    assert other["containers"] == first["containers"]
    assert template["spec"]["nodeSelector"] == {"spot": "true", "gpu": "h100"}, "the template itself stays"


def test_rendering_changes_nothing_that_it_was_given() -> None:
    template: dict[str, Any] = {"spec": {"containers": [{**CONTAINER, "env": [], "volumeMounts": []}]}}
    render_pod(plan(template), "a", grace_seconds=0)
    assert template == {"spec": {"containers": [{**CONTAINER, "env": [], "volumeMounts": []}]}}


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [  # of RFC 7396
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patches(target: Any, patch: Any, result: Any) -> None:
    assert merged(target, patch) == result


@pytest.mark.parametrize("job", ["a", "small", "x" * 50, "y" * 49 + "z", "a-" * 24 + "b"])
def test_names_are_names_for_hosts(job: str) -> None:
    names = {pod_name(job) for _ in range(20)}
    assert len(names) == 20
    for name in names:
        assert len(name) <= 63
        assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)


@pytest.mark.parametrize("spec", [{}, {key: FULL[key] for key in ("nodeSelector", "initContainers", "hostNetwork")}])
def test_the_api_server_takes_it(cluster: Cluster, spec: dict[str, Any]) -> None:
    template = {"spec": {"containers": [CONTAINER, {"name": "side", "image": "s"}], **spec}}
    pod = render_pod(plan(template), pod_name("small"), grace_seconds=0, staging_bytes=1 << 30)
    cluster.create(path_of("pods", "default"), pod)


# ------------------------------------------------------------------------------------------------ reading one


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"metadata": None, "spec": None, "status": None},
        {"metadata": [], "spec": "x", "status": 3},
        {"metadata": {"labels": [], "deletionTimestamp": 5, "creationTimestamp": "yesterday"}},
        {"metadata": {"deletionTimestamp": "soon", "deletionGracePeriodSeconds": "many"}},
        {"status": {"phase": None, "conditions": {}, "containerStatuses": [None, 3, {}]}},
        {
            "status": {
                "phase": "Failed",
                "conditions": [None, "x"],
                "containerStatuses": [{"state": {"terminated": {}}}],
            }
        },
        {"status": {"containerStatuses": [{"state": {"waiting": {"message": "no reason"}}}]}},
        {"status": {"phase": "OfTheFuture"}},
    ],
)
def test_odd_objects_are_read_as_saying_nothing(odd: dict[str, Any]) -> None:
    pod = read_pod(odd)
    assert pod.unschedulable == pod.waiting == ""
    assert pod.deletion_grace_seconds == 0
    assert not is_overdue(pod, None, 1e12)
    assert pod.ended == ("the pod has failed" if pod.phase == "Failed" else "")


def test_why_a_pod_has_ended_is_said_whole() -> None:
    status = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "disk pressure",
        "containerStatuses": [{"name": "t", "state": {"terminated": {"reason": "Error", "exitCode": 143}}}],
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}],
    }
    assert read_pod({"status": status}).ended == (
        "the pod has failed (Evicted; disk pressure; container t: Error, exit code 143; TerminationByKubelet)"
    )


def test_why_a_pod_does_not_start() -> None:
    gated = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    assert read_pod({"status": {"conditions": gated}}).unschedulable == "SchedulingGated"
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off"}
    status = {"initContainerStatuses": [{"name": "fetch", "state": {"waiting": waiting}}]}
    assert read_pod({"status": status}).waiting == "container fetch: CrashLoopBackOff: back-off"
    for usual in ("ContainerCreating", "PodInitializing"):
        status = {"containerStatuses": [{"name": "t", "state": {"waiting": {"reason": usual}}}]}
        assert read_pod({"status": status}).waiting == ""


def test_a_pod_that_should_be_gone() -> None:
    """By our own clock, from when its deletion was seen: the API server's may be minutes off."""
    pod = read_pod({"metadata": {"deletionTimestamp": "2001-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}})
    assert not is_overdue(pod, 1000.0, 1030.0 + OVERDUE_SECONDS)
    assert is_overdue(pod, 1000.0, 1030.1 + OVERDUE_SECONDS)


def test_a_pod_on_other_terms_is_known_by_the_next_controller() -> None:
    terms = plan(fallback={"spec": {"nodeSelector": {"tier": "on-demand"}}})
    made = render_pod(terms, "job-abcde", grace_seconds=0, falls_back=True)
    assert read_pod(made).falls_back
    assert not read_pod(render_pod(terms, "job-abcde", grace_seconds=0)).falls_back


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({}, ""),
        ({"kubernetes.io/hostname": "h"}, ""),
        ({"topology.kubernetes.io/zone": "a"}, "a////////"),
        ({"failure-domain.beta.kubernetes.io/zone": "a"}, "a////////"),
        ({"topology.kubernetes.io/zone": "a", "nvidia.com/gpu.clique": "c"}, "a////////c"),
    ],
)
def test_places(labels: dict[str, str], place: str) -> None:
    assert place_of({"metadata": {"labels": labels}}) == place
    assert place_of({"metadata": {"labels": None}}) == ""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"containers": None}, "spec.containers: one"),
        ({"containers": [None]}, "spec.containers: one"),
        ({"volumes": {"a": {}}}, "spec.volumes: is no list of objects"),
        ({"volumes": ["a"]}, "spec.volumes: is no list of objects"),
        ({"tolerations": "all"}, "spec.tolerations: is no list of objects"),
        ({"containers": [{"env": [None]}]}, "spec.containers[0].env: is no list of objects"),
        ({"containers": [{"env": {"A": "b"}}]}, "spec.containers[0].env: is no list of objects"),
        ({"containers": [{"volumeMounts": ["/x"]}]}, "spec.containers[0].volumeMounts: is no list of objects"),
        ({"containers": [{"command": "python3"}]}, "spec.containers[0].command: is no list of words"),
        ({"terminationGracePeriodSeconds": "30s"}, "spec.terminationGracePeriodSeconds: is no whole number"),
    ],
)
def test_shapes_that_no_pod_has_are_told(spec: dict[str, Any], words: str) -> None:
    assert [problem[: len(words)] for problem in template_problems({"spec": {"containers": [CONTAINER], **spec}})] == [
        words
    ]
    assert template_problems({"spec": {"containers": [CONTAINER]}, "metadata": ["x"]}) == ["metadata: is no object"]


ODD: list[Any] = [None, {}, [], 0, True, "x", 7.5, ["x"], [None], [{}], {"a": "b"}]


def test_what_has_no_problem_can_be_rendered() -> None:
    """Every field that is looked at, in every odd shape."""
    for odd in ODD:
        for name in (
            "volumes",
            "tolerations",
            "terminationGracePeriodSeconds",
            "topologySpreadConstraints",
            "affinity",
        ):
            render_if_well({"spec": {"containers": [CONTAINER], name: odd}})
        for name in ("env", "volumeMounts", "command", "args", "name", "image"):
            render_if_well({"spec": {"containers": [{**CONTAINER, name: odd}, odd]}})
        for name in ("labels", "annotations", "name"):
            render_if_well({"metadata": {name: odd}, "spec": {"containers": [CONTAINER]}})
        for template in (
            {"metadata": odd, "spec": {"containers": [CONTAINER]}},
            {"spec": odd},
            {"spec": {"containers": odd}},
        ):
            render_if_well(template)


def render_if_well(template: dict[str, Any]) -> None:
    if not template_problems(template):
        render_pod(plan(template), "small-abcde", grace_seconds=0.0, staging_bytes=1, falls_back=True)

"""Node and pod objects as notices."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.preemption.base import Reading, rfc3339_seconds
from orchestrator.preemption.kubernetes import parse_node, parse_pod

NOW = rfc3339_seconds("2026-01-01T00:00:00Z")


def taint(key: str, value: str = "") -> dict[str, Any]:
    return {"spec": {"taints": [{"key": key, "value": value, "effect": "NoSchedule"}]}}


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ({}, None),
        ({"spec": {"taints": None}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}, None),
        (taint("nvidia.com/gpu", "present"), None),
        (taint("aws-node-termination-handler/spot-itn", "spot-itn-1"), NoticeKind.PREEMPT),
        (taint("aws-node-termination-handler/rebalance-recommendation"), NoticeKind.HINT),
        (taint("cloud.google.com/impending-node-termination"), NoticeKind.PREEMPT),
        (taint("ToBeDeletedByClusterAutoscaler", "1767225600"), NoticeKind.MAINTENANCE),
        (taint("karpenter.sh/disrupted"), NoticeKind.MAINTENANCE),
        (taint("karpenter.sh/disruption", "disrupting"), NoticeKind.MAINTENANCE),
        (taint("node.kubernetes.io/unreachable"), NoticeKind.HINT),
        (taint("node.cloudprovider.kubernetes.io/shutdown"), NoticeKind.PREEMPT),
        ({"spec": {"unschedulable": True}}, NoticeKind.HINT),
        ({"status": {"conditions": [{"type": "GCESpotPreempting", "status": "True"}]}}, NoticeKind.PREEMPT),
        ({"status": {"conditions": [{"type": "GCESpotPreempting", "status": "False"}]}}, None),
        ({"metadata": {"labels": {"qos.coreweave.cloud/pending-preemption": "true"}}}, NoticeKind.PREEMPT),
        ({"metadata": {"labels": {"qos.coreweave.cloud/pending-preemption": "false"}}}, None),
        (
            {"metadata": {"labels": {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"}}},
            NoticeKind.MAINTENANCE,
        ),
        ({"metadata": {"labels": {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}}}, None),
    ],
)
def test_nodes(node: dict[str, Any], kind: NoticeKind | None) -> None:
    reading = parse_node(node)
    assert [found.kind for found in reading.found] == ([] if kind is None else [kind])
    assert reading.problems == ()


def test_a_cordoned_node_with_its_taint_is_one_hint() -> None:
    node = taint("node.kubernetes.io/unschedulable")
    node["spec"]["unschedulable"] = True
    assert len(parse_node(node).found) == 1


@pytest.mark.parametrize(
    "node",
    [{"spec": {"taints": "x"}}, {"spec": {"taints": [7]}}, {"status": {"conditions": [{"status": "True"}]}}],
)
def test_garbage_is_a_trouble(node: dict[str, Any]) -> None:
    reading = parse_node(node)
    assert reading.found == ()
    assert reading.problems


@pytest.mark.parametrize("node", [{"spec": 7, "status": [], "metadata": None}, {"metadata": {"labels": [1]}}])
def test_parts_of_another_shape_say_nothing(node: dict[str, Any]) -> None:
    assert parse_node(node) == Reading()
    assert parse_pod(node, NOW) == Reading()


def pod(status: str = "True", reason: str = "PreemptionByScheduler", **metadata: Any) -> dict[str, Any]:
    condition = {"type": "DisruptionTarget", "status": status, "reason": reason}
    return {"metadata": metadata, "status": {"conditions": [condition]}}


def test_a_pod_that_will_be_disrupted() -> None:
    (found,) = parse_pod(pod(), NOW).found
    assert (found.kind, found.remaining_seconds) == (NoticeKind.PREEMPT, None)
    assert parse_pod(pod(status="False"), NOW) == Reading()


@pytest.mark.parametrize(
    ("when", "grace", "left"),
    [
        ("2026-01-01T00:00:30Z", 30, 30.0),
        ("2026-01-01T01:00:00Z", 30, 30.0),
        ("2025-12-31T23:59:00Z", 30, None),
        ("2026-01-01T00:02:00Z", None, 120.0),
    ],
)
def test_a_pod_that_is_deleted(when: str, grace: int | None, left: float | None) -> None:
    found = parse_pod(pod("False", deletionTimestamp=when, deletionGracePeriodSeconds=grace), NOW).found
    assert [(one.kind, one.remaining_seconds) for one in found] == [(NoticeKind.PREEMPT, left)]


def test_a_deletion_at_a_time_that_nobody_understands_is_one_all_the_same() -> None:
    reading = parse_pod(pod("False", deletionTimestamp="soon"), NOW)
    assert [found.remaining_seconds for found in reading.found] == [None]
    assert reading.problems

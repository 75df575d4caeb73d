"""What Kubernetes says of a node and of a pod, as notices. Parsers only: `supervisor.kubernetes_notices` watches.

Node: taints, conditions, labels, `spec.unschedulable`. Pod: the condition DisruptionTarget (it is set before the
deletion, and can be taken back) and `metadata.deletionTimestamp`, which is when the grace is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption.base import Found, Reading, rfc3339_seconds, short, time_left, word_of

_PREEMPT, _MAINTENANCE, _HINT = NoticeKind.PREEMPT, NoticeKind.MAINTENANCE, NoticeKind.HINT
TAINTS: Mapping[str, NoticeKind] = {
    "aws-node-termination-handler/spot-itn": _PREEMPT,
    "aws-node-termination-handler/scheduled-maintenance": _MAINTENANCE,
    "aws-node-termination-handler/asg-lifecycle-termination": _MAINTENANCE,
    "aws-node-termination-handler/rebalance-recommendation": _HINT,
    "cloud.google.com/impending-node-termination": _PREEMPT,
    "ToBeDeletedByClusterAutoscaler": _MAINTENANCE,
    "DeletionCandidateOfClusterAutoscaler": _HINT,
    "karpenter.sh/disrupted": _MAINTENANCE,
    "karpenter.sh/disruption": _MAINTENANCE,
    "node.cloudprovider.kubernetes.io/shutdown": _PREEMPT,
    "node.kubernetes.io/out-of-service": _PREEMPT,
    "node.kubernetes.io/unreachable": _HINT,  # not seen is not dead
    "node.kubernetes.io/not-ready": _HINT,
    "node.kubernetes.io/unschedulable": _HINT,
}
CONDITIONS: Mapping[str, NoticeKind] = {"GCESpotPreempting": _PREEMPT}
COREWEAVE_LABEL = "qos.coreweave.cloud/pending-preemption"
SAGEMAKER_LABEL = "sagemaker.amazonaws.com/node-health-status"


def parse_node(node: Mapping[str, Any]) -> Reading:
    """All that stands against a node object, as the API gives it as JSON."""
    found: list[Found] = []
    problems: list[str] = []
    spec = _part(node, "spec")
    for taint in _records(spec, "taints", problems):
        kind = TAINTS.get(word_of(taint, "key"))
        if kind is not None:
            found.append(_found("taint", word_of(taint, "key"), kind, _optional(taint, "value")))
    for condition in _records(_part(node, "status"), "conditions", problems):
        kind = CONDITIONS.get(word_of(condition, "type"))
        if kind is not None and _optional(condition, "status") == "True":
            found.append(_found("condition", word_of(condition, "type"), kind, _optional(condition, "reason")))
    labels = _part(_part(node, "metadata"), "labels")
    if _optional(labels, COREWEAVE_LABEL) == "true":
        found.append(_found("label", COREWEAVE_LABEL, _PREEMPT, ""))
    health = _optional(labels, SAGEMAKER_LABEL)
    if health.startswith("Unschedulable"):
        found.append(_found("label", SAGEMAKER_LABEL, _MAINTENANCE, health))
    if spec.get("unschedulable") is True and not any(one.event_id.endswith("/unschedulable") for one in found):
        found.append(_found("spec", "unschedulable", _HINT, ""))
    return Reading(found=tuple(found), problems=tuple(problems))


def parse_pod(pod: Mapping[str, Any], now_wall_seconds: float) -> Reading:
    """Whether a pod object is being taken away, as the API gives it as JSON."""
    problems: list[str] = []
    found: list[Found] = []
    for condition in _records(_part(pod, "status"), "conditions", problems):
        if (word_of(condition, "type"), _optional(condition, "status")) == ("DisruptionTarget", "True"):
            found.append(_found("condition", "DisruptionTarget", _PREEMPT, _optional(condition, "reason")))
    metadata = _part(pod, "metadata")
    when = _optional(metadata, "deletionTimestamp")
    if when:
        grace = metadata.get("deletionGracePeriodSeconds")
        most = float(grace) if isinstance(grace, int) and 0 <= grace <= 86400 else 86400.0
        try:
            left, remark = time_left(rfc3339_seconds(when), now_wall_seconds, most)
        except SourceError as error:
            left, remark = None, ""
            problems.append(str(error))
        words = f"the pod is deleted at {when}{remark}"
        found.append(Found(event_id="deletion", kind=_PREEMPT, words=words, remaining_seconds=left, version=when))
    return Reading(found=tuple(found), problems=tuple(problems))


def _found(where: str, name: str, kind: NoticeKind, words: str) -> Found:
    said = f"{where} {name}" + (f": {words}" if words else "")
    return Found(event_id=f"{where} {name}", kind=kind, words=said)


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}


def _records(record: Mapping[str, Any], name: str, problems: list[str]) -> list[Mapping[str, Any]]:
    """The list's objects that have what every one of them must have."""
    values = record.get(name) or []
    must = "key" if name == "taints" else "type"
    if not isinstance(values, list):
        problems.append(f"{name} is no list")
        return []
    good = [value for value in values if isinstance(value, Mapping) and _optional(value, must)]
    if len(good) < len(values):
        problems.append(f"one of the {name} is not understood")
    return good


def _optional(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return short(value) if isinstance(value, str) else ""

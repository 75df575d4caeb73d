"""A job's pods: what one is made of, and what the cluster says of it. Pure.

A pod is a node of the job, and its name the node's: a lost one is replaced under a new name, so that nothing that the
old one still says or writes can be taken for the new one's. Its first container runs the agent and its workers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.schedulers.kubernetes.names import GROUP, JOB_LABEL, RUN_LABEL, VERSION, Object

SETTINGS_FOLDER = "/run/orchestrator"
STAGING_FOLDER = "/dev/shm"
LOG_FOLDER = "/var/log/orchestrator"
SPARE_SECONDS = 5
"""Of a pod's grace that are left to the agent's own end."""
LOST_NODE_TOLERATION_SECONDS = 30
"""A host that does not answer loses its pods after that, not after 300 s: the gang stands still meanwhile."""
FALLBACK_ANNOTATION = f"{GROUP}/falls-back"
QUEUE_LABELS = "kueue.x-k8s.io/"
ZONE_LABELS = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
DOMAIN_LABELS = (
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "network.topology.nvidia.com/block",
    "network.topology.nvidia.com/spine",
    "nvidia.com/gpu.clique",
)
"""Where hosts are near each other, from wide to narrow; those that a cluster has not are passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The TrainingJob that pods belong to."""

    namespace: str
    name: str
    uid: str

    def reference(self) -> Object:
        """For `ownerReferences`: what belongs to it goes with it."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "TrainingJob",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What matters of a pod."""

    name: str
    uid: str
    run: str
    host: str
    """The cluster's node; empty before it has one."""
    phase: str
    deleting: bool
    deletion_grace_seconds: float
    """That it has from its deletion on; 0 as long as it is not deleted."""
    created_wall_seconds: float | None
    unschedulable: str
    """What the cluster's scheduler says against it; empty: nothing."""
    falls_back: bool
    """It was made on the terms of `fallback`."""
    gated: bool
    """Whoever queues it (Kueue) has not let it to the scheduler yet."""
    waiting: str
    """Why its first container does not start: an image that cannot be fetched, say; empty: nothing is wrong."""
    ended: str
    """How it ended; empty: it has not."""

    @property
    def lives(self) -> bool:
        """It runs, or may come to run."""
        return self.phase in ("Pending", "Running", "Unknown", "")


def read_pod(found: Mapping[str, Any]) -> Pod:
    """What an object says. What is missing or of another shape is taken as not said."""
    metadata, status = _part(found, "metadata"), _part(found, "status")
    labels = _part(metadata, "labels")
    deleted, grace = metadata.get("deletionTimestamp"), metadata.get("deletionGracePeriodSeconds")
    return Pod(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        run=str(labels.get(RUN_LABEL, "")),
        host=str(_part(found, "spec").get("nodeName") or ""),
        phase=str(status.get("phase") or ""),
        deleting=deleted is not None,
        deletion_grace_seconds=float(grace) if isinstance(grace, int) and grace > 0 else 0.0,
        created_wall_seconds=wall_seconds(metadata.get("creationTimestamp")),
        unschedulable=_unschedulable(status),
        falls_back=FALLBACK_ANNOTATION in _part(metadata, "annotations"),
        gated=bool(_records(_part(found, "spec"), "schedulingGates")),
        waiting=_waiting(status),
        ended=_ended(status),
    )


def _unschedulable(status: Mapping[str, Any]) -> str:
    for condition in _records(status, "conditions"):
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "False"):
            return str(condition.get("message") or condition.get("reason") or "it is not scheduled")
    return ""


def _waiting(status: Mapping[str, Any]) -> str:
    for name in ("initContainerStatuses", "containerStatuses"):
        for container in _records(status, name):
            waiting = _part(_part(container, "state"), "waiting")
            if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                said = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
                return f"container {container.get('name')}: {said}"
    return ""


def _ended(status: Mapping[str, Any]) -> str:
    if status.get("phase") not in ("Succeeded", "Failed"):
        return ""
    words = [str(status[name]) for name in ("reason", "message") if status.get(name)]
    for container in _records(status, "containerStatuses"):
        ended = _part(_part(container, "state"), "terminated")
        if ended:
            status_words = f"{ended.get('reason')}, exit code {ended.get('exitCode')}"
            words.append(f"container {container.get('name')}: {status_words}")
    for condition in _records(status, "conditions"):
        if (condition.get("type"), condition.get("status")) == ("DisruptionTarget", "True"):
            words.append(f"{condition.get('reason')}: {condition.get('message', '')}".rstrip(": "))
    return f"the pod has {str(status['phase']).lower()}" + (f" ({'; '.join(words)})" if words else "")


def place_of(host: Mapping[str, Any]) -> str:
    """Where a host stands, from wide to narrow; empty if no label tells."""
    labels = _part(_part(host, "metadata"), "labels")
    zone = next((str(labels[name]) for name in ZONE_LABELS if labels.get(name)), "")
    words = [zone, *(str(labels.get(name, "")) for name in DOMAIN_LABELS)]
    return "/".join(words) if any(words) else ""


# ------------------------------------------------------------------------------------------------ making one


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """What all pods of a run have alike."""

    owner: Owner
    run: str
    secret: str
    """Its `settings.json` holds what agents are told."""
    template: Object
    """A PodTemplateSpec, as the user wrote it."""
    fallback: Object | None
    """A merge patch of the template, for a pod that found no place for too long."""
    labels: Mapping[str, str]
    """Of the TrainingJob, for whoever looks at pods: Kueue's."""
    grace_seconds: float
    """That a pod gets when it is deleted, at least."""


def merged(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396): None removes, lists are replaced."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def template_problems(template: Mapping[str, Any]) -> list[str]:
    """What is of a shape that no pod has, as far as `render_pod` looks at it. All else is for the API server to say.

    A shape that nobody could render would keep the job from starting without a word.
    """
    metadata, spec = template.get("metadata"), template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not (isinstance(containers, list) and containers and isinstance(containers[0], Mapping)):
        return ["spec.containers: one container is needed, in which agent and workers run"]
    assert isinstance(spec, Mapping)
    found = [] if metadata is None or isinstance(metadata, Mapping) else ["metadata: is no object"]
    for name in ("labels", "annotations"):
        if isinstance(metadata, Mapping) and not isinstance(metadata.get(name) or {}, Mapping):
            found.append(f"metadata.{name}: is no object")
    first = "spec.containers[0]"
    for where, record, name in (
        ("spec", spec, "volumes"),
        ("spec", spec, "tolerations"),
        (first, containers[0], "env"),
        (first, containers[0], "volumeMounts"),
    ):
        values = record.get(name) or []
        if not (isinstance(values, list) and all(isinstance(value, Mapping) for value in values)):
            found.append(f"{where}.{name}: is no list of objects")
    command = containers[0].get("command") or []
    if not (isinstance(command, list) and all(isinstance(word, str) for word in command)):
        found.append(f"{first}.command: is no list of words")
    grace = spec.get("terminationGracePeriodSeconds") or 0
    if isinstance(grace, bool) or not isinstance(grace, int):
        found.append("spec.terminationGracePeriodSeconds: is no whole number")
    return found


def render_pod(
    plan: PodPlan,
    name: str,
    *,
    grace_seconds: float,
    staging_bytes: int | None = None,
    falls_back: bool = False,
) -> Object:
    """The pod to create. What the template says of the agent's own affairs is replaced; all else stays.

    `grace_seconds`: that a save was measured to need. `staging_bytes`: the most that one node stages; None: not known.
    """
    template = merged(plan.template, plan.fallback) if falls_back and plan.fallback else copy.deepcopy(plan.template)
    metadata, spec = dict(template.get("metadata") or {}), dict(template.get("spec") or {})
    grace = int(max(grace_seconds, plan.grace_seconds, float(spec.get("terminationGracePeriodSeconds") or 0)))
    containers = list(spec.get("containers") or [{}])
    containers[0] = _with_agent(dict(containers[0] or {}), grace)
    job = {JOB_LABEL: plan.owner.name, RUN_LABEL: plan.run}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": plan.owner.namespace,
            "labels": {**(metadata.get("labels") or {}), **plan.labels, **job},
            "annotations": {
                **(metadata.get("annotations") or {}),
                **({FALLBACK_ANNOTATION: "true"} if falls_back else {}),
            },
            "ownerReferences": [plan.owner.reference()],
        },
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "hostname": name,
            "subdomain": plan.owner.name,
            "terminationGracePeriodSeconds": grace,
            "containers": containers,
            "volumes": [*(spec.get("volumes") or []), *_volumes(spec, containers[0], plan.secret, staging_bytes)],
            "tolerations": _tolerations(spec.get("tolerations") or []),
            **_spread(spec, plan.owner.name),
        },
    }


def _with_agent(container: Object, grace_seconds: int) -> Object:
    mounts = list(container.get("volumeMounts") or [])
    own: list[Object] = [
        {"name": "orchestrator-settings", "mountPath": SETTINGS_FOLDER, "readOnly": True},
        {"name": "orchestrator-staging", "mountPath": STAGING_FOLDER},
        {"name": "orchestrator-logs", "mountPath": LOG_FOLDER},
    ]
    taken = {mount.get("mountPath") for mount in mounts}
    env = [one for one in container.get("env") or [] if one.get("name") not in ("POD_NAME", "POD_IP")]
    command = container.get("command") or ["python3"]
    return {
        "name": "trainer",
        **container,
        "command": [*command, "-m", "orchestrator.agent"],
        "args": [
            f"--settings={SETTINGS_FOLDER}/settings.json",
            "--node=$(POD_NAME)",
            "--address=$(POD_IP)",
            f"--grace-seconds={max(grace_seconds - SPARE_SECONDS, 1)}",
            f"--staging={STAGING_FOLDER}/orchestrator",
            f"--logs={LOG_FOLDER}",
        ],
        "env": [_from_field("POD_NAME", "metadata.name"), _from_field("POD_IP", "status.podIP"), *env],
        "volumeMounts": [*mounts, *(mount for mount in own if mount["mountPath"] not in taken)],
    }


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _volumes(
    spec: Mapping[str, Any], container: Mapping[str, Any], secret: str, staging_bytes: int | None
) -> list[Object]:
    """Those that the agent needs. Before the state is measured, memory is bounded by the container's limit alone."""
    size = {} if staging_bytes is None else {"sizeLimit": str(staging_bytes)}
    mounted = {mount.get("name") for mount in container["volumeMounts"]}
    there = {volume.get("name") for volume in spec.get("volumes") or []}
    own: list[Object] = [
        {"name": "orchestrator-settings", "secret": {"secretName": secret, "defaultMode": 0o444}},
        {"name": "orchestrator-staging", "emptyDir": {"medium": "Memory", **size}},
        {"name": "orchestrator-logs", "emptyDir": {}},
    ]
    return [volume for volume in own if volume["name"] in mounted and volume["name"] not in there]


def _tolerations(given: list[Object]) -> list[Object]:
    own = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    said = {(one.get("key"), one.get("effect")) for one in given}
    return [
        *given,
        *(
            {
                "key": key,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": LOST_NODE_TOLERATION_SECONDS,
            }
            for key in own
            if (key, "NoExecute") not in said and (key, None) not in said
        ),
    ]


def _spread(spec: Mapping[str, Any], job: str) -> Object:
    """Over zones, if the template says nothing else: one zone's shortage does not take the whole gang."""
    if spec.get("topologySpreadConstraints") is not None or spec.get("affinity") is not None:
        return {}
    return {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": ZONE_LABELS[0],
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {JOB_LABEL: job}},
            }
        ]
    }


def wall_seconds(text: object) -> float | None:
    """A time of the API's; None if it is none."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}


def _records(record: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    values = record.get(name)
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []

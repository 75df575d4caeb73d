"""What a control plane does beside its API server, simulated: scheduling, taints, lost nodes, garbage.

Level-triggered over followed lists, through the REST API only: any of it could be the real one instead. Each reacts
within about a tenth of a second; what takes minutes in the real ones is a parameter in seconds here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.kubernetes.api_objects import label_selector_object
from tests.kubernetes.api_store import BUILT_IN, timestamp
from tests.kubernetes.api_validation import quantity
from tests.kubernetes.rest import STRATEGIC, Api, Client, Followed, Loop, Object

PASS_SECONDS = 0.05
"""Changes that come closer together than this are looked at together."""
TICK_SECONDS = 0.1
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
UNREACHABLE, NOT_READY = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"


@dataclass(frozen=True, kw_only=True)
class Delays:
    """How long things take."""

    node_lost_seconds: float = 4.0
    """Without a renewed Lease until a node is Unknown (real: 50)."""
    pod_garbage_seconds: float = 0.5
    """From a node's deletion to that of its pods (real: 40 to 80)."""


class ClusterControllers:
    """All of them, in a thread of their own."""

    def __init__(self, api: Api, delays: Delays | None = None) -> None:
        self._client = Client(api, "simulated-controllers")
        self._loop = Loop("cluster-controllers")
        self._changed = asyncio.Event()
        self._lists: dict[str, Followed] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.problems: list[BaseException] = []
        """What went wrong in themselves: there should be nothing."""
        self._controllers = [make(self._client, self._lists, delays or Delays()) for make in CONTROLLERS]

    def start(self) -> None:
        """Begin."""

        async def start() -> None:
            for resource in BUILT_IN:
                if resource.plural not in ("events", "priorityclasses"):
                    path = f"/apis/{resource.group}/v1" if resource.group else "/api/v1"
                    self._follow(resource.plural, f"{path}/{resource.plural}")
            self._tasks.append(asyncio.create_task(self._passes()))

        self._loop.run(start())

    def stop(self) -> None:
        """End."""
        self._loop.run(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def _follow(self, name: str, path: str) -> None:
        self._lists[name] = Followed(self._client, path, on_change=self._changed.set)
        self._tasks.append(asyncio.create_task(self._lists[name].follow()))

    async def _passes(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK_SECONDS)
            await asyncio.sleep(PASS_SECONDS)
            self._changed.clear()
            for definition in self._lists["customresourcedefinitions"].things.values():
                spec = definition["spec"]
                name = definition["metadata"]["name"]
                if name not in self._lists:
                    self._follow(name, f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}")
            if all(one.lists for name, one in self._lists.items() if "." not in name):
                for controller in self._controllers:
                    try:
                        await controller.reconcile(time.monotonic())
                    except Exception as error:  # the others go on; the test is told at its end
                        self.problems.append(error)


class Controller(ABC):
    """One of them: `reconcile` brings the cluster nearer to what it should be, as often as one likes."""

    def __init__(self, client: Client, lists: dict[str, Followed], delays: Delays) -> None:
        self.client, self.lists, self.delays = client, lists, delays

    @abstractmethod
    async def reconcile(self, now: float) -> None:
        """One pass; `now` is monotonic."""

    @property
    def pods(self) -> list[Object]:
        """All pods, oldest first."""
        return sorted(self.lists["pods"].things.values(), key=lambda pod: int(pod["metadata"]["resourceVersion"]))

    @property
    def nodes(self) -> dict[str, Object]:
        """By name."""
        return {node["metadata"]["name"]: node for node in self.lists["nodes"].things.values()}

    async def disrupt(
        self, pod: Object, reason: str, message: str, options: Object | None = None, *, phase: str = ""
    ) -> None:
        """Mark a pod as disrupted, then delete it."""
        path, uid = pod_path(pod), pod["metadata"]["uid"]
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        status: Object = {
            "conditions": [{**condition, "lastTransitionTime": timestamp()}],
            **({"phase": phase} if phase else {}),
        }
        await self.client.request("PATCH", f"{path}/status", {"metadata": {"uid": uid}, "status": status}, STRATEGIC)
        await self.client.request("DELETE", path, {"preconditions": {"uid": uid}, **(options or {})})


def pod_path(pod: Object) -> str:
    """Where it is in the API."""
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def finished(pod: Object) -> bool:
    """Whether it holds nothing any more."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def tolerated(taint: Object, tolerations: Iterable[Object]) -> Object | None:
    """The toleration that fits a taint."""
    for one in tolerations:
        if one.get("effect") and one["effect"] != taint["effect"]:
            continue
        if one.get("key") and one["key"] != taint["key"]:
            continue
        if one.get("operator", "Equal") == "Exists" or one.get("value", "") == taint.get("value", ""):
            return one
    return None


# -- scheduling ------------------------------------------------------------------------------------------------


def requests_of(pod: Object) -> Counter[str]:
    """What it asks of a node."""
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        for name, amount in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] += quantity(amount)  # type: ignore[assignment]  # a Counter of floats
    total["pods"] += 1
    return total


def does_not_fit(pod: Object, node: Object, pods: list[Object], nodes: dict[str, Object]) -> str | None:
    """Why a pod may not be on a node at all, whatever room there is; None: it may."""
    spec, labels = pod["spec"], node["metadata"].get("labels") or {}
    taints = list(node["spec"].get("taints") or [])
    if node["spec"].get("unschedulable") and not any(t["key"].endswith("/unschedulable") for t in taints):
        taints.append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    for taint in taints:
        if taint["effect"] in ("NoSchedule", "NoExecute") and tolerated(taint, spec.get("tolerations") or []) is None:
            return (
                "node(s) were unschedulable"
                if taint["key"].endswith("/unschedulable")
                else "node(s) had untolerated taint(s)"
            )
    affinity = spec.get("affinity") or {}
    required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = (required or {}).get("nodeSelectorTerms") or []
    selected = all(labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())
    if not selected or (required and not any(_term_fits(term, node) for term in terms)):
        return "node(s) didn't match Pod's node affinity/selector"
    apart = (affinity.get("podAntiAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or []
    for term in apart:
        here = labels.get(term["topologyKey"])
        selects = label_selector_object(term.get("labelSelector"))
        for other in pods:
            there = nodes.get(other["spec"].get("nodeName", ""), {"metadata": {}})["metadata"].get("labels") or {}
            same = other["metadata"]["namespace"] == pod["metadata"]["namespace"] and other is not pod
            if (
                here is not None
                and same
                and not finished(other)
                and there.get(term["topologyKey"]) == here
                and selects(other)
            ):
                return "node(s) didn't match pod anti-affinity rules"
    return None


def _term_fits(term: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    for one in term.get("matchExpressions") or []:
        value, values = labels.get(one["key"]), one.get("values") or []
        fits = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not fits[one["operator"]]:
            return False
    fields = term.get("matchFields") or []
    return all(node["metadata"]["name"] in one["values"] for one in fields)


def lacking(pod: Object, node: Object, on_node: Iterable[Object]) -> list[str]:
    """What a node has too little of, as the scheduler words it."""
    used: Counter[str] = Counter()
    for other in on_node:
        used += requests_of(other)
    room = node["status"].get("allocatable") or {}
    short = [name for name, amount in requests_of(pod).items() if used[name] + amount > quantity(room.get(name, "0"))]
    return ["Too many pods" if name == "pods" else f"Insufficient {name}" for name in sorted(short)]


@dataclass
class Scheduler(Controller):
    """Binds pods, says why it cannot, and preempts for those of higher priority."""

    client: Client
    lists: dict[str, Followed]
    delays: Delays
    bound: dict[str, str] = field(default_factory=dict)
    """Pods by uid whose binding has not come back yet."""

    async def reconcile(self, now: float) -> None:
        pods, nodes = self.pods, self.nodes
        self.bound = {
            pod["metadata"]["uid"]: self.bound[pod["metadata"]["uid"]]
            for pod in pods
            if pod["metadata"]["uid"] in self.bound and not pod["spec"].get("nodeName")
        }
        pods = [self._assumed(pod) for pod in pods]
        waiting = [
            pod
            for pod in pods
            if not (pod["spec"].get("nodeName") or pod["spec"].get("schedulingGates") or finished(pod))
            and "deletionTimestamp" not in pod["metadata"]
            and pod["spec"].get("schedulerName", "default-scheduler") == "default-scheduler"
        ]
        for pod in sorted(waiting, key=lambda pod: -pod["spec"].get("priority", 0)):
            node = await self._place(pod, pods, nodes)
            if node is not None:
                self.bound[pod["metadata"]["uid"]] = node
                pods = [self._assumed(one) for one in pods]

    def _assumed(self, pod: Object) -> Object:
        node = self.bound.get(pod["metadata"]["uid"])
        return pod if node is None else {**pod, "spec": {**pod["spec"], "nodeName": node}}

    async def _place(self, pod: Object, pods: list[Object], nodes: dict[str, Object]) -> str | None:
        """Bind it where there is room; else say so. The node."""
        reasons: Counter[str] = Counter()
        fitting: list[tuple[int, str]] = []
        without_room: list[str] = []
        for name, node in nodes.items():
            reason = does_not_fit(pod, node, pods, nodes)
            # room that was made for a pod of higher priority is kept for it
            here = [one for one in pods if self._counts(one, name, pod)]
            short = [] if reason else lacking(pod, node, here)
            if reason or short:
                reasons.update([reason] if reason else short)
                without_room += [name] if short else []
            else:
                fitting.append((len(here), name))
        if fitting:
            node_name = min(fitting)[1]
            metadata = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
            body = {
                "kind": "Binding",
                "apiVersion": "v1",
                "metadata": metadata,
                "target": {"kind": "Node", "name": node_name},
            }
            status, _ = await self.client.request("POST", f"{pod_path(pod)}/binding", body)
            return node_name if status == 201 else None
        nominated = await self._preempt(pod, pods, {name: nodes[name] for name in without_room})
        await self._unschedulable(pod, reasons, len(nodes), nominated)
        return None

    def _counts(self, other: Object, node: str, pod: Object) -> bool:
        if finished(other) or other["metadata"]["uid"] == pod["metadata"]["uid"]:
            return False
        if other["spec"].get("nodeName"):
            return bool(other["spec"]["nodeName"] == node)
        nominated = other["status"].get("nominatedNodeName") == node
        return nominated and other["spec"].get("priority", 0) > pod["spec"].get("priority", 0)

    async def _preempt(self, pod: Object, pods: list[Object], nodes: dict[str, Object]) -> str | None:
        """Delete pods of lower priority where that makes room; the node. One that is being emptied is waited for."""
        priority = pod["spec"].get("priority", 0)
        nominated = pod["status"].get("nominatedNodeName")
        if pod["spec"].get("preemptionPolicy") == "Never":
            return None
        leaving = [one for one in pods if "deletionTimestamp" in one["metadata"] and not finished(one)]
        if nominated and any(
            one["spec"].get("nodeName") == nominated and one["spec"].get("priority", 0) < priority for one in leaving
        ):
            return str(nominated)
        choices: list[tuple[int, int, str, list[Object]]] = []
        for name, node in nodes.items():
            stay = [one for one in pods if self._counts(one, name, pod)]
            lower = sorted(
                (one for one in stay if one["spec"].get("priority", 0) < priority and one["spec"].get("nodeName")),
                key=lambda one: one["spec"].get("priority", 0),
            )
            victims: list[Object] = []
            while lower and lacking(pod, node, stay):
                victims.append(lower.pop(0))
                stay.remove(victims[-1])
            if victims and not lacking(pod, node, stay):
                highest = max(one["spec"].get("priority", 0) for one in victims)
                choices.append((highest, len(victims), name, victims))
        if not choices:
            return None
        _, _, name, victims = min(choices, key=lambda choice: choice[:3])
        for victim in victims:
            if "deletionTimestamp" not in victim["metadata"]:
                message = "default-scheduler: preempting to accommodate a higher priority pod"
                await self.disrupt(victim, "PreemptionByScheduler", message)
        return name

    async def _unschedulable(self, pod: Object, reasons: Counter[str], count: int, nominated: str | None) -> None:
        listed = ", ".join(sorted(f"{number} {reason}" for reason, number in reasons.items()))
        message = f"0/{count} nodes are available: {listed}." if count else "no nodes available to schedule pods"
        if count:
            none = (
                "No preemption victims found for incoming pod"
                if nominated is None
                else "Preemption is not helpful for scheduling"
            )
            message += f" preemption: 0/{count} nodes are available: {count} {none}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        old: Object = {one["type"]: one for one in pod["status"].get("conditions") or []}.get("PodScheduled", {})
        if {**old, **condition} == old and pod["status"].get("nominatedNodeName") == nominated:
            return
        since = old.get("lastTransitionTime") if old.get("status") == "False" else None
        status: Object = {
            "conditions": [{**condition, "lastTransitionTime": since or timestamp()}],
            "nominatedNodeName": nominated,
        }
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        await self.client.request("PATCH", f"{pod_path(pod)}/status", body, STRATEGIC)


# -- nodes -----------------------------------------------------------------------------------------------------


@dataclass
class NodeLifecycle(Controller):
    """A node whose kubelet renews nothing any more becomes Unknown and is tainted; one that is back is not."""

    client: Client
    lists: dict[str, Followed]
    delays: Delays
    renewed: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By node: its last renewal, and when that was noticed here: clocks of others are not compared."""
    lists_seen: int = 0

    async def reconcile(self, now: float) -> None:
        leases = self.lists["leases"]
        if leases.lists != self.lists_seen:  # we were blind for a while: nobody is lost for that
            self.lists_seen, self.renewed = leases.lists, {}
        times = {
            one["metadata"]["name"]: one["spec"].get("renewTime", "")
            for one in leases.things.values()
            if one["metadata"]["namespace"] == "kube-node-lease"
        }
        for name, node in self.nodes.items():
            renewal = times.get(name, "")
            if name not in self.renewed or self.renewed[name][0] != renewal:
                self.renewed[name] = (renewal, now)
            ready = next(
                (one["status"] for one in node["status"].get("conditions") or [] if one["type"] == "Ready"), "False"
            )
            if ready == "True" and now - self.renewed[name][1] > self.delays.node_lost_seconds:
                await self._lost(name, node)
            else:
                await self._taint(name, node, {"True": "", "Unknown": UNREACHABLE}.get(ready, NOT_READY))

    async def _lost(self, name: str, node: Object) -> None:
        why = {"reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status."}
        conditions = [
            {**one, "status": "Unknown", **why, "lastTransitionTime": timestamp()}
            for one in node["status"].get("conditions") or []
        ]
        await self.client.request(
            "PATCH", f"/api/v1/nodes/{name}/status", {"status": {"conditions": conditions}}, STRATEGIC
        )
        for pod in self.pods:
            if pod["spec"].get("nodeName") == name and not finished(pod):
                condition = {"type": "Ready", "status": "False", "lastTransitionTime": timestamp()}
                await self.client.request(
                    "PATCH", f"{pod_path(pod)}/status", {"status": {"conditions": [condition]}}, STRATEGIC
                )

    async def _taint(self, name: str, node: Object, key: str) -> None:
        """Only that one of our taints; the taints of others stay."""
        taints = node["spec"].get("taints") or []
        cordoned = node["spec"].get("unschedulable", False)
        ours = {UNREACHABLE, NOT_READY, *(() if cordoned else (UNSCHEDULABLE,))}
        keep = [one for one in taints if one["key"] not in ours or one["key"] == key]
        if cordoned and not any(one["key"] == UNSCHEDULABLE for one in taints):
            keep.append({"key": UNSCHEDULABLE, "effect": "NoSchedule", "timeAdded": timestamp()})
        if key and not any(one["key"] == key for one in taints):
            keep += [{"key": key, "effect": effect, "timeAdded": timestamp()} for effect in ("NoSchedule", "NoExecute")]
        if keep != taints:
            body = {
                "metadata": {"resourceVersion": node["metadata"]["resourceVersion"]},
                "spec": {"taints": keep or None},
            }
            await self.client.request("PATCH", f"/api/v1/nodes/{name}", body)


@dataclass
class TaintManager(Controller):
    """Deletes pods from nodes with a NoExecute taint, once no toleration holds any more."""

    client: Client
    lists: dict[str, Followed]
    delays: Delays
    since: dict[tuple[str, str], float] = field(default_factory=dict)
    """By pod and taint: when they were first seen together."""

    async def reconcile(self, now: float) -> None:
        nodes = self.nodes
        since: dict[tuple[str, str], float] = {}
        for pod in self.pods:
            node = nodes.get(pod["spec"].get("nodeName", ""))
            taints = [one for one in (node["spec"].get("taints") or [] if node else []) if one["effect"] == "NoExecute"]
            if "deletionTimestamp" in pod["metadata"]:
                continue
            due = False
            for taint in taints:
                key = (pod["metadata"]["uid"], f"{taint['key']}={taint.get('value', '')}")
                since[key] = self.since.get(key, now)
                toleration = tolerated(taint, pod["spec"].get("tolerations") or [])
                limit = 0.0 if toleration is None else toleration.get("tolerationSeconds")
                due = due or (limit is not None and now - since[key] >= limit)
            if due:
                await self.disrupt(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
        self.since = since


@dataclass
class PodGarbage(Controller):
    """Removes pods whose node is no more."""

    client: Client
    lists: dict[str, Followed]
    delays: Delays
    orphaned: dict[str, float] = field(default_factory=dict)

    async def reconcile(self, now: float) -> None:
        nodes = self.nodes
        orphans = [pod for pod in self.pods if pod["spec"].get("nodeName") and pod["spec"]["nodeName"] not in nodes]
        self.orphaned = {pod["metadata"]["uid"]: self.orphaned.get(pod["metadata"]["uid"], now) for pod in orphans}
        for pod in orphans:
            if now - self.orphaned[pod["metadata"]["uid"]] >= self.delays.pod_garbage_seconds:
                phase = "" if finished(pod) else "Failed"
                await self.disrupt(
                    pod, "DeletionByPodGC", "PodGC: node no longer exists", {"gracePeriodSeconds": 0}, phase=phase
                )


# -- garbage ---------------------------------------------------------------------------------------------------


class OwnerGarbage(Controller):
    """Deletes what has only owners that are gone."""

    async def reconcile(self, now: float) -> None:
        uids = {uid for one in self.lists.values() for uid in one.things}
        kinds = self._kinds()
        for followed in list(self.lists.values()):
            for thing in list(followed.things.values()):
                metadata = thing["metadata"]
                owners = metadata.get("ownerReferences") or []
                if not owners or "deletionTimestamp" in metadata or any(owner["uid"] in uids for owner in owners):
                    continue
                if all([await self._gone(owner, metadata.get("namespace", ""), kinds) for owner in owners]):
                    where = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
                    prefix, plural = followed.path.rsplit("/", 1)
                    path = f"{prefix}{where}/{plural}/{metadata['name']}"
                    await self.client.request("DELETE", path, {"preconditions": {"uid": metadata["uid"]}})

    def _kinds(self) -> dict[tuple[str, str], tuple[str, bool]]:
        """From (group, kind) to (plural, whether namespaced)."""
        known = {(one.group, one.kind): (one.plural, one.namespaced) for one in BUILT_IN}
        for definition in self.lists["customresourcedefinitions"].things.values():
            spec = definition["spec"]
            known[spec["group"], spec["names"]["kind"]] = (spec["names"]["plural"], spec["scope"] == "Namespaced")
        return known

    async def _gone(self, owner: Object, namespace: str, kinds: dict[tuple[str, str], tuple[str, bool]]) -> bool:
        """Asked of the server: lists may be late."""
        group = owner["apiVersion"].rpartition("/")[0]
        if (group, owner["kind"]) not in kinds:
            return False
        plural, namespaced = kinds[group, owner["kind"]]
        prefix = f"/apis/{owner['apiVersion']}" if group else f"/api/{owner['apiVersion']}"
        where = f"/namespaces/{namespace}" if namespaced else ""
        status, answer = await self.client.request("GET", f"{prefix}{where}/{plural}/{owner['name']}")
        return status == 404 or (status == 200 and answer["metadata"]["uid"] != owner["uid"])


class NamespaceGarbage(Controller):
    """Empties namespaces that are to go, then lets them go."""

    async def reconcile(self, now: float) -> None:
        for namespace in list(self.lists["namespaces"].things.values()):
            if namespace["status"].get("phase") != "Terminating":
                continue
            name = namespace["metadata"]["name"]
            left = 0
            for followed in list(self.lists.values()):
                prefix, plural = followed.path.rsplit("/", 1)
                things = [one for one in followed.things.values() if one["metadata"].get("namespace") == name]
                left += len(things)
                for thing in things:
                    if "deletionTimestamp" not in thing["metadata"]:
                        await self.client.request(
                            "DELETE", f"{prefix}/namespaces/{name}/{plural}/{thing['metadata']['name']}"
                        )
            if not left:
                await self.client.request(
                    "PUT", f"/api/v1/namespaces/{name}/finalize", {**namespace, "spec": {"finalizers": []}}
                )


CONTROLLERS: tuple[Callable[[Client, dict[str, Followed], Delays], Controller], ...] = (
    *(Scheduler, NodeLifecycle, TaintManager),
    *(PodGarbage, OwnerGarbage, NamespaceGarbage),
)

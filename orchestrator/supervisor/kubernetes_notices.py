"""What Kubernetes says of a job's pods and of their hosts, as notices to the job's supervisor, and where hosts stand.

A pod's condition DisruptionTarget and its deletion; its host's taints, conditions and labels (`preemption.kubernetes`).
The agents' own watchers and signals tell of the same end by other names: the earliest deadline counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.clock import Clock
from orchestrator.core.messages import Event, NodePlaced
from orchestrator.preemption.base import Reading
from orchestrator.preemption.kubernetes import parse_node, parse_pod
from orchestrator.preemption.watching import NOTHING_TOLD, Teller, Told, changes
from orchestrator.schedulers.kubernetes.names import Object
from orchestrator.schedulers.kubernetes.pods import place_of, read_pod


class KubernetesNotices:
    """One run's. Fed with every pod of the run and every host of the cluster, whenever one changes."""

    def __init__(self, clock: Clock, submit: Callable[[Event], None], *, grace_seconds: float) -> None:
        self._clock = clock
        self._submit = submit
        self._grace_seconds = grace_seconds
        self._pods: dict[str, Object] = {}
        self._hosts: dict[str, Object] = {}
        self._host_of: dict[str, str] = {}
        """Pod → the host that it is on."""
        self._told: dict[tuple[str, str], Mapping[str, Told]] = {}
        self._places: dict[str, str] = {}

    def on_pod(self, found: Object, gone: bool) -> None:
        """A pod of the run has changed, or is gone."""
        pod = read_pod(found)
        if gone or pod.ended:
            self._pods.pop(pod.name, None)
            self._host_of.pop(pod.name, None)
            self._places.pop(pod.name, None)
            self._told = {key: told for key, told in self._told.items() if key[0] != pod.name}
            return
        self._pods[pod.name] = found
        self._tell(pod.name, "pod", parse_pod(found, self._clock.wall()))
        if pod.host and self._host_of.get(pod.name) != pod.host:
            self._host_of[pod.name] = pod.host
            if pod.host in self._hosts:
                self._look_at(pod.name, self._hosts[pod.host])

    def on_joined(self, pod: str) -> None:
        """The supervisor knows the pod as a node from now on: what was told of it before, it has passed over."""
        if pod not in self._pods:
            return
        self._told = {key: told for key, told in self._told.items() if key[0] != pod}
        self._tell(pod, "pod", parse_pod(self._pods[pod], self._clock.wall()))
        host = self._host_of.get(pod)
        if host in self._hosts:
            self._look_at(pod, self._hosts[host])

    def on_host(self, found: Object, gone: bool) -> None:
        """A host of the cluster has changed. That it is gone is told by its pods."""
        name = str((found.get("metadata") or {}).get("name") or "")
        if gone:
            self._hosts.pop(name, None)
            return
        self._hosts[name] = found
        for pod in [pod for pod, host in self._host_of.items() if host == name]:
            self._look_at(pod, found)

    def _look_at(self, pod: str, host: Object) -> None:
        place = place_of(host)
        if place and self._places.get(pod) != place:
            self._places[pod] = place
            self._submit(NodePlaced(node=pod, place=place))
        self._tell(pod, "host", parse_node(host))

    def _tell(self, pod: str, what: str, reading: Reading) -> None:
        key = (pod, what)
        teller = Teller(node=pod, source=f"kubernetes {what}", withdraws=True, grace_seconds=self._grace_seconds)
        told, notices = changes(self._told.get(key, NOTHING_TOLD), reading, teller, self._clock.monotonic())
        self._told[key] = told
        for notice in notices:
            self._submit(notice)

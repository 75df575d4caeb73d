"""What there is of a TrainingJob in the cluster beside itself: its runs' Secrets, pods, Service, disruption budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from orchestrator.clock import Clock
from orchestrator.controller.crd import read_spec, selector_of
from orchestrator.controller.objects import render_disruption_budget, render_service
from orchestrator.errors import KubernetesError
from orchestrator.schedulers.kubernetes.client import KubernetesClient
from orchestrator.schedulers.kubernetes.names import Object, path_of
from orchestrator.schedulers.kubernetes.pods import Owner, read_pod
from orchestrator.supervisor.kubernetes_job import Run, render_secret

MEND_SECONDS = 30.0
"""Between two looks at whether all is there that pods need to start."""
UNSEEN_SECONDS = 10.0
"""After which a pod that was made and that the watch does not tell of is asked for."""


class Belongings:
    """Makes, mends and removes them. Raises KubernetesError where a request is refused or not answered."""

    def __init__(self, client: KubernetesClient, clock: Clock, owner: Owner, say: Callable[[str], None]) -> None:
        self._client = client
        self._clock = clock
        self._owner = owner
        self._say = say
        self._is_complete = True
        """Service and budget are its own."""
        self._mend_at_seconds = 0.0
        self._unseen: dict[str, float] = {}
        """Pods that are counted on and that the watch has not told of, since when."""

    async def secrets(self) -> list[Object]:
        """Those of its runs."""
        path = path_of("secrets", self._owner.namespace)
        found, _ = await asyncio.to_thread(self._client.list, path, selector_of(self._owner.name))
        return [one for one in found if _owned_by(one, self._owner.uid)]

    async def create_secret(self, run: Run) -> None:
        """What keeps a run."""
        path = path_of("secrets", self._owner.namespace)
        await asyncio.to_thread(self._client.create, path, render_secret(run, self._owner))

    async def remove_others(self, secrets: Iterable[Object], pods: Iterable[Object], run: Run | None) -> None:
        """Runs that are over: what their agents were told is of no use, and their pods go, with their output."""
        for secret in secrets:
            name = secret["metadata"]["name"]
            if run is None or name != run.secret:
                path = path_of("secrets", self._owner.namespace, name)
                await asyncio.to_thread(self._client.delete, path)
        await self.delete_pods(pods, keep=None if run is None else run.name)

    async def delete_pods(self, pods: Iterable[Object], *, keep: str | None) -> None:
        """All but those of the run to keep."""
        for pod in map(read_pod, pods):
            if pod.run != keep and not pod.deleting:
                path = path_of("pods", self._owner.namespace, pod.name)
                await asyncio.to_thread(self._client.delete, path, uid=pod.uid)

    async def make_surroundings(self, run: Run) -> None:
        """Service and budget. Of a TrainingJob that was deleted they are about to go: they are made when they have."""
        spec, owner = read_spec(run.spec), self._owner
        self._mend_at_seconds = self._clock.monotonic() + MEND_SECONDS
        self._is_complete = True
        for plural, body in (
            ("services", render_service(owner)),
            ("poddisruptionbudgets", render_disruption_budget(owner, spec.nodes_min)),
        ):
            path = path_of(plural, owner.namespace, owner.name)
            try:
                known = await asyncio.to_thread(self._client.find, path)
                if known is None:
                    await asyncio.to_thread(self._client.create, path_of(plural, owner.namespace), body)
                elif not _owned_by(known, owner.uid):
                    self._is_complete = False
                elif plural == "poddisruptionbudgets" and known.get("spec") != body["spec"]:
                    await asyncio.to_thread(self._client.patch, path, {"spec": body["spec"]})
            except KubernetesError as error:  # the job runs without it
                self._say(str(error))

    async def mend(self, run: Run, *, pods_start: bool) -> None:
        """What is missing around pods that have yet to start is made again."""
        if not pods_start and self._is_complete:
            return
        if self._clock.monotonic() < self._mend_at_seconds:
            return
        try:
            await self.create_secret(run)
            self._say(f"the Secret {run.secret} was missing, and is made again")
        except KubernetesError as error:
            if error.status != 409:
                raise
        await self.make_surroundings(run)

    async def missing(self, counted_on: Iterable[str], seen: Iterable[str]) -> set[str]:
        """Pods that were made and gone while the watch was blind: nobody tells of their end, so they are asked for."""
        now = self._clock.monotonic()
        self._unseen = {name: self._unseen.get(name, now) for name in {*counted_on} - {*seen}}
        if not any(now - since >= UNSEEN_SECONDS for since in self._unseen.values()):
            return set()
        path = path_of("pods", self._owner.namespace)
        found, _ = await asyncio.to_thread(self._client.list, path, selector_of(self._owner.name))
        gone = self._unseen.keys() - {read_pod(pod).name for pod in found}
        self._unseen = {}
        return gone


def _owned_by(found: Object, uid: str) -> bool:
    owners = (found.get("metadata") or {}).get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)

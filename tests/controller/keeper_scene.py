"""One JobKeeper against the API server double, without kubelets: a test decides what it sees, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from orchestrator.certificates import Identity
from orchestrator.clock import SystemClock
from orchestrator.controller.crd import definition
from orchestrator.controller.keeper import JobKeeper, Surroundings
from orchestrator.controller.port import ControllerPort
from orchestrator.schedulers.kubernetes.client import KubernetesClient, connect
from orchestrator.schedulers.kubernetes.names import RUN_LABEL, path_of
from orchestrator.schedulers.kubernetes.pods import read_pod
from orchestrator.schedulers.kubernetes.watching import Collection
from orchestrator.storage.opening import job_url
from tests.kubernetes.cluster import Cluster

JOB = "small"
JOBS_PATH = path_of("trainingjobs", "default")
PATH = path_of("trainingjobs", "default", JOB)
WAIT_SECONDS = 15.0
TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "t", "image": "i:1"}]}}


class KeeperScene:
    """A TrainingJob and its keeper. Pods are watched; the TrainingJob is told when a test says so."""

    def __init__(self, cluster: Cluster, client: KubernetesClient | None = None) -> None:
        assert cluster.server is not None
        self.cluster, self.server = cluster, cluster.server
        self.client = client or connect()
        self.pods = Collection(self.client, "pods", namespace="default", on_change=self._on_pod)
        self.keeper: JobKeeper | None = None
        self.task: asyncio.Task[None] | None = None
        self.blind = False
        """The watch of pods tells nothing, and what it would have told is not told later."""
        self.port = ControllerPort(Identity(certificate="c", key="k"), "m", address="127.0.0.1", port=0)

    @property
    def around(self) -> Surroundings:
        """What a controller would give it."""
        return Surroundings(
            client=self.client,
            port=self.port,
            clock=SystemClock(),
            url="https://controller",
            certificate="c",
            job_url=job_url,
            pods=lambda _: [] if self.blind else list(self.pods.objects.values()),
            hosts=list,
        )

    def _on_pod(self, found: dict[str, Any], gone: bool) -> None:
        if self.keeper is not None and not self.blind:
            self.keeper.on_pod(found, gone)

    async def begin(self, **spec: Any) -> None:
        """Create the TrainingJob and look after it."""
        self.cluster.create_crd(definition())
        usual = {"store": "/nowhere", "command": ["x"], "template": TEMPLATE}
        await self.create({"metadata": {"name": JOB}, "spec": {**usual, **spec}})
        self.pods.start()
        await asyncio.wait_for(self.pods.listed(), WAIT_SECONDS)
        await self.start_keeper()

    async def start_keeper(self) -> None:
        """Another controller, as it were: it knows nothing but what stands in the cluster."""
        self.keeper = JobKeeper(await self.job(), self.around)
        self.task = asyncio.create_task(self.keeper.run())

    async def stop_keeper(self) -> None:
        """Its process goes."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def end(self) -> None:
        """Look at nothing any more."""
        await self.stop_keeper()
        self.pods.stop()

    # -- the cluster ---------------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request of a person's."""
        return await asyncio.to_thread(self.cluster.request, method, path, body)

    async def create(self, body: dict[str, Any]) -> None:
        """A TrainingJob."""
        kind = {"apiVersion": "orchestrator.dev/v1alpha1", "kind": "TrainingJob"}
        status, answer = await self.ask("POST", JOBS_PATH, {**kind, **body})
        assert status == 201, answer

    async def job(self) -> dict[str, Any]:
        """It as it is."""
        _, found = await self.ask("GET", PATH)
        return dict(found)

    async def status(self) -> dict[str, Any]:
        """What the keeper says of it."""
        return dict((await self.job()).get("status") or {})

    async def tell(self, found: dict[str, Any] | None = None, *, gone: bool = False) -> None:
        """What the watch tells: the object as it is, or as it was once."""
        assert self.keeper is not None
        self.keeper.on_object(found or await self.job(), gone)

    async def edit(self, **spec: Any) -> None:
        """Change the spec, and tell."""
        status, answer = await self.ask("PATCH", PATH, {"spec": spec})
        assert status == 200, answer
        await self.tell()

    def runs(self) -> set[str]:
        """Of all pods that there are."""
        return {read_pod(pod).run for pod in self.pods.objects.values()}

    async def secrets(self) -> list[str]:
        """The runs' Secrets."""
        _, found = await self.ask("GET", path_of("secrets", "default"))
        return [one["metadata"]["name"] for one in found["items"] if RUN_LABEL in one["metadata"].get("labels", {})]

    def count(self, method: str, path: str, code: int | None = None) -> int:
        """Requests of the keeper's that were answered."""
        seen = [one for one in self.server.requests if (one.method, one.path.partition("?")[0]) == (method, path)]
        return len([one for one in seen if code in (None, one.code) and not one.agent.startswith("simulated-")])

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for it."""
        end = time.monotonic() + WAIT_SECONDS
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            assert time.monotonic() < end, f"{what}; {await self.job()}"
            await asyncio.sleep(0.02)

    async def until_state(self, state: str) -> None:
        """Wait until it is said to be so."""

        async def so() -> bool:
            return (await self.status()).get("state") == state

        await self.until(so, state)

    async def said(self, words: str) -> bool:
        """Whether the status' reason has them."""
        return words in str((await self.status()).get("reason"))

    async def tell_if_there(self) -> None:
        """What the watch tells, its end included."""
        status, found = await self.ask("GET", PATH)
        if status == 200:
            await self.tell(found)
        else:
            assert self.keeper is not None
            await self.tell(self.keeper._object, gone=True)

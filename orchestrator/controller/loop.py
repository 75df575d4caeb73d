"""The controller: waits for the Lease, then keeps every TrainingJob that it watches. Run by `orchestrator controller`.

It may be killed at any moment: agents and workers go on, and the next controller takes their supervision over. When the
lease is lost, everything here ends at once and leaves what runs as it is.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from orchestrator.certificates import Identity, new_identity
from orchestrator.clock import SystemClock
from orchestrator.controller.crd import PLURAL
from orchestrator.controller.keeper import JobKeeper, Surroundings
from orchestrator.controller.lease import LeaderLease
from orchestrator.controller.port import ControllerPort
from orchestrator.errors import ConfigError, KubernetesError
from orchestrator.schedulers.kubernetes.client import KubernetesClient
from orchestrator.schedulers.kubernetes.names import JOB_LABEL, Key, Object, key_of, path_of
from orchestrator.schedulers.kubernetes.watching import Collection
from orchestrator.telemetry import Sink

CERTIFICATE_KEY, KEY_KEY, METRICS_KEY = "tls.crt", "tls.key", "metrics-token"
RETRY_SECONDS = 2.0
FAILED_SECONDS = 10.0
"""Before a job is looked after again that could not be by a fault of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """What a controller is told."""

    url: str
    """How agents reach it: its Service's address."""
    address: str
    """Where it listens."""
    port: int
    namespaces: tuple[str, ...]
    """Whose TrainingJobs it keeps; empty: all."""
    lease_name: str
    lease_namespace: str


class Controller:
    """One process of it."""

    def __init__(
        self,
        client: KubernetesClient,
        settings: ControllerSettings,
        *,
        job_url: Callable[[str, str], str],
        sinks: tuple[Sink, ...] = (),
    ) -> None:
        self._client = client
        self._settings = settings
        self._job_url = job_url
        self._sinks = sinks
        self._clock = SystemClock()
        self._keepers: dict[str, JobKeeper] = {}
        """By the TrainingJob's uid."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: list[Collection] = []
        self._pods: list[Collection] = []
        self._hosts: Collection | None = None
        self._around: Surroundings | None = None

    async def run(self) -> str:
        """Until the lease is lost, or this is cancelled; returns why it ended."""
        me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        lease = LeaderLease(self._client, self._settings.lease_namespace, self._settings.lease_name, me, self._clock)
        identity, metrics_token = await self._identity()
        port = ControllerPort(identity, metrics_token, address=self._settings.address, port=self._settings.port)
        try:
            await port.start()
        except OSError as error:
            where = f"{self._settings.address}:{self._settings.port}"
            raise ConfigError(f"the controller cannot listen on {where}: {error.strerror}") from error
        try:
            await self._acquire(lease)
            self._begin(port, identity, lease)
            return await lease.hold()
        finally:
            await self._end()
            await port.stop()
            await lease.release()

    async def _acquire(self, lease: LeaderLease) -> None:
        self._say("waiting for the lease")
        acquiring = asyncio.create_task(lease.acquire())
        said = None
        try:
            while not acquiring.done():
                await asyncio.wait({acquiring}, timeout=RETRY_SECONDS)
                if lease.problem not in (None, said):
                    said = lease.problem
                    self._say(f"the lease cannot be had: {said}")
            acquiring.result()
        finally:
            acquiring.cancel()

    def _begin(self, port: ControllerPort, identity: Identity, lease: LeaderLease) -> None:
        self._around = Surroundings(
            client=self._client.writing_while(lambda: lease.is_certain),
            port=port,
            clock=self._client.clock,
            url=self._settings.url.rstrip("/"),
            certificate=identity.certificate,
            job_url=self._job_url,
            pods=self._pods_of,
            hosts=lambda: [] if self._hosts is None else self._hosts.objects.values(),
            sinks=self._sinks,
        )
        self._hosts = Collection(self._client, "nodes", on_change=self._on_host)
        for namespace in self._settings.namespaces or (None,):
            self._pods.append(
                Collection(self._client, "pods", namespace=namespace, selector=JOB_LABEL, on_change=self._on_pod)
            )
            self._jobs.append(Collection(self._client, PLURAL, namespace=namespace, on_change=self._on_job))
        self._hosts.start()
        for collection in self._pods:
            collection.start()
        self._tasks["problems"] = asyncio.create_task(self._report_problems())
        for pods, jobs in zip(self._pods, self._jobs, strict=True):
            self._tasks[f"start {jobs.path}"] = asyncio.create_task(self._begin_jobs(pods, jobs))
        where = ", ".join(self._settings.namespaces) or "all namespaces"
        self._say(f"leads, and keeps the training jobs of {where}")

    async def _begin_jobs(self, pods: Collection, jobs: Collection) -> None:
        """Pods first: a job whose pods were not seen yet would be started a second time."""
        await pods.listed()
        jobs.start()

    async def _report_problems(self) -> None:
        """What cannot be seen is said once, and again when it can be."""
        said: dict[int, str | None] = {}
        while True:
            for number, collection in enumerate([*self._pods, *self._jobs, *([self._hosts] if self._hosts else [])]):
                if said.get(number) != collection.problem:
                    said[number] = collection.problem
                    self._say(collection.problem or f"{collection.path} can be seen again")
            await asyncio.sleep(RETRY_SECONDS)

    async def _end(self) -> None:
        """Leaves everything that runs as it is."""
        for collection in (*self._jobs, *self._pods, *((self._hosts,) if self._hosts else ())):
            collection.stop()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # ------------------------------------------------------------------------------------------ what is seen

    def _on_job(self, found: Object, gone: bool) -> None:
        uid = str(found["metadata"]["uid"])
        keeper = self._keepers.get(uid)
        if keeper is None:
            if gone or self._around is None:
                return
            keeper = self._keepers[uid] = JobKeeper(found, self._around)
            name = f"keeper of {'/'.join(keeper.key)}"
            task = self._tasks[uid] = asyncio.create_task(self._keep(keeper), name=name)
            task.add_done_callback(lambda _: self._forget(uid))
        keeper.on_object(found, gone)

    async def _keep(self, keeper: JobKeeper) -> None:
        """Until its TrainingJob is gone. A bug that one job brings to light stays with it, and its pods run on."""
        while True:
            try:
                await keeper.run()
                return
            except Exception as error:
                self._say(f"{'/'.join(keeper.key)}: looking after it has failed, which is a bug: {error!r}")
            await asyncio.sleep(FAILED_SECONDS)

    def _forget(self, uid: str) -> None:
        keeper = self._keepers.pop(uid, None)
        self._tasks.pop(uid, None)
        if keeper is None or self._around is None:
            return
        if all(keeper.key != other.key for other in self._keepers.values()):  # else it was made anew already
            self._around.port.forget(keeper.key)

    def _on_pod(self, found: Object, gone: bool) -> None:
        namespace, _ = key_of(found)
        job = (found["metadata"].get("labels") or {}).get(JOB_LABEL)
        for keeper in self._keepers.values():
            if keeper.key == (namespace, job):
                keeper.on_pod(found, gone)

    def _on_host(self, found: Object, gone: bool) -> None:
        for keeper in self._keepers.values():
            keeper.on_host(found, gone)

    def _pods_of(self, key: Key) -> Iterable[Object]:
        namespace, job = key
        for collection in self._pods:
            for (where, _), pod in collection.objects.items():
                if where == namespace and (pod["metadata"].get("labels") or {}).get(JOB_LABEL) == job:
                    yield pod

    # ------------------------------------------------------------------------------------------ who we are

    async def _identity(self) -> tuple[Identity, str]:
        """Certificate, key and the metrics' token: made once, kept in a Secret, the same for all that come after."""
        while True:
            try:
                return await asyncio.to_thread(self._read_or_make_identity)
            except KubernetesError as error:
                if error.is_permanent and error.status != 409:
                    raise
                self._say(str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def _read_or_make_identity(self) -> tuple[Identity, str]:
        namespace, name = self._settings.lease_namespace, self._settings.lease_name
        found = self._client.find(path_of("secrets", namespace, name))
        if found is None:
            identity = new_identity(urlsplit(self._settings.url).hostname)
            data = {CERTIFICATE_KEY: identity.certificate, KEY_KEY: identity.key}
            data[METRICS_KEY] = secrets.token_urlsafe(32)
            body: Object = {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "Opaque",
                "metadata": {"name": name, "namespace": namespace},
                "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
            }
            found = self._client.create(path_of("secrets", namespace), body)
        try:
            data = {
                key: base64.b64decode(found["data"][key]).decode() for key in (CERTIFICATE_KEY, KEY_KEY, METRICS_KEY)
            }
        except (KeyError, TypeError, ValueError) as error:
            problem = "does not hold what a controller has put there; delete it, and running jobs with it"
            raise ConfigError(f"the Secret {namespace}/{name} {problem}") from error
        return Identity(certificate=data[CERTIFICATE_KEY], key=data[KEY_KEY]), data[METRICS_KEY]

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, a closed pipe: nothing ends for that
            sys.stderr.write(f"controller: {text}\n")
            sys.stderr.flush()

"""One controller acts at a time: who holds the Lease. `judge` is pure; no other host's clock is compared with ours.

A lease is free when it has not changed for as long as it says, as seen on our own monotonic clock. A holder that could
not renew for RENEW_SECONDS has lost it, sooner than anybody else may take it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from orchestrator.clock import Clock
from orchestrator.errors import KubernetesError
from orchestrator.schedulers.kubernetes.client import KubernetesClient
from orchestrator.schedulers.kubernetes.names import Object, path_of

LEASE_SECONDS = 15
RENEW_SECONDS = 10.0
RETRY_SECONDS = 2.0
THREADS = 2
"""One request may still wait for its answer when the next one is made."""


class Verdict(StrEnum):
    """What to do about a lease."""

    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSeen:
    """A lease as it was when it last changed."""

    version: str
    at_seconds: float


def judge(lease: Mapping[str, Any] | None, me: str, seen: LastSeen | None, now_seconds: float) -> Verdict:
    """Pure. `seen`: since when it has been as it is, by our own monotonic clock."""
    if lease is None:
        return Verdict.TAKE
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    if holder == me:
        return Verdict.RENEW
    if not holder:
        return Verdict.TAKE
    lasts = spec.get("leaseDurationSeconds")
    lasts_seconds = float(lasts) if isinstance(lasts, int) and lasts > 0 else LEASE_SECONDS
    unchanged = seen is not None and seen.version == _version(lease) and now_seconds - seen.at_seconds > lasts_seconds
    return Verdict.TAKE if unchanged else Verdict.WAIT


class LeaderLease:
    """Our hold of one Lease."""

    def __init__(self, client: KubernetesClient, namespace: str, name: str, me: str, clock: Clock) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._me = me
        self._clock = clock
        self._seen: LastSeen | None = None
        self._renewed_seconds: float | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lease")
        """Its own: the jobs' requests may keep all others busy for longer than a lease lasts."""
        self.problem: str | None = None
        """Why the lease could not be read or written at the last try."""

    @property
    def is_certain(self) -> bool:
        """Nobody else can have it yet. Not so in a process that was stopped for a while, before anybody has told it."""
        renewed = self._renewed_seconds
        return renewed is not None and self._clock.monotonic() - renewed <= RENEW_SECONDS

    async def acquire(self) -> None:
        """Wait until it is ours."""
        while not await self._try(RENEW_SECONDS):
            await asyncio.sleep(RETRY_SECONDS)

    async def hold(self) -> str:
        """Renew it for as long as it is ours; returns why it is not any more."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if not self.is_certain:
                return f"the lease could not be renewed for {RENEW_SECONDS:.0f} s: {self.problem}"
            left_seconds = (self._renewed_seconds or 0.0) + RENEW_SECONDS - self._clock.monotonic()
            if not await self._try(left_seconds) and self.problem is None:
                return "another controller holds the lease"

    async def release(self) -> None:
        """The next one need not wait: called at an orderly end."""
        try:
            lease = await asyncio.to_thread(self._client.get, self._path)
            if (lease.get("spec") or {}).get("holderIdentity") == self._me:
                lease["spec"]["holderIdentity"] = ""
                await asyncio.to_thread(self._client.replace, self._path, lease)
        except KubernetesError:
            return  # it runs out by itself

    async def _try(self, limit_seconds: float) -> bool:
        """Whether it is ours now."""
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(limit_seconds):
                held = await asyncio.get_running_loop().run_in_executor(self._threads, self._take_or_renew)
        except KubernetesError as error:
            self.problem = str(error)  # a conflict, too: who holds it is read again
            return False
        except TimeoutError:
            self.problem = "the API server does not answer"
            return False
        self.problem = None
        self._renewed_seconds = began if held else None
        return held

    @property
    def _path(self) -> str:
        return path_of("leases", self._namespace, self._name)

    def _take_or_renew(self) -> bool:
        now = self._clock.monotonic()
        lease = self._client.find(self._path)
        if lease is not None and (self._seen is None or self._seen.version != _version(lease)):
            self._seen = LastSeen(version=_version(lease), at_seconds=now)
        verdict = judge(lease, self._me, self._seen, now)
        if verdict is Verdict.WAIT:
            return False
        wall = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if lease is None:
            self._client.create(path_of("leases", self._namespace), self._new(wall))
            return True
        spec = dict(lease.get("spec") or {})
        if verdict is Verdict.TAKE:
            spec |= {"acquireTime": wall, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {"holderIdentity": self._me, "renewTime": wall, "leaseDurationSeconds": LEASE_SECONDS}
        self._client.replace(self._path, {**lease, "spec": spec})
        return True

    def _new(self, wall: str) -> Object:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._me,
                "leaseDurationSeconds": LEASE_SECONDS,
                "acquireTime": wall,
                "renewTime": wall,
                "leaseTransitions": 0,
            },
        }


def _version(lease: Mapping[str, Any]) -> str:
    return str((lease.get("metadata") or {}).get("resourceVersion"))

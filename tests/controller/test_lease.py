"""One controller at a time: the judgement, and real holds against the API server double."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.clock import SystemClock
from orchestrator.controller import lease as lease_module
from orchestrator.controller.lease import LastSeen, LeaderLease, Verdict, judge
from orchestrator.errors import KubernetesError
from orchestrator.schedulers.kubernetes.client import KubernetesClient, connect
from orchestrator.schedulers.kubernetes.names import path_of
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.servers import bare_cluster

PATH = path_of("leases", "default", "lead")


def held(by: str | None, version: str = "7", lasts: object = 15) -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": version},
        "spec": {"holderIdentity": by, "leaseDurationSeconds": lasts},
    }


@pytest.mark.parametrize(
    ("lease", "seen", "verdict"),
    [
        (None, None, Verdict.TAKE),
        (held("me"), None, Verdict.RENEW),
        (held(""), None, Verdict.TAKE),
        (held(None), None, Verdict.TAKE),
        ({"metadata": {}, "spec": None}, None, Verdict.TAKE),
        (held("other"), None, Verdict.WAIT),
        (held("other"), LastSeen(version="7", at_seconds=86.0), Verdict.WAIT),
        (held("other"), LastSeen(version="7", at_seconds=84.0), Verdict.TAKE),
        (held("other"), LastSeen(version="6", at_seconds=0.0), Verdict.WAIT),
        (held("other", lasts=60), LastSeen(version="7", at_seconds=84.0), Verdict.WAIT),
        (held("other", lasts=None), LastSeen(version="7", at_seconds=84.0), Verdict.TAKE),
        (held("other", lasts=0), LastSeen(version="7", at_seconds=99.0), Verdict.WAIT),
        (held("other", lasts="1"), LastSeen(version="7", at_seconds=98.0), Verdict.WAIT),
    ],
)
def test_judgements(lease: dict[str, Any] | None, seen: LastSeen | None, verdict: Verdict) -> None:
    """At second 100 of our own clock; no other host's is looked at."""
    assert judge(lease, "me", seen, 100.0) is verdict


class ShiftedClock(SystemClock):
    """Real time, and what a test adds to it."""

    shift_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.shift_seconds


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An API server alone."""
    with bare_cluster(tmp_path) as found:
        yield found


@pytest.fixture
def client(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> KubernetesClient:
    """Of that server; whoever waits for a lease looks often."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setattr(lease_module, "RETRY_SECONDS", 0.02)
    return connect()


def holder(cluster: Cluster) -> str:
    """Who has it."""
    return str(cluster.request("GET", PATH)[1]["spec"]["holderIdentity"])


def lease_of(client: KubernetesClient, me: str, clock: SystemClock | None = None) -> LeaderLease:
    return LeaderLease(client, "default", "lead", me, clock or ShiftedClock())


async def test_the_second_one_waits_until_the_first_lets_go(client: KubernetesClient, cluster: Cluster) -> None:
    first, second = lease_of(client, "first"), lease_of(client, "second")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    holding = asyncio.create_task(first.hold())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert holder(cluster) == "first"
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    await first.release()
    await asyncio.wait_for(waiting, 10)
    assert holder(cluster) == "second"
    assert cluster.request("GET", PATH)[1]["spec"]["leaseTransitions"] == 1
    await first.release()  # it is not its any more
    assert holder(cluster) == "second"


async def test_a_lease_that_nobody_renews_is_taken_when_it_has_run_out(
    client: KubernetesClient, cluster: Cluster
) -> None:
    await lease_of(client, "dead").acquire()
    clock = ShiftedClock()
    next_one = lease_of(client, "next", clock)
    waiting = asyncio.create_task(next_one.acquire())
    await asyncio.sleep(0.2)
    assert holder(cluster) == "dead"
    clock.shift_seconds = 16
    await asyncio.wait_for(waiting, 10)
    assert holder(cluster) == "next"


async def test_of_two_that_take_it_in_the_same_instant_one_has_it(client: KubernetesClient, cluster: Cluster) -> None:
    contenders = [lease_of(client, f"c{number}") for number in range(4)]
    tasks = [asyncio.create_task(one.acquire()) for one in contenders]
    done, rest = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.2)
    assert [task.done() for task in tasks].count(True) == len(done) == 1
    assert holder(cluster) == f"c{tasks.index(done.pop())}"
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def test_who_finds_it_in_other_hands_has_lost_it(client: KubernetesClient, cluster: Cluster) -> None:
    first = lease_of(client, "first")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    cluster.request("PATCH", PATH, {"spec": {"holderIdentity": "usurper"}})
    assert "another controller" in await asyncio.wait_for(holding, 10)
    assert holder(cluster) == "usurper"


async def test_a_conflict_is_no_loss_as_long_as_it_is_ours(client: KubernetesClient, cluster: Cluster) -> None:
    """Somebody has written to the object between our read and our write: read again."""
    assert cluster.server is not None
    first = lease_of(client, "first")
    await first.acquire()
    cluster.server.fail_next("PUT", "leases/lead", 409)
    holding = asyncio.create_task(first.hold())
    await asyncio.sleep(0.3)
    assert not holding.done()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


async def test_an_api_server_that_is_away_for_too_long_takes_it_away(
    client: KubernetesClient, cluster: Cluster
) -> None:
    assert cluster.server is not None
    clock = ShiftedClock()
    first = lease_of(client, "first", clock)
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    cluster.server.stop()
    await asyncio.sleep(0.2)
    assert not holding.done()
    assert first.problem is not None
    clock.shift_seconds = 11
    reason = await asyncio.wait_for(holding, 10)
    assert "could not be renewed for 10 s" in reason
    await first.release()  # no error: it runs out by itself
    cluster.server.start()
    assert holder(cluster) == "first"


async def test_an_api_server_that_refuses_and_then_hangs_gets_no_second_ten_seconds(
    client: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one may take the lease 15 s after the last renewal: by then this one must have let go."""
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 1.0)
    first = lease_of(client, "first")
    await first.acquire()
    began, done = time.monotonic(), threading.Event()

    def hang() -> bool:
        if time.monotonic() - began < 0.5:
            raise KubernetesError("refused", status=500)
        done.wait(30)
        return True

    monkeypatch.setattr(first, "_take_or_renew", hang)
    try:
        assert "could not be renewed" in await asyncio.wait_for(first.hold(), 20)
        assert time.monotonic() - began < 1.5  # not 0.5 and another 1.0
    finally:
        done.set()


async def test_what_was_stopped_for_a_while_writes_nothing_before_it_has_looked(
    client: KubernetesClient, cluster: Cluster
) -> None:
    """Its clock goes on meanwhile, and another one may hold the lease and the jobs."""
    clock = ShiftedClock()
    lease = lease_of(client, "first", clock)
    guarded = client.writing_while(lambda: lease.is_certain)
    secrets = path_of("secrets", "default")
    with pytest.raises(KubernetesError, match="another controller may hold the lease"):
        guarded.create(secrets, {"metadata": {"name": "before"}})
    await lease.acquire()
    guarded.create(secrets, {"metadata": {"name": "with"}})
    clock.shift_seconds = 20.0
    writes: tuple[Callable[[], object], ...] = (
        lambda: guarded.create(secrets, {"metadata": {"name": "after"}}),
        lambda: guarded.patch(f"{secrets}/with", {"stringData": {"a": "b"}}),
        lambda: guarded.delete(f"{secrets}/with"),
    )
    for write in writes:
        with pytest.raises(KubernetesError, match="another controller may hold the lease"):
            write()
    assert [one["metadata"]["name"] for one in guarded.list(secrets)[0]] == ["with"]


async def test_requests_that_wait_for_their_answers_do_not_cost_the_lease(client: KubernetesClient) -> None:
    """All of the process' other threads are busy."""
    end = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        busy = asyncio.get_running_loop().run_in_executor(threads, end.wait, 20)
        asyncio.get_running_loop().set_default_executor(threads)
        lease = lease_of(client, "first")
        try:
            await asyncio.wait_for(lease.acquire(), 10)
        finally:
            end.set()
        await busy
        assert lease.is_certain

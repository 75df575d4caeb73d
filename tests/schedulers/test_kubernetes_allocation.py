"""A run's pods while the API server answers badly. Nothing runs in them: the double has no kubelets here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from orchestrator.schedulers.kubernetes import allocation as module
from orchestrator.schedulers.kubernetes.allocation import KubernetesAllocation
from orchestrator.schedulers.kubernetes.client import connect
from orchestrator.schedulers.kubernetes.names import JOB_LABEL, path_of
from orchestrator.schedulers.kubernetes.pods import Owner, Pod, PodPlan
from orchestrator.schedulers.kubernetes.watching import Collection
from tests.kubernetes import api_store
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_store import timestamp as stamp
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.servers import bare_cluster

PODS = path_of("pods", "default")
WAIT_SECONDS = 15.0


class Scene:
    """An allocation that has started."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.server is not None
        self.cluster: Cluster = cluster
        self.server: ApiServer = cluster.server
        self.lost: list[str] = []
        client = connect()
        plan = PodPlan(
            owner=Owner(namespace="default", name="job", uid="no-owner"),
            run="run",
            secret="job-run",
            template={"spec": {"containers": [{"name": "t", "image": "i"}]}},
            fallback=None,
            labels={},
            grace_seconds=30.0,
        )
        self.clock = client.clock
        self.allocation = KubernetesAllocation(client=client, plan=plan, clock=self.clock, patience_seconds=600.0)
        self.pods = Collection(
            client, "pods", namespace="default", selector=JOB_LABEL, on_change=self.allocation.observe
        )

    def there(self) -> set[str]:
        """Pods that there are."""
        return {name for _, name in self.pods.objects}

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for it."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"{what}; {self.there()}"
            await asyncio.sleep(0.01)


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """With short pauses."""
    for name in ("REFUSED_SECONDS_FIRST", "REFUSED_SECONDS_MAX", "DELETE_AGAIN_SECONDS_FIRST"):
        monkeypatch.setattr(module, name, 0.02)
    with bare_cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        found = Scene(cluster)
        found.pods.start()
        await asyncio.wait_for(found.pods.listed(), WAIT_SECONDS)
        await found.allocation.start("https://c", "t", lambda node, _: found.lost.append(node))
        yield found
        await found.allocation.stop()
        found.pods.stop()


async def test_an_answer_that_is_lost_makes_no_second_pod(scene: Scene) -> None:
    scene.server.lose_answers("POST", "/pods$", 3)
    scene.server.fail_next("POST", "/pods$", 500, 2)
    scene.allocation.request(3)
    await scene.until(lambda: scene.allocation.refusal is not None, "it was refused")
    await scene.until(lambda: scene.allocation.refusal is None, "all is well")
    await scene.until(lambda: {node.node for node in scene.allocation.nodes()} == scene.there(), "all are seen")
    assert len(scene.there()) == 3


async def test_a_pod_that_is_given_back_is_deleted_however_long_that_is_refused(scene: Scene) -> None:
    """Nobody else would: it waits for a place, gets one in the end, and holds it."""
    scene.allocation.request(1)
    await scene.until(scene.there, "a pod")
    (pod,) = scene.there()
    scene.server.fail_next("DELETE", f"/pods/{pod}", 503, 8)
    scene.server.lose_answers("DELETE", f"/pods/{pod}", 1)
    scene.allocation.release(pod)
    await scene.until(lambda: not scene.there(), "it is gone")
    assert not scene.lost


async def test_the_end_does_not_wait_for_an_api_server_that_is_away(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(module, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(module, "GONE_SECONDS", 0.1)
    scene.allocation.request(1)
    await scene.until(scene.there, "a pod")
    scene.allocation.abandoned = False
    scene.server.fail_next("DELETE", "/pods/", 503, 10_000)
    await asyncio.wait_for(scene.allocation.stop(), 10)
    assert len(scene.there()) == 1


@pytest.mark.parametrize("ahead_seconds", [-600.0, 0.0, 600.0])
async def test_clocks_that_differ_lose_no_pod_before_its_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, ahead_seconds: float
) -> None:
    """A deleted pod saves until its grace is over: counted on our own clock, from when its deletion was seen."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(api_store, "timestamp", lambda at=None: stamp((at or time.time()) + ahead_seconds))
    scene.server.ahead_seconds = ahead_seconds
    scene.allocation.request(1)
    await scene.until(scene.there, "a pod")
    (pod,) = scene.there()
    ask = scene.cluster.request
    assert ask("POST", f"{PODS}/{pod}/binding", {"target": {"kind": "Node", "name": "n"}})[0] == 201
    assert ask("PATCH", f"{PODS}/{pod}/status", {"status": {"phase": "Running"}})[0] == 200
    looks, look = [0], module.is_overdue

    later_seconds = [0.0]

    def counted(found: Pod, since: float | None, now: float) -> bool:
        looks[0] += found.deleting
        return look(found, since, now + later_seconds[0])

    monkeypatch.setattr(module, "is_overdue", counted)
    ask("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 60})
    await scene.until(lambda: looks[0] > 5, "it has looked")
    assert not scene.lost
    assert abs(scene.clock.wall() - time.time() - ahead_seconds) < 3
    later_seconds[0] = 90.0
    await scene.until(lambda: scene.lost == [pod], "it is lost when its time is over")
    ask("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0})

"""A whole controller in this process, against the API server double without kubelets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.crd import definition
from orchestrator.controller.lease import LeaderLease
from orchestrator.controller.loop import Controller, ControllerSettings
from orchestrator.controller.port import ControllerPort
from orchestrator.schedulers.kubernetes.client import connect
from orchestrator.schedulers.kubernetes.names import Key, path_of
from orchestrator.storage.opening import job_url
from orchestrator.supervisor.metrics import Metrics
from tests.controller.keeper_scene import TEMPLATE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.servers import bare_cluster

WAIT_SECONDS = 20.0


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """It knows TrainingJobs, and two namespaces."""
    with bare_cluster(tmp_path) as found:
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
        found.create_crd(definition())
        found.create("/api/v1/namespaces", {"metadata": {"name": "other"}})
        yield found


def controller(*namespaces: str) -> asyncio.Task[str]:
    """One that runs."""
    settings = ControllerSettings(
        url="https://127.0.0.1:8443",
        address="127.0.0.1",
        port=0,
        namespaces=namespaces,
        lease_name="lead",
        lease_namespace="default",
    )
    return asyncio.create_task(Controller(connect(), settings, job_url=job_url).run())


async def create(cluster: Cluster, namespace: str, name: str) -> None:
    """A TrainingJob."""
    body: dict[str, Any] = {
        "apiVersion": "orchestrator.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"store": "/nowhere", "command": ["x"], "template": TEMPLATE},
    }
    await asyncio.to_thread(cluster.create, path_of("trainingjobs", namespace), body)


def count(cluster: Cluster, method: str, path: str) -> int:
    """Requests of that kind that were granted."""
    assert cluster.server is not None
    return len([one for one in cluster.server.requests if (one.method, one.path) == (method, path) and one.code < 300])


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for it."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.02)


async def stop(task: asyncio.Task[str]) -> None:
    """As a signal does."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_controller_that_is_not_certain_of_its_lease_writes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that was stopped for a while: another one has its jobs by now."""
    monkeypatch.setattr(LeaderLease, "is_certain", False)
    await create(cluster, "default", "small")
    reason = await asyncio.wait_for(controller("default"), WAIT_SECONDS)
    assert "the lease could not be renewed" in reason
    assert count(cluster, "PATCH", path_of("trainingjobs", "default", "small")) == 0
    assert count(cluster, "POST", path_of("pods", "default")) == 0


async def test_a_namespace_that_cannot_be_seen_keeps_no_others_from_being_looked_after(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.server is not None
    cluster.server.fail_next("GET", "/namespaces/other/pods", 403, 1000)
    for namespace in ("default", "other"):
        await create(cluster, namespace, "small")
    task = controller("other", "default")
    await until(lambda: count(cluster, "POST", path_of("pods", "default")) == 1, "a pod")
    said = ""
    while "/namespaces/other/pods" not in said:
        said += capsys.readouterr().err
        await asyncio.sleep(0.05)
    assert "(403)" in said
    assert count(cluster, "POST", path_of("pods", "other")) == 0
    await stop(task)


async def test_nothing_is_counted_of_a_job_that_does_not_exist_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[Key] = []
    monkeypatch.setattr(ControllerPort, "forget", lambda _, key: forgotten.append(key))
    for name in ("small", "other"):
        await create(cluster, "default", name)
    task = controller("default")
    await until(lambda: count(cluster, "POST", path_of("pods", "default")) == 2, "a pod of each")
    await asyncio.to_thread(cluster.request, "DELETE", path_of("trainingjobs", "default", "small"))
    await until(lambda: forgotten, "it is gone")
    assert forgotten == [("default", "small")]
    await stop(task)


def test_the_counters_of_one_job_go() -> None:
    metrics = Metrics()
    for job, kind in (("a/x", "committed"), ("a/x", "node lost"), ("a/xx", "committed")):
        metrics.count(job, kind)
    metrics.forget("a/x")
    metrics.forget("never/seen")
    text = metrics.text().decode()
    assert 'job="a/xx"' in text
    assert 'job="a/x"' not in text
    metrics.count("a/x", "committed")
    assert 'orchestrator_events_total{job="a/x",kind="committed"} 1.0' in metrics.text().decode()

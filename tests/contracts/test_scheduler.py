"""What every scheduler must do, on each of them: nodes come, are lost with and without asking, go, and stay away.

Agents here only read their settings and wait. Real jobs on each scheduler: `tests/processes`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.clock import SystemClock
from orchestrator.schedulers.base import Scheduler
from orchestrator.schedulers.kubernetes import allocation
from orchestrator.schedulers.kubernetes.allocation import KubernetesAllocation
from orchestrator.schedulers.kubernetes.client import connect
from orchestrator.schedulers.kubernetes.names import JOB_LABEL, path_of
from orchestrator.schedulers.kubernetes.pods import Owner, PodPlan
from orchestrator.schedulers.kubernetes.watching import Collection
from orchestrator.schedulers.local import LocalScheduler
from orchestrator.schedulers.slurm.allocation import Host, SlurmAllocation
from orchestrator.schedulers.slurm.commands import SlurmCommands
from tests.kubernetes.cluster import running_cluster, why_not
from tests.slurm_cluster import SlurmCluster

KINDS = ("local", "slurm", "kubernetes")
WAIT_SECONDS = 30.0
STUB = """
import json, os, signal, sys, time
words = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
said = json.load(open(words["settings"])) | {"node": words["node"]} if words else json.load(sys.stdin)
name = os.path.join(said["folder"], said["node"])
with open(name + ".draft", "w") as file:
    json.dump(said | {"pid": os.getpid()}, file)
os.rename(name + ".draft", name)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
while not os.path.exists(name + ".dismissed"):
    time.sleep(0.02)
"""


@dataclass(kw_only=True)
class Scene:
    """A scheduler that was started, and what it has said."""

    scheduler: Scheduler
    folder: Path
    lost: dict[str, str] = field(default_factory=dict)

    def up(self) -> dict[str, int]:
        """Pids of the agents that have read their settings and live."""
        found = {}
        for path in self.folder.iterdir():
            if not path.suffix:
                pid = int(json.loads(path.read_text())["pid"])
                if _lives(pid):
                    found[path.name] = pid
        return found

    def said(self, node: str) -> dict[str, str]:
        """What an agent was told."""
        told: dict[str, str] = json.loads((self.folder / node).read_text())
        return told

    def dismiss(self, node: str) -> None:
        """As the supervisor does: the agent ends by itself."""
        (self.folder / f"{node}.dismissed").touch()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"not within {WAIT_SECONDS:.0f} s: {what}; up {self.up()}, lost {self.lost}"
            await asyncio.sleep(0.02)

    async def get(self, count: int) -> list[str]:
        """Ask for nodes and wait until there are that many more."""
        before = set(self.up())
        self.scheduler.request(count)
        await self.until(lambda: len(set(self.up()) - before) == count, f"{count} nodes")
        return sorted(set(self.up()) - before)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(params=KINDS)
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    """Each scheduler, started."""
    (tmp_path / "agents").mkdir()
    make = {"local": _local, "slurm": _slurm, "kubernetes": _kubernetes}
    async with make[request.param](request, tmp_path) as scheduler:
        found = Scene(scheduler=scheduler, folder=tmp_path / "agents")
        left = await scheduler.start("http://127.0.0.1:1", "the token", found.lost.__setitem__)
        assert left == ()
        yield found
        for node in found.up():
            found.dismiss(node)
        await scheduler.stop()
        assert not found.up(), "something is left running"


@asynccontextmanager
async def _local(_: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Scheduler]:
    yield LocalScheduler(
        settings_of=lambda node, url, token, staging: _settings(folder, node, url, token),
        staging=folder,
        state_file=folder / "nodes.json",
        claimant="a test",
        terms="",
        agent_command=(sys.executable, "-c", STUB),
    )


@asynccontextmanager
async def _slurm(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Scheduler]:
    cluster: SlurmCluster = request.getfixturevalue("slurm")
    nodes = cluster.nodes
    job_id = cluster.run(
        *("sbatch", "--parsable", f"--nodes={len(nodes)}", "--mincpus=2", "--no-kill", "--output=/dev/null"),
        "--wrap=sleep 1000",
    ).strip()
    commands = SlurmCommands({**os.environ, **cluster.variables})
    end = time.monotonic() + WAIT_SECONDS
    while (record := commands.job(job_id)) is None or record.state != "RUNNING":
        assert time.monotonic() < end, record
        await asyncio.sleep(0.1)
    yield SlurmAllocation(
        job_id=job_id,
        hosts=[Host(name=name, address="127.0.0.1", cpus=2) for name in nodes],
        settings_of=lambda node, address, url, token: _settings(folder, node, url, token),
        commands=commands,
        agent_command=(sys.executable, "-c", STUB),
    )
    cluster.run("scancel", job_id)
    while cluster.run("squeue", "-h", "-j", job_id, check=False).strip():
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _kubernetes(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Scheduler]:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    patch.setattr(allocation, "STOP_SECONDS", 2.0)
    (folder / "cluster").mkdir()
    (folder / "stub.py").write_text(STUB)
    with running_cluster(folder / "cluster", nodes=2) as cluster:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        data = {"settings.json": _settings(folder, "", "http://127.0.0.1:1", "the token")}
        cluster.create(path_of("secrets", "default"), {"metadata": {"name": "job-run"}, "stringData": data})
        container = {"name": "t", "image": "i", "command": [sys.executable, str(folder / "stub.py")]}
        plan = PodPlan(
            owner=Owner(namespace="default", name="job", uid="no-owner"),
            run="run",
            secret="job-run",
            template={"spec": {"containers": [container]}},
            fallback=None,
            labels={},
            grace_seconds=30.0,
        )
        client = connect()
        found = KubernetesAllocation(client=client, plan=plan, clock=SystemClock(), patience_seconds=600.0)
        pods = Collection(client, "pods", namespace="default", selector=JOB_LABEL, on_change=found.observe)
        pods.start()
        await pods.listed()
        yield found
        pods.stop()


def _settings(folder: Path, node: str, url: str, token: str) -> str:
    return json.dumps({"folder": str(folder / "agents"), "node": node, "url": url, "token": token})


async def test_nodes_come_with_their_settings(scene: Scene) -> None:
    nodes = await scene.get(2)
    assert sorted(info.node for info in scene.scheduler.nodes()) == nodes
    assert [scene.said(node)["token"] for node in nodes] == ["the token"] * 2
    assert not scene.lost


async def test_one_that_dies_is_lost_once_with_the_reason(scene: Scene) -> None:
    first, second = await scene.get(2)
    os.kill(scene.up()[first], 9)
    await scene.until(lambda: bool(scene.lost), "the loss is told")
    assert list(scene.lost) == [first]
    assert scene.lost[first]
    assert [info.node for info in scene.scheduler.nodes()] == [second]


async def test_one_that_is_taken_away_is_lost_in_its_time(scene: Scene) -> None:
    """A rehearsed notice: until the deadline it lives."""
    first, second = await scene.get(2)
    scene.scheduler.lose(first, 0.5)
    assert first in scene.up()
    await scene.until(lambda: first in scene.lost, "it is lost")
    await scene.until(lambda: list(scene.up()) == [second], "its agent is gone")


async def test_one_that_is_given_back_is_not_lost(scene: Scene) -> None:
    """Shrinking: it was dismissed, and ends by itself."""
    first, second = await scene.get(2)
    scene.scheduler.release(first)
    scene.dismiss(first)
    await scene.until(lambda: list(scene.up()) == [second], "it has gone")
    await scene.until(lambda: len(scene.scheduler.nodes()) == 1, "the scheduler knows")
    assert not scene.lost


async def test_one_that_does_not_go_is_ended(scene: Scene) -> None:
    """A twin that does not listen: nothing of it is left running beside the next gang."""
    (first,) = await scene.get(1)
    scene.scheduler.release(first)
    await scene.until(lambda: not scene.up(), "it was ended")
    assert not scene.lost


async def test_a_replacement_has_another_name(scene: Scene) -> None:
    """Growing again after a loss: what the first one still says must not be taken for the second one's."""
    (first,) = await scene.get(1)
    scene.scheduler.lose(first, 0.0)
    await scene.until(lambda: first in scene.lost, "it is lost")
    (second,) = await scene.get(1)
    assert second != first
    assert [info.node for info in scene.scheduler.nodes()] == [second]


async def test_what_is_unknown_is_passed_over(scene: Scene) -> None:
    scene.scheduler.release("nobody")
    scene.scheduler.lose("nobody", 0.0)
    await scene.get(1)
    assert not scene.lost


async def test_stopping_ends_all(scene: Scene) -> None:
    """Those that were dismissed end by themselves, the others are ended."""
    nodes = await scene.get(2)
    scene.dismiss(nodes[0])
    await scene.scheduler.stop()
    assert not scene.up()
    assert not scene.lost
    assert scene.scheduler.nodes() == []

"""Stories told to the simulated cluster one fault at a time: what a random seed meets too seldom."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from orchestrator.core.messages import NoticeKind
from orchestrator.core.states import JobSpec, Phase
from orchestrator.testing.simulated_cluster import Limits, SimulatedCluster, SimulatedRun
from orchestrator.testing.simulated_time import SimulatedLoop
from orchestrator.testing.simulated_workers import Training
from tests.simulation.promises import Promises

Story = Callable[[SimulatedCluster, SimulatedRun], Awaitable[None]]


def tell(story: Story, *, limits: Limits | None = None, until: int = 60, **spec: object) -> SimulatedRun:
    """Run a job of two nodes to its end, with a story beside it; every promise is watched."""
    values: dict[str, object] = {"nodes_min": 1, "nodes_max": 2, "workers_per_node": 1, "save_every_steps": 10, **spec}
    loop, draw = SimulatedLoop(), random.Random(1)
    training = Training(until=until, step_seconds=0.2, start_seconds=0.2, synchronous=True, decision_wait_seconds=10.0)
    cluster = SimulatedCluster(
        loop=loop,
        draw=draw,
        spec=JobSpec(name="simulated", gather_seconds=5.0, reform_seconds=1.0, **values),  # type: ignore[arg-type]
        training=training,
        limits=limits or Limits(),
    )
    promises = Promises(cluster=cluster, on_violation=cluster.finished.set)
    promises.watch()

    async def run() -> SimulatedRun:
        job = cluster.start_run("run-1", "owner")
        await asyncio.wait_for(story(cluster, job), 300)
        await asyncio.wait_for(cluster.finished.wait(), 600)
        return job

    try:
        job = loop.run_until_complete(run())
        assert promises.problem is None
        assert job.finish is not None
        assert job.finish.exit_code == 0, job.finish.reason
        return job
    finally:
        cluster.close()


async def running(run: SimulatedRun, step: int) -> None:
    """Until the job has come to a step and has a committed checkpoint."""
    while True:
        job = run.supervisor.job if run.supervisor is not None else None
        if job is not None and job.phase is Phase.RUNNING and job.highest_step >= step and job.newest_committed:
            return
        await asyncio.sleep(0.05)


def kinds(run: SimulatedRun) -> list[str]:
    """The kinds of what happened, in order."""
    return [record.kind for record in run.records]


def test_a_shard_that_would_not_get_to_the_store_in_time_is_handed_over() -> None:
    """The store is slow, the notice short: the node that stays copies the shard and uploads it."""

    async def story(cluster: SimulatedCluster, run: SimulatedRun) -> None:
        await running(run, 25)
        node = cluster.nodes()[0]
        cluster.notice(node, NoticeKind.PREEMPT, 6.0, "n1")
        cluster.lose(node.name, 6.0)

    run = tell(story, limits=Limits(store_latency_seconds=0.6))
    happened = kinds(run)
    assert "handed over" in happened
    handed = happened.index("handed over")
    lost = happened.index("node lost")
    assert handed < lost, "before its node is gone"
    assert "committed" in happened[handed:], "and the step is committed"


def test_a_supervisor_that_was_killed_takes_the_running_gang_back() -> None:
    """F88: nothing is restarted, no new generation is opened, and saving goes on."""

    async def story(cluster: SimulatedCluster, run: SimulatedRun) -> None:
        await running(run, 15)
        run.kill(5.0)

    run = tell(story)
    assert kinds(run).count("generation opened") == 1
    assert "taken back" in kinds(run)


def test_what_was_decided_becomes_durable_without_a_supervisor() -> None:
    """A notice reaches a node while the supervisor is away, and all nodes go: the next run finds the staged step."""

    async def story(cluster: SimulatedCluster, run: SimulatedRun) -> None:
        while not (run.supervisor and run.supervisor.job.saves):
            await asyncio.sleep(0.01)
        save = next(iter(run.supervisor.job.saves.values()))
        while run.supervisor.job.highest_step < save.id.step:
            await asyncio.sleep(0.01)
        run.kill(20.0, with_nodes=False)
        for node in cluster.nodes():
            cluster.notice(node, NoticeKind.PREEMPT, 8.0, f"n-{node.name}")
            cluster.lose(node.name, 8.0)

    run = tell(story, limits=Limits(store_latency_seconds=0.1))
    bases = [record.step for record in run.records if record.kind == "generation opened"]
    assert bases == [0, 10]


def test_a_condemned_node_trains_on_and_is_not_in_the_next_generation() -> None:
    """Its device has failed; a worker elsewhere dies later."""
    condemned: list[str] = []

    async def story(cluster: SimulatedCluster, run: SimulatedRun) -> None:
        await running(run, 15)
        bad, other = cluster.nodes()[:2]
        condemned.append(bad.name)
        cluster.host_trouble(bad, "device", "it has failed", condemns=True)
        await running(run, 18)
        assert run.supervisor is not None
        assert run.supervisor.job.gang is not None
        assert bad.name in run.supervisor.job.gang.nodes
        other.runtime.alive()[0].kill()

    run = tell(story)
    (name,) = condemned
    members = [str(record.facts["nodes"]).split() for record in run.records if record.kind == "generation opened"]
    assert name in members[0]
    assert all(name not in later for later in members[1:])
    released = [record.node for record in run.records if record.kind == "node released"]
    assert name in released


def test_what_condemns_a_node_is_known_to_the_next_supervisor() -> None:
    async def story(cluster: SimulatedCluster, run: SimulatedRun) -> None:
        await running(run, 15)
        bad = cluster.nodes()[0]
        cluster.host_trouble(bad, "device", "it has failed", condemns=True)
        await asyncio.sleep(0.5)
        run.kill(2.0)
        await asyncio.sleep(2.5)
        await running(run, 18)
        assert run.supervisor is not None
        assert run.supervisor.job.condemned == {bad.name}

    assert "taken back" in kinds(tell(story))


def test_a_node_with_bad_devices_never_joins() -> None:
    async def story(cluster: SimulatedCluster, run: SimulatedRun) -> None:
        cluster.unfit["node-1"] = "device cuda:0: wrong results"
        await running(run, 15)
        assert run.supervisor is not None
        assert "node-1" not in run.supervisor.job.nodes
        assert "node-1" not in run.nodes, "it was dismissed, and has ended"

    run = tell(story)
    (unfit,) = [record for record in run.records if record.kind == "node unfit"]
    assert (unfit.node, unfit.reason) == ("node-1", "device cuda:0: wrong results")

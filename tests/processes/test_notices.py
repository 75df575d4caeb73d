"""Real jobs whose agents watch simulated metadata services: notice, save, leave, commit before the deadline."""

from __future__ import annotations

import time
from pathlib import Path

import aiohttp
import pytest

from orchestrator.core.job import Phase
from orchestrator.supervisor.loop import Supervisor
from orchestrator.testing.metadata import SimulatedAWS, SimulatedAzure
from orchestrator.testing.metadata_server import Unauthorized
from tests.processes.harness import JobResult, check_store, final_digests, run_job, until


def committed_in_time(result: JobResult) -> bool:
    """Whether a checkpoint was committed for a notice, each of them before its deadline."""
    left = [record.facts.get("seconds_before_deadline") for record in result.kinds("committed")]
    return any(left) and all(float(seconds) > 0 for seconds in left if seconds is not None)


def noticed(supervisor: Supervisor, kind: str) -> bool:
    """Whether every node knows of a notice or (`kind` "hints") of a hint."""
    nodes = supervisor.job.nodes.values()
    return bool(nodes) and all(getattr(node, kind) for node in nodes)


async def test_a_spot_interruption_after_a_storm_of_401(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8, F9: a node that cannot read its metadata is an alarm; once it can, a notice is acted on in time."""
    monkeypatch.setenv("STEP_SECONDS", "0.3")
    async with SimulatedAWS() as aws:
        aws.misbehave(Unauthorized(), path="/latest/meta-data")

        async def scenario(supervisor: Supervisor) -> None:
            await until(lambda: any(node.blind for node in supervisor.job.nodes.values()))
            aws.behave()
            await until(lambda: not any(node.blind for node in supervisor.job.nodes.values()))
            await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 3)
            aws.recommend_rebalance()
            await until(lambda: noticed(supervisor, "hints"))
            announced = time.monotonic()
            aws.interrupt(seconds=25)
            await until(lambda: noticed(supervisor, "notices"))
            print(f"from the announcement to the supervisor: {time.monotonic() - announced:.3f} s")
            await until(lambda: supervisor.job.phase is Phase.GATHERING)
            aws.forget()  # the replacement is another machine

        result = await run_job(
            tmp_path,
            nodes="1",
            workers_per_node=2,
            staging=staging,
            scenario=scenario,
            notices=f"aws@{aws.url}",
        )
    assert result.finish.exit_code == 0, result.output()
    (blind,) = result.kinds("watcher blind")
    assert "aws" in blind.reason
    assert "401" in blind.reason
    assert len(result.kinds("watcher sees again")) == 1
    assert any("a hint" in record.reason for record in result.kinds("notice received"))
    assert committed_in_time(result)
    assert final_digests(result.store) == reference
    check_store(result.store)


@pytest.mark.extended
async def test_azure_is_told_to_go_on_once_the_node_is_given_back(
    tmp_path: Path, staging: str, reference: dict[str, str]
) -> None:
    """The cloud is found by its answers; nothing is acknowledged before the commit, and never a neighbour's event."""
    committed: list[int] = []
    async with SimulatedAzure() as azure:

        async def scenario(supervisor: Supervisor) -> None:
            await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 3)
            (node,) = supervisor.status()["nodes"]
            async with aiohttp.ClientSession() as session:
                headers = {"Authorization": f"Bearer {supervisor.server.token}"}
                async with session.post(f"{node['url']}/notices", json={"kind": "hint"}, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
            await until(lambda: noticed(supervisor, "hints"))
            azure.announce("neighbour", machines=("vmss_1",), seconds=5)
            azure.announce("mine", seconds=25)
            await until(lambda: noticed(supervisor, "notices"))
            step = supervisor.job.highest_step
            await until(lambda: bool(azure.acknowledged))
            assert supervisor.job.newest_committed is not None
            committed.append(supervisor.job.newest_committed.step - step)
            azure.withdraw("mine")

        result = await run_job(
            tmp_path,
            nodes="1",
            workers_per_node=2,
            staging=staging,
            scenario=scenario,
            notices=f"auto@{azure.url}",
        )
    assert result.finish.exit_code == 0, result.output()
    assert azure.acknowledged == ["mine"]
    assert committed[0] >= 0, "it was acknowledged before anything was committed for it"
    assert committed_in_time(result)
    assert final_digests(result.store) == reference
    check_store(result.store)

"""Ranks that stand still, in real jobs: found, named, and started again; what only looks like that is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from orchestrator.core.job import Phase
from orchestrator.supervisor.loop import Supervisor
from tests.processes.harness import JobResult, check_store, final_digests, run_job, until

HANG_SECONDS = 2.0


def hung(result: JobResult) -> list[str]:
    """The reasons of what was ended as a hang."""
    return [record.reason for record in result.kinds("gang broken") if record.reason.startswith("hang: ")]


async def reached(supervisor: Supervisor, step: int) -> None:
    """All ranks are at this step."""
    await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= step)


async def test_f96_a_stopped_rank_is_named_and_the_job_goes_on(
    tmp_path: Path, staging: str, reference: dict[str, str]
) -> None:
    """F95, F96, F97: SIGSTOP to one rank; the others wait in a collective for ever."""

    async def scenario(supervisor: Supervisor) -> None:
        await reached(supervisor, 25)
        os.kill(supervisor.job.ranks[1].pid, signal.SIGSTOP)

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario, hang_seconds=HANG_SECONDS)
    assert result.finish.exit_code == 0, result.output()
    (judged,) = result.kinds("hang judged")
    assert (judged.rank, judged.node) == (1, "node-1")
    assert "rank 1 on node-1 is stopped (state T)" in judged.reason
    assert len(hung(result)) == 1
    waits = ("_engine_run_backward", "torch/nn/parallel/distributed.py")  # for gradients, or for buffers before them
    assert any(place in result.output() for place in waits), "the stack of the rank that waits is in its output"
    assert final_digests(result.store) == reference
    check_store(result.store)


async def test_a_rank_that_waits_for_nothing_is_named_by_its_stack(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are at one step, and nobody is stopped: one of them is not where the others wait, and does nothing."""
    monkeypatch.setenv("HANG", "1 25")
    result = await run_job(tmp_path, nodes="2", staging=staging, hang_seconds=1.0)
    assert result.finish.exit_code == 0, result.output()
    judged = result.kinds("hang judged")[0]
    assert (judged.rank, judged.facts["sign"]) == (1, "idle")
    assert "in stand" in judged.reason, "where it stands"
    assert len(hung(result)) == 1
    assert final_digests(result.store) == reference


@pytest.mark.extended
async def test_what_is_no_hang(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow first step, an announced pause, evaluations, a supervisor and an agent that stand still themselves."""
    monkeypatch.setenv("FIRST_STEP_SECONDS", "4")
    monkeypatch.setenv("PAUSE", "5 6")
    monkeypatch.setenv("EVALUATE", "10 4")

    async def scenario(supervisor: Supervisor) -> None:
        await reached(supervisor, 12)
        time.sleep(6.0)  # the supervisor lives in this loop: it is to stand still
        await until(lambda: supervisor.job.highest_step >= 25)
        agents = {node["node"]: node["agent_pid"] for node in supervisor.status()["nodes"]}
        os.kill(agents["node-1"], signal.SIGSTOP)
        await asyncio.sleep(5.0)
        os.kill(agents["node-1"], signal.SIGCONT)

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario, hang_seconds=HANG_SECONDS)
    assert result.finish.exit_code == 0, result.output()
    assert not result.kinds("gang broken")
    assert final_digests(result.store) == reference

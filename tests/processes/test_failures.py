"""Workers, agents and the supervisor killed at named points: the job ends as if nothing had happened.

Each case runs a real two-node job and compares the last checkpoint with an uninterrupted run's, tensor by tensor.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import orchestrator
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.retention import Keep
from orchestrator.checkpoint.sweeping import Sweeper
from orchestrator.core.job import Phase
from orchestrator.core.messages import CheckpointId, Request, Requested
from orchestrator.storage.opening import open_store
from orchestrator.supervisor.loop import Supervisor
from orchestrator.testing import faults
from tests.commands import RUN
from tests.processes.harness import TRAINING, check_store, final_digests, run_job, until

PACKAGE = Path(orchestrator.__file__).parent
AGENT_POINTS = (
    "after-base",
    "before-shard-upload rank=1 step=20",
    "after-shard-upload rank=1 step=20",
    "after-receipt rank=0 step=20",
    "before-index step=20",
    "after-index step=20",
)
SWEEP_POINTS = ("after-retired step=10", "after-delete step=10")
WORKER_POINTS = ("before-stage rank=1 step=20", "while-staging rank=1 step=20", "after-stage rank=1 step=20")


def test_processes_are_killed_at_every_named_point() -> None:
    """A point that is added to the code is one to be killed at."""
    sources = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "testing"]
    in_code = {point for path in sources for point in re.findall(r'reached\("([a-z-]+)"', path.read_text())}
    assert (
        in_code == set(faults.POINTS) == {point.split()[0] for point in (*WORKER_POINTS, *AGENT_POINTS, *SWEEP_POINTS)}
    )


@pytest.mark.parametrize("point", WORKER_POINTS)
async def test_worker_killed_at(
    point: str, tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F24, F29: a rank dies while saving; the others do not wait for it, and nothing half saved is used."""
    marker = tmp_path / "fault"
    monkeypatch.setenv("FAULT", point)
    monkeypatch.setenv("FAULT_MARKER", str(marker))
    result = await run_job(tmp_path, nodes="2", staging=staging)
    assert marker.exists(), "the fault never happened"
    assert result.finish.exit_code == 0, result.output()
    assert final_digests(result.store) == reference
    check_store(result.store)
    torn = CheckpointId(generation=1, step=20)
    assert not any(entry.id == torn and entry.standing is Standing.COMMITTED for entry in survey(result.store).entries)


@pytest.mark.parametrize("point", AGENT_POINTS)
async def test_agent_killed_at(point: str, tmp_path: Path, staging: str, reference: dict[str, str]) -> None:
    """F19, F20, F22, F30: a node dies at any point of saving; only whole checkpoints are ever used."""
    marker = tmp_path / "fault"
    agent = (sys.executable, "-m", "orchestrator.testing.faulty_agent", str(marker), point)
    result = await run_job(tmp_path, nodes="2", staging=staging, agent_command=agent)
    assert marker.exists(), "the fault never happened"
    assert result.finish.exit_code == 0, result.output()
    assert final_digests(result.store) == reference
    check_store(result.store)


@pytest.mark.extended
@pytest.mark.parametrize("point", SWEEP_POINTS)
async def test_agent_killed_while_it_deletes(
    point: str, tmp_path: Path, staging: str, reference: dict[str, str]
) -> None:
    """What is half deleted is never taken for damaged, and another node goes on with it."""
    marker = tmp_path / "fault"
    agent = (sys.executable, "-m", "orchestrator.testing.faulty_agent", str(marker), point)
    result = await run_job(tmp_path, nodes="2", staging=staging, agent_command=agent, keep_last=1)
    assert marker.exists(), "the fault never happened"
    assert result.finish.exit_code == 0, result.output()
    assert final_digests(result.store) == reference
    check_store(result.store)
    catalog = survey(result.store)
    assert next(entry for entry in catalog.entries if entry.id.step == 10).standing is Standing.RETIRED
    # Where the fault came with the job's last sweep, nobody has gone on with it yet.
    Sweeper(result.store, time.monotonic).sweep(max(catalog.generations), Keep(last=1), (), 3600)
    left = {entry.id.step for entry in survey(result.store).entries if entry.size_bytes}
    assert 10 not in left
    assert 40 in left
    assert len(left) <= 2, "what the last generation started from stays beside the newest one, and no more"
    check_store(result.store)


@pytest.mark.extended
async def test_a_shard_that_both_nodes_find_damaged(tmp_path: Path, staging: str, reference: dict[str, str]) -> None:
    """F20, F119: the older checkpoint is taken, and the damaged one set aside once a second node has read it, too."""

    async def drain(supervisor: Supervisor) -> None:
        await until(lambda: (supervisor.job.newest_committed or CheckpointId(generation=0, step=0)).step >= 20)
        supervisor.submit(Requested(request=Request.DRAIN, by="test"))

    first = await run_job(tmp_path, scenario=drain, nodes="2", staging=staging)
    newest = survey(first.store).newest()
    assert newest is not None
    shard = tmp_path / "store" / "small" / fmt.shard_key(newest.id, 1, 2)
    data = bytearray(shard.read_bytes())
    data[-10] ^= 0xFF
    shard.write_bytes(data)
    second = await run_job(tmp_path, nodes="2", staging=staging)
    assert second.finish.exit_code == 0, second.output()
    assert final_digests(second.store) == reference
    (found,) = second.kinds("checkpoint quarantined")
    assert str(newest.id) in found.reason
    assert shard.name in found.reason
    standings = {entry.id: entry.standing for entry in survey(second.store).entries}
    assert standings[newest.id] is Standing.QUARANTINED
    assert bytes(data) == shard.read_bytes()


@pytest.mark.extended
async def test_worker_killed_between_saves(tmp_path: Path, staging: str, reference: dict[str, str]) -> None:
    """SIGKILL without notice: back to the newest committed step, same end."""

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 25)
        os.kill(supervisor.job.ranks[1].pid, signal.SIGKILL)

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario)
    assert result.finish.exit_code == 0
    assert result.kinds("restarted")
    assert final_digests(result.store) == reference


@pytest.mark.parametrize("step", [3, 22])
async def test_supervisor_killed(step: int, tmp_path: Path, staging: str, reference: dict[str, str]) -> None:
    """SIGKILL to the supervisor, before and after the first checkpoint: the same command goes on to the same end."""
    command = [
        *RUN,
        *("--job", "small", "--store", str(tmp_path / "store")),
        *("--nodes", "2", "--workers-per-node", "1", "--save-every", "10", "--staging", staging),
        *("--", sys.executable, str(TRAINING)),
    ]
    log = tmp_path / "log"
    first = subprocess.Popen(command, env={**os.environ, "LOG": str(log), "STEP_SECONDS": "0.1"})
    try:
        await until(lambda: _lines(log / "rank-0.jsonl") >= step)
    finally:
        first.kill()
        first.wait()
    second = await asyncio.to_thread(subprocess.run, command, env={**os.environ, "LOG": str(log)}, check=False)
    assert second.returncode == 0
    store = open_store(str(tmp_path / "store" / "small"))
    assert final_digests(store) == reference
    check_store(store)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.extended
async def test_sigterm_to_one_worker_of_four(tmp_path: Path, staging: str) -> None:
    """F1, F2, F4: one rank alone is signalled; all four leave at one agreed step and the job goes on."""

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 13)
        os.kill(supervisor.job.ranks[2].pid, signal.SIGTERM)

    result = await run_job(tmp_path, nodes="2", workers_per_node=2, staging=staging, scenario=scenario)
    assert result.finish.exit_code == 0, result.output()
    agreed = [record for record in result.kinds("step agreed") if record.reason.startswith("leave")]
    assert len(agreed) == 1
    left = next(record for record in result.kinds("committed") if record.facts["mode"] == "leave")
    assert left.step == agreed[0].step
    assert result.kinds("generation opened")[1].step == left.step, "the new generation starts exactly there"
    check_store(result.store)


@pytest.mark.extended
async def test_notice_during_the_first_long_step(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5: a notice while the first step compiles is not missed: nothing is lost yet, so everybody leaves at once."""
    monkeypatch.setenv("FIRST_STEP_SECONDS", "3")

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING)
        assert supervisor.job.highest_step == 0
        supervisor.rehearse_notice("node-1", 20)
        await until(lambda: supervisor.job.newest_committed is not None)

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario)
    assert result.finish.exit_code == 0, result.output()
    (course,) = result.kinds("course chosen")
    assert course.facts["course"] == "stand"
    assert result.kinds("generation opened")[1].step == 0
    assert final_digests(result.store) == reference


@pytest.mark.extended
async def test_world_size_that_does_not_share_the_batch(tmp_path: Path, staging: str) -> None:
    """F65: three nodes cannot share a global batch of 16: the job is formed anew with two, the third stays spare."""
    result = await run_job(tmp_path, nodes="1:3", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    assert [record.facts["world_size"] for record in result.kinds("generation opened")] == [3, 2]
    assert not result.kinds("failure judged")


async def test_resize(tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resize saves, forms anew at the other number of nodes, and goes on exactly at that step; both directions."""
    monkeypatch.setenv("STEPS", "4000")  # growing is worth a restart only while much is left to do
    monkeypatch.setenv("STEP_SECONDS", "0.05")

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 4)
        supervisor.submit(Requested(request=Request.RESIZE, by="a test", nodes=1))
        await until(lambda: _runs_with(supervisor, 1))
        supervisor.submit(Requested(request=Request.RESIZE, by="a test", nodes=2))
        await until(lambda: _runs_with(supervisor, 2))
        supervisor.drain("a test")

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario, save_every=5)
    assert result.finish.exit_code == 75, result.output()
    opened = result.kinds("generation opened")
    assert [record.facts["world_size"] for record in opened] == [2, 1, 2]
    left = [record.step for record in result.kinds("committed") if record.facts["mode"] == "leave"]
    assert [record.step for record in opened[1:]] == left[:2]
    check_store(result.store)


async def test_running_statistics_are_saved_by_rank_0_though_its_node_goes(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP broadcasts rank 0's before each forward pass: a save without it would go on with another rank's."""
    monkeypatch.setenv("STEP_SECONDS", "0.05")

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 4)
        assert supervisor.job.gang is not None
        supervisor.rehearse_notice(supervisor.job.gang.nodes[0], 30)

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario, save_every=0)
    assert result.finish.exit_code == 0, result.output()
    left = next(record for record in result.kinds("committed") if record.facts["mode"] == "leave")
    index = read_committed(result.store, CheckpointId(generation=1, step=left.step or 0))
    assert [shard.rank for shard in index.shards] == [0, 1]
    assert final_digests(result.store) == reference


async def test_rollback_of_a_running_job(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation ends without a save, the next one loads the older checkpoint; the end is the same to the bit.

    A step that cannot be gone back to costs nothing.
    """
    monkeypatch.setenv("STEP_SECONDS", "0.05")

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.newest_committed == CheckpointId(generation=1, step=10))
        supervisor.submit(Requested(request=Request.ROLLBACK, by="a test", step=7))
        await until(lambda: supervisor.job.newest_committed == CheckpointId(generation=1, step=20))
        supervisor.submit(Requested(request=Request.ROLLBACK, by="a test", step=10))

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario)
    assert result.finish.exit_code == 0, result.output()
    assert [record.step for record in result.kinds("generation opened")] == [0, 10]
    assert [record.step for record in result.kinds("rolled back")] == [10]
    (refused,) = result.kinds("not rolled back")
    assert refused.reason.startswith("step 7 cannot be gone back to; these steps can: ")
    assert refused.reason.endswith("10; the job trains on")
    assert not result.kinds("failure judged")
    standings = {entry.id: entry.standing for entry in survey(result.store).entries}
    assert standings[CheckpointId(generation=1, step=20)] is Standing.ROLLED_BACK
    assert final_digests(result.store) == reference
    check_store(result.store)


def _runs_with(supervisor: Supervisor, world_size: int) -> bool:
    job = supervisor.job
    return job.phase is Phase.RUNNING and job.gang is not None and job.gang.world_size == world_size


async def test_the_script_asks_for_a_save(tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: without any source of notices and without periodic saves, `run.save()` and the last step are saved."""
    monkeypatch.setenv("SAVE_AT", "7")
    monkeypatch.setenv("STEPS", "60")
    monkeypatch.setenv("STEP_SECONDS", "0.05")
    result = await run_job(tmp_path, nodes="1", staging=staging, save_every=0)
    assert result.finish.exit_code == 0, result.output()
    first, last = result.kinds("committed")
    assert 7 < (first.step or 0) < 60
    assert last.step == 60


async def test_drain_and_resume(tmp_path: Path, staging: str, reference: dict[str, str]) -> None:
    """Drain saves first, then ends with 75; the same run resumes and ends the same (F79: also the very first start)."""

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 14)
        supervisor.drain("a test")

    drained = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario)
    assert drained.finish.exit_code == 75
    saved = survey(drained.store).newest()  # a periodic save that was decided for a later step is abandoned
    assert saved is not None
    assert saved.id.step >= 14
    resumed = await run_job(tmp_path, nodes="2", staging=staging)
    assert resumed.finish.exit_code == 0
    assert final_digests(resumed.store) == reference
    again = await run_job(tmp_path, nodes="2", staging=staging)
    assert again.finish.exit_code == 0
    assert "is done" in again.finish.reason

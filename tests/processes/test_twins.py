"""Twins, a store that goes away, a supervisor that stands still, children that nobody ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.job import Phase
from orchestrator.storage.opening import open_store
from orchestrator.supervisor.loop import Supervisor
from tests.commands import RUN
from tests.processes.harness import TRAINING, check_store, run_job, until


def command(tmp_path: Path, staging: str, nodes: str = "1") -> list[str]:
    """The command line of the job that the harness runs."""
    return [
        *RUN,
        *("--job", "small", "--store", str(tmp_path / "store")),
        *("--nodes", nodes, "--save-every", "10", "--staging", staging, "--", sys.executable, str(TRAINING)),
    ]


async def test_a_fenced_twin_does_no_harm(tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F93, F94: another owner starts the same job on the same machine: it ends with 3, no harm done."""
    monkeypatch.setenv("STEP_SECONDS", "0.5")
    status: list[int] = []

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 3)
        twin = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "twin")}
        call = subprocess.run
        status.append(
            (await asyncio.to_thread(call, command(tmp_path, staging), env=twin, timeout=60, check=False)).returncode
        )

    result = await run_job(tmp_path, nodes="1", staging=staging, scenario=scenario)
    assert status == [3]
    assert result.finish.exit_code == 0
    assert not result.kinds("save failed")
    assert not result.kinds("node lost")
    check_store(result.store)


async def test_a_store_that_went_away_is_no_fresh_start(tmp_path: Path, staging: str) -> None:
    """The folder is renamed and a node is lost: the job waits for its store, it does not begin anew."""
    store, away = tmp_path / "store" / "small", tmp_path / "away"

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.newest_committed is not None)
        store.rename(away)
        os.kill(supervisor.scheduler.nodes()[0].pid or 0, signal.SIGKILL)
        await until(lambda: supervisor.job.phase is Phase.GATHERING and supervisor.job.retry_at_seconds > 0)
        if store.exists():
            store.rename(tmp_path / "made-meanwhile")
        away.rename(store)

    result = await run_job(tmp_path, nodes="1", staging=staging, scenario=scenario)
    assert result.finish.exit_code == 0, result.output()
    assert any("our own claim is gone" in record.reason for record in result.kinds("store failed"))
    assert all((record.step or 0) >= 10 for record in result.kinds("generation opened")[1:])
    check_store(result.store)


@pytest.mark.extended
async def test_a_supervisor_that_stands_still_for_a_while(tmp_path: Path, staging: str) -> None:
    """Suspended for longer than any heartbeat: training goes on meanwhile, and nothing is restarted for it."""
    log = tmp_path / "log"
    environment = {**os.environ, "STEPS": "400", "STEP_SECONDS": "0.1", "LOG": str(log)}
    run = subprocess.Popen(command(tmp_path, staging), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        await until(lambda: _lines(log) >= 12)
        run.send_signal(signal.SIGSTOP)
        before = _lines(log)
        await asyncio.sleep(22)  # the time itself is what is tested: both ends' heartbeats give up within 15 s
        assert _lines(log) > before + 50, "training went on"
        run.send_signal(signal.SIGCONT)
        reached = _lines(log)
        await until(lambda: _lines(log) > reached + 20)
        run.send_signal(signal.SIGTERM)
        _, events = await asyncio.to_thread(run.communicate, timeout=60)
    finally:
        run.kill()
    assert run.returncode == 75
    assert "restarted" not in events
    assert "node lost" not in events
    check_store(open_store(str(tmp_path / "store" / "small")))


async def test_children_of_a_killed_worker_do_not_survive(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker has started is ended with it: an old trainer must not hold the GPU of the next generation."""
    mark = f"{random.randrange(10_000, 1_000_000)}.5"
    monkeypatch.setenv("CHILD", mark)

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 3)
        assert len(_sleepers(mark)) == 2
        os.kill(supervisor.job.ranks[0].pid, signal.SIGKILL)
        await until(lambda: len(supervisor.job.ranks) == 2 and supervisor.job.phase is Phase.STARTING)
        supervisor.rehearse_notice("node-1", 0)

    result = await run_job(tmp_path, nodes="2", staging=staging, scenario=scenario)
    assert result.finish.exit_code == 0, result.output()
    assert _sleepers(mark) == []


def _lines(log: Path) -> int:
    path = log / "rank-0.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _sleepers(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{mark}\0".encode():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_fork_after_attach_gives_signals_back(tmp_path: Path) -> None:
    """A child that the script forks is ended by SIGTERM as always (multiprocessing's terminate relies on it)."""
    script = """
import os, signal, sys, time
from orchestrator.preemption.process import record_signals
record_signals(lambda number: None)
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == str(-signal.SIGTERM)

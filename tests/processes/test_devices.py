"""Devices that fail, in real jobs: a command named nvidia-smi says so, there are none here."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from orchestrator.checkpoint.reader import read_committed
from orchestrator.core.job import Phase
from orchestrator.core.messages import CheckpointId
from orchestrator.supervisor.loop import Supervisor
from tests.processes.harness import check_store, final_digests, run_job, until

FIRST = CheckpointId(generation=0, step=0)
AGENT = (sys.executable, "-m", "tests.processes.watching_agent")
NVIDIA_SMI = """#!/bin/sh
cd {folder}
rows=No
mkdir one-bad 2>/dev/null && echo $PPID > one-bad/agent
[ "$(cat one-bad/agent 2>/dev/null)" = $PPID ] && rows=Yes
case "$*" in
  *remapped*) echo "GPU-aa, No, $rows" ;;
  *recovery*) echo "GPU-aa, None" ;;
  *) [ -e gone-$PPID ] || echo "GPU-aa, 00000000:3B:00.0, 35, 0, Not Active" ;;
esac
"""


def play_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *, one_is_bad: bool) -> Path:
    """Put it on the path; a file gone-PID in the folder takes the device away that the agent with this pid sees."""
    command = folder / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(NVIDIA_SMI.format(folder=folder))
    command.chmod(0o755)
    if not one_is_bad:
        (folder / "one-bad").mkdir()
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    return folder


async def test_a_node_whose_device_is_gone_is_not_in_the_next_generation(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains on, and is left out of a save; then a worker of another node dies."""
    monkeypatch.setenv("STEP_SECONDS", "0.1")
    folder = play_nvidia_smi(tmp_path, monkeypatch, one_is_bad=False)
    without: list[CheckpointId | None] = []

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= 2)
        agents = {node["node"]: node["agent_pid"] for node in supervisor.status()["nodes"]}
        (folder / f"gone-{agents['node-1']}").touch()
        await until(lambda: bool(supervisor.job.condemned))
        seen_at = supervisor.job.highest_step
        await until(lambda: (supervisor.job.newest_committed or FIRST).step > seen_at + 10)  # agreed on since
        without.append(supervisor.job.newest_committed)
        os.kill(supervisor.job.ranks[0].pid, signal.SIGKILL)

    result = await run_job(
        tmp_path, nodes="1:2", staging=staging, scenario=scenario, agent_command=AGENT, reform_seconds=60.0
    )
    assert result.finish.exit_code == 0, result.output()
    (told,) = result.kinds("host trouble")
    assert (told.node, told.facts) == ("node-1", {"condemns": True})
    assert "device GPU-aa is not there any more" in told.reason
    (released,) = result.kinds("node released")
    assert (released.node, released.reason) == ("node-1", "device GPU-aa is not there any more")
    members = [record.facts["nodes"] for record in result.kinds("generation opened")]
    assert members == ["node-0 node-1", "node-0 node-2"]
    assert without[0] is not None
    index = read_committed(result.store, without[0])
    shared = [name for name in index.tensors if not name.startswith("rank.")]
    assert {chunk.rank for name in shared for chunk in index.chunks(name)} == {0}
    assert final_digests(result.store) == reference
    check_store(result.store)


async def test_a_node_with_a_bad_device_does_not_join(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_nvidia_smi(tmp_path, monkeypatch, one_is_bad=True)
    result = await run_job(tmp_path, nodes="1", staging=staging, agent_command=AGENT)
    assert result.finish.exit_code == 0, result.output()
    (unfit,) = result.kinds("node unfit")
    assert unfit.node == "node-0"
    assert "it has to be exchanged" in unfit.reason
    assert [record.facts["nodes"] for record in result.kinds("generation opened")] == ["node-1"]

"""`orchestrator drill kill` and `stall` on real processes: only those that the job's supervisor started are touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import drill
from orchestrator.errors import SupervisorError
from orchestrator.supervisor.state_folder import SupervisorAddress
from tests.cli.conftest import Command

Child = subprocess.Popen[bytes]


@pytest.fixture
def child() -> Iterator[Child]:
    """A process of ours, which waits."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class FakeClient:
    """A supervisor, this process, whose only worker is the child."""

    def __init__(self, status: dict[str, Any], pid: int) -> None:
        self._status = status
        self.address = SupervisorAddress(job="small", url="http://127.0.0.1:1", token="t", pid=pid)

    def status(self) -> dict[str, Any]:
        """Made up."""
        return self._status


@pytest.fixture
def job(child: Child, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The status of a job with the child as rank 1."""
    ranks = [{"rank": 0, "pid": 0}, {"rank": 1, "pid": child.pid}]
    nodes = [{"node": "node-0", "agent_pid": child.pid, "going": False}, {"node": "node-1", "agent_pid": None}]
    status = {"job": "small", "phase": "running", "ranks": ranks, "nodes": nodes}
    monkeypatch.setattr(drill, "connect", lambda name: FakeClient(status, os.getpid()))
    return status


def state(child: Child) -> str:
    """The kernel's letter for what a process does: T is stopped."""
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("words", [[], ["--rank", "1"], ["--node", "node-0"]])
def test_kill(command: Command, child: Child, job: dict[str, Any], words: list[str]) -> None:
    result = command("drill", "kill", "small", *words)
    assert result.exit_code == 0
    assert child.wait(10) == -signal.SIGKILL
    assert f"(process {child.pid})" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rank", "0"], (1, "error: rank 0 has not attached yet; try again once the job is running\n")),
        (["--rank", "2"], (2, "error: --rank: there is no rank 2; there are 0 to 1\n")),
        (["--node", "node-1"], (1, "error: node-1 has no process on this machine\n")),
        (["--node", "node-0", "--rank", "1"], (2, "error: --rank and --node: give one of them\n")),
    ],
)
def test_kill_nobody(
    command: Command, child: Child, job: dict[str, Any], words: list[str], says: tuple[int, str]
) -> None:
    result = command("drill", "kill", "small", *words)
    assert (result.exit_code, result.stderr) == says
    assert child.poll() is None


def test_a_process_of_another_job_is_not_touched(child: Child) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
        pytest.raises(SupervisorError, match="was not started by this job's supervisor"),
        drill.own_process("rank 1", child.pid, other.pid),
    ):
        pytest.fail("it must not get here")
    assert child.poll() is None


def test_a_supervisor_is_not_its_own_descendant() -> None:
    with pytest.raises(SupervisorError, match="was not started by"), drill.own_process("x", os.getpid(), os.getpid()):
        pytest.fail("it must not get here")


def test_a_process_of_another_user(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(SupervisorError, match="another user"), drill.own_process("x", child.pid, os.getpid()):
        pytest.fail("it must not get here")


def test_a_process_that_is_gone(child: Child) -> None:
    child.kill()
    child.wait()
    with pytest.raises(SupervisorError, match="is gone already"), drill.own_process("x", child.pid, os.getpid()):
        pytest.fail("it must not get here")


def test_a_grandchild(tmp_path: Path) -> None:
    """A worker is a child of an agent, which is a child of the supervisor."""
    worker_program = "import os; print(os.getpid(), flush=True); input()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker_program!r}])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        worker = int(agent.stdout.readline())
        with drill.own_process("rank 0", worker, os.getpid()) as handle:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        agent.wait(10)


@pytest.mark.parametrize("interruption", [None, KeyboardInterrupt, SystemExit])
def test_a_stalled_worker_always_goes_on(
    command: Command,
    child: Child,
    job: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    interruption: type[BaseException] | None,
) -> None:
    seen: list[str] = []

    def sleep(seconds: float) -> None:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        seen.append(f"{state(child)} for {seconds:g} s")
        if interruption is not None:
            raise interruption

    monkeypatch.setattr(time, "sleep", sleep)
    before = signal.getsignal(signal.SIGTERM)
    command("drill", "stall", "small", "--seconds", "7")
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert seen == ["T for 7 s"]
    assert state(child) != "T"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stall_is_ended_by_sigterm(
    command: Command, child: Child, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", sleep)
    assert command("drill", "stall", "small").exit_code == 130
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert state(child) != "T"

"""`orchestrator drill` on real processes: what kill and stall touch, and what a simulated cloud says to whom."""

from __future__ import annotations

import os
import signal
import socket
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


# -------------------------------------------------------------------------------------- a metadata service

ASKS_UNTIL_THERE_IS_AN_EVENT = """
import json, sys, urllib.error, urllib.request
url = sys.argv[1] + "/metadata/scheduledevents?api-version=2020-07-01"
statuses, events = set(), []
while not events:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Metadata": "true"})) as answer:
            events = json.load(answer)["Events"]
    except urllib.error.HTTPError as error:
        statuses.add(error.code)
body = json.dumps({"StartRequests": [{"EventId": events[0]["EventId"]}]}).encode()
urllib.request.urlopen(urllib.request.Request(url, body, headers={"Metadata": "true"})).close()
print(statuses, len(events))
"""


def test_a_clouds_notice_to_the_process_that_asks() -> None:
    """A service that answers 401, then a notice, which is acknowledged: all as a person sees it."""
    words = ("drill", "metadata", "azure", "--after", "0.5", "--deadline", "40", "--fault", "unauthorized")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *words], stdout=pipe, stderr=pipe, text=True
    ) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        said = serving.stdout.readline()
        url = said.removeprefix("--notices azure@").strip()
        with subprocess.Popen(
            [sys.executable, "-c", ASKS_UNTIL_THERE_IS_AN_EVENT, url], stdout=pipe, text=True
        ) as asking:
            assert asking.stdout is not None
            assert asking.stdout.read() == "{401} 1\n"
        lines = [serving.stderr.readline() for _ in range(5)]
        serving.send_signal(signal.SIGINT)
        assert serving.wait(10) == 0
        assert serving.stderr.read() == "ended\n"
    who = f"process {asking.pid}"
    assert said.startswith("--notices azure@http://127.0.0.1:")
    assert lines[1:4] == [
        f"{who} has asked first; the notice comes in 0.5 s\n",
        f"announced to {who}: its machine goes in 40 s\n",
        f"{who} has acknowledged it\n",
    ]
    assert lines[4].startswith(f"{who} has ended, ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["oci"], "CLOUD: the metadata of 'oci' announce nothing; those of aws, gcp, azure"),
        (["gcp", "--deadline", "30"], "--deadline: the metadata of gcp say no time; `run --grace-seconds` is what"),
        (["aws", "--fault", "fire"], "'fire' is not one of 'unauthorized', 'error', 'slow', 'page', 'cut'"),
    ],
)
def test_metadata_that_cannot_be_served(command: Command, words: list[str], problem: str) -> None:
    result = command("drill", "metadata", *words)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_a_port_that_is_taken(command: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = command("drill", "metadata", "aws", "--port", str(port))
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: --port: cannot listen at 127.0.0.1:{port}: Address already in use\n",
    )


def test_all_words_for_faults_have_one() -> None:
    assert set(drill._faults()) == set(drill.FaultName)

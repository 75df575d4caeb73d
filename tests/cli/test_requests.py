"""The verbs that ask a running job for something, against a real supervisor that waits for its nodes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from orchestrator.checkpoint.catalog import read_generations
from orchestrator.checkpoint.generations import Claimant, open_generation
from orchestrator.cli import client as client_module
from orchestrator.cli.client import SupervisorClient
from orchestrator.cli.status import describe as status_table
from orchestrator.cli.terminal import output
from orchestrator.clock import SystemClock
from orchestrator.core.messages import Finish, NodeJoined
from orchestrator.core.states import JobSpec
from orchestrator.errors import SupervisorError
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from orchestrator.supervisor.loop import Supervisor
from orchestrator.supervisor.state_folder import StateFolder, SupervisorAddress, find_supervisor
from orchestrator.telemetry import EventLog, EventRecord
from tests.checkpoint.shards import checkpoint_id, save
from tests.cli.conftest import Command

TOKEN = "this-is-the-token"
VERBS = (
    ("status",),
    ("status", "--json"),
    ("drain",),
    ("cancel",),
    ("resize", "2"),
    ("drill", "notice"),
    ("drill", "kill"),
    ("drill", "stall"),
)


class NoNodes:
    """A scheduler that never gives a node, but knows one by name."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, float]] = []

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        """Nothing to begin, and nothing was left."""
        return ()

    def request(self, count: int) -> None:
        """Never answered."""

    def release(self, node: str) -> None:
        """Nothing to give back."""

    def lose(self, node: str, after_seconds: float) -> None:
        """Remembered."""
        self.lost.append((node, after_seconds))

    def nodes(self) -> list[NodeInfo]:
        """One node."""
        return [NodeInfo(node="node-7", pid=os.getpid())]

    async def stop(self) -> None:
        """Nothing to wait for."""


class RunningSupervisor:
    """A supervisor in a thread: it waits for two nodes, of which one has joined."""

    def __init__(self, job_url: str = "/somewhere/small") -> None:
        self._job_url = job_url
        self.records: list[EventRecord] = []
        self.scheduler = NoNodes()
        self.finish: Finish | None = None
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.supervisor: Supervisor | None = None

    async def _run(self) -> None:
        spec = JobSpec(name="small", nodes_min=2, nodes_max=2, workers_per_node=2, save_every_steps=10)
        self.supervisor = Supervisor(spec, self.scheduler, SystemClock(), EventLog(self.records.append), TOKEN)
        self.loop = asyncio.get_running_loop()
        state = StateFolder("small", self._job_url)
        state.acquire()

        def publish(url: str) -> None:
            state.publish(url, TOKEN)
            assert self.supervisor is not None
            self.supervisor.submit(NodeJoined(node="node-7", workers=2))
            self.loop.call_later(0.01, self._listening.set) if self.loop else None

        self.supervisor.on_listening = publish
        self.finish = await self.supervisor.run()
        state.release()

    def __enter__(self) -> RunningSupervisor:
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive() and self.supervisor is not None and self.loop is not None:
            self.loop.call_soon_threadsafe(self.supervisor.drain, "the test's end")
        self.join()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(10)
        assert not self._thread.is_alive()

    def reasons(self, kind: str) -> list[str]:
        """Reasons of a kind of events."""
        return [record.reason for record in self.records if record.kind == kind]


@pytest.fixture
def running() -> Iterator[RunningSupervisor]:
    """A running supervisor."""
    with RunningSupervisor() as found:
        yield found


# ------------------------------------------------------------------------------------------------ it answers


def test_status(command: Command, running: RunningSupervisor) -> None:
    now = json.loads(command("status", "small", "--json").stdout)
    assert (now["job"], now["phase"], now["nodes"][0]["node"]) == ("small", "gathering", "node-7")
    text = command("status", "small").stdout
    assert "gathering" in text
    assert "node-7" in text
    assert "none yet" in text


def test_drain(command: Command, running: RunningSupervisor) -> None:
    result = command("drain", "small")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "accepted" in result.stderr
    running.join()
    assert running.finish is not None
    assert running.finish.exit_code == 75


def test_cancel(command: Command, running: RunningSupervisor) -> None:
    assert command("cancel", "small").exit_code == 0
    running.join()
    assert running.finish is not None
    assert running.finish.exit_code == 1


def test_resize(command: Command, running: RunningSupervisor) -> None:
    assert command("resize", "small", "5").exit_code == 0
    command("status", "small")
    assert running.reasons("requested")[0].startswith("resize by ")
    assert running.reasons("requested")[0].endswith(", 5 nodes")


def test_drill_notice(command: Command, running: RunningSupervisor) -> None:
    result = command("drill", "notice", "small", "--deadline", "12.5")
    assert result.exit_code == 0
    assert result.stderr == "node-7 of the job 'small' goes once its state is saved, in 12.5 s at the latest\n"
    assert running.scheduler.lost == [("node-7", 12.5)]
    command("status", "small")
    assert running.reasons("notice received") == ["drill: preempt, 12.5 s left"]


def test_drill_names_nodes_that_are_there(command: Command, running: RunningSupervisor) -> None:
    for verb in ("notice", "kill"):
        result = command("drill", verb, "small", "--node", "node-1")
        assert result.exit_code == 2
        assert result.stderr == "error: --node: 'node-1' is none of this job's nodes: node-7\n"


def test_drill_without_workers(command: Command, running: RunningSupervisor) -> None:
    for verb in ("kill", "stall"):
        result = command("drill", verb, "small")
        assert result.exit_code == 1
        assert "has no workers at present: it is gathering" in result.stderr


def test_the_job_is_watched_to_its_end(
    command: Command, running: RunningSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is drained while it is watched, and its process counts as gone then."""
    monkeypatch.setattr(client_module, "is_running", lambda address: False)
    monkeypatch.setattr("orchestrator.cli.status.WATCH_SECONDS", 0.01)
    assert running.supervisor is not None
    assert running.loop is not None
    running.loop.call_soon_threadsafe(running.loop.call_later, 0.1, running.supervisor.drain, "another terminal")
    result = command("status", "small", "--watch", "--json")
    assert result.exit_code == 0
    assert all(json.loads(line)["job"] == "small" for line in result.stdout.splitlines())
    assert result.stderr == "the job 'small' has ended\n"


@pytest.mark.parametrize("words", VERBS)
def test_the_token_is_never_printed(command: Command, running: RunningSupervisor, words: tuple[str, ...]) -> None:
    verb, *rest = words
    result = command(verb, *rest[:1], "small") if verb == "drill" else command(verb, "small", *rest)
    assert TOKEN not in result.output


def test_the_token_is_in_no_traceback() -> None:
    assert TOKEN not in repr(address())


# ------------------------------------------------------------------------------------------- nobody answers


@pytest.mark.parametrize("words", VERBS)
def test_no_such_job(command: Command, words: tuple[str, ...]) -> None:
    verb, *rest = words
    result = command(verb, *rest[:1], "nosuch") if verb == "drill" else command(verb, "nosuch", *rest)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "error: no supervisor of a job 'nosuch' runs on this machine; `orchestrator run` starts one\n"
    )


def test_other_jobs_are_named(command: Command, running: RunningSupervisor) -> None:
    assert "running are: small" in command("drain", "nosuch").stderr


class Answers(BaseHTTPRequestHandler):
    """A server that gives one answer to everything."""

    status, body = 200, b"{}"

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b'{"error": "the token is missing or wrong"}', "refused the token: it was started anew"),
        (500, b'{"error": "out of luck"}', "refused: out of luck"),
        (500, b"[]", "refused: 500"),
        (200, b"<html>", "did not answer with JSON"),
        (200, b"\xff\xfe", "did not answer with JSON"),
    ],
)
def test_bad_answers(status: int, body: bytes, says: str) -> None:
    handler = type("Handler", (Answers,), {"status": status, "body": body})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        asked = SupervisorClient(address(port=server.server_port))
        with pytest.raises(SupervisorError, match=says) as raised:
            asked.status()
        thread.join()
    assert TOKEN not in str(raised.value)


def test_a_supervisor_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, but nobody takes the call."""
    monkeypatch.setattr(client_module, "ANSWER_SECONDS_MAX", 0.05)
    with HTTPServer(("127.0.0.1", 0), Answers) as server, pytest.raises(SupervisorError, match="did not answer within"):
        SupervisorClient(address(port=server.server_port)).status()


def test_a_supervisor_that_is_gone(command: Command) -> None:
    """Its file is still there, and its process, but nobody listens."""
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        port = server.server_port
    StateFolder("small", "/somewhere/small").path.mkdir(parents=True)
    StateFolder("small", "/somewhere/small").publish(f"http://127.0.0.1:{port}", TOKEN)
    result = command("status", "small")
    assert result.exit_code == 1
    assert "cannot be reached; it may have ended just now: try again" in result.stderr
    assert TOKEN not in result.output


def test_the_token_stays_on_this_machine() -> None:
    with pytest.raises(SupervisorError, match="is not on this machine"):
        SupervisorClient(SupervisorAddress(job="small", url="http://192.0.2.1:80", token=TOKEN, pid=1))


def address(*, port: int = 1, pid: int = 0, start_ticks: int | None = None) -> SupervisorAddress:
    """An address on this machine."""
    url = f"http://127.0.0.1:{port}"
    return SupervisorAddress(job="small", url=url, token=TOKEN, pid=pid or os.getpid(), start_ticks=start_ticks)


# --------------------------------------------------------------------------------------- who runs, who waits


def test_files_of_supervisors_that_are_gone_are_passed_over(state_home: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    good = {"job": "small", "url": "http://127.0.0.1:1", "token": TOKEN, "pid": os.getpid()}
    for number, text in enumerate(
        (
            "not JSON",
            "[]",
            "{}",
            json.dumps({**good, "more": 1}),
            json.dumps({**good, "pid": ended.pid}),
            json.dumps({**good, "start_ticks": 1}),  # our pid, but the process before us that had it
        )
    ):
        folder = state_home / "orchestrator" / f"small-{number}"
        folder.mkdir(parents=True)
        (folder / "supervisor.json").write_text(text)
    with pytest.raises(SupervisorError, match="no supervisor"):
        find_supervisor("small")
    (state_home / "orchestrator" / "small-0" / "supervisor.json").write_text(json.dumps(good))
    assert find_supervisor("small").token == TOKEN
    (state_home / "orchestrator" / "small-1" / "supervisor.json").write_text(json.dumps(good))
    with pytest.raises(SupervisorError, match="2 jobs on this machine are called 'small'"):
        find_supervisor("small")


def test_waiting_ends_with_the_process_or_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.001)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        asked = SupervisorClient(address(pid=process.pid))
        with pytest.raises(SupervisorError, match="has not ended within 0"):
            asked.wait_until_gone(timeout_seconds=0.01)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        asked.wait_until_gone(timeout_seconds=5)


# ------------------------------------------------------------------------------------------------- the table


def test_a_table_of_a_job_in_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    now: dict[str, Any] = {
        "job": "small",
        "phase": "running",
        "generation": 3,
        "world_size": 4,
        "step": 50,
        "until": 200,
        "progress": 0.25,
        "eta_seconds": 7300.0,
        "step_seconds": 0.5,
        "seconds_without_step": 75.0,
        "hang": "rank 1 on node-1 is stopped (state T)",
        "loss_trouble": {"reason": "rank 2: the loss is nan at step 45", "ranks": 4},
        "rollback": {"to": 40, "refusal": None},
        "newest_committed": "g00000003-s0000000040",
        "newest_committed_step": 40,
        "commit_age_seconds": 5.0,
        "failures": 1,
        "nodes": [
            {"node": "node-0", "agent_pid": 10, "going": False, "seconds_left": None, "ranks": [0]},
            {"node": "node-3", "agent_pid": 13, "going": False, "seconds_left": None, "ranks": [1, 2]},
            {"node": "node-1", "agent_pid": None, "going": True, "seconds_left": 12.25, "ranks": [3]},
            {"node": "[red]node-2\x1b[2J", "agent_pid": 12, "going": True, "seconds_left": None, "ranks": []},
        ],
        "saves": [
            {
                "checkpoint": "g00000003-s0000000050",
                "state": "uploading",
                "ranks": 4,
                "staged": 4,
                "durable": 1,
                "staged_bytes": 4096,
                "since_seconds": 2.0,
            }
        ],
        "ranks": [{"rank": 0, "pid": 11, "step": 50, "step_seconds": 0.5, "save": "durable"}],
    }
    for node in now["nodes"]:
        node["condemned"] = ["device GPU-aa is lost"] if node["node"] == "node-3" else []
        node["hinted"] = node["node"] == "node-0"
    output().print(status_table(now))
    text = capsys.readouterr().out
    for expected in (
        "50 of 200 (25.0 %)",
        "2 h 01 min",
        "g00000003-s0000000040, 5.0 s ago",
        "will go in 12.2 s",
        "here; it may go, as a hint says",
        "1 to 2",
        "here, but not for another generation: device GPU-aa is lost",
        "g00000003-s0000000050, for 2.0 s: 4 of 4 ranks staged, 1 durable",
        "[red]node-2",
        "no step for 75.0 s: rank 1 on node-1 is stopped (state T)",
        "rank 2: the loss is nan at step 45; 3 more ranks as well",
        "to step 40, as soon as the next generation can be opened",
    ):
        assert expected in text
    assert "\x1b" not in text


# ------------------------------------------------------------------------------------------------- rolling back


def test_rollback_asks_the_running_job(command: Command, tmp_path: Path) -> None:
    """The verb looks into the store first: a step that is not there is refused, and the job trains on."""
    folder = tmp_path / "store" / "small"
    folder.mkdir(parents=True)
    store = open_store(str(folder))
    open_generation(store, Claimant(job="small", owner="o", claimant="c", take_over=False), None, (), 1.0)
    for step in (10, 20):
        save(store, tmp_path, {"w": torch.ones(8)}, checkpoint=checkpoint_id(1, step))
    with RunningSupervisor(str(folder)) as running:
        refused = command("rollback", "small", "--to", "15")
        result = command("rollback", "small", "--to", "10")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "error: step 15 cannot be gone back to; these steps can: 20, 10\n",
    )
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == (
        "accepted: the job 'small' ends its generation and goes on from checkpoint g00000001-s0000000010\n"
        "1 newer checkpoint will not be used again\n"
    )
    (asked, _) = running.reasons("requested")
    assert asked.startswith("rollback by ")
    assert asked.endswith(", to step 10")
    assert set(read_generations(store)) == {1}  # the verb itself claims nothing


@pytest.fixture
def asked_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Callable[..., Result]:
    """`rollback --wait` of a job with a checkpoint of step 10; `then` happens once the supervisor has the request."""
    folder = tmp_path / "store" / "small"
    folder.mkdir(parents=True)
    store = open_store(str(folder))
    who = Claimant(job="small", owner="o", claimant="c", take_over=False)
    open_generation(store, who, None, (), 1.0)
    save(store, tmp_path, {"w": torch.ones(8)}, checkpoint=checkpoint_id(1, 10))
    request = SupervisorClient.request

    def ask(then: Callable[[ObjectStore, Claimant, StateFolder], object], *words: str) -> Result:
        def requested(client: SupervisorClient, *what: Any, **more: Any) -> None:
            request(client, *what, **more)
            then(store, who, StateFolder("small", str(folder)))

        monkeypatch.setattr(SupervisorClient, "request", requested)
        with RunningSupervisor(str(folder)):
            return command("rollback", "small", "--to", "10", "--wait", *words)

    return ask


def test_rollback_waits_for_the_claim(asked_of: Callable[..., Result]) -> None:
    result = asked_of(lambda store, who, _: open_generation(store, who, 1, (), 1.0, rollback_to=10))
    assert result.exit_code == 0, result.stderr
    assert "done: it goes on from checkpoint g00000001-s0000000010" in result.stderr


def test_rollback_does_not_take_another_claim_for_its_own(asked_of: Callable[..., Result]) -> None:
    result = asked_of(lambda store, who, _: open_generation(store, who, 1, (), 1.0), "--timeout-seconds", "0.5")
    assert result.exit_code == 1
    assert "error: the job 'small' has not gone back within 0.5 s" in result.stderr
    assert "done: " not in result.stderr


def test_rollback_says_that_the_supervisor_ended_before_it_went_back(asked_of: Callable[..., Result]) -> None:
    result = asked_of(lambda _store, _who, state: state.forget_supervisor())
    assert result.exit_code == 2
    assert "error: the job 'small' has ended before it went back; give the same command again" in result.stderr


def test_rollback_says_why_it_was_refused(asked_of: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SupervisorClient, "status", lambda _: {"rollback": {"to": None, "refusal": "it has gone"}})
    result = asked_of(lambda *_: None)
    assert result.exit_code == 2
    assert "error: not rolled back: it has gone" in result.stderr


def test_rollback_is_forgotten_by_a_supervisor_that_takes_the_gang_back(
    asked_of: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the token of the one that was asked, and is another process."""
    supervisor = StateFolder.supervisor

    def another(state: StateFolder) -> SupervisorAddress | None:
        found = supervisor(state)
        return None if found is None else replace(found, start_ticks=1)

    result = asked_of(lambda *_: monkeypatch.setattr(StateFolder, "supervisor", another))
    assert result.exit_code == 2
    assert "has ended before it went back" in result.stderr


def test_rollback_says_that_another_request_has_taken_its_place(
    asked_of: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter((None, 10, 10, 5))
    monkeypatch.setattr(SupervisorClient, "status", lambda _: {"rollback": {"to": next(steps), "refusal": None}})
    result = asked_of(lambda *_: None)
    assert result.exit_code == 2
    assert "error: the job 'small' was asked meanwhile to go back to step 5" in result.stderr

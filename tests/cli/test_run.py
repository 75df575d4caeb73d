"""`orchestrator run` before anything starts: every mistake named at once, and what a dry run says; then its signals."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.run import VARIABLES, Signals, Talk
from orchestrator.core.messages import Request, Requested
from orchestrator.supervisor.state_folder import StateFolder
from orchestrator.telemetry import EventRecord
from tests.cli.conftest import Command

WORKS = ("--", sys.executable, "train.py")


def errors(result: Any) -> list[str]:
    """The sentences on standard error."""
    assert result.stdout == ""
    lines: list[str] = result.stderr.splitlines()
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


def test_all_problems_of_file_and_flags_at_once(command: Command) -> None:
    Path("bad.toml").write_text('nodes = "3:1"\nsave_every = -4\njobb = "x"\n[scheduling]\ncores = 2\n')
    result = command("run", "--config", "bad.toml", "--workers-per-node", "0", "--grace-seconds", "soon", *WORKS)
    assert result.exit_code == 2
    found = errors(result)
    for beginning in (
        "bad.toml: job: is missing",
        "bad.toml: store: is missing",
        "bad.toml: nodes: needs 1 <= MIN <= MAX <= 4096, got 3:1",
        "bad.toml: save_every: ",
        "bad.toml: jobb: there is no such setting",
        "bad.toml: scheduling: there is no such setting",
        "--workers-per-node: ",
        "--grace-seconds: ",
    ):
        assert any(problem.startswith(beginning) for problem in found), (beginning, found)
    assert len(found) == 8


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--nodes", "3:1", "--nodes: needs 1 <= MIN <= MAX"),
        ("--nodes", "a few", "--nodes: expected MIN:MAX"),
        ("--job", "No Name", "--job: use 1 to 63"),
        ("--scheduler", "pbs", "--scheduler: this release knows"),
        ("--max-failures", "-1", "--max-failures: "),
        ("--notices", "aws@http://10.0.0.1", "--notices: aws@http://10.0.0.1: an address is for rehearsals on this"),
        ("--store", "az://container", "store: az:// is not supported"),
    ],
)
def test_a_bad_flag_is_named(command: Command, flag: str, value: str, says: str) -> None:
    good = {"--job": "small", "--store": "store", "--nodes": "1:2"}
    words = [word for pair in ({**good, flag: value}).items() for word in pair]
    result = command("run", *words, *WORKS)
    assert result.exit_code == 2
    assert errors(result)[0].startswith(says)
    assert len(errors(result)) == 1


def test_no_command(command: Command) -> None:
    result = command("run", "--job", "small", "--store", "store")
    assert result.exit_code == 2
    assert errors(result) == ["command: nothing to run; give it after --, or as a list in the file"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("nosuch-program", "there is no program 'nosuch-program' on the PATH"),
        ("./nosuch.sh", "there is no file './nosuch.sh'"),
        ("./train.sh", "'./train.sh' is not executable"),
        ("./", "'./' is a folder"),
    ],
)
def test_a_command_that_cannot_be_run(command: Command, program: str, says: str) -> None:
    Path("train.sh").write_text("#!/bin/sh\n")
    result = command("run", "--job", "small", "--store", "store", "--staging", "/nosuch", "--", program)
    assert result.exit_code == 2
    assert errors(result)[0].startswith(f"command: {says}")
    assert errors(result)[1].startswith("staging: /nosuch is not there")
    assert not Path("store").exists()


@pytest.mark.parametrize("content", [b"\xff\x00 job = ", b"save_every = " + b"9" * 5000, b"job = " + b"[" * 5000])
def test_a_file_that_is_not_toml(command: Command, content: bytes) -> None:
    Path("orchestrator.toml").write_bytes(content)
    result = command("run", *WORKS)
    assert result.exit_code == 2
    assert errors(result)[0].startswith("orchestrator.toml: not valid TOML")
    assert "settings come from orchestrator.toml" in result.stderr


def test_a_truth_is_no_number(command: Command) -> None:
    """`save_every = true` would be a checkpoint after every step."""
    Path("orchestrator.toml").write_text("save_every = true\ngrace_seconds = false")
    result = command("run", "--job", "small", "--store", "store", "--", "true")
    assert result.exit_code == 2
    assert errors(result) == [
        "orchestrator.toml: save_every: is neither true nor false, got true",
        "orchestrator.toml: grace_seconds: is neither true nor false, got false",
    ]


def test_a_file_that_is_not_there(command: Command) -> None:
    result = command("run", "--config", "nosuch.toml", *WORKS)
    assert (result.exit_code, errors(result)) == (2, ["nosuch.toml: No such file or directory"])


def test_settings_in_a_stores_url_stay_behind_the_jobs_folder(command: Command, tmp_path: Path) -> None:
    store = "s3://bucket/jobs/?region=eu-1&endpoint=http://127.0.0.1:1"
    words = ("run", "--job", "small", "--store", store, "--staging", str(tmp_path), "--dry-run", "--json")
    result = command(*words, *WORKS)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["job_url"] == "s3://bucket/jobs/small?endpoint=http://127.0.0.1:1&region=eu-1"


def test_a_dry_run_starts_nothing_and_tells_all(command: Command, tmp_path: Path) -> None:
    Path("orchestrator.toml").write_text('job = "small"\nstore = "store"\nnodes = "1:2"\nsave_every = 7\n')
    flags = ("--nodes", "2:3", "--workers-per-node", "4", "--notices", "aws@http://127.0.0.1:8123")
    words = ("run", *flags, "--staging", str(tmp_path), "--dry-run")
    result = command(*words, "--json", *WORKS, "--", "--job")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["job_url"] == str(tmp_path / "here" / "store" / "small")
    assert plan["command"] == [sys.executable, "train.py", "--", "--job"]
    assert (plan["nodes_min"], plan["nodes_max"], plan["world_size_max"], plan["save_every"]) == (2, 3, 12, 7)
    assert plan["notices"] == "aws@http://127.0.0.1:8123"
    assert plan["staging_free_bytes"] > 0
    assert plan["variables"] == list(VARIABLES)
    assert not Path("store").exists()
    assert not (tmp_path / "state").exists()

    as_text = command(*words, *WORKS)
    assert as_text.exit_code == 0
    assert "2 to 3" in as_text.stdout
    assert "signals, and aws@http://127.0.0.1:8123" in as_text.stdout
    assert str(tmp_path / "here" / "store" / "small") in as_text.stdout
    assert "nothing was started" in as_text.stderr


def test_flags_after_the_command_belong_to_it(command: Command) -> None:
    result = command("run", "--job", "a", "--store", "s", "--dry-run", "--json", sys.executable, "--job", "b")
    plan = json.loads(result.stdout)
    assert (plan["job"], plan["command"]) == ("a", [sys.executable, "--job", "b"])


def test_json_without_a_dry_run(command: Command) -> None:
    assert command("run", "--json", "--job", "a", "--store", "s", *WORKS).exit_code == 2


@pytest.mark.parametrize("store", ["store", "./store/", "../here/store", "file://{here}/store"])
def test_a_job_that_runs_here_already(command: Command, tmp_path: Path, store: str) -> None:
    """However its store is written."""
    other = StateFolder("small", str(tmp_path / "here" / "store" / "small"))
    other.acquire()
    try:
        written = store.format(here=tmp_path / "here")
        result = command("run", "--job", "small", "--store", written, "--staging", str(tmp_path), *WORKS)
    finally:
        other.release()
    assert result.exit_code == 3
    assert "is already running on this machine" in errors(result)[0]
    assert not Path("store").exists()


# ------------------------------------------------------------------------------------------------- signals


class FakeSupervisor:
    """Remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def drain(self, by: str) -> None:
        self.asked.append(Request.DRAIN)

    def submit(self, event: Requested) -> None:
        self.asked.append(event.request)


class FakeTask:
    """Counts how often it was cancelled."""

    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.mark.parametrize(
    ("numbers", "asked", "cancelled"),
    [
        ([signal.SIGTERM], [Request.DRAIN], 0),
        ([signal.SIGHUP], [Request.DRAIN], 0),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGHUP], [Request.DRAIN], 0),
        ([signal.SIGINT], [Request.DRAIN], 0),
        ([signal.SIGINT, signal.SIGINT], [Request.DRAIN, Request.CANCEL], 0),
        ([signal.SIGTERM, signal.SIGINT], [Request.DRAIN, Request.CANCEL], 0),
        ([signal.SIGINT, signal.SIGINT, signal.SIGTERM], [Request.DRAIN, Request.CANCEL], 0),
        ([signal.SIGINT] * 3, [Request.DRAIN, Request.CANCEL], 1),
        ([signal.SIGINT] * 5, [Request.DRAIN, Request.CANCEL], 1),  # a second one would cut ending the nodes short
    ],
)
def test_signals(numbers: list[int], asked: list[Request], cancelled: int) -> None:
    supervisor, task = FakeSupervisor(), FakeTask()
    signals = Signals(SimpleNamespace(supervisor=supervisor), task, Talk(as_json=False))  # type: ignore[arg-type]
    for number in numbers:
        signals.on_signal(number)
    assert (supervisor.asked, task.cancelled) == (asked, cancelled)


# ------------------------------------------------------------------------------------------------ the lines


class GoneTerminal:
    """A standard error that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


RECORD = EventRecord(wall_seconds=1.0, monotonic_seconds=2.0, job="small", kind="staged", reason="a\nb")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    monkeypatch.setattr(sys, "stderr", GoneTerminal())
    talk = Talk(as_json=as_json)
    talk.say("hello")
    talk.event_sink(0.0)(RECORD)
    talk.last(0, "done")


def test_json_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(as_json=True)
    talk.say("hello")
    talk.event_sink(0.0)(RECORD)
    talk.last(75, "drained")
    captured = capsys.readouterr()
    assert captured.out == ""
    said, event, ended = (json.loads(line) for line in captured.err.splitlines())
    assert said == {"kind": "said", "reason": "hello"}
    assert event["kind"] == "staged"
    assert ended == {"kind": "run ended", "reason": "drained", "exit_code": 75}

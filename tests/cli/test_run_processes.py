"""`orchestrator run` as a process, with commands that never attach: what is said, which status, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.cli.run import VARIABLES
from tests.commands import RUN

pytestmark = pytest.mark.processes

LIMIT_SECONDS = 40


def words(folder: Path, program: str, *flags: str) -> list[str]:
    """The command line of a run of a small program."""
    run = [*RUN, "--job", "tiny", "--store", str(folder / "store")]
    return [*run, "--staging", str(folder), *flags, "--", sys.executable, "-c", program]


def environment(folder: Path) -> dict[str, str]:
    """This process's, with a state folder of its own."""
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state")}


def run(folder: Path, program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A run to its end."""
    return subprocess.run(
        words(folder, program, *flags),
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=LIMIT_SECONDS,
        check=False,
    )


@contextmanager
def sleeping(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose command sleeps; it has started when this is entered."""
    program = f"import pathlib, time; pathlib.Path({str(folder / 'started')!r}).touch(); time.sleep(100)"
    with subprocess.Popen(
        words(folder, program), env=environment(folder), stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + LIMIT_SECONDS
        while not (folder / "started").exists() and time.monotonic() < until:
            time.sleep(0.02)
        try:
            yield process
        finally:
            process.terminate()  # it ends its nodes, which a kill would leave behind
            try:
                process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.parametrize("code", [0, 7])
def test_a_command_that_never_attaches_keeps_its_exit_code(tmp_path: Path, code: int) -> None:
    program = f"import json, os, sys; print(json.dumps(sorted(os.environ))); sys.exit({code})"
    done = run(tmp_path, program, "--workers-per-node", "2")
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "orchestrator.attach()" in last
    assert f"(exit code {code})" in last
    output = sorted(done.stdout.splitlines())
    ranks = [line[:4] for line in output]
    assert ranks == ["[0] ", "[1] "] or (code and len(ranks) == 1)  # the first failure ends the other
    assert set(VARIABLES) <= set(json.loads(output[0][4:]))
    assert list(tmp_path.glob("orchestrator-*/*/*")) == []  # nothing is left in the staging folder


def test_events_as_json_lines(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--json-events")
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert [record["kind"] for record in records][-2:] == ["ended", "run ended"]
    assert records[-1]["exit_code"] == done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_command_that_cannot_be_saved(tmp_path: Path, number: signal.Signals) -> None:
    with sleeping(tmp_path) as process:
        process.send_signal(number)
        _, talk = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 75, talk
    assert "the same command starts from the beginning, nothing was saved (exit code 75)" in talk.splitlines()[-1]


def test_drain_waits_for_the_end(tmp_path: Path) -> None:
    with sleeping(tmp_path) as process:
        again = subprocess.run(
            words(tmp_path, ""), env=environment(tmp_path), capture_output=True, text=True, timeout=20, check=False
        )
        assert again.returncode == 3, again.stderr
        drain = [sys.executable, "-m", "orchestrator", "drain", "tiny", "--wait", "--timeout-seconds", "20"]
        done = subprocess.run(
            drain, env=environment(tmp_path), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
        process.communicate(timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("the job 'tiny' has ended\n")
    assert process.returncode == 75

"""`orchestrator status` of jobs that do not run: how they ended, and which there are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.generations import Claimant, open_generation, record_end
from orchestrator.core.messages import Outcome
from orchestrator.schedulers.leftovers import StartedNode, start_ticks, write_leftovers
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from orchestrator.supervisor.state_folder import StateFolder
from tests.checkpoint.shards import checkpoint_id, save
from tests.cli.conftest import Command

WHO = Claimant(job="small", owner="an owner", claimant="a run", take_over=False)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Of a job that has run on this machine, and left step 10."""
    folder = tmp_path / "store" / "small"
    folder.mkdir(parents=True)
    StateFolder("small", str(folder)).make()
    found = open_store(str(folder))
    open_generation(found, WHO, None, (), 1.0)
    save(found, tmp_path, {"w": torch.ones(8)}, checkpoint=checkpoint_id(1, 10))
    return found


@pytest.mark.parametrize("outcome", list(Outcome))
def test_how_a_job_ended(command: Command, store: ObjectStore, outcome: Outcome) -> None:
    record_end(store, WHO, outcome, "somebody asked for it", 2.0)
    result = command("status", "small")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"the job 'small' has ended: {outcome}: somebody asked for it; its newest checkpoint is g00000001-s0000000010\n"
    )
    assert json.loads(command("status", "small", "--json").stdout) == {
        "job": "small",
        "phase": "ended",
        "outcome": str(outcome),
        "reason": "somebody asked for it",
        "newest_committed": "g00000001-s0000000010",
    }
    assert "has ended" in command("drain", "small").stderr


def test_a_word_is_not_said_twice(command: Command, store: ObjectStore) -> None:
    record_end(store, WHO, Outcome.DRAINED, "drained by me", 2.0)
    assert "has ended: drained by me; its" in command("status", "small").stdout


def test_nodes_that_a_dead_supervisor_left(command: Command, store: ObjectStore) -> None:
    """They train on: whoever asks must not be told that nothing runs."""
    state = StateFolder("small", store.url)
    with subprocess.Popen(["sleep", "60"]) as process:
        node = StartedNode(number=0, pid=process.pid, started_ticks=start_ticks(process.pid), staging="/tmp/x")
        write_leftovers(state.path / "nodes.json", claimant="c", terms="t", nodes=[node])
        for verb in ("status", "cancel"):
            result = command(verb, "small")
            assert result.exit_code == 1
            assert f"has died, and 1 node of it (process {process.pid}) may still train: the same" in result.stderr
        process.kill()
    assert "nobody wrote down how it ended" in command("status", "small").stderr


def test_one_that_was_killed(command: Command, store: ObjectStore) -> None:
    assert "does not run, and nobody wrote down how it ended; its newest" in command("status", "small").stderr


def test_one_whose_store_cannot_be_read(command: Command, store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert "no supervisor of a job 'small' runs on this machine" in command("status", "small").stderr


def test_all_jobs(command: Command, store: ObjectStore) -> None:
    other = StateFolder("other", "s3://bucket/other")
    other.acquire()
    other.publish("http://127.0.0.1:1", "a token")
    assert json.loads(command("status", "--json").stdout) == [
        {"job": "other", "url": "s3://bucket/other", "running": True, "namespace": None},
        {"job": "small", "url": store.url, "running": False, "namespace": None},
    ]
    text = command("status").stdout
    assert "not running" in text
    assert "a token" not in text
    other.release()
    StateFolder("small", store.url).note_cluster_job("training")
    assert "in Kubernetes, namespace training" in command("status").stdout


def test_no_job_yet(command: Command) -> None:
    result = command("status")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "no job has run on this machine yet: `orchestrator run` starts one\n"
    assert command("status", "--json").stdout == "[]\n"

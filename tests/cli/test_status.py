"""`orchestrator status` of jobs that do not run: how they ended, and which there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.generations import Claimant, open_generation, record_end
from orchestrator.core.messages import Outcome
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
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: the job 'small' does not run: {outcome}, somebody asked for it; "
        "its newest checkpoint is g00000001-s0000000010\n"
    )


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
        {"job": "other", "url": "s3://bucket/other", "running": True},
        {"job": "small", "url": store.url, "running": False},
    ]
    text = command("status").stdout
    assert "not running" in text
    assert "a token" not in text
    other.release()


def test_no_job_yet(command: Command) -> None:
    result = command("status")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "no job has run on this machine yet: `orchestrator run` starts one\n"
    assert command("status", "--json").stdout == "[]\n"

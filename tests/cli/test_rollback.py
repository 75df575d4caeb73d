"""`orchestrator rollback` on jobs that do not run: the claim is made by the verb, under the job's lock and owner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.catalog import read_generations, survey
from orchestrator.checkpoint.generations import Claimant, open_generation
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from orchestrator.supervisor.state_folder import StateFolder
from tests.checkpoint.shards import checkpoint_id, save
from tests.cli.conftest import Command


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    """Of a job that has run on this machine and left steps 10 and 20."""
    folder = tmp_path / "store" / "small"
    folder.mkdir(parents=True)
    found = StateFolder("small", str(folder))
    found.acquire()
    store = open_store(str(folder))
    who = Claimant(job="small", owner=found.owner(), claimant="a run", take_over=False)
    open_generation(store, who, None, (), 1.0)
    for step in (10, 20):
        save(store, tmp_path, {"w": torch.ones(8)}, checkpoint=checkpoint_id(1, step))
    found.release()
    return found


@pytest.fixture
def store(state: StateFolder) -> ObjectStore:
    return open_store(state.job_url)


def test_the_next_start_goes_on_from_there(command: Command, state: StateFolder, store: ObjectStore) -> None:
    result = command("rollback", "small", "--to", "10")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == (
        "done: the next start of the job 'small' goes on from checkpoint g00000001-s0000000010\n"
        "1 newer checkpoint will not be used again\n"
    )
    newest = survey(store).newest()
    assert newest is not None
    assert newest.id == checkpoint_id(1, 10)
    again = Claimant(job="small", owner=state.owner(), claimant="another run", take_over=False)
    assert open_generation(store, again, None, (), 1.0).base == checkpoint_id(1, 10)


def test_a_store_that_is_named_is_the_same_job(command: Command, store: ObjectStore, tmp_path: Path) -> None:
    assert command("rollback", "small", "--to", "10", "--store", str(tmp_path / "store")).exit_code == 0
    assert set(read_generations(store)) == {1, 2}


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (("small", "--to", "15"), 2, "step 15 cannot be gone back to; these steps can: 20, 10"),
        (("other", "--to", "10"), 2, "no job 'other' has run on this machine, but small; --store says where it is"),
        (("small", "--to", "-1"), 2, "--to"),
        (("small", "--to", "ten"), 2, "--to"),
        (("small",), 2, "--to"),
        (("small", "--to", "10", "--store", "/nowhere"), 1, "there is no such folder"),
        (("sm/all", "--to", "10", "--store", "/nowhere"), 2, "is no plain name"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    command: Command, store: ObjectStore, words: tuple[str, ...], exit_code: int, said: str
) -> None:
    result = command("rollback", *words)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert said in result.stderr
    assert set(read_generations(store)) == {1}, "something was claimed"


def test_of_two_jobs_of_one_name_one_has_to_be_chosen(command: Command, store: ObjectStore, tmp_path: Path) -> None:
    other = StateFolder("small", "s3://elsewhere/small")
    other.acquire()
    other.release()
    result = command("rollback", "small", "--to", "10")
    assert result.exit_code == 2
    assert "there are 2 jobs 'small' on this machine: --store says which" in result.stderr
    assert command("rollback", "small", "--to", "10", "--store", str(tmp_path / "store")).exit_code == 0


def test_a_job_that_is_just_starting_is_not_touched(command: Command, state: StateFolder, store: ObjectStore) -> None:
    """Its lock is taken, and its address not published yet."""
    state.acquire()
    result = command("rollback", "small", "--to", "10")
    assert result.exit_code == 3
    assert "is already running on this machine" in result.stderr
    assert set(read_generations(store)) == {1}
    state.release()


@pytest.mark.parametrize(("step", "stays"), [("15", True), ("10", False)])
def test_what_a_dead_supervisor_left_running_is_only_given_up_if_the_job_goes_back(
    command: Command, state: StateFolder, step: str, stays: bool
) -> None:
    """Its nodes are found and taken back by the address and token that it published."""
    state.address_path.write_text('{"job": "small", "url": "http://127.0.0.1:1", "token": "t", "pid": 999999999}')
    assert command("rollback", "small", "--to", step).exit_code == (2 if stays else 0)
    assert state.address_path.exists() is stays


def test_a_run_elsewhere_is_taken_over_only_on_demand(command: Command, store: ObjectStore, tmp_path: Path) -> None:
    (next((tmp_path / "state").rglob("owner"))).unlink()  # as on another machine
    words = ("rollback", "small", "--to", "10", "--store", str(tmp_path / "store"))
    result = command(*words)
    assert result.exit_code == 3
    assert "if that run is dead for certain, use --take-over" in result.stderr
    assert command(*words, "--take-over").exit_code == 0
    assert set(read_generations(store)) == {1, 2}

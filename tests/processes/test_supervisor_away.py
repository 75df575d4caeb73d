"""F88: the supervisor is killed while its nodes train. The same command goes on with the same workers.

Real `orchestrator run` processes on two nodes; what they did is read from their logs, their events and the store.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.catalog import survey
from orchestrator.checkpoint.slots import ControlBlock
from orchestrator.schedulers.leftovers import start_ticks
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from tests.commands import RUN
from tests.processes.harness import TRAINING, check_store, final_digests, until

WORLD_SIZE = 2
START_SECONDS = 100.0  # until workers train, on a machine that is busy with other things
TRAINS_ON = ("--", sys.executable, str(TRAINING))


class Runs:
    """The same command, given again and again, and what came of it."""

    def __init__(self, folder: Path, staging: str) -> None:
        self._folder = folder
        self._staging = Path(staging)
        self._arguments = [
            *RUN,
            *("--job", "small", "--store", str(folder / "store")),
            *("--nodes", "2", "--workers-per-node", "1", "--save-every", "10", "--staging", staging),
        ]
        self._environment = {**os.environ, "LOG": str(folder / "log"), "STEP_SECONDS": "0.3"}
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def store(self) -> ObjectStore:
        return open_store(str(self._folder / "store" / "small"))

    def start(self, command: tuple[str, ...] = TRAINS_ON) -> subprocess.Popen[bytes]:
        """Give the command."""
        process = subprocess.Popen([*self._arguments, *command], env=self._environment)
        self._running.append(process)
        return process

    async def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL to the supervisor alone."""
        process.kill()
        await asyncio.to_thread(process.wait)

    async def end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for its end; the exit status."""
        return await asyncio.wait_for(asyncio.to_thread(process.wait), 90)

    def clean_up(self) -> None:
        """End what a test that failed has left: supervisors, then their nodes."""
        for process in self._running:
            process.kill()
            process.wait()
        for path in self._state("nodes.json"):
            for node in json.loads(path.read_text())["nodes"]:
                if start_ticks(node["pid"]) == node["started_ticks"]:
                    os.kill(node["pid"], signal.SIGKILL)

    def _state(self, name: str) -> list[Path]:
        return list((self._folder / "state" / "orchestrator").glob(f"small-*/{name}"))

    def events(self, kind: str, **where: object) -> list[dict[str, Any]]:
        """Events of all supervisors so far."""
        lines = [line for path in self._state("events.jsonl") for line in path.read_text().splitlines() if line]
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["kind"] == kind and where.items() <= event.items()]

    def trained(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has logged: one line for each step."""
        path = self._folder / "log" / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> int:
        """The last step that rank 0 has logged."""
        lines = self.trained(0)
        return int(lines[-1]["step"]) if lines else 0

    def receipts(self, step: int) -> int:
        """How many receipts of a step are on the store."""
        keys = (entry.key for entry in self.store.entries("checkpoints/"))
        return sum(f"s{step:010d}/shard-" in key and key.endswith(".json") for key in keys)

    def has_decided(self, step: int) -> bool:
        """Whether every rank can read that the step is decided: its agent has heard of it."""
        decided = []
        for path in self._staging.rglob("*.control"):
            control = ControlBlock.open(path)
            decided.append(control.read_record().decided_step)
            control.close()
        return decided == [step] * WORLD_SIZE

    def check_that_nothing_was_restarted(self) -> None:
        """One process for each rank, each step once, one claim."""
        assert list(survey(self.store).generations) == [1]
        for rank in range(WORLD_SIZE):
            lines = self.trained(rank)
            assert len({line["pid"] for line in lines}) == 1
            assert [line["step"] for line in lines] == list(range(1, 41))


@pytest.fixture
def runs(tmp_path: Path, staging: str) -> Iterator[Runs]:
    made = Runs(tmp_path, staging)
    yield made
    made.clean_up()


async def test_the_same_workers_train_on_under_the_next_supervisor(runs: Runs, reference: dict[str, str]) -> None:
    """Before the first save of all, and again later: nothing is restarted, nothing is lost, the end is the same."""
    first = runs.start()
    await until(lambda: runs.steps() >= 3, START_SECONDS)
    await runs.kill(first)
    trained = runs.steps()
    await until(lambda: runs.steps() >= trained + 2)
    second = runs.start()
    await until(lambda: bool(runs.events("taken back")))
    await runs.kill(second)
    assert await runs.end(runs.start()) == 0
    assert len(runs.events("taken back")) == 2
    runs.check_that_nothing_was_restarted()
    assert final_digests(runs.store) == reference
    check_store(runs.store)


@pytest.mark.parametrize("kind", ["step agreed", "staged"])
async def test_killed_in_the_middle_of_a_save(kind: str, runs: Runs, reference: dict[str, str]) -> None:
    """F19, F30: what was decided is staged, uploaded and committed all the same, by whoever is there."""
    first = runs.start()
    await until(lambda: bool(runs.events(kind, step=20)), START_SECONDS)
    await runs.kill(first)
    assert await runs.end(runs.start()) == 0
    runs.check_that_nothing_was_restarted()
    assert final_digests(runs.store) == reference
    check_store(runs.store)


@pytest.mark.extended
async def test_a_worker_is_told_to_go_while_nobody_is_there(runs: Runs, reference: dict[str, str]) -> None:
    """F2, F19: the decided step is durable without any order, and the next supervisor lets everybody leave in time."""
    first = runs.start()
    await until(lambda: runs.has_decided(20), START_SECONDS)
    await runs.kill(first)
    os.kill(runs.trained(1)[-1]["pid"], signal.SIGTERM)
    await until(lambda: runs.receipts(20) == WORLD_SIZE, limit_seconds=20)
    assert await runs.end(runs.start()) == 0
    (notice,) = runs.events("notice received")
    assert 0 < float(notice["facts"]["remaining_seconds"]) < 30
    left = [event for event in runs.events("committed") if event["facts"]["mode"] == "leave"]
    if left:  # else the last step came first
        assert [event["step"] for event in runs.events("generation opened")][-1] == left[0]["step"]
    assert final_digests(runs.store) == reference
    check_store(runs.store)


@pytest.mark.extended
async def test_another_command_begins_a_new_generation(runs: Runs, reference: dict[str, str]) -> None:
    """What was started with another command is ended before anything new is launched."""
    first = runs.start()
    await until(lambda: bool(runs.events("committed", step=20)), START_SECONDS)
    await runs.kill(first)
    pids = [runs.trained(rank)[-1]["pid"] for rank in range(WORLD_SIZE)]
    assert await runs.end(runs.start((*TRAINS_ON, "another-argument"))) == 0
    assert all(start_ticks(pid) is None for pid in pids)
    assert not runs.events("taken back")
    assert [event["step"] for event in runs.events("generation opened")][1] >= 20
    assert final_digests(runs.store) == reference
    check_store(runs.store)


@pytest.mark.extended
async def test_a_second_run_beside_a_living_one(runs: Runs) -> None:
    """F80: it ends with 3 at once, and the first one does not notice."""
    first = runs.start()
    await until(lambda: runs.steps() >= 3, START_SECONDS)
    assert await runs.end(runs.start()) == 3
    assert await runs.end(first) == 0
    runs.check_that_nothing_was_restarted()
    assert not runs.events("node lost")

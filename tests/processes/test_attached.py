"""Scripts that nobody supervises: plain python and torchrun, a signal, an emergency checkpoint, status 75."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.checkpoint.catalog import survey
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from tests.processes.harness import TRAINING, check_store, final_digests, until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")


class Script:
    """One start of the training script in a folder of its own."""

    def __init__(self, folder: Path, command: Sequence[str] = (sys.executable,), **variables: object) -> None:
        self.log = folder / "log"
        environment = {**os.environ, "LOG": str(self.log), **{name: str(value) for name, value in variables.items()}}
        self.process = subprocess.Popen(
            [*command, str(TRAINING)], cwd=folder, env=environment, stderr=subprocess.PIPE, start_new_session=True
        )
        self.errors = ""

    def lines(self, rank: int) -> list[dict[str, object]]:
        """What a rank has logged, in all starts."""
        path = self.log / f"rank-{rank}.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

    async def reach(self, step: int, rank: int = 0) -> None:
        """Wait until a rank has done a step."""
        await until(lambda: bool(self.lines(rank)) and int(str(self.lines(rank)[-1]["step"])) >= step)

    async def end(self) -> int:
        """Wait for the end; exit status."""
        _, errors = await asyncio.wait_for(asyncio.to_thread(self.process.communicate), 90)
        self.errors = errors.decode()
        return self.process.returncode


def store_of(folder: Path) -> ObjectStore:
    """Where an attached script saves unless told otherwise."""
    return open_store(str(folder / "checkpoints" / "small_training"))


async def test_a_file_tells_a_script_to_leave(tmp_path: Path) -> None:
    """What is watched beside signals is a parameter of attach: saved at a common step, status 75."""
    leave = tmp_path / "leave"
    script = Script(tmp_path, STEP_SECONDS=0.05, NOTICES=f"file:{leave}")
    await script.reach(5)
    leave.touch()
    assert await script.end() == 75, script.errors
    newest = survey(store_of(tmp_path)).newest()
    assert newest is not None
    assert newest.id.step == script.lines(0)[-1]["step"]


@pytest.fixture
def free_port() -> str:
    """A port for torchrun."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


async def test_plain_python_leaves_on_sigterm_and_resumes_exactly(tmp_path: Path) -> None:
    """SIGTERM: saved at a common step, status 75; the next start goes on there and ends as if nothing had happened."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    reference = Script(whole)
    assert await reference.end() == 0, reference.errors
    first = Script(cut, STEP_SECONDS=0.05)
    await first.reach(13)
    first.process.send_signal(signal.SIGTERM)
    assert await first.end() == 75, first.errors
    assert first.errors.count("nobody supervises this script") == 1
    newest = survey(store_of(cut)).newest()
    assert newest is not None
    assert newest.id.step == first.lines(0)[-1]["step"], "the step that it left at is the one that is committed"
    second = Script(cut)
    assert await second.end() == 0, second.errors
    assert final_digests(store_of(cut)) == final_digests(store_of(whole))
    rates = {line["step"]: line["lr"] for line in second.lines(0)}
    assert rates == {line["step"]: line["lr"] for line in reference.lines(0)}, "F52: the LR curve is the same"
    third = Script(cut)
    assert await third.end() == 0
    assert "is done" in third.errors


async def test_torchrun_one_rank_signalled(tmp_path: Path, free_port: str) -> None:
    """F1, F2, W6: SIGTERM to rank 1 alone; both ranks leave at one step with status 75."""
    script = Script(tmp_path, (*TORCHRUN, free_port), STEPS=400, STEP_SECONDS=0.05)
    await script.reach(12, rank=1)
    os.kill(int(str(script.lines(1)[-1]["pid"])), signal.SIGTERM)
    assert await script.end() != 0
    assert "exitcode  : 75" in script.errors, "torchrun ends the other rank as soon as the first has left"
    assert script.lines(0)[-1]["step"] == script.lines(1)[-1]["step"]
    newest = survey(store_of(tmp_path)).newest()
    assert newest is not None
    assert newest.id.step == script.lines(0)[-1]["step"]
    check_store(store_of(tmp_path))


@pytest.mark.extended
async def test_signal_to_the_group_with_loader_workers(tmp_path: Path) -> None:
    """F6: DataLoader workers get the signal too; they live on, the save happens, status 75."""
    script = Script(tmp_path, STEPS=400, STEP_SECONDS=0.05, LOADER=2)
    await script.reach(12)
    os.killpg(script.process.pid, signal.SIGTERM)
    assert await script.end() == 75, script.errors
    newest = survey(store_of(tmp_path)).newest()
    assert newest is not None
    assert newest.id.step == script.lines(0)[-1]["step"]


@pytest.mark.extended
async def test_sigkill_leaves_the_newest_periodic_checkpoint(tmp_path: Path) -> None:
    """No notice at all: the supervisor of the dead script ends by itself and the next start resumes."""
    first = Script(tmp_path, STEP_SECONDS=0.05)
    await first.reach(17)
    first.process.kill()
    assert await first.end() == -signal.SIGKILL
    second = Script(tmp_path)
    assert await second.end() == 0, second.errors
    resumed = [line["step"] for line in second.lines(0) if line["generation"] == 2]
    assert resumed[0] == 11
    check_store(store_of(tmp_path))


async def test_a_bad_store_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    """The script learns the cause from `attach`, and has trained nothing."""
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    script = Script(tmp_path)
    assert await script.end() == 1
    assert "ConfigError: store: " in script.errors
    assert "there is a file where the folder" in script.errors
    assert script.lines(0) == []

"""Restarts that read the base from slots that the workers before have left; from the store where those are no good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.supervisor.loop import Supervisor
from tests.processes.harness import check_store, final_digests, run_job, until

pytestmark = pytest.mark.processes


async def kill_after_the_first_commit(supervisor: Supervisor, before: Callable[[], None]) -> None:
    fresh = supervisor.job.newest_committed
    await until(lambda: supervisor.job.newest_committed is not fresh)
    before()
    os.kill(supervisor.job.ranks[1].pid, signal.SIGKILL)


async def test_the_base_is_read_from_memory(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has its own shard in a slot and reads the other one from the other node: the store's are damaged."""
    monkeypatch.setenv("STEP_SECONDS", "0.2")
    right: dict[Path, bytes] = {}

    def damage_store() -> None:
        for path in tmp_path.rglob("shard-*.safetensors"):
            right[path] = path.read_bytes()
            path.unlink()
            path.write_bytes(bytes(len(right[path])))

    result = await run_job(
        tmp_path, nodes="2", staging=staging, scenario=lambda one: kill_after_the_first_commit(one, damage_store)
    )
    assert result.finish.exit_code == 0, result.output()
    assert len(right) == 2
    assert 10 in [record.step for record in result.kinds("generation opened")], "a later commit came first"
    assert final_digests(result.store) == reference
    for path, content in right.items():
        path.write_bytes(content)
    check_store(result.store)


async def test_what_is_damaged_in_memory_is_read_from_the_store(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.2")

    def damage_slots() -> None:
        slots = [path for path in Path(staging).rglob("*.slot-*") if path.stat().st_size]
        assert slots
        for path in slots:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"damaged")

    result = await run_job(
        tmp_path, nodes="2", staging=staging, scenario=lambda one: kill_after_the_first_commit(one, damage_slots)
    )
    assert result.finish.exit_code == 0, result.output()
    assert 10 in [record.step for record in result.kinds("generation opened")], "a later commit came first"
    assert final_digests(result.store) == reference

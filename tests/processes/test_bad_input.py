"""Bad input: one clear sentence, the right status, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.format import canonical_json
from orchestrator.core.job import Phase
from orchestrator.supervisor.loop import Supervisor
from tests.processes.harness import JobResult, check_store, final_digests, run_job, until

LARGE_TRAINING = """
import torch, orchestrator
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.Adam(model.parameters())
run = orchestrator.attach(model=model, optimizer=optimizer)
for step in run.steps(until=50):
    model(torch.ones(1024)).sum().backward()
    optimizer.step()
    print(f"step {step + 1}", flush=True)
"""
"""Its shard takes 12 MiB: parameters, and twice as much that Adam keeps."""


async def drained_at(tmp_path: Path, staging: str, step: int, nodes: str = "1") -> JobResult:
    """A job that was drained after some step, to damage its store."""

    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.job.phase is Phase.RUNNING and supervisor.job.lowest_step >= step)
        supervisor.drain("a test")

    result = await run_job(tmp_path, nodes=nodes, staging=staging, scenario=scenario)
    assert result.finish.exit_code == 75
    return result


def committed_folders(tmp_path: Path) -> list[Path]:
    """Folders of the committed checkpoints, newest first."""
    store = tmp_path / "store" / "small" / "checkpoints"
    return sorted(path for path in store.iterdir() if b'"committed"' in (path / "index.json").read_bytes())[::-1]


def newest_folder(tmp_path: Path) -> Path:
    """Folder of the newest committed checkpoint."""
    return committed_folders(tmp_path)[0]


def older_step(tmp_path: Path) -> int:
    """Step of the committed checkpoint before the newest."""
    return int(committed_folders(tmp_path)[1].name.rpartition("-s")[2])


async def test_truncated_shard_falls_back(tmp_path: Path, staging: str) -> None:
    """F20: a truncated shard does not block restarts: the next older checkpoint is used, and it is said."""
    await drained_at(tmp_path, staging, 23)
    older = older_step(tmp_path)
    shard = next(newest_folder(tmp_path).glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    assert "the index says" in result.kinds("checkpoint skipped")[0].reason
    assert result.kinds("generation opened")[0].step == older


async def test_edited_shard_falls_back(tmp_path: Path, staging: str) -> None:
    """A flipped byte: the digest tells, the generation ends, an older checkpoint is used; nothing is condemned."""
    await drained_at(tmp_path, staging, 23)
    older = older_step(tmp_path)
    shard = next(newest_folder(tmp_path).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    assert "does not match its digest" in result.output()
    assert [record.step for record in result.kinds("generation opened")][-1] == older


async def test_a_shard_that_one_rank_cannot_read_falls_back(tmp_path: Path, staging: str) -> None:
    """Ranks restore together: only the one that could not read says so, and the others wait for its end, not longer."""
    await drained_at(tmp_path, staging, 23, nodes="2")
    older = older_step(tmp_path)
    shard = sorted(newest_folder(tmp_path).glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    result = await run_job(tmp_path, nodes="2", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    steps = [record.step for record in result.kinds("generation opened")]
    assert len(steps) == 2, "avoided at once, though one of two ranks could not read it"
    assert steps[-1] == older
    failed = result.kinds("worker exited")[0]
    assert failed.rank == 1
    assert "does not match its digest" in result.kinds("failure judged")[0].reason


@pytest.mark.extended
async def test_edited_index_falls_back(tmp_path: Path, staging: str) -> None:
    """An index that was edited, though valid JSON, is found out by its own digest."""
    await drained_at(tmp_path, staging, 23)
    index = newest_folder(tmp_path) / "index.json"
    fields = json.loads(index.read_bytes())
    fields["step"] += 1
    index.write_bytes(canonical_json(fields))
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    assert "truncated or edited" in result.kinds("checkpoint skipped")[0].reason


async def test_unknown_version_is_refused_by_name(tmp_path: Path, staging: str) -> None:
    """An index of a newer release: an older checkpoint would lose work, so the job does not start."""
    await drained_at(tmp_path, staging, 12)
    index = newest_folder(tmp_path) / "index.json"
    fields = json.loads(index.read_bytes())
    fields["version"] = 99
    index.write_bytes(canonical_json(fields))
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 78
    assert "format version 99" in result.finish.reason


async def test_nothing_readable_is_never_a_fresh_start(tmp_path: Path, staging: str) -> None:
    """If no committed checkpoint can be used, training from step 0 would bury them: the job stops instead."""
    await drained_at(tmp_path, staging, 12)
    for index in (tmp_path / "store" / "small" / "checkpoints").glob("*/index.json"):
        index.write_bytes(index.read_bytes()[:-20])
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 78
    assert "starting afresh would lose them" in result.finish.reason


async def test_state_that_cannot_be_saved(tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of what cannot be saved is named, and restarting is not tried."""
    monkeypatch.setenv("ODD", "1")
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 78
    assert "odd.0.fn" in result.finish.reason


async def test_another_jobs_folder(tmp_path: Path, staging: str) -> None:
    """A folder with files that are not a job's is left alone; status 3."""
    foreign = tmp_path / "store" / "small" / "thesis.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("do not touch")
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 3
    assert "thesis.txt" in result.finish.reason
    assert foreign.read_text() == "do not touch"


@pytest.mark.extended
async def test_another_owners_job(tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that another owner has not ended is not taken, unless one says so."""

    await drained_at(tmp_path, staging, 12)
    (tmp_path / "store" / "small" / "generations" / "00000001.end.json").unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    refused = await run_job(tmp_path, nodes="1", staging=staging)
    assert refused.finish.exit_code == 3
    assert "--take-over" in refused.finish.reason
    taken = await run_job(tmp_path, nodes="1", staging=staging, take_over=True)
    assert taken.finish.exit_code == 0


async def test_store_that_cannot_be_written(tmp_path: Path, staging: str) -> None:
    """A store whose place is taken by a file: the job does not start, and says why."""
    (tmp_path / "store").write_text("a file, not a folder")
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 1
    assert str(tmp_path / "store") in result.finish.reason


@contextlib.contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """One of this size, in memory."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB for the store."""
    with small_file_system(tmp_path / "store", "1m") as folder:
        yield folder


async def test_disk_full_during_a_save(
    small_disk: Path, tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC: training goes on, the failure is an event, the old checkpoint stays, later saves work again (F76)."""
    monkeypatch.setenv("STEP_SECONDS", "0.05")
    filler = small_disk / "filler"

    async def scenario(supervisor: Supervisor) -> None:
        committed = supervisor.job.newest_committed
        await until(lambda: supervisor.job.newest_committed is not committed)
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        filler.write_bytes(b"x" * (free - 4096))
        await until(lambda: supervisor.job.lowest_step >= 24)
        assert supervisor.job.newest_committed is not None
        assert supervisor.job.newest_committed.step == 10, "the old checkpoint stays the newest"
        filler.unlink()

    result = await run_job(tmp_path, nodes="1", staging=staging, scenario=scenario)
    assert result.finish.exit_code == 0, result.output()
    failed = result.kinds("save failed")
    assert failed
    assert "space" in failed[0].reason
    steps = [record.step for record in result.kinds("committed")]
    assert steps in ([10, 30, 40], [10, 40]), "after a failure the store is left alone for a while"
    assert not result.kinds("restarted"), "training went on"
    check_store(result.store)
    assert final_digests(result.store)


async def test_staging_folder_that_is_too_small(tmp_path: Path) -> None:
    """F106: said after the first step, when shards are planned: what is needed and what to do. There is no restart."""
    with small_file_system(tmp_path / "memory", "8m") as staging:
        result = await run_job(
            tmp_path, nodes="1", staging=str(staging), command=[sys.executable, "-c", LARGE_TRAINING], save_every=1000
        )
    assert result.finish.exit_code == 78, result.output()
    reason = result.finish.reason
    assert re.search(r"has \d MiB left, a staging slot needs 1[2-9] MiB, and each rank has two: give it more", reason)
    assert str(staging) in reason
    assert "--staging" in reason
    assert "step 2" not in result.output(), "it does not train on and fail at the first save"


async def test_script_that_never_attaches(tmp_path: Path, staging: str) -> None:
    """Said plainly; its status is kept."""
    ended = await run_job(tmp_path, nodes="1", staging=staging, command=[sys.executable, "-c", "print('hello')"])
    assert ended.finish.exit_code == 0
    assert "without ever calling orchestrator.attach()" in ended.finish.reason
    failing = [sys.executable, "-c", "raise SystemExit(7)"]
    failed = await run_job(tmp_path / "two", nodes="1", staging=staging, command=failing, job="small-two")
    assert failed.finish.exit_code == 7
    assert "before it called orchestrator.attach()" in failed.finish.reason


@pytest.mark.extended
async def test_abandoned_and_undecided_are_never_used(tmp_path: Path, staging: str) -> None:
    """F20, F22: folders without a committed index, whatever they hold, are not visible to a restart."""
    await drained_at(tmp_path, staging, 23)
    older = older_step(tmp_path)
    newest = newest_folder(tmp_path)
    (newest / "index.json").unlink()
    next(newest.glob("shard-*.json")).unlink()
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    assert result.kinds("generation opened")[0].step == older
    standings = {entry.id.step: entry.standing for entry in survey(result.store).entries if entry.id.generation == 1}
    assert Standing.UNDECIDED in standings.values()


@pytest.mark.extended
async def test_complete_but_undecided_is_rolled_forward(tmp_path: Path, staging: str) -> None:
    """All receipts are there and only the index is missing: the next start commits it and loses nothing."""
    await drained_at(tmp_path, staging, 23)
    older = older_step(tmp_path)
    newest = newest_folder(tmp_path)
    assert older < int(newest.name.rpartition("-s")[2])
    (newest / "index.json").unlink()
    result = await run_job(tmp_path, nodes="1", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    assert result.kinds("generation opened")[0].step == int(newest.name.rpartition("-s")[2])
    assert "1 rolled forward" in result.kinds("generation opened")[0].reason

"""What an agent does on the store: each action ends in one event, errors of the store included; uploads and slots."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator import telemetry
from orchestrator.agent import actions as actions_module
from orchestrator.agent.actions import StoreActions
from orchestrator.agent.uploads import REST_SECONDS_MAX, UPLOAD_NICE, Uploads
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint import save
from orchestrator.checkpoint.generations import read_end
from orchestrator.checkpoint.save import commit, read_index
from orchestrator.clock import SystemClock
from orchestrator.core.messages import (
    Abandon,
    CheckpointId,
    Commit,
    EndRecorded,
    GenerationOpened,
    GenerationRefused,
    IndexDecided,
    IndexFailed,
    OpenGeneration,
    Outcome,
    ReadAgain,
    RecordEnd,
    Refusal,
    SecondReading,
    Superseded,
    Sweep,
    Swept,
)
from orchestrator.errors import FormatError, StoreError
from orchestrator.storage.base import Piece
from orchestrator.storage.memory import MemoryStore
from tests.agent.settings import settings_in
from tests.checkpoint.shards import checkpoint_id, place, stage, upload_all
from tests.checkpoint.stores import change_byte, replace

SMALL = {"w": torch.arange(30, dtype=torch.float32)}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def actions_of(store: MemoryStore, folder: Path, **settings: Any) -> StoreActions:
    return StoreActions(settings_in(folder, **settings), store, SystemClock())


def opening(own: int | None = None, avoid: tuple[CheckpointId, ...] = ()) -> OpenGeneration:
    return OpenGeneration(node="node-1", own=own, avoid=avoid)


def committing(checkpoint: CheckpointId) -> Commit:
    return Commit(node="node-1", generation=checkpoint.generation, step=checkpoint.step)


def abandoning(checkpoint: CheckpointId) -> Abandon:
    return Abandon(node="node-1", generation=checkpoint.generation, step=checkpoint.step, reason="torn")


class Broken(MemoryStore):
    """A store that does nothing any more."""

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        raise StoreError(key, "out of order")

    def entries(self, prefix: str) -> Iterator[Any]:
        raise StoreError(prefix, "out of order")


# --------------------------------------------------------------------------------------------- generations, index


async def test_opening_tells_base_and_meeting_place(store: MemoryStore, tmp_path: Path) -> None:
    actions = actions_of(store, tmp_path)
    opened = await actions.open_generation(opening())
    assert isinstance(opened, GenerationOpened)
    assert (opened.generation, opened.base, opened.rolled_forward, opened.after) == (1, None, 0, 0)
    assert 0 < opened.meeting_port < 65536
    checkpoint = upload_all(store, tmp_path, SMALL)
    opened = await actions.open_generation(opening(own=1))
    assert isinstance(opened, GenerationOpened)
    assert (opened.generation, opened.base, opened.rolled_forward, opened.after) == (2, checkpoint, 1, 1)


@pytest.mark.parametrize(("outcome", "refusal"), [(Outcome.DONE, Refusal.DONE), (Outcome.CANCELLED, Refusal.CANCELLED)])
async def test_a_job_that_is_over_says_how(
    store: MemoryStore, tmp_path: Path, outcome: Outcome, refusal: Refusal
) -> None:
    actions = actions_of(store, tmp_path)
    await actions.open_generation(opening())
    ended = await actions.record_end(RecordEnd(node="node-1", outcome=outcome, reason="why"))
    assert ended == EndRecorded(node="node-1")
    end = read_end(store, 1)
    assert end is not None
    assert end.outcome is outcome
    refused = await actions.open_generation(opening())
    assert isinstance(refused, GenerationRefused)
    assert refused.refusal is refusal
    assert "why" in refused.reason


async def test_a_fenced_agent_says_so(store: MemoryStore, tmp_path: Path) -> None:
    await actions_of(store, tmp_path).open_generation(opening())
    refused = await actions_of(store, tmp_path, owner="stranger", claimant="other").open_generation(opening())
    assert isinstance(refused, GenerationRefused)
    assert refused.refusal is Refusal.FENCED


async def test_an_agent_whose_run_has_a_successor_says_so(store: MemoryStore, tmp_path: Path) -> None:
    """And ends nothing in its name: a drained zombie would be started again, and take the job back."""
    zombie = actions_of(store, tmp_path)
    await zombie.open_generation(opening())
    assert await zombie.superseded(1) is None
    await zombie.open_generation(opening(own=1))
    assert await zombie.superseded(1) is None, "its own next generation"
    await actions_of(store, tmp_path, claimant="other").open_generation(opening())
    told = await zombie.superseded(1)
    assert told is not None
    assert "another run has taken over" in told.reason
    ended = await zombie.record_end(RecordEnd(node="node-1", outcome=Outcome.DRAINED, reason="why"))
    assert isinstance(ended, Superseded)
    assert read_end(store, 2) is None
    assert await actions_of(Broken(), tmp_path).superseded(1) is None, "it is asked again after the next commit"


async def test_nothing_readable_is_told_from_a_store_that_fails(store: MemoryStore, tmp_path: Path) -> None:
    checkpoint = upload_all(store, tmp_path, SMALL)
    commit(store, checkpoint)
    actions = actions_of(store, tmp_path)
    replace(store, fmt.index_key(checkpoint), b"{")
    replace(
        store,
        fmt.generation_key(1),
        fmt.dump(
            fmt.GenerationRecord(
                version=1, job="job", generation=1, owner="owner", claimant="claimant", wall_seconds=1.0
            )
        ),
    )
    refused = await actions.open_generation(opening(own=1))
    assert isinstance(refused, GenerationRefused)
    assert refused.refusal is Refusal.FORMAT
    refused = await actions_of(Broken(), tmp_path).open_generation(opening())
    assert isinstance(refused, GenerationRefused)
    assert refused.refusal is Refusal.STORE
    assert "out of order" in refused.reason


async def test_commit_and_abandon_report_who_won(store: MemoryStore, tmp_path: Path) -> None:
    actions = actions_of(store, tmp_path)
    first, second = checkpoint_id(1, 10), checkpoint_id(1, 20)
    upload_all(store, tmp_path, SMALL, checkpoint=first)
    upload_all(store, tmp_path, SMALL, checkpoint=second)
    found = [
        await actions.commit(committing(first)),
        await actions.abandon(abandoning(first)),
        await actions.abandon(abandoning(second)),
        await actions.commit(committing(second)),
    ]
    assert [event.committed for event in found if isinstance(event, IndexDecided)] == [True, True, False, False]


async def test_what_cannot_be_committed_is_reported_with_its_reason(store: MemoryStore, tmp_path: Path) -> None:
    """F26, F76: a failed save is an event, never a crash."""
    checkpoint = upload_all(store, tmp_path, SMALL, world_size=3, without=(1,))
    event = await actions_of(store, tmp_path).commit(committing(checkpoint))
    assert isinstance(event, IndexFailed)
    assert "ranks [1] are missing" in event.reason
    assert read_index(store, checkpoint) is None
    replace(store, fmt.receipt_key(checkpoint, 0, 3), b"{")
    event = await actions_of(store, tmp_path).commit(committing(checkpoint))
    assert isinstance(event, IndexFailed)


async def test_an_end_that_cannot_be_recorded_is_reported(tmp_path: Path) -> None:
    recording = RecordEnd(node="node-1", outcome=Outcome.DONE, reason="why")
    event = await actions_of(Broken(), tmp_path).record_end(recording)
    assert event.reason is not None
    assert "out of order" in event.reason


# ------------------------------------------------------------------------------------------------------- uploads


@pytest.fixture
def slot(tmp_path: Path) -> tuple[Path, int]:
    """A staged shard in a slot that is larger than it, and the shard's size."""
    data = stage(tmp_path, SMALL)
    path = tmp_path / "slot"
    path.write_bytes(data + b"what an earlier, larger shard left")
    return path, len(data)


def whole(size_bytes: int) -> Callable[[], tuple[int, bool]]:
    """A shard that is staged."""
    return lambda: (size_bytes, True)


async def test_an_upload_takes_the_shard_and_no_byte_more(store: MemoryStore, slot: tuple[Path, int]) -> None:
    uploads = Uploads(store, SystemClock(), 1)
    try:
        made = await uploads.start(place(), slot[0], whole(slot[1]))
    finally:
        uploads.close()
    assert store.size(place().shard_key) == slot[1] == made.size_bytes
    assert commit(store, place().checkpoint)


class Slow(MemoryStore):
    """Waits in `create` until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        super().create(key, pieces)


async def test_a_slot_counts_as_being_read_from_start_to_end(slot: tuple[Path, int]) -> None:
    """It must not be freed before the last byte is out."""
    store = Slow()
    uploads = Uploads(store, SystemClock(), 1)
    try:
        upload = uploads.start(place(), slot[0], whole(slot[1]))
        assert uploads.reading(slot[0])
        await asyncio.to_thread(store.begun.wait, 10)
        assert uploads.reading(slot[0])
        assert not uploads.reading(slot[0].with_name("another"))
        store.go_on.set()
        await upload
        await asyncio.sleep(0)
        assert not uploads.reading(slot[0])
    finally:
        store.go_on.set()
        uploads.close()


async def test_a_slot_that_was_used_again_meanwhile_gets_no_receipt(store: MemoryStore, slot: tuple[Path, int]) -> None:
    """F108: what was read may be two steps' bytes; without a receipt it is never committed."""

    def until_the_receipt() -> tuple[int, bool]:
        if list(store.entries("")):
            raise StoreError(place().shard_key, "no receipt is written")
        return slot[1], True

    uploads = Uploads(store, SystemClock(), 1)
    try:
        with pytest.raises(StoreError, match="no receipt"):
            await uploads.start(place(), slot[0], until_the_receipt)
        await asyncio.sleep(0)
        assert not uploads.reading(slot[0])
    finally:
        uploads.close()
    assert not any(entry.key.endswith(".json") for entry in store.entries(""))


@pytest.mark.parametrize("content", [None, b"", b"short"], ids=["missing", "empty", "short"])
async def test_a_slot_that_is_not_what_it_should_be_is_an_error_of_the_upload(
    store: MemoryStore, tmp_path: Path, content: bytes | None
) -> None:
    """The node's memory went with the node: the save fails, the agent does not."""
    path = tmp_path / "slot"
    if content is not None:
        path.write_bytes(content)
    uploads = Uploads(store, SystemClock(), 1)
    try:
        with pytest.raises((FormatError, FileNotFoundError)):
            await uploads.start(place(), path, whole(8192))
    finally:
        uploads.close()


class Ticking:
    """A clock that only sleeping and writing move on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.rests: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds


class SlowDisk(MemoryStore):
    """Takes some time for each piece, and notes the priority of the thread that writes."""

    def __init__(self, clock: Ticking, piece_seconds: float) -> None:
        super().__init__()
        self.nices: set[int] = set()
        self._clock, self._piece_seconds = clock, piece_seconds

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        def slowly() -> Iterator[Piece]:
            for piece in pieces:
                self.nices.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                self._clock.now += self._piece_seconds if key.endswith(".safetensors") else 0.0
                yield piece

        super().create(key, slowly())


@pytest.mark.parametrize(
    ("hurried", "piece_seconds", "rest_seconds"),
    [(False, 0.125, 0.125), (False, 2.0, REST_SECONDS_MAX), (True, 0.125, 0)],
)
async def test_uploads_leave_the_training_half_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hurried: bool, piece_seconds: float, rest_seconds: float
) -> None:
    """Not when there is no time to lose; and rests do not count where it is measured how fast the store is."""
    monkeypatch.setattr(save, "PIECE_BYTES", 4096)
    data = stage(tmp_path, {"x": torch.arange(2048)})
    (tmp_path / "slot").write_bytes(data)
    pieces = -(-len(data) // 4096)
    clock = Ticking()
    store = SlowDisk(clock, piece_seconds)
    uploads = Uploads(store, clock, 1, lambda: hurried, clock.sleep)
    try:
        made = await uploads.start(place(), tmp_path / "slot", whole(len(data)))
    finally:
        uploads.close()
    assert made.seconds == pytest.approx(pieces * piece_seconds)
    assert clock.rests == ([] if hurried else pytest.approx([rest_seconds] * pieces))
    assert store.nices == {UPLOAD_NICE}
    assert store.read(place().shard_key) == data
    assert place().receipt_key in {entry.key for entry in store.entries("")}


async def test_the_named_points_of_an_upload_come_in_order(store: MemoryStore, slot: tuple[Path, int]) -> None:
    seen: list[tuple[str, int]] = []
    telemetry.set_point_hook(lambda point, where: seen.append((point, len(list(store.entries(""))))))
    uploads = Uploads(store, SystemClock(), 1)
    try:
        await uploads.start(place(), slot[0], whole(slot[1]))
    finally:
        uploads.close()
        telemetry.set_point_hook(None)
    assert seen == [("before-shard-upload", 0), ("after-shard-upload", 1), ("after-receipt", 2)]


# ------------------------------------------------------------------------------------------ sweeps, second readings


def sweeping(generation: int = 1, keep_last: int = 1) -> Sweep:
    return Sweep(
        node="node-1", generation=generation, keep_last=keep_last, keep_every_steps=0, in_flight=(), grace_seconds=60.0
    )


async def test_a_sweep_says_what_it_has_done(store: MemoryStore, tmp_path: Path) -> None:
    actions = actions_of(store, tmp_path)
    await actions.open_generation(opening())
    old, _ = (save_one(store, tmp_path, step) for step in (10, 20))
    done = await actions.sweep(sweeping())
    assert (done.retired, done.problem) == ((old,), None)
    assert done.freed_bytes > 0
    assert await actions.sweep(sweeping()) == Swept(node="node-1", generation=1)


async def test_a_sweep_that_may_not_says_why(store: MemoryStore, tmp_path: Path) -> None:
    actions = actions_of(store, tmp_path)
    await actions.open_generation(opening())
    await actions.open_generation(opening(own=1))
    done = await actions.sweep(sweeping(generation=1))
    assert done.problem == "generation 2 is there: generation 1 deletes nothing any more"
    broken = await actions_of(Broken(), tmp_path).sweep(sweeping())
    assert "out of order" in (broken.problem or "")


async def test_the_end_record_of_a_job_that_is_done_waits_for_the_sweep(store: MemoryStore, tmp_path: Path) -> None:
    actions = actions_of(store, tmp_path)
    await actions.open_generation(opening())
    old, _ = (save_one(store, tmp_path, step) for step in (10, 20))
    sweep = asyncio.create_task(actions.sweep(sweeping()))
    await asyncio.sleep(0)
    await actions.record_end(RecordEnd(node="node-1", outcome=Outcome.DONE, reason="done"))
    assert sweep.done()
    assert fmt.retired_key(old) in [entry.key for entry in store.entries("")]


async def test_a_sweep_without_an_end_does_not_hold_up_the_end_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the record the same command would train on a job that is done."""
    monkeypatch.setattr(actions_module, "LAST_SWEEP_SECONDS", 0.05)
    goes_on = threading.Event()

    class Slow(MemoryStore):
        def delete(self, key: str) -> None:
            assert goes_on.wait(20)
            super().delete(key)

    store = Slow()
    actions = actions_of(store, tmp_path)
    await actions.open_generation(opening())
    for step in (10, 20):
        save_one(store, tmp_path, step)
    sweep = asyncio.create_task(actions.sweep(sweeping()))
    await asyncio.sleep(0)
    await actions.record_end(RecordEnd(node="node-1", outcome=Outcome.DONE, reason="done"))
    assert read_end(store, 1) is not None
    assert not sweep.done()
    goes_on.set()
    assert (await sweep).problem is None


async def test_a_second_reading_sets_aside_what_is_bad_here_too(store: MemoryStore, tmp_path: Path) -> None:
    actions = actions_of(store, tmp_path)
    await actions.open_generation(opening())
    checkpoint = save_one(store, tmp_path, 10)
    asked = ReadAgain(node="node-1", generation=2, checkpoint=checkpoint, first="rank 0 on node-0: DigestError")
    assert await actions.second_reading(asked) == SecondReading(node="node-1", generation=2, checkpoint=checkpoint)
    assert fmt.quarantine_key(checkpoint) not in [entry.key for entry in store.entries("")]
    change_byte(store, fmt.shard_key(checkpoint, 0, 1), -1)
    found = await actions.second_reading(asked)
    assert "does not match its digest" in (found.mismatch or "")
    marker = fmt.load(fmt.Marker, "marker", store.read(fmt.quarantine_key(checkpoint)))
    assert marker.reason == f"rank 0 on node-0: DigestError; node-1: {found.mismatch}"
    gone = await actions.second_reading(
        ReadAgain(node="node-1", generation=2, checkpoint=checkpoint_id(7, 7), first="")
    )
    assert gone.mismatch is None
    assert gone.problem is not None


def save_one(store: MemoryStore, folder: Path, step: int) -> CheckpointId:
    checkpoint = upload_all(store, folder, SMALL, checkpoint=checkpoint_id(1, step))
    assert commit(store, checkpoint)
    return checkpoint

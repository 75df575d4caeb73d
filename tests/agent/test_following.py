"""Uploads that begin while their shard is still being staged, as when all leave: receipts wait for the order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.reader import verify_shard
from orchestrator.checkpoint.save import commit, read_index
from orchestrator.core.messages import Mode, Settled, Uploaded, UploadFailed
from orchestrator.errors import StoreFullError
from tests.agent.simulated_agent import GENERATION, NODE, STATE, Scene
from tests.agent.test_away import ordered, running
from tests.checkpoint.shards import checkpoint_id, place, stage

STEP = 10


def shards(scene: Scene) -> list[str]:
    return [entry.key for entry in scene.store.entries("checkpoints/") if entry.key.endswith(".safetensors")]


class Staging:
    """A worker that writes a shard into its slot bit by bit."""

    def __init__(self, scene: Scene, rank: int = 0) -> None:
        self._worker = scene.runtime.launched[rank]
        where = place(rank, scene.world_size, (), checkpoint_id(GENERATION, STEP))
        self._data = stage(scene.folder / "made", STATE, where)
        self._worker.slot_paths[0].write_bytes(b"\xff" * len(self._data))

    def begin(self) -> None:
        self._worker.control.start_slot(0, GENERATION, STEP)

    def half(self) -> None:
        half = len(self._data) // 2
        with self._worker.slot_paths[0].open("r+b") as slot:
            slot.write(self._data[:half])
        self._worker.control.advance_slot(0, STEP, half)

    def end(self) -> None:
        with self._worker.slot_paths[0].open("r+b") as slot:
            slot.write(self._data)
        self._worker.control.finish_slot(0, GENERATION, STEP, len(self._data), 1_000_000)
        self._worker.control.publish(STEP, 0)


async def leaving(scene: Scene, mode: Mode = Mode.LEAVE) -> Staging:
    """A gang that has agreed, and whose worker has begun to stage."""
    await running(scene)
    scene.agree(STEP, mode=mode)
    await asyncio.sleep(0.5)
    staging = Staging(scene)
    staging.begin()
    await asyncio.sleep(0.5)
    staging.half()
    await asyncio.sleep(0.5)
    return staging


def test_the_shard_is_there_when_it_is_staged_and_the_receipt_when_it_is_ordered(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        staging = await leaving(scene)
        assert shards(scene) == []
        staging.end()
        await asyncio.sleep(1)
        assert len(shards(scene)) == 1
        assert scene.receipts() == [], "nobody has said that all ranks have staged the step"
        scene.supervisor.say(ordered(scene, STEP))
        await asyncio.sleep(1)
        assert len(scene.receipts()) == 1
        (uploaded,) = [event for event in scene.supervisor.heard if isinstance(event, Uploaded)]
        assert uploaded.seconds < 0.5, "waiting for the worker and the order says nothing about the store"
        assert commit(scene.store, checkpoint_id(GENERATION, STEP))
        index = read_index(scene.store, checkpoint_id(GENERATION, STEP))
        assert isinstance(index, fmt.Index)
        assert verify_shard(scene.store, index, index.shards[0]) is None

    scene.play(story)


def test_while_training_goes_on_nothing_is_read_that_is_still_being_staged(tmp_path: Path) -> None:
    """Staging takes its time then, beside the training, and may come to nothing."""
    scene = Scene(tmp_path)

    async def story() -> None:
        staging = await leaving(scene, Mode.STAY)
        assert not scene.agent._uploads.reading(scene.runtime.launched[0].slot_paths[0])
        staging.end()
        scene.supervisor.say(ordered(scene, STEP))
        await asyncio.sleep(1)
        assert len(scene.receipts()) == 1

    scene.play(story)


@pytest.mark.parametrize("settled", [False, True], ids=["given up by the worker", "settled without it"])
def test_what_comes_to_nothing_leaves_neither_shard_nor_receipt_nor_a_complaint(
    tmp_path: Path, *, settled: bool
) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        staging = await leaving(scene)
        worker = scene.runtime.launched[0]
        if settled:
            staging.end()
            await asyncio.sleep(0.5)
            scene.supervisor.say(Settled(node=NODE, generation=GENERATION, step=STEP, committed=False))
        else:
            worker.control.report_passed(STEP)
        await asyncio.sleep(1)
        assert scene.receipts() == []
        assert len(shards(scene)) == settled
        assert not scene.agent._uploads.reading(worker.slot_paths[0])
        assert not worker.control.holds_any, "its slot is free again"
        assert not [event for event in scene.supervisor.heard if isinstance(event, UploadFailed)]

    scene.play(story)


def test_a_store_that_fails_meanwhile_is_tried_again_when_it_is_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then does anybody hear of it."""
    scene = Scene(tmp_path)
    tried: list[str] = []

    def full(key: str, pieces: Any) -> None:
        tried.append(key)
        raise StoreFullError(key, "no space")

    async def story() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(scene.store, "create", full)
            staging = await leaving(scene)
            staging.end()
            await asyncio.sleep(2)
        assert len(tried) == 1
        assert not [event for event in scene.supervisor.heard if isinstance(event, UploadFailed)]
        scene.supervisor.say(ordered(scene, STEP))
        await asyncio.sleep(1)
        assert len(scene.receipts()) == 1

    scene.play(story)


def test_a_slot_that_grows_before_its_first_byte_is_mapped_whole(tmp_path: Path) -> None:
    """The worker plans anew for who is absent, and finds that it needs more room than it had reserved."""
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.agree(STEP, mode=Mode.LEAVE)
        await asyncio.sleep(0.5)
        staging = Staging(scene)
        path = scene.runtime.launched[0].slot_paths[0]
        content = path.read_bytes()
        path.write_bytes(b"")
        staging.begin()
        await asyncio.sleep(0.5)
        path.write_bytes(content)
        staging.half()
        await asyncio.sleep(0.5)
        staging.end()
        scene.supervisor.say(ordered(scene, STEP))
        await asyncio.sleep(1)
        assert commit(scene.store, checkpoint_id(GENERATION, STEP))

    scene.play(story)


def test_a_follower_gives_up_when_its_generation_is_over(tmp_path: Path) -> None:
    """Though nobody settles the step: else a thread is lost for each restart."""
    scene = Scene(tmp_path)

    async def story() -> None:
        staging = await leaving(scene)
        staging.end()
        await asyncio.sleep(0.5)
        worker = scene.runtime.launched[0]
        assert scene.agent._uploads.reading(worker.slot_paths[0])
        worker.control.free_slot(0)
        await asyncio.sleep(0.5)
        assert not scene.agent._uploads.reading(worker.slot_paths[0])
        assert scene.receipts() == []

    scene.play(story)


def test_an_agent_that_ends_does_not_wait_for_a_shard_or_an_order(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        staging = await leaving(scene)
        staging.end()
        await asyncio.sleep(0.5)
        scene.agent._uploads.close()
        await asyncio.sleep(0.5)
        assert scene.receipts() == []
        assert not scene.agent._uploads.reading(scene.runtime.launched[0].slot_paths[0])

    scene.play(story)

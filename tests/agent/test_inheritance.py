"""What a new gang takes over from the one before: slot files, and the base's shards in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.agent.gang import LocalGang
from orchestrator.agent.inheritance import Inheritance
from orchestrator.agent.staged import Nearby, NodeObjects
from orchestrator.agent.workers import ProcessRuntime
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import HeldShard, Launch
from orchestrator.checkpoint.near import NearStore
from orchestrator.checkpoint.slots import SlotState
from orchestrator.core.messages import CheckpointId, Holder, LaunchWorkers, Prepare
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.memory import MemoryStore
from tests.agent.settings import settings_in

BASE = CheckpointId(generation=3, step=20)
URL = "http://127.0.0.1:2"


def gang_in(
    folder: Path,
    *,
    generation: int,
    count: int = 2,
    base: CheckpointId | None = None,
    inheritance: Inheritance | None = None,
    holders: tuple[Holder, ...] = (),
) -> LocalGang:
    folder.mkdir(exist_ok=True)
    action = LaunchWorkers(
        node="node-1",
        generation=generation,
        world_size=count,
        first_rank=0,
        count=count,
        base=base,
        meeting_address="127.0.0.1",
        meeting_port=1,
        holders=holders,
    )
    settings = settings_in(folder, workers=count)
    runtime, token = ProcessRuntime(), "objects token"
    return LocalGang(settings, runtime, action, URL, token, inheritance=inheritance or Inheritance())


def stage(gang: LocalGang, index: int, step: int) -> None:
    """Every worker has staged the step in that slot."""
    for worker in gang.workers:
        content = content_of(worker.rank, step)
        worker.slot_paths[index].write_bytes(content + bytes(100))
        worker.slot_paths[1 - index].touch()
        worker.control.finish_slot(index, gang.generation, step, len(content), 0)


def content_of(rank: int, step: int) -> bytes:
    return f"rank {rank} at step {step}".encode()


def held(gang: LocalGang, rank: int) -> bytes | None:
    found = gang.staged_shard(BASE, rank)
    return None if found is None else found[0].read_bytes()[: found[1]]


def nobody_reads(path: Path) -> bool:
    return False


@pytest.mark.parametrize("index", [0, 1])
def test_the_bases_shards_stay_until_the_new_gang_trains(tmp_path: Path, index: int) -> None:
    old = gang_in(tmp_path, generation=3)
    stage(old, index, 20)
    new = gang_in(tmp_path, generation=4, base=BASE, inheritance=old.hand_down(BASE, nobody_reads))
    assert [held(new, rank) for rank in (0, 1)] == [content_of(0, 20), content_of(1, 20)]
    assert [worker.control.slot(0).state for worker in new.workers] == [SlotState.FREE] * 2
    assert [worker.control.slot(1).state for worker in new.workers] == [SlotState.STAGED] * 2
    new.free(lambda step: True, nobody_reads)
    assert held(new, 0) is not None, "it is no step of this generation"
    assert list(new.observe()) == [], "nobody has staged anything"
    new.prepare(Prepare(node="node-1", generation=4, ballot=1, step=25))
    assert [held(new, rank) for rank in (0, 1)] == [None, None]
    assert [worker.control.slot(1).state for worker in new.workers] == [SlotState.FREE] * 2
    new.hand_down(None, lambda _: True)
    assert list(tmp_path.iterdir()) == []


def test_a_gang_that_never_trained_hands_the_base_on(tmp_path: Path) -> None:
    """Two restarts in a row from one base; between them other ranks live here."""
    old = gang_in(tmp_path, generation=3, count=1)
    stage(old, 0, 20)
    second = gang_in(tmp_path, generation=4, count=2, base=BASE, inheritance=old.hand_down(BASE, nobody_reads))
    third = gang_in(tmp_path, generation=5, count=1, base=BASE, inheritance=second.hand_down(BASE, nobody_reads))
    assert held(third, 0) == content_of(0, 20)


def test_another_base_makes_all_slots_free(tmp_path: Path) -> None:
    old = gang_in(tmp_path, generation=3)
    stage(old, 0, 20)
    other = CheckpointId(generation=2, step=20)
    inheritance = old.hand_down(other, nobody_reads)
    assert (len(inheritance.held), len(inheritance.spare)) == (0, 4)
    new = gang_in(tmp_path, generation=4, base=other, inheritance=inheritance)
    assert held(new, 0) is None
    assert all(path.exists() for worker in new.workers for path in worker.slot_paths), "the memory is used again"


def test_a_slot_that_is_still_read_is_not_written_again(tmp_path: Path) -> None:
    old = gang_in(tmp_path, generation=3, count=1)
    stage(old, 0, 20)
    read = old.workers[0].slot_paths[0]
    inheritance = old.hand_down(None, lambda path: path == read)
    assert inheritance == Inheritance(spare=(old.workers[0].slot_paths[1],))
    assert not read.exists()


def gone(path: Path) -> None:
    path.unlink()


def folder_there(path: Path) -> None:
    path.unlink()
    (path / "within").mkdir(parents=True)


def pipe_there(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_there(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [gone, folder_there, pipe_there, link_there])
@pytest.mark.parametrize("early", [True, False], ids=["before it is handed down", "after"])
def test_slots_that_are_no_files_any_more_are_not_inherited(
    tmp_path: Path, change: Callable[[Path], None], *, early: bool
) -> None:
    """Somebody has cleaned the memory disk: the store has it all, and the new gang gets slots of its own."""
    old = gang_in(tmp_path, generation=3)
    stage(old, 0, 20)
    paths = [path for worker in old.workers for path in worker.slot_paths]
    if early:
        for path in paths:
            change(path)
    inheritance = old.hand_down(BASE, nobody_reads)
    if not early:
        for path in paths:
            change(path)
    new = gang_in(tmp_path, generation=4, base=BASE, inheritance=inheritance)
    assert held(new, 0) is held(new, 1) is None
    assert [worker.control.slot(1).state for worker in new.workers] == [SlotState.FREE] * 2
    assert not any(path.exists() or path.is_symlink() for worker in new.workers for path in worker.slot_paths)
    if early:
        assert not any(path.exists() or path.is_symlink() for path in paths)


def test_what_is_too_much_for_the_new_gang_is_removed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.touch()
    shards = tuple(
        HeldShard(checkpoint=BASE, rank=rank, path=path, size_bytes=0) for rank, path in enumerate(paths[:2])
    )
    slots = [(tmp_path / "slot-0", tmp_path / "slot-1")]
    moved = list(Inheritance(held=shards, spare=tuple(paths[2:])).move(slots))
    assert [shard.rank for shard in moved if shard] == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slot-0", "slot-1"]


class Counted(MemoryStore):
    """A store that counts what it is asked."""

    reads = 0

    def size(self, key: str) -> int:
        self.reads += 1
        return super().size(key)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.reads += 1
        return super().read(key, start, stop)


def objects_of(gang: LocalGang, store: ObjectStore, nearby: Nearby) -> NodeObjects:
    return NodeObjects(store, gang.staged_shard, nearby)


def test_a_shard_comes_from_this_node_then_from_another_then_from_the_store(tmp_path: Path) -> None:
    gangs: list[LocalGang] = []
    for name in ("a", "b"):
        old = gang_in(tmp_path / name, generation=3)
        stage(old, 0, 20)
        inheritance = old.hand_down(BASE, nobody_reads)
        # each node still has the shard of one rank: a that of rank 0, b that of rank 1
        kept = tuple(shard for shard in inheritance.held if shard.rank == len(gangs))
        inheritance = Inheritance(held=kept)
        holders = (Holder(first_rank=1, count=1, objects_url="http://b"),)
        gangs.append(gang_in(tmp_path / name, generation=4, base=BASE, inheritance=inheritance, holders=holders))
    store = Counted()
    store.create("generations/00000001.json", [b"{}"])
    keys = [fmt.shard_key(BASE, rank, 2) for rank in (0, 1)]
    for rank, key in enumerate(keys):
        store.create(key, [content_of(rank, 20)])
    far = Nearby("token", never, lambda rank: None)
    opened: list[str] = []

    def open_peer(url: str, token: str) -> Opened:
        opened.append(url)
        return Opened(objects_of(gangs[1], store, far))

    agent = objects_of(gangs[0], store, Nearby("token", open_peer, gangs[0].holder_url))
    launch = Launch.read(gangs[0].workers[1].launch_path)
    near = NearStore(store, agent, launch.held, held_elsewhere=launch.held_elsewhere)
    assert [near.read(key, 5) for key in keys] == [content_of(rank, 20)[5:] for rank in (0, 1)]
    assert [near.size(key) for key in keys] == [len(content_of(rank, 20)) for rank in (0, 1)]
    assert (store.reads, opened) == (0, ["http://b"]), "the store is asked nothing at all"
    gangs[1].prepare(Prepare(node="node-1", generation=4, ballot=1, step=25))
    assert [near.read(key) for key in (keys[1], keys[1], keys[0])] == [content_of(rank, 20) for rank in (1, 1, 0)]
    assert (store.reads, opened) == (2, ["http://b"]), "a node that has failed is not asked again"
    buffer = bytearray(8)
    assert near.read_into(keys[0], 3, [memoryview(buffer)]) == 8
    assert buffer == content_of(0, 20)[3:11]
    assert near.read("generations/00000001.json") == b"{}", "everything else is the store's"


def test_where_no_other_node_has_anything_the_agent_is_not_asked(tmp_path: Path) -> None:
    gang = gang_in(tmp_path / "a", generation=4, base=BASE, holders=(Holder(first_rank=0, count=2, objects_url=URL),))
    launch = Launch.read(gang.workers[0].launch_path)
    assert (launch.held, launch.held_elsewhere) == ((), False), "the only holder is this node itself"
    store, key = MemoryStore(), fmt.shard_key(BASE, 0, 2)
    store.create(key, [b"shard"])
    near = NearStore(store, MemoryStore(), launch.held, held_elsewhere=launch.held_elsewhere)
    assert (near.read(key), near.size(key)) == (b"shard", 5)


class Opened:
    """An open peer."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def __enter__(self) -> ObjectStore:
        return self._objects

    def __exit__(self, *_: object) -> None:
        return


def never(url: str, token: str) -> Opened:
    raise AssertionError(url)

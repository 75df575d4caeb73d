"""From shards to a decision: receipts, commit against abandon, repeats. Exactly one outcome, believed by all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint import save as saving
from orchestrator.checkpoint.save import (
    METADATA_KEY,
    abandon,
    commit,
    draft_index,
    read_index,
    shard_metadata,
    upload_shard,
)
from orchestrator.checkpoint.slots import build_header
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import DigestError, FormatError, StoreError, VersionError
from orchestrator.storage.base import ObjectStore, Piece, bytes_at_most
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import GATE, checkpoint_id, place, stage, upload, upload_all
from tests.checkpoint.stores import CountingStore, at_once, new_store, replace

TENSORS = {"w": torch.arange(300_000, dtype=torch.float32), "b": torch.ones(3, dtype=torch.float64)}
SMALL = {"w": torch.arange(30, dtype=torch.float32)}


# ------------------------------------------------------------------------------------------------ shard, receipt


def test_the_receipt_says_what_is_in_the_shard(any_store: ObjectStore, tmp_path: Path) -> None:
    data = stage(tmp_path, TENSORS)
    receipt = upload(any_store, place(), data)
    assert any_store.read(place().shard_key) == data
    assert fmt.load_receipt("receipt", any_store.read(place().receipt_key), fmt.Receipt) == receipt
    assert receipt.size_bytes == len(data)
    blocks = fmt.unpack_blocks("shard", receipt.blocks, len(data))
    assert len(blocks) == 2
    assert receipt.crc32c == crc32c.crc32c(data)
    assert blocks[0] == crc32c.crc32c(data[: fmt.BLOCK_BYTES])
    table = receipt.tensors
    assert (table.names, table.dtypes, table.shapes) == (("b", "w"), ("F64", "F32"), ((3,), (300_000,)))
    assert (table.starts, table.lengths) == ((0, 0), (3, 300_000))
    first = receipt.header_bytes
    assert data[first : first + 24] == TENSORS["b"].numpy().tobytes()
    assert data[first + 24 :] == TENSORS["w"].numpy().tobytes()


def test_only_the_first_present_ranks_receipt_repeats_the_values(tmp_path: Path) -> None:
    """Every rank has them alike, and they grow with the tensors; the others' receipts say by digest that they do."""
    store = MemoryStore()
    upload_all(store, tmp_path, SMALL, world_size=4, absent=(0,), values={"scheduler": {"at": 1}})
    receipts = [fmt.load_receipt("receipt", store.read(place(rank, 4).receipt_key), fmt.Receipt) for rank in range(4)]
    assert [one.values for one in receipts] == [None, {"objects": {"scheduler": {"at": 1}}}, None, None]
    assert len({one.objects["scheduler"] for one in receipts}) == 1


def test_the_shard_is_durable_before_its_receipt_is_written(tmp_path: Path) -> None:
    store = MemoryStore()
    seen: list[set[str]] = []
    upload_shard(
        store,
        place(),
        memoryview(stage(tmp_path, SMALL)),
        before_receipt=lambda: seen.append({e.key for e in store.entries("")}),
    )
    assert seen == [{place().shard_key}]
    assert {entry.key for entry in store.entries("")} == {place().shard_key, place().receipt_key}


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_shard_is_uploaded_while_it_is_being_made(
    any_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    """What is not there yet is not read: it is garbage until somebody says that it is there."""
    monkeypatch.setattr(saving, "PIECE_BYTES", fmt.BLOCK_BYTES)
    data = stage(tmp_path, {"x": torch.arange(3 << 17)})
    if again:
        upload_shard(any_store, place(), memoryview(data))
    memory = bytearray(b"\xff" * (len(data) + 5000))  # a slot is larger than the shard, and was used before
    made, asked = 0, []

    def there(wanted_bytes: int) -> tuple[int, bool]:
        nonlocal made
        asked.append(wanted_bytes)
        while made < min(wanted_bytes, len(data)):
            low, made = made, min(made + 700_000, len(data))
            memory[low:made] = data[low:made]
        return made, made == len(data)

    receipt = upload_shard(any_store, place(), memoryview(memory), await_bytes=there)
    assert receipt.size_bytes == len(data)
    assert any_store.read(place().shard_key) == data
    assert asked == [fmt.BLOCK_BYTES * (number + 1) for number in range(-(-len(data) // fmt.BLOCK_BYTES))]
    assert commit(any_store, place().checkpoint)


def test_a_store_is_told_how_large_a_shard_may_get(tmp_path: Path) -> None:
    """Also while it is still being made: its memory is at least as long."""
    data = stage(tmp_path, SMALL)
    told = []

    class AskedStore(CountingStore):
        def create(self, key: str, pieces: Iterable[Piece]) -> None:
            told.append(bytes_at_most(pieces))
            super().create(key, pieces)

    memory = memoryview(data + bytes(500))
    upload_shard(AskedStore(MemoryStore()), place(), memory, await_bytes=lambda _: (len(data), True))
    assert told[0] == len(memory)


def test_bytes_that_the_memory_does_not_have_are_an_error(any_store: ObjectStore, tmp_path: Path) -> None:
    """A slot that grew after it was mapped: never a shard that is cut off, and never an endless upload."""
    data = stage(tmp_path, {"x": torch.arange(3 << 20)})
    with pytest.raises(FormatError, match="are said to be there, in memory of"):
        upload_shard(any_store, place(), memoryview(data)[:-4096], await_bytes=lambda _: (len(data), True))
    assert not list(any_store.entries(""))


class TwiceStore(MemoryStore):
    """Takes what it is given only at the second attempt, as a store that tries again does."""

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        if key.endswith(".safetensors"):
            next(iter(pieces))
        super().create(key, pieces)


def test_a_store_that_takes_the_pieces_anew_gets_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "PIECE_BYTES", fmt.BLOCK_BYTES)
    store, data = TwiceStore(), stage(tmp_path, {"x": torch.arange(3 << 17)})
    upload_shard(store, place(), memoryview(data))
    assert store.read(place().shard_key) == data
    assert commit(store, place().checkpoint)


def test_a_shard_that_is_given_up_while_it_is_uploaded_is_never_there(any_store: ObjectStore, tmp_path: Path) -> None:
    data = stage(tmp_path, {"x": torch.arange(3 << 20)})

    def there(wanted_bytes: int) -> tuple[int, bool]:
        if wanted_bytes > len(data) // 2:
            raise StoreError(place().shard_key, "given up")
        return wanted_bytes, False

    with pytest.raises(StoreError, match="given up"):
        upload_shard(any_store, place(), memoryview(data), await_bytes=there)
    assert not list(any_store.entries(""))


def test_uploading_the_same_shard_again_is_harmless(any_store: ObjectStore, tmp_path: Path) -> None:
    """F36: nothing is overwritten. A repeat, after a lost answer say, finds its own bytes and goes on."""
    data = stage(tmp_path, TENSORS)
    first = upload(any_store, place(), data)
    assert upload(any_store, place(), data) == first
    any_store.delete(place().receipt_key)  # the first attempt ended between the two writes
    assert upload(any_store, place(), data) == first
    assert any_store.read(place().shard_key) == data


@pytest.mark.parametrize("where", ["first byte", "last byte", "size"])
def test_another_shard_under_the_same_key_is_refused(any_store: ObjectStore, tmp_path: Path, where: str) -> None:
    data = stage(tmp_path, TENSORS)
    upload(any_store, place(), data)
    if where == "size":
        other = data + b"\0" * 8
    else:
        position = 0 if where == "first byte" else len(data) - 1
        other = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
    with pytest.raises(DigestError, match="another shard"):
        upload(any_store, place(), other)
    assert any_store.read(place().shard_key) == data


def test_another_receipt_under_the_same_key_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    store.create(place().receipt_key, [b"{}"])
    with pytest.raises(DigestError, match="another receipt"):
        upload(store, place(), stage(tmp_path, SMALL))


def test_bytes_that_did_not_all_arrive_leave_no_receipt(tmp_path: Path) -> None:
    class LosingStore(MemoryStore):
        """Keeps one byte less than it was given."""

        def create(self, key: str, pieces: Iterable[Piece]) -> None:
            super().create(key, [b"".join(pieces)[:-1]])

    store = LosingStore()
    data = stage(tmp_path, SMALL)
    with pytest.raises(DigestError, match=rf"{len(data) - 1} bytes arrived of {len(data)}"):
        upload(store, place(), data)
    assert [entry.key for entry in store.entries("")] == [place().shard_key]


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\x02" + b"\0" * 7 + b"{}", b"PK\x03\x04 some archive"])
def test_what_is_no_shard_gets_no_receipt(data: bytes) -> None:
    store = MemoryStore()
    with pytest.raises(FormatError):
        upload(store, place(), data)
    assert not any(entry.key.endswith(".json") for entry in store.entries(""))


GOOD_ENTRIES = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
}


@pytest.mark.parametrize(
    ("entries", "parts", "word"),
    [
        ({"a": {"data_offsets": [0, 4]}}, {}, "a is not where its shape puts it"),
        ({"a": {"data_offsets": [4, 12]}}, {}, "a is not where its shape puts it"),
        ({"b": {"data_offsets": [9, 13]}}, {}, "b is not where its shape puts it"),
        ({"b": {"data_offsets": [4, 8]}}, {}, "b is not where its shape puts it"),
        ({"b": {"shape": [5], "data_offsets": [8, 13]}}, {}, "13 bytes of tensors in 12"),
        ({"b": {"shape": [1 << 40], "data_offsets": [8, 8 + (1 << 40)]}}, {}, "bytes of tensors in 12"),
        ({"b": {"shape": [2], "dtype": "F16"}}, {}, ""),
        ({"b": {"dtype": "F4"}}, {}, "b: 'F4'"),
        ({"b": {"shape": None}}, {}, "b: "),
        ({"b": {"data_offsets": [8]}}, {}, "b: "),
        ({}, {"a": {"start": 0}}, "a: 'shape'"),
        ({}, {"a": {"shape": [4]}}, "a: 'start'"),
        ({}, {"a": 7}, "a: "),
        ({}, [], "metadata is of another form"),
    ],
)
def test_a_header_that_does_not_fill_its_file_gets_no_receipt(entries: Any, parts: Any, word: str) -> None:
    """The table of a receipt is the header's: what does not fit there is never written down as durable."""
    changed = {name: {**entry, **entries.get(name, {})} for name, entry in GOOD_ENTRIES.items()}
    text = json.dumps({"parts": parts, "values": {}, "rank_values": {}, "gate": {**GATE}})
    header = build_header(changed, {METADATA_KEY: text}, 4096)
    store = MemoryStore()
    if not word:
        assert upload(store, place(), header + bytes(12)).tensors.lengths == (2, 2)
        return
    with pytest.raises(FormatError, match=f"is not a shard of this project: .*{word}"):
        upload(store, place(), header + bytes(12))
    assert not any(entry.key.endswith(".json") for entry in store.entries(""))


def test_values_that_are_not_json_get_no_receipt() -> None:
    text = '{"parts":{},"values":{"objects":{"a":NaN}},"rank_values":{},"gate":{}}'
    with pytest.raises(FormatError, match="is not a shard of this project: expected value"):
        upload(MemoryStore(), place(), build_header({}, {METADATA_KEY: text}, 4096))


def test_a_foreign_safetensors_file_is_no_shard() -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    with pytest.raises(FormatError, match="not a shard of this project"):
        shard_metadata("shard", memoryview(len(header).to_bytes(8, "little") + header.encode() + b"\0"))


# ------------------------------------------------------------------------------------------------------ commit


@pytest.mark.parametrize("absent", [(), (1,), (0, 3)])
def test_commit_names_the_ranks_that_are_missing(tmp_path: Path, absent: tuple[int, ...]) -> None:
    """F28, F30: commit needs every rank's receipt, and says whose are not there."""
    store = MemoryStore()
    wanted = [rank for rank in range(5) if rank not in absent]
    checkpoint = checkpoint_id()
    with pytest.raises(StoreError, match="no receipt"):
        commit(store, checkpoint)
    for rank in wanted[:-1]:
        upload(store, place(rank, 5, absent), stage(tmp_path, SMALL, place(rank, 5, absent)))
        missing = [one for one in wanted if one > rank]
        with pytest.raises(StoreError) as caught:
            commit(store, checkpoint)
        assert f"ranks {missing} are missing" in str(caught.value)
        assert read_index(store, checkpoint) is None
    upload(store, place(wanted[-1], 5, absent), stage(tmp_path, SMALL, place(wanted[-1], 5, absent)))
    assert commit(store, checkpoint)


def test_where_everyone_is_absent_everyone_is_needed(tmp_path: Path) -> None:
    """If all nodes go, all own something: one receipt alone makes no checkpoint."""
    store = MemoryStore()
    everyone = (0, 1)
    upload_all(store, tmp_path, SMALL, world_size=2, absent=everyone, without=(1,))
    with pytest.raises(StoreError, match=r"ranks \[1\] are missing"):
        commit(store, checkpoint_id())
    upload_all(store, tmp_path, SMALL, world_size=2, absent=everyone, without=(0,))
    assert commit(store, checkpoint_id())


@pytest.mark.parametrize("with_victim", [False, True])
def test_an_absent_rank_is_taken_in_if_it_made_it(tmp_path: Path, with_victim: bool) -> None:
    store = MemoryStore()
    checkpoint = upload_all(
        store,
        tmp_path,
        SMALL,
        world_size=3,
        absent=(2,),
        without=() if with_victim else (2,),
        rank_values=lambda rank: {"rng": {"of": rank}},
    )
    assert commit(store, checkpoint)
    index = read_index(store, checkpoint)
    assert isinstance(index, fmt.Index)
    assert set(index.by_rank) == ({0, 1, 2} if with_victim else {0, 1})


def test_commit_looks_at_the_sizes_of_the_shards(tmp_path: Path) -> None:
    """F24: a receipt beside a shard that is not what it says is not enough."""
    store = MemoryStore()
    checkpoint = upload_all(store, tmp_path, SMALL, world_size=2)
    key = fmt.shard_key(checkpoint, 1, 2)
    data = store.read(key)
    for shorter in (data[:-1], None):
        store.delete(key)
        if shorter is not None:
            store.create(key, [shorter])
        with pytest.raises(StoreError, match=f"{key} has {0 if shorter is None else len(data) - 1} bytes"):
            commit(store, checkpoint)


def test_whoever_commits_writes_the_same_bytes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    written = set()
    for attempt in range(4):
        store = MemoryStore()
        order = draw.sample(range(4), 4)
        for rank in order:
            upload(store, place(rank, 4), stage(tmp_path, SMALL, place(rank, 4)))
        assert commit(store, checkpoint_id()), attempt
        written.add(store.read(fmt.index_key(checkpoint_id())))
    assert len(written) == 1


def test_committing_again_is_harmless(any_store: ObjectStore, tmp_path: Path) -> None:
    checkpoint = upload_all(any_store, tmp_path, SMALL)
    assert commit(any_store, checkpoint)
    before = any_store.read(fmt.index_key(checkpoint))
    assert commit(any_store, checkpoint)
    assert abandon(any_store, checkpoint, "too late")  # True: it is committed
    assert any_store.read(fmt.index_key(checkpoint)) == before


def test_a_late_committer_believes_the_abandoned_index(any_store: ObjectStore, tmp_path: Path) -> None:
    checkpoint = upload_all(any_store, tmp_path, SMALL)
    assert not abandon(any_store, checkpoint, "rank 1 went on")
    assert not commit(any_store, checkpoint)
    index = read_index(any_store, checkpoint)
    assert isinstance(index, fmt.AbandonedIndex)
    assert index.reason == "rank 1 went on"


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_commit_against_abandon_has_one_outcome(kind: str, tmp_path: Path) -> None:
    """F32: one decision, whoever makes it; all who tried hear the same answer."""
    outcomes = set()
    for turn in range(25):
        store = new_store(kind, tmp_path / str(turn))
        folder = tmp_path / f"slots-{turn}"
        folder.mkdir()
        checkpoint = upload_all(store, folder, SMALL)
        calls = [lambda: commit(store, checkpoint), lambda: abandon(store, checkpoint, "a race")] * 3  # noqa: B023
        answers = at_once(calls)
        assert len(set(answers)) == 1, answers
        index = read_index(store, checkpoint)
        assert isinstance(index, fmt.Index) is answers[0]
        outcomes.add(answers[0])
    assert outcomes <= {True, False}


def test_many_committers_over_a_folder_write_one_index(tmp_path: Path) -> None:
    store = new_store("folder", tmp_path)
    checkpoint = upload_all(store, tmp_path, SMALL, world_size=2)
    assert at_once([lambda: commit(store, checkpoint)] * 16) == [True] * 16
    names = {entry.key.rpartition("/")[2] for entry in store.entries("checkpoints/")}
    assert sorted(names) == [
        "index.json",
        "shard-00000-of-00002.json",
        "shard-00000-of-00002.safetensors",
        "shard-00001-of-00002.json",
        "shard-00001-of-00002.safetensors",
    ]


def test_a_commit_reads_each_receipt_once_and_nothing_else(tmp_path: Path) -> None:
    store = CountingStore(MemoryStore())
    checkpoint = upload_all(store, tmp_path, SMALL, world_size=40)
    store.reads.clear()
    assert commit(store, checkpoint)
    assert [key for key, _, _ in store.reads] == [place(rank, 40).receipt_key for rank in range(40)]
    store.reads.clear()
    assert commit(store, checkpoint)  # it is decided: nobody has to read them again
    assert [key for key, _, _ in store.reads] == [fmt.index_key(checkpoint)]


def test_a_receipt_that_shrinks_while_it_is_read_makes_no_index(tmp_path: Path) -> None:
    inner = MemoryStore()
    checkpoint = upload_all(inner, tmp_path, SMALL, world_size=2)

    class ShrinkingStore(CountingStore):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            data = super().read(key, start, stop)
            return data[:-1] if key == place(1, 2).receipt_key else data

    store = ShrinkingStore(inner)
    with pytest.raises(FormatError, match=r"shard-00001-of-00002\.json: has \d+ bytes, \d+ were listed"):
        commit(store, checkpoint)
    assert read_index(inner, checkpoint) is None


# --------------------------------------------------------------------------------------- receipts that do not fit


def test_receipts_of_another_attempt_are_refused(tmp_path: Path) -> None:
    """W2, W8: eight ranks' stale receipt beside a save of four is not merged in, and does not count."""
    store = MemoryStore()
    checkpoint = upload_all(store, tmp_path, SMALL, world_size=4, without=(3,))
    upload(store, place(5, 8), stage(tmp_path, SMALL, place(5, 8)))
    with pytest.raises((StoreError, FormatError)):
        commit(store, checkpoint)
    upload_all(store, tmp_path, SMALL, world_size=4, without=(0, 1, 2))
    with pytest.raises(FormatError, match="world_size"):
        commit(store, checkpoint)
    assert read_index(store, checkpoint) is None


def moved(store: ObjectStore, source: str, target: str) -> None:
    store.create(target, [store.read(source)])


def test_a_receipt_under_another_ones_key_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    upload_all(store, tmp_path, SMALL, world_size=2, without=(1,))
    moved(store, place(0, 2).receipt_key, place(1, 2).receipt_key)
    with pytest.raises(FormatError, match="is the receipt of rank 0 of 2"):
        draft_index(store, checkpoint_id())


def test_a_receipt_of_another_step_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    upload(store, place(), stage(tmp_path, SMALL))
    moved(store, place().receipt_key, place(checkpoint=checkpoint_id(step=3)).receipt_key)
    with pytest.raises(FormatError, match="of g00000001-s0000000002"):
        draft_index(store, checkpoint_id(step=3))


def test_an_index_under_another_ones_key_is_refused(tmp_path: Path) -> None:
    """A copied folder is not a checkpoint of the generation and step that its name says."""
    store = MemoryStore()
    checkpoint = upload_all(store, tmp_path, SMALL)
    commit(store, checkpoint)
    other = CheckpointId(generation=2, step=9)
    moved(store, fmt.index_key(checkpoint), fmt.index_key(other))
    with pytest.raises(FormatError, match="is the index of generation 1, step 2"):
        read_index(store, other)


def test_receipts_of_an_unknown_version_are_named(tmp_path: Path) -> None:
    store = MemoryStore()
    checkpoint = upload_all(store, tmp_path, SMALL)
    fields: dict[str, Any] = json.loads(store.read(place().receipt_key))
    replace(store, place().receipt_key, fmt.canonical_json({**fields, "version": 2}))
    with pytest.raises(VersionError, match="version 2"):
        commit(store, checkpoint)


def test_records_of_an_absurd_size_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LARGE_BYTES_MAX", 100)
    store = CountingStore(MemoryStore())
    checkpoint = upload_all(store, tmp_path, SMALL)
    store.create(fmt.index_key(checkpoint), [b" " * 101])
    store.reads.clear()
    with pytest.raises(FormatError, match="is larger than 100"):
        read_index(store, checkpoint)
    with pytest.raises(FormatError, match="is larger than 100"):
        draft_index(store, checkpoint)
    assert store.reads == []


def test_a_damaged_index_is_not_taken_for_a_decision(tmp_path: Path) -> None:
    store = MemoryStore()
    checkpoint = upload_all(store, tmp_path, SMALL)
    store.create(fmt.index_key(checkpoint), [b'{"version":1,"state":"comm'])
    with pytest.raises(FormatError):
        commit(store, checkpoint)
    with pytest.raises(FormatError):
        abandon(store, checkpoint, "why")


def test_the_steps_of_the_module_are_in_the_order_that_it_promises(tmp_path: Path) -> None:
    """F19, F35: shard, then receipt, then index; an observer of the store never sees a later one first."""
    order: list[str] = []

    class Watched(MemoryStore):
        def create(self, key: str, pieces: Iterable[Piece]) -> None:
            super().create(key, pieces)
            order.append(key.rpartition("/")[2])

    store = Watched()
    commit(store, upload_all(store, tmp_path, SMALL, world_size=2))
    assert order == [
        "shard-00000-of-00002.safetensors",
        "shard-00000-of-00002.json",
        "shard-00001-of-00002.safetensors",
        "shard-00001-of-00002.json",
        "index.json",
    ]


@pytest.mark.parametrize("size_bytes", [1, 1 << 20, (4 << 20) - 1, 4 << 20, (9 << 20) + 12_345])
def test_a_shard_knows_the_digests_of_its_parts(size_bytes: int, seed: int) -> None:
    """Computed once, for the receipt; the store sends them along with its parts, and the server checks them."""
    data = memoryview(random.Random(seed).randbytes(size_bytes))
    shard = saving._Digested("key", data, lambda _: (size_bytes, True), lambda: None)
    taken = 0
    for piece in shard:
        block = min(1 << 20, len(piece))
        assert shard.crc32c(taken, taken + block) in (crc32c.crc32c(data[taken : taken + block]), None)
        taken += len(piece)
    for start in range(0, size_bytes, 1 << 20):
        for stop in {*range(start + (1 << 20), size_bytes, 1 << 20), size_bytes}:
            assert shard.crc32c(start, stop) == crc32c.crc32c(data[start:stop])
    if size_bytes > 2 << 20:
        assert shard.crc32c(1, 1 << 20) is None
        assert shard.crc32c(0, (1 << 20) + 1) is None

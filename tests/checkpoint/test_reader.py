"""Verified reading: whole blocks, each once, only those that are needed, and nothing that does not match its digest."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint import reader
from orchestrator.checkpoint.digest import crc
from orchestrator.checkpoint.reader import (
    STRIDE_BYTES,
    WINDOW_BYTES,
    Piece,
    Window,
    read_committed,
    read_pieces,
    read_rank_state,
    verified_windows,
    verify,
)
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.checkpoint.save import abandon
from orchestrator.errors import DigestError, FormatError, NotFoundError
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import checkpoint_id, save, upload_all
from tests.checkpoint.stores import CountingStore, CutStore, change_byte, replace

ELEMENTS = 11 * fmt.BLOCK_BYTES // 4 + 123
SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStore, fmt.Index]:
    """One shard of more than two windows; not to be changed."""
    store = MemoryStore()
    tensor = torch.arange(ELEMENTS, dtype=torch.int32)
    return store, save(store, tmp_path_factory.mktemp("slots"), {"x": tensor})


def copy_of(store: MemoryStore) -> MemoryStore:
    """A store of its own with the same objects."""
    copy = MemoryStore()
    copy._objects = dict(store._objects)
    return copy


def blocks_of(ranges: list[tuple[int, int]], size_bytes: int) -> set[int]:
    """The blocks that the ranges touch."""
    return {
        block
        for first, last in ranges
        if first < last
        for block in range(first // fmt.BLOCK_BYTES, (min(last, size_bytes) - 1) // fmt.BLOCK_BYTES + 1)
    }


def test_all_of_a_shard_is_read_once_in_order(saved: tuple[MemoryStore, fmt.Index]) -> None:
    store, index = saved
    counting = CountingStore(store)
    (shard,) = index.shards
    windows = list(verified_windows(counting, index, shard, [(0, shard.size_bytes)]))
    assert counting.reads.pop(0)[0] == fmt.receipt_key(index.id, 0, 1)
    assert b"".join(bytes(window.data) for window in windows) == store.read(fmt.shard_key(index.id, 0, 1))
    assert [window.start for window in windows] == [start for _, start, _ in counting.reads]
    assert [stop for _, _, stop in counting.reads] == [
        *(start for _, start, _ in counting.reads[1:]),
        shard.size_bytes,
    ]
    assert max(len(window.data) for window in windows) <= WINDOW_BYTES


def test_only_the_needed_blocks_are_read_and_each_once(saved: tuple[MemoryStore, fmt.Index], seed: int) -> None:
    draw = random.Random(seed)
    store, index = saved
    (shard,) = index.shards
    for _ in range(30):
        ranges = []
        for _ in range(draw.randrange(6)):
            first = draw.randrange(shard.size_bytes)
            ranges.append((first, min(first + draw.choice([0, 1, 4096, 1 << 20, 3 << 20]), shard.size_bytes)))
        counting = CountingStore(store)
        windows = list(verified_windows(counting, index, shard, ranges))
        read = [
            block
            for key, start, stop in counting.reads
            if key.endswith(".safetensors")
            for block in range(start // fmt.BLOCK_BYTES, -(-(stop or 0) // fmt.BLOCK_BYTES))
        ]
        assert sorted(read) == read == sorted(blocks_of(ranges, shard.size_bytes)), ranges
        whole = store.read(fmt.shard_key(index.id, 0, 1))
        for first, last in ranges:
            found = bytearray(last - first)
            for window in windows:
                offset, piece = window.cut(first, last)
                if len(piece):
                    found[offset : offset + len(piece)] = piece
            assert found == whole[first:last], ranges


def test_nothing_is_read_for_nothing(saved: tuple[MemoryStore, fmt.Index]) -> None:
    store, index = saved
    counting = CountingStore(store)
    assert list(verified_windows(counting, index, index.shards[0], [(5, 5), (0, 0)])) == []
    assert counting.reads == []


@pytest.mark.parametrize(("first", "last"), [(0, 10), (5, 15), (15, 25), (0, 30), (25, 40), (10, 20), (12, 13)])
def test_a_window_gives_what_it_has_of_a_range(first: int, last: int) -> None:
    window = Window(start=10, data=memoryview(bytes(range(10, 20))))
    offset, piece = window.cut(first, last)
    have = range(max(first, 10), min(last, 20))
    assert bytes(piece) == bytes(have)
    if have:
        assert first + offset == have[0]


@pytest.mark.parametrize("position", [0, fmt.BLOCK_BYTES - 1, fmt.BLOCK_BYTES, 9 * fmt.BLOCK_BYTES + 5, -1])
def test_a_changed_byte_is_named_by_shard_and_block(saved: tuple[MemoryStore, fmt.Index], position: int) -> None:
    """F108, F119: what is read is what was saved, or it is not used at all."""
    store, index = copy_of(saved[0]), saved[1]
    (shard,) = index.shards
    position %= shard.size_bytes
    change_byte(store, fmt.shard_key(index.id, 0, 1), position)
    block = position // fmt.BLOCK_BYTES
    with pytest.raises(DigestError, match=rf"{SHARD}: block {block} "):
        list(verified_windows(store, index, shard, [(0, shard.size_bytes)]))
    before = blocks_of([(0, shard.size_bytes)], shard.size_bytes) - {block}
    for good in before:  # the others can still be read
        list(verified_windows(store, index, shard, [(good * fmt.BLOCK_BYTES, good * fmt.BLOCK_BYTES + 1)]))


@pytest.mark.parametrize("missing", [1, fmt.BLOCK_BYTES, 5 * fmt.BLOCK_BYTES])
def test_a_short_answer_is_never_used(saved: tuple[MemoryStore, fmt.Index], missing: int) -> None:
    store, index = saved
    (shard,) = index.shards
    cut = CutStore(store, lambda key, start, stop: max(0, min(stop, shard.size_bytes - missing) - start))
    with pytest.raises(DigestError, match=rf"ends at byte {shard.size_bytes - missing}, the index says"):
        list(verified_windows(cut, index, shard, [(0, shard.size_bytes)]))


def test_a_missing_shard_is_not_found(saved: tuple[MemoryStore, fmt.Index]) -> None:
    store, index = copy_of(saved[0]), saved[1]
    store.delete(fmt.shard_key(index.id, 0, 1))
    with pytest.raises(NotFoundError, match=SHARD):
        list(verified_windows(store, index, index.shards[0], [(0, 1)]))


def test_verify_reports_every_shard(tmp_path: Path) -> None:
    store = MemoryStore()
    index = save(store, tmp_path, {"x": torch.arange(100)}, world_size=4)
    assert [(shard.rank, problem) for shard, problem in verify(store, index)] == [(rank, None) for rank in range(4)]
    change_byte(store, fmt.shard_key(index.id, 1, 4), 0)
    store.delete(fmt.shard_key(index.id, 2, 4))
    found = {shard.rank: problem for shard, problem in verify(store, index)}
    assert found[0] is None
    assert found[3] is None
    assert "shard-00001-of-00004.safetensors: block 0" in str(found[1])
    assert "shard-00002-of-00004.safetensors" in str(found[2])


@pytest.mark.parametrize("how", ["edited", "cut", "longer", "of another rank", "missing"])
def test_a_receipt_that_was_replaced_after_the_commit_is_refused(tmp_path: Path, how: str) -> None:
    """F35: the index has the digest of every receipt, so the block digests are those that were committed."""
    store = MemoryStore()
    index = save(store, tmp_path, {"x": torch.arange(100)}, world_size=2)
    key = fmt.receipt_key(index.id, 1, 2)
    data = store.read(key)
    store.delete(key)
    if how != "missing":
        other = {
            "edited": data.replace(b'"rng":"deadbeef"', b'"rng":"beefdead"'),
            "cut": data[:-1],
            "longer": data + b" ",
            "of another rank": store.read(fmt.receipt_key(index.id, 0, 2)),
        }[how]
        store.create(key, [other])
    problem = dict((shard.rank, problem) for shard, problem in verify(store, index))[1]
    if how == "longer":  # what was committed is all there and is what is used; the listing shows the size
        assert problem is None
        return
    word = "is missing" if how == "missing" else "is not the receipt that was committed"
    assert "shard-00001-of-00002.json" in str(problem)
    assert word in str(problem)
    target = torch.zeros(100, dtype=torch.int64)
    with pytest.raises((DigestError, NotFoundError), match=r"shard-00001-of-00002\.json"):
        read_tensors(store, index, {"x": target})
    with pytest.raises((DigestError, NotFoundError), match=r"shard-00001-of-00002\.json"):
        read_rank_state(store, index, index.shards[1])
    read_rank_state(store, index, index.shards[0])


def test_a_receipt_that_the_index_names_must_still_be_of_its_shard(tmp_path: Path) -> None:
    """Someone who can make digests: sizes are compared, and there must be a digest for each block."""
    store = MemoryStore()
    index = save(store, tmp_path, {"x": torch.arange(10)})
    key = fmt.receipt_key(index.id, 0, 1)
    receipt = fmt.load_receipt(key, store.read(key), fmt.Receipt)
    for change, word in (({"size_bytes": 1}, "other sizes"), ({"blocks": "!"}, "base64"), ({"blocks": ""}, "0 block")):
        data = fmt.dump(receipt.model_copy(update=change))
        replace(store, key, data)
        named = {"receipt_bytes": len(data), "receipt_crc32c": crc(data)}
        forged = index.model_copy(update={"shards": (index.shards[0].model_copy(update=named),)})
        with pytest.raises(FormatError, match=word):
            list(verified_windows(store, forged, forged.shards[0], [(0, 1)]))


def test_what_is_one_ranks_alone_comes_from_its_own_shard(tmp_path: Path) -> None:
    store = MemoryStore()
    long = "x" * (3 << 20)  # a header of several blocks
    index = save(
        store,
        tmp_path,
        {"x": torch.arange(10)},
        world_size=2,
        rank_values=lambda rank: {"rng": {"of": rank, "long": long}},
        values={"scheduler": {"at": 1}},
    )
    counting = CountingStore(store)
    state = read_rank_state(counting, index, index.shards[1])
    assert state.rank_values == {"rng": {"of": 1, "long": long}}
    assert state.objects == {"scheduler": {"at": 1}}
    assert state.gate.step == 2
    assert {key for key, _, _ in counting.reads} == {fmt.receipt_key(index.id, 1, 2), fmt.shard_key(index.id, 1, 2)}
    change_byte(store, fmt.shard_key(index.id, 1, 2), 2 << 20)
    with pytest.raises(DigestError, match="block 2 "):
        read_rank_state(store, index, index.shards[1])


def test_only_what_is_committed_is_read(tmp_path: Path) -> None:
    store = MemoryStore()
    checkpoint = upload_all(store, tmp_path, {"x": torch.arange(10)})
    with pytest.raises(NotFoundError, match="never committed"):
        read_committed(store, checkpoint)
    abandon(store, checkpoint, "a rank went on")
    with pytest.raises(FormatError, match="abandoned: a rank went on"):
        read_committed(store, checkpoint)
    with pytest.raises(NotFoundError):
        read_committed(store, checkpoint_id(7, 7))


def test_windows_of_neighbouring_ranges_are_joined(saved: tuple[MemoryStore, fmt.Index]) -> None:
    """Many small tensors side by side cost no more requests than one large one."""
    store, index = saved
    (shard,) = index.shards
    edges = [*range(0, shard.size_bytes, 50_000), shard.size_bytes]
    counting = CountingStore(store)
    list(verified_windows(counting, index, shard, list(itertools.pairwise(edges))))
    assert len(counting.reads) == 1 + -(-shard.size_bytes // WINDOW_BYTES)
    counting.reads.clear()
    list(verified_windows(counting, index, shard, [(0, fmt.BLOCK_BYTES), (fmt.BLOCK_BYTES, 2 * fmt.BLOCK_BYTES)]))
    assert len(counting.reads) == 1 + 1


# ------------------------------------------------------------------------------------- pieces, where they belong


class Collected:
    """A sink that keeps what it was given."""

    def __init__(self, length: int) -> None:
        self.content = bytearray(length)
        self.calls = 0

    def put(self, offset: int, data: memoryview) -> None:
        self.content[offset : offset + len(data)] = data
        self.calls += 1


def random_ranges(draw: random.Random, size_bytes: int, *, overlapping: bool) -> list[tuple[int, int]]:
    """Sorted byte ranges of a shard: some empty, some next to each other, some across blocks."""
    ranges = []
    position = draw.randrange(size_bytes)
    for _ in range(draw.choice([0, 1, 3, 40])):
        length = min(draw.choice([0, 1, 4096, 100_000, 1 << 20, 5 << 20]), size_bytes - position)
        ranges.append((position, position + length))
        if overlapping:
            position += draw.randrange(length + 1)
        else:
            position += length + draw.choice([0, 0, 1, 5000, 1 << 20, 3 << 20])
        if position >= size_bytes:
            break
    return ranges


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_come_to_where_they_belong(
    saved: tuple[MemoryStore, fmt.Index], seed: int, overlapping: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into memory and into sinks alike, in any mixture; each needed block is read once and no other."""
    monkeypatch.setattr(reader, "THREADS_MAX", threads)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    draw = random.Random(seed)
    store, index = saved
    (shard,) = index.shards
    whole = store.read(fmt.shard_key(index.id, 0, 1))
    for _ in range(25):
        ranges = random_ranges(draw, shard.size_bytes, overlapping=overlapping)
        memories = [bytearray(last - first) if draw.random() < 0.7 else None for first, last in ranges]
        sinks = [Collected(last - first) for first, last in ranges]
        pieces: list[Piece] = [
            (first, last, sink if memory is None else memoryview(memory))
            for (first, last), memory, sink in zip(ranges, memories, sinks, strict=True)
        ]
        counting = CountingStore(store)
        read_pieces(counting, index, shard, pieces)
        for (first, last), memory, sink in zip(ranges, memories, sinks, strict=True):
            assert (sink.content if memory is None else memory) == whole[first:last], ranges
        reads = sorted(one for one in counting.reads if one[0].endswith(".safetensors"))
        read = [b for _, start, stop in reads for b in range(start >> 20, -(-(stop or 0) >> 20))]
        assert read == sorted(blocks_of(ranges, shard.size_bytes)), ranges
        assert max([(stop or 0) - start for _, start, stop in reads], default=0) <= STRIDE_BYTES


def test_no_pieces_read_nothing(saved: tuple[MemoryStore, fmt.Index]) -> None:
    store, index = saved
    counting = CountingStore(store)
    read_pieces(counting, index, index.shards[0], [])
    read_pieces(counting, index, index.shards[0], [(5, 5, memoryview(b""))])
    assert counting.reads == []


@pytest.mark.parametrize("position", [0, fmt.BLOCK_BYTES - 1, fmt.BLOCK_BYTES, 9 * fmt.BLOCK_BYTES + 5, -1])
@pytest.mark.parametrize("kind", ["memory", "sink"])
def test_a_changed_byte_of_a_piece_is_named_by_shard_and_block(
    saved: tuple[MemoryStore, fmt.Index], position: int, kind: str
) -> None:
    """Also where the byte itself is not wanted. A sink gets nothing of what does not match."""
    store, index = copy_of(saved[0]), saved[1]
    (shard,) = index.shards
    position %= shard.size_bytes
    change_byte(store, fmt.shard_key(index.id, 0, 1), position)
    block = position // fmt.BLOCK_BYTES
    first = block * fmt.BLOCK_BYTES + 4
    for begin, end in ((0, shard.size_bytes), (first, first + 4)):
        sink = Collected(end - begin)
        target = memoryview(bytearray(end - begin)) if kind == "memory" else sink
        with pytest.raises(DigestError, match=rf"{SHARD}: block {block} "):
            read_pieces(store, index, shard, [(begin, end, target)])
        assert bytes(sink.content[position - begin : position - begin + 1]) in (b"", b"\0")


@pytest.mark.parametrize("missing", [1, fmt.BLOCK_BYTES, 5 * fmt.BLOCK_BYTES])
def test_a_piece_that_is_cut_short_is_never_used(saved: tuple[MemoryStore, fmt.Index], missing: int) -> None:
    store, index = saved
    (shard,) = index.shards
    cut = CutStore(store, lambda key, start, stop: max(0, min(stop, shard.size_bytes - missing) - start))
    target = memoryview(bytearray(shard.size_bytes))
    with pytest.raises(DigestError, match=r"ends at byte [0-9]+, the index says"):
        read_pieces(cut, index, shard, [(0, shard.size_bytes, target)])


def test_pieces_of_a_shard_that_is_missing(saved: tuple[MemoryStore, fmt.Index]) -> None:
    store, index = copy_of(saved[0]), saved[1]
    store.delete(fmt.shard_key(index.id, 0, 1))
    size_bytes = index.shards[0].size_bytes
    for last in (1, size_bytes):
        with pytest.raises(NotFoundError, match=SHARD):
            read_pieces(store, index, index.shards[0], [(0, last, memoryview(bytearray(last)))])

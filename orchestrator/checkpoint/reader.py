"""Reading a committed checkpoint: byte ranges of shards, verified in whole 1 MiB blocks. No torch.

The index says where everything is. What else of a shard is needed stands in its receipt (block digests, gate), whose
digest the index has, and in its header (what is one rank's alone); neither is read for shards that nothing is read of.

Called by `checkpoint.restore` (into tensors) and by the command line. The store may be a folder, a bucket or
an agent's memory: one code path.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.digest import crc, crc_of
from orchestrator.checkpoint.records import LARGE_BYTES_MAX, check_size, collector_resting
from orchestrator.checkpoint.save import load_receipt, read_index, shard_metadata, shard_table
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import DigestError, FormatError, NotFoundError
from orchestrator.storage.base import ObjectStore

WINDOW_BYTES = 8 * fmt.BLOCK_BYTES
"""Read at a time, where bytes are handed on."""
STRIDE_BYTES = 4 * fmt.BLOCK_BYTES
"""Read at a time into the memory where it stays: few requests, and still in the processor's cache when the digests are
computed."""
THREADS_MAX = 2
"""That read one shard; each has one stride of memory for what is not wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Verified bytes of one shard, beginning at `start`."""

    start: int
    data: memoryview

    def cut(self, first: int, last: int) -> tuple[int, memoryview]:
        """(position of the piece within [first, last), piece) of the bytes that this window has of that range."""
        low, high = max(first, self.start), min(last, self.start + len(self.data))
        return low - first, self.data[max(low - self.start, 0) : max(high - self.start, 0)]


@collector_resting()
def read_committed(store: ObjectStore, checkpoint: CheckpointId) -> fmt.Index:
    """The index of a committed checkpoint. Raises FormatError if it is not committed, NotFoundError if absent."""
    index = read_index(store, checkpoint)
    key = fmt.index_key(checkpoint)
    if index is None:
        raise NotFoundError(key, "there is no index: the checkpoint was never committed")
    if isinstance(index, fmt.AbandonedIndex):
        raise FormatError(key, f"the checkpoint was abandoned: {index.reason}")
    return index


def read_receipt(store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord) -> fmt.ReceiptHead:
    """The receipt that the checkpoint was committed with. Raises DigestError if it is another one, StoreError."""
    return _read_receipt(store, index, shard, fmt.ReceiptHead)


def _read_receipt(
    store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord, kind: type[fmt.ReceiptT]
) -> fmt.ReceiptT:
    key = fmt.receipt_key(index.id, shard.rank, index.world_size)
    check_size(key, shard.receipt_bytes, LARGE_BYTES_MAX)
    data = store.read(key, 0, shard.receipt_bytes)
    if len(data) != shard.receipt_bytes or crc(data) != shard.receipt_crc32c:
        raise DigestError(key, "is not the receipt that was committed: truncated, edited or replaced")
    receipt = load_receipt(index.id, key, data, kind)
    if (receipt.size_bytes, receipt.header_bytes) != (shard.size_bytes, shard.header_bytes):
        raise FormatError(key, f"has other sizes than {fmt.index_key(index.id)}")
    return receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a checkpoint has of one rank alone, beside its tensors."""

    objects: dict[str, Any]
    """The state of each object given to attach, as this rank had it."""
    rank_values: dict[str, Any]
    gate: fmt.Gate


def read_rank_state(store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord) -> RankState:
    """From a shard's header, its blocks verified, and its receipt. Raises DigestError, FormatError, StoreError."""
    receipt, key = read_receipt(store, index, shard), fmt.shard_key(index.id, shard.rank, index.world_size)
    check_size(key, shard.header_bytes, LARGE_BYTES_MAX)
    header = bytearray()
    for window in _verified(store, index, receipt, [(0, shard.header_bytes)]):
        header += window.data[: shard.header_bytes - len(header)]
    metadata, _, _ = shard_metadata(key, memoryview(header))
    return RankState(
        objects=metadata["values"].get("objects", {}), rank_values=metadata["rank_values"], gate=receipt.gate
    )


def verified_windows(
    store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord, ranges: Iterable[tuple[int, int]]
) -> Iterator[Window]:
    """The blocks of one shard that the byte ranges touch, read once each in order, each block's digest checked.

    Raises DigestError naming the shard and the block, or the receipt if the digests themselves cannot be trusted.
    """
    needed = [(first, last) for first, last in ranges if first < last]
    if needed:
        yield from _verified(store, index, read_receipt(store, index, shard), needed)


def _verified(
    store: ObjectStore, index: fmt.Index, receipt: fmt.ReceiptHead, ranges: Iterable[tuple[int, int]]
) -> Iterator[Window]:
    shard = _Shard.of(store, index, receipt)
    for start, stop in _window_ranges(ranges, shard.size_bytes, WINDOW_BYTES):
        data = memoryview(store.read(shard.key, start, stop))
        shard.check_length(start, stop, len(data))
        for offset in range(0, len(data), fmt.BLOCK_BYTES):
            shard.check_block((start + offset) // fmt.BLOCK_BYTES, crc(data[offset : offset + fmt.BLOCK_BYTES]))
        yield Window(start=start, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """A shard file and what its bytes must be."""

    store: ObjectStore
    key: str
    size_bytes: int
    digests: Sequence[int]
    """Of each block."""

    @classmethod
    def of(cls, store: ObjectStore, index: fmt.Index, receipt: fmt.ReceiptHead) -> Self:
        """The shard of a receipt that can be trusted. Raises FormatError."""
        key = fmt.shard_key(index.id, receipt.rank, index.world_size)
        digests = fmt.unpack_blocks(key, receipt.blocks, receipt.size_bytes)
        return cls(store=store, key=key, size_bytes=receipt.size_bytes, digests=digests)

    def check_length(self, start: int, stop: int, length: int) -> None:
        """All of [start, stop) was there. Raises DigestError."""
        if length != stop - start:
            raise DigestError(self.key, f"ends at byte {start + length}, the index says {self.size_bytes} bytes")

    def check_block(self, number: int, digest: int) -> None:
        """A block has that digest. Raises DigestError."""
        if digest != self.digests[number]:
            start = number * fmt.BLOCK_BYTES
            raise DigestError(self.key, f"block {number} (bytes from {start}) does not match its digest")


def _window_ranges(ranges: Iterable[tuple[int, int]], size_bytes: int, length: int) -> Iterator[tuple[int, int]]:
    """Block-aligned, disjoint, ascending windows of at most `length` bytes that cover the ranges."""
    merged: list[list[int]] = []
    for first, last in sorted(ranges):
        low = first // fmt.BLOCK_BYTES * fmt.BLOCK_BYTES
        high = min(-(-last // fmt.BLOCK_BYTES) * fmt.BLOCK_BYTES, size_bytes)
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    for low, high in merged:
        for start in range(low, high, length):
            yield start, min(start + length, high)


class Sink(Protocol):
    """Takes the bytes of a piece that do not lie together in memory."""

    def put(self, offset: int, data: memoryview) -> None:
        """Take in verified bytes from `offset` of the piece on; the memory is used again afterwards."""
        ...


Piece = tuple[int, int, memoryview | Sink]
"""Bytes [first, last) of a shard, and where they go: memory of that length, or what takes them part by part."""


def read_pieces(store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord, pieces: Sequence[Piece]) -> None:
    """Bring pieces of one shard, in rising order, to where they belong. Reads each block that they touch once, whole.

    The bytes of a block go straight into the memory of its pieces, and its digest is computed there; only what goes
    to a sink or is not wanted takes the way over a buffer. A sink gets nothing that is not verified; memory may hold
    anything after an error. Raises DigestError naming the shard and the block, or the receipt; StoreError.
    """
    wanted = [piece for piece in pieces if piece[0] < piece[1]]
    if not wanted:
        return
    shard_file = _Shard.of(store, index, read_receipt(store, index, shard))
    strides = _strides(wanted, shard_file.size_bytes)
    span_bytes = wanted[-1][1] - wanted[0][0]
    threads = min(THREADS_MAX, os.cpu_count() or 1, span_bytes // (2 * STRIDE_BYTES))
    if threads <= 1:
        _fill_all(shard_file, strides)
        return
    queue = _Queue(strides)
    with ThreadPoolExecutor(threads, "read-pieces") as pool:
        try:
            for done in [pool.submit(_fill_all, shard_file, queue) for _ in range(threads)]:
                done.result()
        finally:
            queue.close()


@dataclass(frozen=True, slots=True)
class _Stride:
    """Bytes [start, stop) of a shard, whole blocks, and the pieces that have some of them."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    def overlaps(self) -> bool:
        """Whether two pieces have bytes in common."""
        return any(before[1] > after[0] for before, after in pairwise(self.pieces))


class _Queue:
    """Strides for several threads: each is given to one of them, and none any more after `close`."""

    def __init__(self, strides: Iterator[_Stride]) -> None:
        self._strides = strides
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[_Stride]:
        while (stride := self._next()) is not None:
            yield stride

    def close(self) -> None:
        """Give out nothing more."""
        with self._lock:
            self._strides = iter(())

    def _next(self) -> _Stride | None:
        with self._lock:
            return next(self._strides, None)


def _strides(pieces: Sequence[Piece], size_bytes: int) -> Iterator[_Stride]:
    place, here = 0, list[Piece]()
    for start, stop in _window_ranges(((first, last) for first, last, _ in pieces), size_bytes, STRIDE_BYTES):
        here = [piece for piece in here if piece[1] > start]
        while place < len(pieces) and pieces[place][0] < stop:
            here.append(pieces[place])
            place += 1
        yield _Stride(start, stop, tuple(here))


def _fill_all(shard: _Shard, strides: Iterable[_Stride]) -> None:
    spare = memoryview(bytearray(STRIDE_BYTES))  # takes memory only where something is written to it
    for stride in strides:
        _fill(shard, stride, spare)


def _fill(shard: _Shard, stride: _Stride, spare: memoryview) -> None:
    """Read a stride, verify it, and hand on what did not go straight to where it belongs."""
    straight = not stride.overlaps()
    blocks = _in_blocks(_parts(stride, spare) if straight else [spare[: stride.stop - stride.start]])
    length = shard.store.read_into(shard.key, stride.start, [part for block in blocks for part in block])
    shard.check_length(stride.start, stride.stop, length)
    for number, parts in enumerate(blocks, start=stride.start // fmt.BLOCK_BYTES):
        shard.check_block(number, crc_of(parts))
    for first, last, target in stride.pieces:
        low, high = max(first, stride.start), min(last, stride.stop)
        data = spare[low - stride.start : high - stride.start]
        if not isinstance(target, memoryview):
            target.put(low - first, data)
        elif not straight:
            target[low - first : high - first] = data


def _parts(stride: _Stride, spare: memoryview) -> Iterator[memoryview]:
    """The memory that the stride's bytes go to, in their order."""
    start, stop, position = stride.start, stride.stop, stride.start
    for first, last, target in stride.pieces:
        low = first if first > start else start
        high = last if last < stop else stop
        if position < low:
            yield spare[position - start : low - start]
        if not isinstance(target, memoryview):
            yield spare[low - start : high - start]
        elif low == first and high == last:
            yield target
        else:
            yield target[low - first : high - first]
        position = high
    if position < stop:
        yield spare[position - start : stop - start]


def _in_blocks(parts: Iterable[memoryview]) -> list[list[memoryview]]:
    """The parts, cut where a block ends."""
    blocks: list[list[memoryview]] = []
    room = 0
    for part in parts:
        rest, size = part, len(part)
        while size:
            if room == 0:
                blocks.append([])
                room = fmt.BLOCK_BYTES
            if size <= room:
                blocks[-1].append(rest)
                room -= size
                break
            blocks[-1].append(rest[:room])
            rest, size, room = rest[room:], size - room, 0
    return blocks


def verify(store: ObjectStore, index: fmt.Index) -> Iterator[tuple[fmt.ShardRecord, str | None]]:
    """Read every shard of a checkpoint; (shard, problem that names its key, or None) one after another."""
    for shard in index.shards:
        problem = verify_shard(store, index, shard)
        key = fmt.shard_key(index.id, shard.rank, index.world_size)
        yield shard, None if problem is None else f"{key}: {problem}"


def verify_shard(
    store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord, advance: Callable[[int], None] = lambda _: None
) -> str | None:
    """Read one shard whole; what is wrong with it, or None. `advance` is told the bytes of each verified piece."""
    key = fmt.shard_key(index.id, shard.rank, index.world_size)
    try:
        size_bytes = store.size(key)
        if size_bytes != shard.size_bytes:
            return f"has {size_bytes} bytes, the index says {shard.size_bytes}"
        receipt, header = _read_receipt(store, index, shard, fmt.Receipt), bytearray()
        check_size(key, shard.header_bytes, LARGE_BYTES_MAX)
        for window in _verified(store, index, receipt, [(0, shard.size_bytes)]):
            header += window.data[: shard.header_bytes - len(header)]
            advance(len(window.data))
        _check_header(key, memoryview(header), receipt)
    except NotFoundError as error:
        return "is missing" if error.key == key else f"its receipt {error.key} is missing"
    except FormatError as error:
        return error.problem if error.key == key else str(error)
    return None


def shard_mismatch(store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord) -> str | None:
    """The size or digest in which a shard, or its receipt, differs from what was committed; None if all are the same.

    Raises NotFoundError, FormatError, StoreError for whatever else is wrong.
    """
    key = fmt.shard_key(index.id, shard.rank, index.world_size)
    size_bytes = store.size(key)
    if size_bytes != shard.size_bytes:
        return f"{key}: has {size_bytes} bytes, the index says {shard.size_bytes}"
    try:
        receipt = read_receipt(store, index, shard)
        for _ in _verified(store, index, receipt, [(0, shard.size_bytes)]):
            pass
    except DigestError as error:
        return str(error)
    return None


def _check_header(key: str, header: memoryview, receipt: fmt.Receipt) -> None:
    """Raises FormatError unless the header has the table of the receipt.

    Other readers of safetensors go by the header, ours by index and receipt: they must say the same.
    """
    metadata, header_bytes, entries = shard_metadata(key, header)
    table = shard_table(key, entries, metadata["parts"], receipt.size_bytes - receipt.header_bytes)
    if header_bytes != receipt.header_bytes or table != receipt.tensors:
        raise FormatError(key, "its header and its receipt say different things of its tensors")

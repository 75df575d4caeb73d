"""Reading a committed checkpoint: byte ranges of shards, verified in whole 1 MiB blocks. No torch.

The index says where everything is. What else of a shard is needed stands in its receipt (block digests, gate), whose
digest the index has, and in its header (what is one rank's alone); neither is read for shards that nothing is read of.

Called by `checkpoint.restore` (into tensors) and by the CLI's read verbs. The store may be a folder, a bucket or
an agent's memory: one code path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.digest import crc
from orchestrator.checkpoint.save import load_receipt, read_index, shard_metadata
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import DigestError, FormatError, NotFoundError
from orchestrator.storage.base import ObjectStore

WINDOW_BYTES = 8 * fmt.BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Verified bytes of one shard, beginning at `start`."""

    start: int
    data: memoryview

    def cut(self, first: int, last: int) -> tuple[int, memoryview]:
        """(position of the piece within [first, last), piece) of the bytes that this window has of that range."""
        low, high = max(first, self.start), min(last, self.start + len(self.data))
        return low - first, self.data[max(low - self.start, 0) : max(high - self.start, 0)]


def read_committed(store: ObjectStore, checkpoint: CheckpointId) -> fmt.Index:
    """The index of a committed checkpoint. Raises FormatError if it is not committed, NotFoundError if absent."""
    index = read_index(store, checkpoint)
    key = fmt.index_key(checkpoint)
    if index is None:
        raise NotFoundError(key, "there is no index: the checkpoint was never committed")
    if isinstance(index, fmt.AbandonedIndex):
        raise FormatError(key, f"the checkpoint was abandoned: {index.reason}")
    return index


def read_receipt(store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord) -> fmt.Receipt:
    """The receipt that the checkpoint was committed with. Raises DigestError if it is another one, StoreError."""
    key = fmt.receipt_key(index.id, shard.rank, index.world_size)
    data = store.read(key, 0, shard.receipt_bytes)
    if len(data) != shard.receipt_bytes or crc(data) != shard.receipt_crc32c:
        raise DigestError(key, "is not the receipt that was committed: truncated, edited or replaced")
    receipt = load_receipt(index.id, key, data)
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
    receipt = read_receipt(store, index, shard)
    header = bytearray()
    for window in _verified(store, index, receipt, [(0, shard.header_bytes)]):
        header += window.data[: shard.header_bytes - len(header)]
    metadata, _, _ = shard_metadata(fmt.shard_key(index.id, shard.rank, index.world_size), memoryview(header))
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
    store: ObjectStore, index: fmt.Index, shard: fmt.Receipt, ranges: Iterable[tuple[int, int]]
) -> Iterator[Window]:
    key = fmt.shard_key(index.id, shard.rank, index.world_size)
    blocks = fmt.unpack_blocks(key, shard.blocks, shard.size_bytes)
    for start, stop in _window_ranges(ranges, shard.size_bytes):
        data = memoryview(store.read(key, start, stop))
        if len(data) != stop - start:
            raise DigestError(key, f"ends at byte {start + len(data)}, the index says {shard.size_bytes} bytes")
        for offset in range(0, len(data), fmt.BLOCK_BYTES):
            number = (start + offset) // fmt.BLOCK_BYTES
            if crc(data[offset : offset + fmt.BLOCK_BYTES]) != blocks[number]:
                raise DigestError(
                    key, f"block {number} (bytes from {number * fmt.BLOCK_BYTES}) does not match its digest"
                )
        yield Window(start=start, data=data)


def _window_ranges(ranges: Iterable[tuple[int, int]], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Block-aligned, disjoint, ascending windows that cover the ranges."""
    merged: list[list[int]] = []
    for first, last in sorted(ranges):
        low = first // fmt.BLOCK_BYTES * fmt.BLOCK_BYTES
        high = min(-(-last // fmt.BLOCK_BYTES) * fmt.BLOCK_BYTES, size_bytes)
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    for low, high in merged:
        for start in range(low, high, WINDOW_BYTES):
            yield start, min(start + WINDOW_BYTES, high)


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
        for window in verified_windows(store, index, shard, [(0, shard.size_bytes)]):
            advance(len(window.data))
    except NotFoundError as error:
        return "is missing" if error.key == key else f"its receipt {error.key} is missing"
    except FormatError as error:
        return error.problem if error.key == key else str(error)
    return None

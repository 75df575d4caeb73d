"""Reading a committed checkpoint: byte ranges of shards, verified in whole 1 MiB blocks. No torch.

Called by `checkpoint.restore` (into tensors) and by the CLI's read verbs. The store may be a folder, a bucket or
an agent's memory: one code path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.digest import crc
from orchestrator.checkpoint.save import read_index
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


def verified_windows(
    store: ObjectStore, index: fmt.Index, shard: fmt.ShardRecord, ranges: Iterable[tuple[int, int]]
) -> Iterator[Window]:
    """The blocks of one shard that the byte ranges touch, read once each in order, each block's digest checked.

    Raises DigestError naming the shard and the block.
    """
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
        if first >= last:
            continue
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
    try:
        size_bytes = store.size(fmt.shard_key(index.id, shard.rank, index.world_size))
        if size_bytes != shard.size_bytes:
            return f"has {size_bytes} bytes, the index says {shard.size_bytes}"
        for window in verified_windows(store, index, shard, [(0, shard.size_bytes)]):
            advance(len(window.data))
    except NotFoundError:
        return "is missing"
    except FormatError as error:
        return error.problem
    return None

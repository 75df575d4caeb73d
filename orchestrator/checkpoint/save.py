"""From a staged slot to a committed checkpoint: shard, receipt, index. The agent's side; no torch.

Order (must): shard, then its receipt, then, when all needed receipts are there, the index by create-if-absent.
Every function blocks; the agent calls them in threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.digest import block_digests, combine, crc
from orchestrator.checkpoint.records import LARGE_BYTES_MAX, read_record
from orchestrator.checkpoint.slots import read_header
from orchestrator.core.messages import CheckpointId
from orchestrator.core.ownership import present_ranks
from orchestrator.errors import AlreadyExistsError, DigestError, FormatError, NotFoundError, ProtocolError, StoreError
from orchestrator.storage.base import ObjectStore

METADATA_KEY = "orchestrator"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlace:
    """Which shard of which checkpoint of which job."""

    job: str
    checkpoint: CheckpointId
    rank: int
    world_size: int
    absent: tuple[int, ...]

    @property
    def shard_key(self) -> str:
        """Key of the shard."""
        return fmt.shard_key(self.checkpoint, self.rank, self.world_size)

    @property
    def receipt_key(self) -> str:
        """Key of its receipt."""
        return fmt.receipt_key(self.checkpoint, self.rank, self.world_size)


def upload_shard(
    store: ObjectStore, place: ShardPlace, data: memoryview, before_receipt: Callable[[], None] | None = None
) -> fmt.Receipt:
    """Make a staged shard durable and write its receipt. `data` is the shard file, byte for byte.

    Uploading the same shard again is harmless: what is there must have the same digest. `before_receipt` is called
    between the two writes (a named point for fault injection). Raises StoreError, DigestError, FormatError.
    """
    digests: list[int] = []
    try:
        store.create(place.shard_key, _digested_blocks(data, digests))
    except AlreadyExistsError:
        digests = block_digests(data)
        _check_same(store, place.shard_key, data, digests)
    stored = store.size(place.shard_key)
    if stored != len(data):
        raise DigestError(place.shard_key, f"{stored} bytes arrived of {len(data)}")
    if before_receipt is not None:
        before_receipt()
    receipt = _receipt(place, data, digests)
    body = fmt.dump(receipt)
    try:
        store.create(place.receipt_key, [body])
    except AlreadyExistsError:
        if read_record(store, place.receipt_key, LARGE_BYTES_MAX) != body:
            raise DigestError(place.receipt_key, "another receipt is there already") from None
    return receipt


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), fmt.BLOCK_BYTES):
        yield data[start : start + fmt.BLOCK_BYTES]


def _digested_blocks(data: memoryview, digests: list[int]) -> Iterator[memoryview]:
    """The blocks, each digested while it is hot in the cache."""
    for block in _blocks(data):
        digests.append(crc(block))
        yield block


def _check_same(store: ObjectStore, key: str, data: memoryview, digests: list[int]) -> None:
    if store.size(key) != len(data):
        raise DigestError(key, "another shard of another size is there already")
    for number, digest in enumerate(digests):
        start = number * fmt.BLOCK_BYTES
        if crc(store.read(key, start, min(start + fmt.BLOCK_BYTES, len(data)))) != digest:
            raise DigestError(key, f"another shard is there already: block {number} differs")


def _receipt(place: ShardPlace, data: memoryview, digests: list[int]) -> fmt.Receipt:
    metadata, header_bytes, header = shard_metadata(place.shard_key, data)
    tensors = {
        name: fmt.ShardTensor(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            chunks=tuple(_chunk(place, chunk, header, header_bytes) for chunk in entry["chunks"]),
        )
        for name, entry in metadata["tensors"].items()
    }
    size_bytes = len(data)
    return fmt.Receipt(
        version=fmt.FORMAT_VERSION,
        job=place.job,
        generation=place.checkpoint.generation,
        step=place.checkpoint.step,
        world_size=place.world_size,
        absent=place.absent,
        shard=fmt.ShardRecord(
            rank=place.rank,
            size_bytes=size_bytes,
            crc32c=combine(digests, size_bytes),
            blocks=fmt.pack_blocks(digests),
        ),
        tensors=tensors,
        values=metadata["values"],
        rank_values=metadata["rank_values"],
        gate=fmt.Gate(**metadata["gate"]),
    )


def _chunk(place: ShardPlace, chunk: dict[str, Any], header: dict[str, Any], header_bytes: int) -> fmt.Chunk:
    first, last = header[chunk["entry"]]["data_offsets"]
    return fmt.Chunk(
        rank=place.rank,
        offsets=tuple(chunk["offsets"]),
        lengths=tuple(chunk["lengths"]),
        start=chunk["start"],
        stop=chunk["stop"],
        first_byte=header_bytes + first,
        last_byte=header_bytes + last,
    )


def shard_metadata(key: str, data: memoryview) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """(our metadata, header bytes, safetensors header) of a shard. Raises FormatError."""
    try:
        header_bytes, header = read_header(data)
        metadata: dict[str, Any] = json.loads(header["__metadata__"][METADATA_KEY])
    except (ProtocolError, KeyError, ValueError, TypeError) as error:
        raise FormatError(key, f"is not a shard of this project: {error}") from error
    return metadata, header_bytes, header


# --------------------------------------------------------------------------------------------- the index


def read_receipts(store: ObjectStore, checkpoint: CheckpointId) -> tuple[list[fmt.Receipt], dict[str, int]]:
    """All receipts in a checkpoint's folder, and the sizes of all objects there. Raises FormatError, StoreError."""
    prefix = fmt.folder_key(checkpoint) + "/"
    sizes = {entry.key: entry.size_bytes for entry in store.entries(prefix)}
    receipts = [
        _read_receipt(store, checkpoint, key)
        for key in sizes
        if key.endswith(".json") and key.rpartition("/")[2].startswith("shard-")
    ]
    return receipts, sizes


def _read_receipt(store: ObjectStore, checkpoint: CheckpointId, key: str) -> fmt.Receipt:
    receipt = fmt.load(fmt.Receipt, key, read_record(store, key, LARGE_BYTES_MAX))
    of = CheckpointId(generation=receipt.generation, step=receipt.step)
    if of != checkpoint or key != fmt.receipt_key(of, receipt.shard.rank, receipt.world_size):
        raise FormatError(key, f"is the receipt of rank {receipt.shard.rank} of {receipt.world_size} of {of}")
    return receipt


def missing_for_commit(receipts: list[fmt.Receipt], sizes: dict[str, int], checkpoint: CheckpointId) -> str | None:
    """Why the checkpoint may not be committed yet; None if it may."""
    if not receipts:
        return "no receipt is there"
    first = receipts[0]
    present = {receipt.shard.rank for receipt in receipts}
    missing = sorted(set(present_ranks(first.world_size, first.absent)) - present)
    if missing:
        return f"{len(present)} of {first.world_size} receipts are there; ranks {missing} are missing"
    for receipt in receipts:
        key = fmt.shard_key(checkpoint, receipt.shard.rank, receipt.world_size)
        if sizes.get(key) != receipt.shard.size_bytes:
            return f"{key} has {sizes.get(key, 0)} bytes, its receipt says {receipt.shard.size_bytes}"
    return None


def commit(store: ObjectStore, checkpoint: CheckpointId) -> bool:
    """Write the index from the receipts; True if the checkpoint is committed, False if it was abandoned before.

    Raises StoreError with what is missing if it cannot be committed (yet).
    """
    receipts, sizes = read_receipts(store, checkpoint)
    problem = missing_for_commit(receipts, sizes, checkpoint)
    if problem is not None:
        raise StoreError(fmt.folder_key(checkpoint), problem)
    return _decide(store, checkpoint, fmt.dump(fmt.build_index(receipts)))


def commit_whole(store: ObjectStore, checkpoint: CheckpointId) -> None:
    """Write the index if the receipts of all ranks are there, absent ones included; else do nothing."""
    receipts, sizes = read_receipts(store, checkpoint)
    whole = bool(receipts) and len(receipts) == receipts[0].world_size
    if whole and missing_for_commit(receipts, sizes, checkpoint) is None:
        _decide(store, checkpoint, fmt.dump(fmt.build_index(receipts)))


def abandon(store: ObjectStore, checkpoint: CheckpointId, reason: str) -> bool:
    """Write an abandoned index; True if the checkpoint had been committed before."""
    record = fmt.AbandonedIndex(
        version=fmt.FORMAT_VERSION, generation=checkpoint.generation, step=checkpoint.step, reason=reason
    )
    return _decide(store, checkpoint, fmt.dump(record))


def _decide(store: ObjectStore, checkpoint: CheckpointId, body: bytes) -> bool:
    """Create the index; whoever was first is believed. True: committed."""
    key = fmt.index_key(checkpoint)
    try:
        store.create(key, [body])
    except AlreadyExistsError:
        body = read_record(store, key, LARGE_BYTES_MAX)
    return isinstance(fmt.load_index(key, body), fmt.Index)


def read_index(store: ObjectStore, checkpoint: CheckpointId) -> fmt.Index | fmt.AbandonedIndex | None:
    """The index of a checkpoint, None while it is undecided. Raises FormatError, StoreError."""
    key = fmt.index_key(checkpoint)
    try:
        index = fmt.load_index(key, read_record(store, key, LARGE_BYTES_MAX))
    except NotFoundError:
        return None
    if (index.generation, index.step) != (checkpoint.generation, checkpoint.step):
        raise FormatError(key, f"is the index of generation {index.generation}, step {index.step}")
    return index

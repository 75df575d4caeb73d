"""From a staged slot to a committed checkpoint: shard, receipt, index. The agent's side; no torch.

Order (must): shard, then its receipt, then, when all needed receipts are there, the index by create-if-absent.
Every function blocks; the agent calls them in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.chunks import POSITION_MAX
from orchestrator.checkpoint.digest import block_digests, combine, crc
from orchestrator.checkpoint.indexing import IndexBuilder, object_digests
from orchestrator.checkpoint.records import LARGE_BYTES_MAX, collector_resting, read_in_order, read_record
from orchestrator.checkpoint.slots import read_header
from orchestrator.core.messages import CheckpointId
from orchestrator.core.ownership import present_ranks
from orchestrator.errors import (
    AlreadyExistsError,
    DigestError,
    FormatError,
    NotFoundError,
    ProtocolError,
    StoreError,
    VersionError,
)
from orchestrator.storage.base import Entry, ObjectStore

METADATA_KEY = "orchestrator"
PIECE_BYTES = 4 * fmt.BLOCK_BYTES
"""Of a shard, written and digested at the same time."""
_METADATA_KINDS = {"parts": dict, "values": dict, "rank_values": dict, "gate": dict}


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


AwaitBytes = Callable[[int], tuple[int, bool]]
"""Waits for that many bytes of a shard, or for all: (how many are there, whether that is all). Raises StoreError if it
will not be completed."""


def upload_shard(
    store: ObjectStore,
    place: ShardPlace,
    data: memoryview,
    *,
    before_receipt: Callable[[], None] = lambda: None,
    between_pieces: Callable[[], None] = lambda: None,
    await_bytes: AwaitBytes | None = None,
) -> fmt.Receipt:
    """Make a staged shard durable and write its receipt. `data` is the shard file, byte for byte.

    With `await_bytes` the shard may still be in the making: `data` is its memory, at least as long as it will be.
    Uploading the same shard again is harmless: what is there must have the same digest. `between_pieces` is called
    after each of PIECE_BYTES that was written, `before_receipt` between the two writes: it may wait, or raise.
    Raises StoreError, DigestError, FormatError.
    """
    shard = _Digested(place.shard_key, data, await_bytes or (lambda _: (len(data), True)), between_pieces)
    try:
        store.create(place.shard_key, shard)
    except AlreadyExistsError:
        if not shard.whole:  # it was refused before its digests were known
            for _ in shard:
                pass
        _check_same(store, place.shard_key, data[: shard.size_bytes], shard.digests)
    data = data[: shard.size_bytes]
    stored = store.size(place.shard_key)
    if stored != len(data):
        raise DigestError(place.shard_key, f"{stored} bytes arrived of {len(data)}")
    before_receipt()
    receipt = _receipt(place, data, shard.digests)
    body = fmt.dump(receipt)
    try:
        store.create(place.receipt_key, [body])
    except AlreadyExistsError:
        if read_record(store, place.receipt_key, LARGE_BYTES_MAX) != body:
            raise DigestError(place.receipt_key, "another receipt is there already") from None
    return receipt


class _Digested:
    """A shard in pieces; another thread digests each while it is written, so that it is fetched from memory once.

    Each iteration begins anew.
    """

    def __init__(self, key: str, data: memoryview, await_bytes: AwaitBytes, between_pieces: Callable[[], None]) -> None:
        self.digests: list[int] = []
        """Of the blocks of all pieces that were taken."""
        self.size_bytes = 0
        """Of these pieces."""
        self.size_bytes_max = len(data)
        """Of all pieces: stores choose the size of their parts by it."""
        self._key = key
        self._data = data
        self.whole = False
        """Whether all pieces were taken."""
        self._await_bytes = await_bytes
        self._between_pieces = between_pieces
        self._digesting: list[Future[list[int]]] = []
        """The blocks' digests of each piece that was given out; all pieces but the last one are of PIECE_BYTES."""

    def crc32c(self, start: int, stop: int) -> int | None:
        """See `storage.base.digest_of`: from the blocks' digests, if [start, stop) is made of whole blocks."""
        pieces = self._digesting[start // PIECE_BYTES : -(-stop // PIECE_BYTES)]
        blocks = [digest for piece in pieces for digest in piece.result()][start % PIECE_BYTES // fmt.BLOCK_BYTES :]
        count = -(-(stop - start) // fmt.BLOCK_BYTES)
        whole = start % fmt.BLOCK_BYTES == 0 and (stop % fmt.BLOCK_BYTES == 0 or stop == self.size_bytes)
        return combine(blocks[:count], stop - start) if whole and len(blocks) >= count else None

    def __iter__(self) -> Iterator[memoryview]:
        self.digests, self.size_bytes, self.whole, self._digesting = [], 0, False, []
        piece, last = self._next_piece()
        if last:  # a small one is not worth a thread
            self._take(piece, block_digests(piece))
            self._digesting.append(Future())
            self._digesting[0].set_result(self.digests)
            yield piece
            self.whole = True
            return
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:  # it has this thread's low priority
            while True:
                digested = pool.submit(block_digests, piece)
                self._digesting.append(digested)
                yield piece
                self._take(piece, digested.result())
                self._between_pieces()
                if last:
                    self.whole = True
                    return
                piece, last = self._next_piece()

    def _next_piece(self) -> tuple[memoryview, bool]:
        """(the next piece, whether it is the last)."""
        there_bytes, complete = self._await_bytes(self.size_bytes + PIECE_BYTES)
        stop = min(self.size_bytes + PIECE_BYTES, there_bytes)
        if stop > len(self._data):
            raise FormatError(self._key, f"{stop} bytes are said to be there, in memory of {len(self._data)}")
        return self._data[self.size_bytes : stop], complete and stop == there_bytes

    def _take(self, piece: memoryview, digests: list[int]) -> None:
        self.digests += digests
        self.size_bytes += len(piece)


def _check_same(store: ObjectStore, key: str, data: memoryview, digests: list[int]) -> None:
    if store.size(key) != len(data):
        raise DigestError(key, "another shard of another size is there already")
    for number, digest in enumerate(digests):
        start = number * fmt.BLOCK_BYTES
        if crc(store.read(key, start, min(start + fmt.BLOCK_BYTES, len(data)))) != digest:
            raise DigestError(key, f"another shard is there already: block {number} differs")


@collector_resting()
def _receipt(place: ShardPlace, data: memoryview, digests: list[int]) -> fmt.Receipt:
    key, size_bytes = place.shard_key, len(data)
    metadata, header_bytes, header = shard_metadata(key, data)
    due = present_ranks(place.world_size, place.absent)[0]
    try:
        return fmt.Receipt(
            version=fmt.FORMAT_VERSION,
            job=place.job,
            generation=place.checkpoint.generation,
            step=place.checkpoint.step,
            world_size=place.world_size,
            absent=place.absent,
            rank=place.rank,
            size_bytes=size_bytes,
            header_bytes=header_bytes,
            crc32c=combine(digests, size_bytes),
            blocks=fmt.pack_blocks(digests),
            tensors=shard_table(key, header, metadata["parts"], size_bytes - header_bytes),
            objects=object_digests(key, metadata["values"].get("objects", {})),
            values=metadata["values"] if place.rank == due else None,
            gate=fmt.Gate(**metadata["gate"]),
        )
    except (ValidationError, TypeError) as error:
        raise FormatError(key, f"is not a shard of this project: {error}") from error


def shard_table(key: str, header: dict[str, Any], parts: dict[str, Any], data_bytes: int) -> fmt.ShardTable:
    """The header's entries as columns. Raises FormatError if they do not fill the file in their order."""
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    shapes, starts, lengths, boxes, position = list[tuple[int, ...]](), [], [], [], 0
    sizes: dict[tuple[int, ...], int] = {}
    try:
        for name, entry in entries:
            first, last = entry["data_offsets"]
            shape, part = _shape(key, name, entry["shape"], sizes), parts.get(name)
            length, left = divmod(last - first, fmt.DTYPE_BYTES[entry["dtype"]])
            if first != position or left or length != sizes[shape]:
                raise FormatError(key, f"is not a shard of this project: {name} is not where its shape puts it")
            if part is not None:
                shape = _shape(key, name, part["shape"], sizes)
            shapes.append(shape)
            starts.append(0 if part is None else part["start"])
            lengths.append(length)
            boxes.append(() if part is None or "box" not in part else (*part["box"], part["before"]))
            position = last
    except (KeyError, ValueError, TypeError) as error:
        raise FormatError(key, f"is not a shard of this project: {name}: {error}") from error
    if position != data_bytes:
        raise FormatError(key, f"is not a shard of this project: {position} bytes of tensors in {data_bytes}")
    try:
        return fmt.ShardTable(
            names=tuple(name for name, _ in entries),
            dtypes=tuple(entry["dtype"] for _, entry in entries),
            shapes=tuple(shapes),
            starts=tuple(starts),
            lengths=tuple(lengths),
            boxes=tuple(boxes),
        )
    except ValidationError as error:
        raise FormatError(key, f"is not a shard of this project: {error}") from error


def _shape(key: str, name: str, value: Any, sizes: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """A shape in a header; its number of elements goes into `sizes`, as most shapes are there many times.

    Raises TypeError for what can be none, FormatError for one that no tensor has: nothing is computed with those.
    """
    shape = tuple(value) if isinstance(value, list) else (None,)
    with suppress(TypeError):  # lists in it
        if shape in sizes:
            return shape
    if not all(type(one) is int and 0 <= one <= POSITION_MAX for one in shape):
        raise TypeError(f"{value!r:.80} is no shape")
    sizes[shape] = fmt.tensor_elements(key, name, shape)
    return shape


def shard_metadata(key: str, data: memoryview) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """(our metadata, header bytes, safetensors header) of a shard, or of its beginning. Raises FormatError."""
    try:
        header_bytes, header = read_header(data)
        metadata = fmt.parse_header(header["__metadata__"][METADATA_KEY].encode())
        known = all(isinstance(metadata[name], kind) for name, kind in _METADATA_KINDS.items())
    except (ProtocolError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(key, f"is not a shard of this project: {error}") from error
    if not known or not isinstance(metadata["values"].get("objects", {}), dict):
        raise FormatError(key, "is not a shard of this project: its metadata is of another form")
    return metadata, header_bytes, header


# --------------------------------------------------------------------------------------------- the index


@collector_resting()
def draft_index(store: ObjectStore, checkpoint: CheckpointId) -> list[bytes] | str:
    """The index that the receipts make, or why they make none (yet).

    Receipts are read one after another in the order of ranks, a bounded number ahead. Raises FormatError if they do
    not belong together or do not cover every tensor exactly, StoreError.
    """
    prefix = fmt.folder_key(checkpoint) + "/"
    entries = {entry.key: entry for entry in store.entries(prefix)}
    listed = sorted(_receipt_entries(prefix, entries))
    if not listed:
        return "no receipt is there"
    ranks = {rank for rank, _, _ in listed}
    builder = IndexBuilder(checkpoint)
    for number, (key, data) in enumerate(read_in_order(store, [entry for *_, entry in listed], LARGE_BYTES_MAX)):
        receipt = load_receipt(checkpoint, key, data, fmt.Receipt)
        problem = _missing(receipt, ranks) if number == 0 else None
        shard_key = fmt.shard_key(checkpoint, receipt.rank, receipt.world_size)
        shard = entries.get(shard_key)
        size_bytes = 0 if shard is None else shard.size_bytes
        if size_bytes != receipt.size_bytes:
            problem = problem or f"{shard_key} has {size_bytes} bytes, its receipt says {receipt.size_bytes}"
        if problem is not None:
            return problem
        builder.add(key, receipt, data)
    return builder.finish()


def draft_if_whole(store: ObjectStore, checkpoint: CheckpointId) -> list[bytes] | None:
    """The index that the receipts make; None if some are missing, or do not belong together: no start fails on those.

    Raises VersionError, StoreError.
    """
    try:
        draft = draft_index(store, checkpoint)
    except VersionError:
        raise
    except FormatError:
        return None
    return None if isinstance(draft, str) else draft


def _receipt_entries(prefix: str, entries: dict[str, Entry]) -> Iterator[tuple[int, int, Entry]]:
    for key, entry in entries.items():
        named = fmt.parse_receipt_name(key.removeprefix(prefix))
        if named is not None:
            yield (*named, entry)


def _missing(first: fmt.Receipt, ranks: set[int]) -> str | None:
    missing = sorted(set(present_ranks(first.world_size, first.absent)) - ranks)
    if not missing:
        return None
    return f"{len(ranks)} of {first.world_size} receipts are there; ranks {missing} are missing"


def load_receipt(checkpoint: CheckpointId, key: str, data: bytes, kind: type[fmt.ReceiptT]) -> fmt.ReceiptT:
    """Parse a receipt that was read from `key`, or its head. Raises FormatError if it is not that of its key."""
    receipt = fmt.load_receipt(key, data, kind)
    of = CheckpointId(generation=receipt.generation, step=receipt.step)
    if of != checkpoint or key != fmt.receipt_key(of, receipt.rank, receipt.world_size):
        raise FormatError(key, f"is the receipt of rank {receipt.rank} of {receipt.world_size} of {of}")
    return receipt


def commit(store: ObjectStore, checkpoint: CheckpointId) -> bool:
    """Write the index from the receipts; True if the checkpoint is committed, False if it was abandoned before.

    Raises StoreError with what is missing if it cannot be committed (yet).
    """
    decided = read_index(store, checkpoint)
    if decided is not None:
        return isinstance(decided, fmt.Index)
    draft = draft_index(store, checkpoint)
    if isinstance(draft, str):
        raise StoreError(fmt.folder_key(checkpoint), draft)
    return commit_draft(store, checkpoint, draft)


def commit_whole(store: ObjectStore, checkpoint: CheckpointId) -> None:
    """Write the index if the receipts of all ranks are there, absent ones included; else do nothing."""
    receipts = receipts_there(store, checkpoint)
    if receipts and all(len(receipts) == world_size for _, world_size in receipts):
        commit(store, checkpoint)


def receipts_there(store: ObjectStore, checkpoint: CheckpointId) -> set[tuple[int, int]]:
    """(rank, world size) of every receipt in a checkpoint's folder, by their names alone."""
    prefix = fmt.folder_key(checkpoint) + "/"
    entries = {entry.key: entry for entry in store.entries(prefix)}
    return {(rank, world_size) for rank, world_size, _ in _receipt_entries(prefix, entries)}


def abandon(store: ObjectStore, checkpoint: CheckpointId, reason: str) -> bool:
    """Write an abandoned index; True if the checkpoint had been committed before."""
    record = fmt.AbandonedIndex(
        version=fmt.FORMAT_VERSION, generation=checkpoint.generation, step=checkpoint.step, reason=reason
    )
    return _decide(store, checkpoint, [fmt.dump(record)], committed=False)


def commit_draft(store: ObjectStore, checkpoint: CheckpointId, draft: list[bytes]) -> bool:
    """Create the index from a draft; True if the checkpoint is committed, False if it was abandoned before."""
    return _decide(store, checkpoint, draft, committed=True)


def _decide(store: ObjectStore, checkpoint: CheckpointId, pieces: list[bytes], *, committed: bool) -> bool:
    """Create the index; whoever was first is believed. True: committed."""
    key = fmt.index_key(checkpoint)
    try:
        store.create(key, pieces)
    except AlreadyExistsError:
        decided = read_index(store, checkpoint)
        if decided is None:
            raise StoreError(key, "it was there a moment ago, and is gone") from None
        return isinstance(decided, fmt.Index)
    return committed


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

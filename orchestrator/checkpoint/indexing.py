"""From receipts to the index: taken in one at a time, by rising rank, so that memory does not grow with the ranks.

Pure: no store here. The index is a function of the receipts alone, the same bytes whoever makes it. Called by
`checkpoint.save`. What is kept is the shards' sizes and, for each tensor, the series of its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, compress, count, repeat
from operator import add, mul, ne
from typing import Any

import crc32c

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.chunks import Run, TensorChunks
from orchestrator.core.messages import CheckpointId
from orchestrator.core.ownership import present_ranks
from orchestrator.errors import FormatError

_ALIKE = ("job", "generation", "step", "world_size", "absent")
_Following = tuple[str, tuple[int, ...], int, int, int, int, tuple[int, ...]]
"""Dtype, shape, rank, start, length, offset and box of the chunk that would go on a series."""
_PIECE_TENSORS = 512  # entries of the tensor table that are written at once


class IndexBuilder:
    """Makes the index of one checkpoint. `add` every receipt in the order of ranks, then `finish`."""

    def __init__(self, checkpoint: CheckpointId) -> None:
        self._key = fmt.index_key(checkpoint)
        self._first: fmt.Receipt | None = None
        self._values: dict[str, Any] | None = None
        self._values_rank = 0
        self._shards: list[dict[str, int]] = []
        self._tensors: dict[str, TensorChunks] = {}
        self._following: dict[str, _Following] = {}
        self._steps: dict[str, int] = {}
        self._alike: dict[str, int] = {}
        self._objects: set[str] = set()

    def add(self, key: str, receipt: fmt.Receipt, data: bytes) -> None:
        """Take in the receipt of the next rank; `data` are its bytes.

        Raises FormatError if it does not belong to the others, or its table is not of its shard.
        """
        if self._first is None:
            self._first, self._alike = receipt, dict(receipt.objects)
            self._values_rank = present_ranks(receipt.world_size, receipt.absent)[0]
        self._check_belongs(receipt, self._first)
        fmt.unpack_blocks(key, receipt.blocks, receipt.size_bytes)  # without them nothing of the shard could be read
        self._shards.append(
            {
                "rank": receipt.rank,
                "size_bytes": receipt.size_bytes,
                "header_bytes": receipt.header_bytes,
                "crc32c": receipt.crc32c,
                "receipt_bytes": len(data),
                "receipt_crc32c": crc32c.crc32c(data),
            }
        )
        self._objects.update(receipt.objects)
        if receipt.objects != self._alike:
            self._alike = dict(self._alike.items() & receipt.objects.items())
        self._take_values(key, receipt)
        self._take_table(key, receipt)

    def _check_belongs(self, receipt: fmt.Receipt, first: fmt.Receipt) -> None:
        differing = [name for name in _ALIKE if getattr(receipt, name) != getattr(first, name)]
        if differing:
            raise FormatError(
                self._key, f"rank {receipt.rank}'s receipt differs from rank {first.rank}'s in {differing}"
            )
        if receipt.rank >= receipt.world_size or (self._shards and receipt.rank <= self._shards[-1]["rank"]):
            ranks = [shard["rank"] for shard in self._shards] + [receipt.rank]
            raise FormatError(self._key, f"its shards are of ranks {ranks} of {receipt.world_size}")

    def _take_values(self, key: str, receipt: fmt.Receipt) -> None:
        """The job-scoped values come from the first present rank."""
        due = receipt.rank == self._values_rank
        if due is (receipt.values is None):
            whose = f"the receipt of rank {self._values_rank} has the job's values, no other"
            raise FormatError(key, f"{whose}; this one {'lacks' if due else 'has'} them")
        if receipt.values is None:
            return
        objects = receipt.values.get("objects", {})
        object_digests(key, receipt.values | {"objects": None})  # refuses what JSON cannot hold
        if not isinstance(objects, dict) or object_digests(key, objects) != receipt.objects:
            raise FormatError(key, "its objects do not have the digests that it says")
        self._values = receipt.values

    def _take_table(self, key: str, receipt: fmt.Receipt) -> None:
        """Compare each chunk with the one that would go on its tensor's series; look closer only where it does not.

        The hot path, millions of chunks: whole columns go through the interpreter's own loops.
        """
        table, rank, following = receipt.tensors, receipt.rank, self._following
        names, dtypes, shapes, starts, lengths, boxes = (getattr(table, column) for column in fmt.TABLE_COLUMNS)
        offsets = checked_offsets(key, receipt)
        chunks = zip(dtypes, shapes, repeat(rank), starts, lengths, offsets, boxes, strict=False)
        for place in list(compress(count(), map(ne, chunks, map(following.get, names)))):
            run = (rank, starts[place], lengths[place], offsets[place], boxes[place])
            self._take_chunk(names[place], dtypes[place], shapes[place], run)
        nexts = map(add, starts, map(self._steps.get, names, lengths))
        following.update(
            zip(names, zip(dtypes, shapes, repeat(rank + 1), nexts, lengths, offsets, boxes, strict=False), strict=True)
        )

    def _take_chunk(self, name: str, dtype: str, shape: tuple[int, ...], run: Run) -> None:
        tensor, following = self._tensor(name, dtype, shape), self._following.get(name)
        try:
            tensor.take(run, run[0] if following is None else following[2])
        except ValueError as error:
            raise FormatError(self._key, f"{name}: {error}") from error
        if tensor.step is not None:
            self._steps[name] = tensor.step

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorChunks:
        tensor = self._tensors.get(name)
        if tensor is None:
            elements = fmt.tensor_elements(self._key, name, shape)
            tensor = self._tensors[name] = TensorChunks(dtype, shape, elements)
        elif tensor.dtype != dtype or tensor.shape != shape:
            raise FormatError(self._key, f"{name}: the ranks disagree on its dtype or shape")
        return tensor

    def finish(self) -> list[bytes]:
        """The pieces of the index file. Raises FormatError if not every element of every tensor is there once."""
        first = self._first
        assert first is not None
        if self._values is None:
            raise FormatError(self._key, "no receipt has the job's values")
        objects = self._values.get("objects", {})
        fields: dict[str, Any] = {
            "version": fmt.FORMAT_VERSION,
            "state": "committed",
            **{name: getattr(first, name) for name in _ALIKE},
            "shards": self._shards,
            "values": {**self._values, "objects": {name: objects[name] for name in self._alike}},
            "rank_objects": sorted(self._objects - set(self._alike)),
            "tensors": None,
        }
        pieces = list(self._pieces(fields))
        return [fmt.seal(pieces), *pieces]

    def _pieces(self, fields: dict[str, Any]) -> Iterator[bytes]:
        """Canonical JSON of the fields without its first byte; `tensors` is written from what was taken in."""
        separator = b""
        for name in sorted(fields):
            yield separator + fmt.canonical_json(name) + b":"
            if name == "tensors":
                yield from self._tensor_pieces()
            else:
                yield fmt.canonical_json(fields[name])
            separator = b","
        yield b"}"

    def _tensor_pieces(self) -> Iterator[bytes]:
        names, separator = sorted(self._tensors), b"{"
        for low in range(0, len(names), _PIECE_TENSORS):
            entries = {name: self._tensor_entry(name) for name in names[low : low + _PIECE_TENSORS]}
            yield separator + fmt.canonical_json(entries)[1:-1]
            separator = b","
        yield b"}" if names else b"{}"

    def _tensor_entry(self, name: str) -> dict[str, Any]:
        tensor = self._tensors.pop(name)  # its text is in the entry now
        try:
            series = tensor.finish(self._following[name][2])
        except ValueError as error:
            raise FormatError(self._key, f"{name}: {error}") from error
        return {"dtype": tensor.dtype, "series": series, "shape": tensor.shape}


def checked_offsets(key: str, receipt: fmt.Receipt) -> list[int]:
    """Where each chunk of a shard begins, in bytes after the header. Raises FormatError if the table is not of it."""
    table = receipt.tensors
    sizes = [len(getattr(table, column)) for column in fmt.TABLE_COLUMNS]
    if len(set(sizes)) != 1:
        raise FormatError(key, f"the columns of its table have {sizes} entries")
    if len(set(table.names)) != len(table.names):
        raise FormatError(key, "its table names a tensor twice")
    unknown = sorted(set(table.dtypes) - set(fmt.DTYPE_BYTES))
    if unknown:
        fmt.dtype_width(key, table.names[table.dtypes.index(unknown[0])], unknown[0])
    offsets = [0, *accumulate(map(mul, table.lengths, map(fmt.DTYPE_BYTES.__getitem__, table.dtypes)))]
    if receipt.header_bytes + offsets[-1] != receipt.size_bytes:
        raise FormatError(
            key,
            f"its tensors take {offsets[-1]} bytes after {receipt.header_bytes} of header; "
            f"the shard has {receipt.size_bytes}",
        )
    return offsets


def object_digests(key: str, objects: dict[str, Any]) -> dict[str, int]:
    """crc32c of the canonical JSON of each object's state: tells whether ranks have it alike (1 and true are not)."""
    try:
        return {name: int(crc32c.crc32c(fmt.canonical_json(tree))) for name, tree in objects.items()}
    except ValueError as error:
        raise FormatError(key, f"holds values that JSON cannot hold: {error}") from error

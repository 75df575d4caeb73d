"""Receipts without shards, and the indexes that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.indexing import IndexBuilder, object_digests
from orchestrator.core.messages import CheckpointId
from orchestrator.core.ownership import present_ranks

CHECKPOINT = CheckpointId(generation=1, step=2)
HEADER_BYTES = 4096
Row = tuple[str, str, tuple[int, ...], int, int] | tuple[str, str, tuple[int, ...], int, int, tuple[int, ...]]
"""Name, dtype, shape, first element, elements, and the box if it is part of one."""


def full(row: Row) -> tuple[str, str, tuple[int, ...], int, int, tuple[int, ...]]:
    """The row with its box."""
    return row if len(row) == 6 else (*row, ())


def table(*rows: Row) -> fmt.ShardTable:
    """A shard's table from its rows."""
    columns = [tuple(column) for column in zip(*(full(row) for row in rows), strict=True)]
    columns = columns or [()] * len(fmt.TABLE_COLUMNS)
    return fmt.ShardTable(**dict(zip(fmt.TABLE_COLUMNS, columns, strict=True)))


def data_bytes(rows: Iterable[Row]) -> int:
    """Bytes of a shard's tensors."""
    return sum(length * fmt.DTYPE_BYTES.get(dtype, 4) for _, dtype, _, _, length, _ in map(full, rows))


def receipt(
    rank: int = 0,
    world_size: int = 2,
    *,
    elements: tuple[int, int] = (0, 4),
    rows: list[Row] | None = None,
    objects: Any = None,
    **fields: Any,
) -> fmt.Receipt:
    """A receipt; its shard holds elements of the tensor `t`, 8 of F32, unless `rows` says what else."""
    rows = [("t", "F32", (8,), elements[0], elements[1] - elements[0])] if rows is None else rows
    absent = fields.get("absent", ())
    values: dict[str, Any] = {
        "version": fmt.FORMAT_VERSION,
        "job": "job",
        "generation": 1,
        "step": 2,
        "world_size": world_size,
        "absent": absent,
        "rank": rank,
        "size_bytes": HEADER_BYTES + data_bytes(rows),
        "header_bytes": HEADER_BYTES,
        "crc32c": 7,
        "blocks": fmt.pack_blocks([7]),
        "tensors": table(*rows),
        "objects": object_digests("objects", objects or {}),
        "values": {"objects": objects or {}} if rank == present_ranks(world_size, absent)[0] else None,
        "gate": fmt.Gate(step=2, lr="lr", data=None, rng="rng"),
    }
    return fmt.Receipt(**{**values, **fields})


def two(**fields: Any) -> list[fmt.Receipt]:
    """Receipts of both ranks of a checkpoint."""
    return [receipt(0, elements=(0, 4), **fields), receipt(1, elements=(4, 8), **fields)]


def index_of(receipts: Iterable[fmt.Receipt]) -> bytes:
    """The index file that the receipts make, taken in in the given order."""
    builder = IndexBuilder(CHECKPOINT)
    for one in receipts:
        builder.add(
            fmt.receipt_key(CHECKPOINT, one.rank, one.world_size),
            one,
            json.dumps(one.model_dump(), sort_keys=True, separators=(",", ":")).encode(),
        )
    return b"".join(builder.finish())


def read(data: bytes) -> fmt.Index:
    """The index in an index file."""
    index = fmt.load_index(fmt.index_key(CHECKPOINT), data)
    assert isinstance(index, fmt.Index)
    return index

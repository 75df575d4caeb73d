"""Who reads what of the state that every rank needs whole, and how it travels to the others. Pure.

Tensors are laid end to end in the order of a shard file (widest elements first, then by name) and cut into equal byte
windows, as for saving (`core.ownership`): at the world size that saved a plain state, each rank reads what it staged
itself, which is nearest. A window is cut into buckets, so that what is under way takes a bounded memory.

Called by `training.sharing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from orchestrator.checkpoint.boxes import Box, boxes_of_range, whole
from orchestrator.core.ownership import Span, equal_windows


class Needed(NamedTuple):
    """A tensor that every rank needs whole."""

    name: str
    width: int
    """Bytes per element: a power of two."""
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A box whose elements follow each other in its tensor, at bytes [first_byte, last_byte) of a bucket."""

    name: str
    box: Box
    first_byte: int
    last_byte: int


Bucket = tuple[Piece, ...]


def bucket_bytes(bucket: Bucket) -> int:
    """How long it is."""
    return bucket[-1].last_byte


def buckets_by_rank(needed: Iterable[Needed], *, ranks: int, bytes_max: int) -> list[list[Bucket]]:
    """For each rank, what it reads for all, in buckets of at most `bytes_max` bytes (8 or more).

    The same for the same tensors in any order. Ranks differ by less than one element; every element is in one piece,
    and every piece is aligned to its width.
    """
    ordered = sorted(needed, key=lambda one: (-one.width, one.name))
    sizes = [prod(one.shape) for one in ordered]
    windows = equal_windows([(size, one.width) for size, one in zip(sizes, ordered, strict=True)], ranks)
    return [list(_buckets(spans, ordered, sizes, bytes_max)) for spans in windows]


def _buckets(
    spans: Iterable[Span], ordered: Sequence[Needed], sizes: Sequence[int], bytes_max: int
) -> Iterator[Bucket]:
    bucket: list[Piece] = []
    filled = 0
    for span in spans:
        one, start = ordered[span.tensor], span.start
        while start < span.stop:
            room = (bytes_max - filled) // one.width
            if room == 0:
                yield tuple(bucket)
                bucket, filled = [], 0
                continue
            stop = min(span.stop, start + room)
            everything = start == 0 and stop == sizes[span.tensor]
            for box in [whole(one.shape)] if everything else boxes_of_range(one.shape, start, stop):
                last = filled + box.elements * one.width
                bucket.append(Piece(one.name, box, filled, last))
                filled = last
            start = stop
    if bucket:
        yield tuple(bucket)

"""Which shard holds which elements of a tensor: chunks, their short form in the index, and exact cover. Pure, no I/O.

A **chunk** is what one shard holds of one tensor: a range of its elements in row-major order. A **series** is chunks of
consecutive ranks that are equally long, follow each other in the tensor and lie at the same place of each shard: what
sharding evenly makes, however many ranks there are. Called by `checkpoint.format` and `checkpoint.indexing`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import NamedTuple

POSITION_MAX = (1 << 62) - 1
"""No count, element or byte of a checkpoint is beyond this: sums of two fit 64 bits."""

_NUMBER = r"(0|[1-9][0-9]{0,18})"
_SERIES = re.compile(rf"{_NUMBER}\*{_NUMBER}:{_NUMBER}\+{_NUMBER}@{_NUMBER}")


class Chunk(NamedTuple):
    """Elements [start, stop) of a tensor at bytes [first_byte, last_byte) of the shard file of `rank`."""

    rank: int
    start: int
    stop: int
    first_byte: int
    last_byte: int


class Series(NamedTuple):
    """One chunk for each of `ranks` ranks from `rank` on, of `length` elements each, beginning at element `start`."""

    rank: int
    ranks: int
    start: int
    length: int
    offset: int
    """Bytes between the end of each shard's header and the chunk."""

    @property
    def stop(self) -> int:
        """The element after the last one."""
        return self.start + self.ranks * self.length

    def text(self) -> str:
        """As it stands in the index: ranks, elements, place."""
        return f"{self.rank}*{self.ranks}:{self.start}+{self.length}@{self.offset}"


def parse_series(text: str) -> Iterator[Series]:
    """The series of a tensor, as its entry in the index has them. Raises ValueError."""
    for item in text.split(" "):
        match = _SERIES.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r:.80} is not of the form rank*ranks:start+length@offset")
        yield Series._make(map(int, match.groups()))


class Cover:
    """The elements of one tensor that were found so far: disjoint ranges in order, neighbours joined.

    Ranks in order mostly extend one range, so that it stays small whatever the number of chunks.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts = array("q")
        self._stops = array("q")

    def add(self, start: int, stop: int) -> None:
        """Take a range in; both at most POSITION_MAX. Raises ValueError naming elements that are there already."""
        starts, stops = self._starts, self._stops
        place = bisect_right(starts, start)  # before it: ranges that begin at `start` or earlier
        if place and stops[place - 1] > start:
            raise ValueError(f"elements {start} to {min(stop, stops[place - 1])} are written twice")
        if place < len(starts) and starts[place] < stop:
            raise ValueError(f"elements {starts[place]} to {min(stop, stops[place])} are written twice")
        if start == stop:
            return
        joins_left = place > 0 and stops[place - 1] == start
        joins_right = place < len(starts) and starts[place] == stop
        if joins_left and joins_right:
            stops[place - 1] = stops[place]
            del starts[place], stops[place]
        elif joins_left:
            stops[place - 1] = stop
        elif joins_right:
            starts[place] = start
        else:
            starts.insert(place, start)
            stops.insert(place, stop)

    def missing(self, total: int) -> tuple[int, int] | None:
        """The first range of a tensor of `total` elements that is not there, or None."""
        if total == 0:
            return None
        if not self._starts:
            return 0, total
        if self._starts[0] > 0:
            return 0, self._starts[0]
        if self._stops[0] < total:
            return self._stops[0], self._starts[1] if len(self._starts) > 1 else total
        return None


class TensorChunks:
    """The chunks of one tensor while an index is being made, by rising rank; kept as the text of their series."""

    __slots__ = ("_cover", "_first", "_text", "dtype", "shape", "total")

    def __init__(self, dtype: str, shape: tuple[int, ...], total: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.total = total
        self._cover = Cover()
        self._text = bytearray()
        self._first: tuple[int, int, int, int] | None = None

    def begin(self, rank: int, start: int, length: int, offset: int) -> None:
        """The first chunk of a series; the one before it must have been ended."""
        self._first = (rank, start, length, offset)

    def end(self, rank: int) -> None:
        """The series goes up to before `rank`. Raises ValueError if elements are there already or beyond the tensor."""
        assert self._first is not None
        first, start, length, offset = self._first
        series = Series(first, rank - first, start, length, offset)
        check_series(series, self.total)
        self._cover.add(start, series.stop)
        if self._text:
            self._text += b" "
        self._text += series.text().encode()

    def finish(self) -> bytes:
        """The text of all series, ASCII. Raises ValueError if not every element is there exactly once."""
        missing = self._cover.missing(self.total)
        if missing is not None:
            raise ValueError(f"elements {missing[0]} to {missing[1]} of {self.total} are missing")
        return bytes(self._text)


def check_series(series: Series, total: int) -> None:
    """A series lies within a tensor of `total` elements and is not empty without reason. Raises ValueError."""
    if series.stop > total:
        raise ValueError(f"a chunk ends at element {series.stop} of {total}")
    if series.length == 0 and total:
        raise ValueError(f"rank {series.rank} has an empty chunk of it")


def chunks_of(series: Series, width: int, places: Mapping[int, tuple[int, int]]) -> Iterator[Chunk]:
    """The chunks of a series of elements of `width` bytes. Raises ValueError if one lies outside its shard.

    `places` has (bytes of header, bytes of tensors) of the shard of each rank that has one.
    """
    if series.ranks > len(places):
        raise ValueError(f"{series.ranks} ranks are said to have a part of it, {len(places)} have shards")
    ranks, size_bytes = range(series.rank, series.rank + series.ranks), series.length * width
    firsts = []
    for rank in ranks:
        header_bytes, data_bytes = places.get(rank, (0, -1))
        if series.offset + size_bytes > data_bytes:
            raise ValueError(f"a chunk lies outside the shard of rank {rank}")
        firsts.append(header_bytes + series.offset)
    starts = [series.start + place * series.length for place in range(series.ranks)]
    stops = [start + series.length for start in starts]
    return map(Chunk, ranks, starts, stops, firsts, [first + size_bytes for first in firsts])

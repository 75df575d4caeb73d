"""Which shard holds which elements of a tensor: chunks, their short form in the index, and exact cover. Pure, no I/O.

A **chunk** is what one shard holds of one tensor: a range of its elements in row-major order, or, of a tensor that is
cut into boxes, a range of a box's elements. A **series** is chunks of consecutive ranks that are equally long, equally
far apart in the tensor and at the same place of each shard, perhaps repeated by the ranks after them: what sharding
evenly makes, on a mesh too, however many ranks there are. Called by `checkpoint.format` and `checkpoint.indexing`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, repeat
from math import prod
from typing import Any, NamedTuple

from orchestrator.checkpoint.boxes import Box, box_at

POSITION_MAX = (1 << 62) - 1
"""No count, element or byte of a checkpoint is beyond this: sums of two fit 64 bits."""

_NUMBER = r"(0|[1-9][0-9]{0,18})"
_SERIES = re.compile(
    rf"{_NUMBER}\*{_NUMBER}(?:x{_NUMBER}(?:/{_NUMBER})?)?:{_NUMBER}\+{_NUMBER}(?:~{_NUMBER}(?:~{_NUMBER})?)?@{_NUMBER}"
    rf"(?:#((?:{_NUMBER},)*{_NUMBER}))?"
)

_WHOLE = re.compile(rf"{_NUMBER}\*1:0\+{_NUMBER}@{_NUMBER}")
"""A tensor that one rank has all of, as most small ones are."""


class Chunk(NamedTuple):
    """Elements [start, stop) of a tensor, or of a box of it, at bytes [first_byte, last_byte) of a rank's shard."""

    rank: int
    start: int
    stop: int
    first_byte: int
    last_byte: int
    box: Box | None = None


class Series(NamedTuple):
    """One chunk for each of `ranks` ranks from `rank` on, of `length` elements each, the first at element `start`.

    With a box, `start` is the first element of the first rank's box.
    """

    rank: int
    ranks: int
    start: int
    length: int
    offset: int
    """Bytes between the end of each shard's header and the chunk."""
    step: int
    """Elements from one rank's start to the next one's."""
    repeats: int = 1
    """How often: every `every` ranks from `rank` on there is the same again, `jump` elements on."""
    every: int = 0
    jump: int = 0
    box: tuple[int, ...] = ()
    """Lengths of each rank's box, then how many of its elements come before the chunk; () if it is a plain range."""

    @property
    def stop(self) -> int:
        """The element after the last one; of boxes, the one after the last box's first."""
        last = self.start + (self.ranks - 1) * self.step + (self.repeats - 1) * self.jump
        return last + (1 if self.box else self.length)

    def all_ranks(self) -> list[int]:
        """The rank of each chunk."""
        inner = range(self.ranks)
        if self.repeats == 1:
            return [self.rank + place for place in inner]
        return [self.rank + turn * self.every + place for turn in range(self.repeats) for place in inner]

    def starts(self) -> list[int]:
        """Where each rank's chunk, or box, begins."""
        inner = range(self.ranks)
        if self.repeats == 1:
            return [self.start + place * self.step for place in inner]
        firsts = [self.start + turn * self.jump for turn in range(self.repeats)]
        return [first + place * self.step for first in firsts for place in inner]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The elements of plain ranges, neighbours joined where that is quick."""
        if self.repeats > 1 and self.jump == self.length:
            for place in range(self.ranks):
                first = self.start + place * self.step
                yield first, first + self.repeats * self.length
        elif self.ranks == 1 or self.step == self.length:
            for turn in range(self.repeats):
                first = self.start + turn * self.jump
                yield first, first + self.ranks * self.length
        else:
            for first in self.starts():
                yield first, first + self.length

    def text(self) -> str:
        """As it stands in the index: ranks, elements, place."""
        if self.ranks == self.repeats == 1 and not self.box:
            return f"{self.rank}*1:{self.start}+{self.length}@{self.offset}"
        times = f"x{self.repeats}" if self.repeats > 1 else ""
        times += f"/{self.every}" if self.repeats > 1 and self.every != self.ranks else ""
        apart = f"~{self.step}" if self.repeats > 1 or (self.ranks > 1 and self.step != self.length) else ""
        jump = f"~{self.jump}" if self.repeats > 1 else ""
        box = "#" + ",".join(map(str, self.box)) if self.box else ""
        return f"{self.rank}*{self.ranks}{times}:{self.start}+{self.length}{apart}{jump}@{self.offset}{box}"


def parse_series(text: str) -> Iterator[Series]:
    """The series of a tensor, as its entry in the index has them. Raises ValueError."""
    for item in text.split(" "):
        match = _SERIES.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r:.80} is not of the form rank*ranks:start+length@offset")
        rank, ranks, repeats, every, start, length, step, jump, offset, box = match.groups()[:10]
        yield Series(
            rank=int(rank),
            ranks=int(ranks),
            start=int(start),
            length=int(length),
            offset=int(offset),
            step=int(step or length),
            repeats=int(repeats or 1),
            every=int(every or ranks) if repeats else 0,
            jump=int(jump or 0),
            box=tuple(map(int, box.split(","))) if box else (),
        )


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


OPEN_SERIES_MAX = 16
"""Series of one tensor that may still be repeated; what a mesh of more unequal parts makes takes more of them."""
Run = tuple[int, int, int, int, tuple[int, ...]]
"""The first chunk of a series: rank, start, elements, bytes after the header, box."""


class TensorChunks:
    """The chunks of one tensor while an index is being made, by rising rank; kept as the text of their series."""

    __slots__ = ("_boxed", "_cover", "_open", "_run", "_text", "dtype", "shape", "step", "total")

    def __init__(self, dtype: str, shape: tuple[int, ...], total: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.total = total
        self.step: int | None = None
        """Elements from the last chunk to the one that would go on its series; None: its length."""
        self._cover: Cover | None = None
        self._text = bytearray()
        self._run: Run | None = None
        self._open: dict[tuple[Any, ...], Series] = {}
        self._boxed: bool | None = None

    def take(self, run: Run, upto: int) -> None:
        """A chunk that does not go on the series as `step` has it; that one ended before rank `upto`.

        Raises ValueError if elements are there already or beyond the tensor.
        """
        first = self._run
        if first is not None:
            if first[0] + 1 == upto == run[0] and first[2:] == run[2:] and first[1] < run[1]:
                self.step = run[1] - first[1]  # the second chunk says how far apart they are
                return
            self._end(upto)
        self._run = run

    def _end(self, upto: int) -> None:
        """The run goes up to before rank `upto`: it repeats one that is alike, or begins a series of its own."""
        assert self._run is not None
        rank, start, length, offset, box = self._run
        ranks = upto - rank
        step = length if self.step is None or ranks == 1 else self.step
        run = Series(rank, ranks, start, length, offset, step, box=box)
        alike = (ranks, length, offset, step, box)
        series = self._open.pop(alike, None)
        if series is not None:
            repeated = _repeated(series, run)
            if repeated is not None:
                self._open[alike] = repeated
                return
            self._flush(series)
        elif len(self._open) == OPEN_SERIES_MAX:
            self._flush(self._open.pop(next(iter(self._open))))
        self._open[alike] = run

    def _flush(self, series: Series) -> None:
        check_series(series, self.shape, self.total)
        self._boxed = _same_kind(self._boxed, series)
        if self._cover is None:
            self._cover = Cover()
        if not series.box and series.ranks == series.repeats == 1:
            self._cover.add(series.start, series.stop)
        elif not series.box:
            for start, stop in series.ranges():
                self._cover.add(start, stop)
        if self._text:
            self._text += b" "
        self._text += series.text().encode()

    def finish(self, upto: int) -> str:
        """The text of all series. Raises ValueError if not every element is there exactly once."""
        assert self._run is not None
        rank, start, length, offset, box = self._run
        if not self._open and not self._text and (start, length, box, upto) == (0, self.total, (), rank + 1):
            return f"{rank}*1:0+{length}@{offset}"  # as most small tensors are
        self._end(upto)
        for series in self._open.values():
            self._flush(series)
        if self._boxed:
            check_grid(self.shape, map(_box_part, *zip(*self._boxes(), strict=True)))
        else:
            _check_whole(self._cover or Cover(), self.total)
        return self._text.decode()

    def _boxes(self) -> Iterator[tuple[Series, int]]:
        for series in parse_series(self._text.decode()):
            for start in series.starts():
                yield series, start


def _repeated(series: Series, run: Series) -> Series | None:
    """The series with a run that is alike as its next repetition, None if it is not that."""
    every, jump = run.rank - series.rank, run.start - series.start
    if series.repeats == 1:
        return series._replace(repeats=2, every=every, jump=jump) if jump > 0 else None
    if (every, jump) != (series.every * series.repeats, series.jump * series.repeats):
        return None
    return series._replace(repeats=series.repeats + 1)


def _same_kind(boxed: bool | None, series: Series) -> bool:
    """A tensor is stored in ranges or in boxes. Raises ValueError if it is in both."""
    if boxed is not None and boxed is not bool(series.box):
        raise ValueError(
            f"rank {series.rank} has {'a box' if series.box else 'a range'} of it, ranks before it have not"
        )
    return bool(series.box)


def _check_whole(cover: Cover, total: int) -> None:
    missing = cover.missing(total)
    if missing is not None:
        raise ValueError(f"elements {missing[0]} to {missing[1]} of {total} are missing")


def check_series(series: Series, shape: tuple[int, ...], total: int) -> None:
    """A series lies within a tensor of that shape and is not empty without reason. Raises ValueError.

    That each box lies within it is found out by `check_grid`.
    """
    if series.ranks < 1 or series.repeats < 1 or (series.repeats > 1 and series.every < series.ranks):
        raise ValueError(f"a series of {series.ranks} × {series.repeats} ranks, every {series.every}, is none")
    if series.stop > total:
        raise ValueError(f"a chunk ends at element {series.stop} of {total}")
    if series.length == 0 and total:
        raise ValueError(f"rank {series.rank} has an empty chunk of it")
    if series.box:
        *lengths, before = series.box
        if len(lengths) != len(shape):
            raise ValueError(f"rank {series.rank} has a box of {len(lengths)} dimensions, it has {len(shape)}")
        if any(length > size for length, size in zip(lengths, shape, strict=True)):
            raise ValueError(f"a box of {lengths} lies outside its shape {list(shape)}")
        if before + series.length > prod(lengths):
            raise ValueError(f"a chunk ends at element {before + series.length} of a box of {lengths}")


BoxPart = tuple[int, tuple[int, ...], int, int]
"""Elements [start, stop) of a box: the box's first element, its lengths, start, stop."""


def _box_part(series: Series, start: int) -> BoxPart:
    *lengths, before = series.box
    return start, tuple(lengths), before, before + series.length


def check_grid(shape: tuple[int, ...], parts: Iterable[BoxPart]) -> None:
    """The parts make every element of a tensor of that shape once. Raises ValueError naming what is wrong.

    Different boxes must form a grid: in each dimension their intervals follow each other from end to end, and there
    are as many boxes as the grid has places. Each box must be there exactly once.
    """
    boxes: dict[tuple[int, tuple[int, ...]], Cover] = {}
    edges: tuple[dict[int, int], ...] = tuple({} for _ in shape)
    for element, lengths, start, stop in parts:
        cover = boxes.get((element, lengths))
        if cover is None:
            cover = boxes[element, lengths] = Cover()
            box = box_at(element, lengths, shape)
            for edge, offset, length in zip(edges, *box, strict=True):
                if edge.setdefault(offset, length) != length:
                    raise ValueError(f"its boxes are no grid: at {offset} one is {length} wide, another {edge[offset]}")
        try:
            cover.add(start, stop)
        except ValueError as error:
            raise ValueError(f"of the box at element {element}, {error}") from error
    for edge, size in zip(edges, shape, strict=True):
        intervals = sorted(edge.items())
        ends = [0, *(offset + length for offset, length in intervals)]
        if ends[:-1] != [offset for offset, _ in intervals] or ends[-1] != size:
            raise ValueError(f"its boxes are no grid: {_hole(intervals, size)}")
    if len(boxes) != prod(map(len, edges)):
        raise ValueError(f"{len(boxes)} boxes are there of a grid of {prod(map(len, edges))}")
    for (element, lengths), cover in boxes.items():
        missing = cover.missing(prod(lengths))
        if missing is not None:
            raise ValueError(f"of the box at element {element}, elements {missing[0]} to {missing[1]} are missing")


def _hole(intervals: list[tuple[int, int]], size: int) -> str:
    """Where intervals do not follow each other from 0 to `size`."""
    ends = [(0, 0), *intervals, (size, 0)]
    for (offset, length), (after, _) in pairwise(ends):
        if offset + length != after:
            return f"places {offset + length} and {after} of {size} should be one"
    return "its places do not follow each other"


def chunks_of(
    series: Series, shape: tuple[int, ...], width: int, places: Mapping[int, tuple[int, int]]
) -> Iterator[Chunk]:
    """The chunks of a series of elements of `width` bytes. Raises ValueError if one lies outside its shard.

    `places` has (bytes of header, bytes of tensors) of the shard of each rank that has one.
    """
    count = series.ranks * series.repeats
    if count > len(places):
        raise ValueError(f"{count} ranks are said to have a part of it, {len(places)} have shards")
    ranks, size_bytes = series.all_ranks(), series.length * width
    firsts = []
    for rank in ranks:
        header_bytes, data_bytes = places.get(rank, (0, -1))
        if series.offset + size_bytes > data_bytes:
            raise ValueError(f"a chunk lies outside the shard of rank {rank}")
        firsts.append(header_bytes + series.offset)
    starts, lasts = series.starts(), [first + size_bytes for first in firsts]
    if not series.box:
        return map(Chunk, ranks, starts, [start + series.length for start in starts], firsts, lasts)
    *lengths, before = series.box
    boxes = [box_at(start, tuple(lengths), shape) for start in starts]
    return map(Chunk, ranks, repeat(before), repeat(before + series.length), firsts, lasts, boxes)


def all_chunks(
    text: str, shape: tuple[int, ...], total: int, width: int, places: Mapping[int, tuple[int, int]]
) -> list[Chunk]:
    """All chunks of a tensor from the text of its series: every element once, all of it within its shard.

    Raises ValueError, before anything is made that is larger than the text and the shards' number.
    """
    if match := _WHOLE.fullmatch(text):
        rank, length, offset = map(int, match.groups())
        header_bytes, data_bytes = places.get(rank, (0, -1))
        if length == total and offset + length * width <= data_bytes:
            first = header_bytes + offset
            return [Chunk(rank, 0, total, first, first + total * width)]
    found: list[Chunk] = []
    parts: list[BoxPart] = []
    cover, boxed = Cover(), None
    for series in parse_series(text):
        check_series(series, shape, total)
        boxed = _same_kind(boxed, series)
        chunks = list(chunks_of(series, shape, width, places))
        if boxed:
            parts += [_box_part(series, start) for start in series.starts()]
        else:
            for start, stop in series.ranges():
                cover.add(start, stop)
        found += chunks
    if boxed:
        check_grid(shape, parts)
    else:
        _check_whole(cover, total)
    return found

"""Pieces of an object as the parts of an S3 upload: cut without a copy, digested, read by the SDK as a file.

Pure; no SDK. Called by `store` and `upload`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from orchestrator.storage.answers import checksum, checksum_text
from orchestrator.storage.arguments import bytes_of
from orchestrator.storage.base import Piece, digest_of

PART_BYTES = 32 << 20
"""Of what is large, or of any size: a part costs the SDK 3 to 4 ms of a core, whatever its size, and no memory."""
SMALLER = ((64 << 20, 8 << 20), (256 << 20, 16 << 20))
"""(objects of no more bytes than these, their parts' size): so that there are more than a few to be sent at once."""
EQUAL_PARTS = 5000
"""Some servers (R2) take only parts of equal size. Where the object's size is not bounded, so many are equal."""
DOUBLING_PARTS = 1000
"""After those, the size doubles after each so many: 10,000 parts are the most that S3 takes."""
LARGE_BYTES_MIN = 15_000_000_000
"""A shard of a model of 70 billion parameters on 64 ranks."""
PARTS_AT_ONCE, LARGE_PARTS_AT_ONCE = 4, 8
"""Of one object, on their way to the server, if it does not ask for fewer."""
PARTS_MAX = 10_000
SLICE_BYTES = 1 << 20
"""Given to the SDK at a time: each must be sent within its time-out, so this also says how slow is too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """How an object is cut: into equal parts for as long as possible. Only the last one is smaller."""

    first_bytes: int
    at_once: int
    count_max: int | None = None
    """So many parts at most, if the object's size is bounded: then all are equal."""

    def part_bytes(self, number: int) -> int:
        """Size of part `number`, counted from 1."""
        if self.count_max is not None:
            return self.first_bytes
        return self.first_bytes << max(0, -(-(number - EQUAL_PARTS) // DOUBLING_PARTS))


def plan_parts(size_bytes_max: int | None) -> PartPlan:
    """The plan for an object of no more bytes than that; None: nobody knows."""
    if size_bytes_max is None:
        return PartPlan(first_bytes=PART_BYTES, at_once=PARTS_AT_ONCE)
    least = -(-size_bytes_max // (PARTS_MAX << 20)) << 20
    size_bytes = next((size for limit, size in SMALLER if size_bytes_max <= limit), max(PART_BYTES, least))
    at_once = PARTS_AT_ONCE if size_bytes_max < LARGE_BYTES_MIN else LARGE_PARTS_AT_ONCE
    return PartPlan(first_bytes=size_bytes, at_once=at_once, count_max=max(1, -(-size_bytes_max // size_bytes)))


class Part:
    """Consecutive views of memory as a file that is read once from its beginning, or again after `seek(0)`."""

    def __init__(self, views: Sequence[memoryview], known: Callable[[], int | None] = lambda: None) -> None:
        """`known`: their crc32c, if somebody has it already."""
        self.views = views
        self._known = known
        self._starts = [0, *accumulate(len(view) for view in views)]
        self._place = 0
        self._position = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next bytes, without a copy: any number up to SLICE_BYTES, whatever `size` says; all if it is negative."""
        if size < 0:
            return b"".join(iter(self.read_slice, b""))
        return self.read_slice()

    def read_slice(self) -> bytes | memoryview:
        """The next bytes, at most SLICE_BYTES and of one view; empty at the end."""
        if self._position == len(self):
            return b""
        while self._starts[self._place + 1] <= self._position:
            self._place += 1
        view, offset = self.views[self._place], self._position - self._starts[self._place]
        piece = view[offset : offset + SLICE_BYTES]
        self._position += len(piece)
        return piece

    def tell(self) -> int:
        """How many bytes were read."""
        return self._position

    def seek(self, position: int) -> int:
        """Go on reading from there."""
        self._place, self._position = 0, position
        return position

    def checksum(self) -> str:
        """crc32c of all bytes, as S3 writes it."""
        digest = self._known()
        return checksum(self.views) if digest is None else checksum_text(digest)


def cut(pieces: Iterable[Piece], plan: PartPlan) -> Iterator[Part]:
    """Parts of exactly the planned sizes, as soon as their bytes are there; the last one is smaller, maybe empty."""
    known = digest_of(pieces)
    number, start, missing = 1, 0, plan.part_bytes(1)
    views: list[memoryview] = []
    for view in map(bytes_of, pieces):
        rest = view
        while len(rest) >= missing:
            stop = start + plan.part_bytes(number)
            yield Part([*views, rest[:missing]], partial(known, start, stop))
            rest, number, start, views = rest[missing:], number + 1, stop, []
            missing = plan.part_bytes(number)
        if rest:
            views.append(rest)
            missing -= len(rest)
    yield Part(views, partial(known, start, start + sum(map(len, views))))


def whole(pieces: Iterable[Piece]) -> Part:
    """All pieces as one part."""
    return Part([view for view in map(bytes_of, pieces) if view])

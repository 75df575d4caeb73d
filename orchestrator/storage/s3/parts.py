"""Pieces of an object as the parts of an S3 upload: cut without a copy, digested, read by the SDK as a file.

Pure; no SDK. Called by `store` and `upload`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from crc32c import crc32c

from orchestrator.storage.base import Piece

PART_BYTES = 32 << 20
"""Of the first EQUAL_PARTS parts: each costs the SDK 3 to 4 ms of a core, whatever its size. Some servers (R2) take
only parts of equal size: up to 156 GiB they are."""
EQUAL_PARTS = 5000
"""After that many, the size doubles every DOUBLING_PARTS: nobody knows the size of a shard that is still being staged,
and 10,000 parts are the most that S3 takes."""
DOUBLING_PARTS = 1000
PARTS_MAX = 10_000
SLICE_BYTES = 1 << 20
"""Given to the SDK at a time: each must be sent within its time-out, so this also says how slow is too slow."""


def part_bytes(number: int) -> int:
    """Size of part `number`, counted from 1; only the last one is smaller."""
    return PART_BYTES << max(0, -(-(number - EQUAL_PARTS) // DOUBLING_PARTS))


class Part:
    """Consecutive views of memory as a file that is read once from its beginning, or again after `seek(0)`."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
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
        view, offset = self._views[self._place], self._position - self._starts[self._place]
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
        digest = 0
        for view in self._views:
            digest = crc32c(view, digest)
        return base64.b64encode(digest.to_bytes(4, "big")).decode()


def cut(pieces: Iterable[Piece]) -> Iterator[Part]:
    """Parts of exactly `part_bytes`, as soon as their bytes are there; the last one is smaller, maybe empty."""
    number, missing = 1, part_bytes(1)
    views: list[memoryview] = []
    for view in map(_bytes_of, pieces):
        rest = view
        while len(rest) >= missing:
            yield Part([*views, rest[:missing]])
            rest, number, views = rest[missing:], number + 1, []
            missing = part_bytes(number)
        if rest:
            views.append(rest)
            missing -= len(rest)
    yield Part(views)


def whole(pieces: Iterable[Piece]) -> Part:
    """All pieces as one part."""
    return Part([view for view in map(_bytes_of, pieces) if view])


def _bytes_of(piece: Piece) -> memoryview:
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")

"""Pieces of an object as the bodies of requests: cut without a copy, and digested.

Pure; no SDK. Called by `store` and `upload`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from crc32c import crc32c

from orchestrator.storage.arguments import bytes_of
from orchestrator.storage.base import Piece

CHUNK_BYTES = 32 << 20
"""Of one request of a resumable upload; GCS wants a multiple of 256 KiB. Each costs one round trip."""
SLICE_BYTES = 1 << 20
"""Given to the socket at a time: each must leave within its time-out, so this also says how slow is too slow."""


class Content:
    """Consecutive views of memory as the body of a request, which is sent from its beginning each time."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        self._size_bytes = sum([len(view) for view in views])

    def __len__(self) -> int:
        return self._size_bytes

    def __iter__(self) -> Iterator[memoryview]:
        """Slices of at most SLICE_BYTES, without a copy."""
        for view in self.views:
            for start in range(0, len(view), SLICE_BYTES):
                yield view[start : start + SLICE_BYTES]

    def after(self, position: int) -> Content:
        """What follows the first `position` bytes."""
        rest: list[memoryview] = []
        for view in self.views:
            if position < len(view):
                rest.append(view[position:])
            position = max(0, position - len(view))
        return Content(rest)

    def digest(self, before: int = 0) -> int:
        """crc32c of all bytes; `before` is that of the bytes in front of them."""
        for view in self.views:
            before = crc32c(view, before)
        return before


def cut(pieces: Iterable[Piece]) -> Iterator[tuple[Content, bool]]:
    """Chunks, and whether it is the last one: that is what is left, and empty only if all is. The others are of exactly
    CHUNK_BYTES, and come as soon as a byte follows."""
    views: list[memoryview] = []
    missing = CHUNK_BYTES
    for view in map(bytes_of, pieces):
        rest = view
        while rest:
            if missing == 0:
                yield Content(views), False
                views, missing = [], CHUNK_BYTES
            views.append(rest[:missing])
            rest = rest[missing:]
            missing -= len(views[-1])
    yield Content(views), True


def whole(pieces: Iterable[Piece]) -> Content:
    """All pieces at once."""
    return Content([view for view in map(bytes_of, pieces) if view])

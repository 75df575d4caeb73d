"""What comes back from a bucket's server: an answer's body, read once from the socket; is it what was asked for?

Called by `s3` and `gcs`, whose SDKs would copy what is read.
"""

from __future__ import annotations

import base64
import http.client
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from crc32c import crc32c

from orchestrator.errors import StoreError, StoreUnavailableError
from orchestrator.storage.arguments import byte_views, bytes_wanted, check_range, key_parts

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class Body:
    """What comes after an answer's head: read once, whole or into given memory."""

    def __init__(self, key: str, answer: Any, length: int, checksum: str = "") -> None:
        """`answer`: urllib3's. `checksum`: the crc32c of all bytes as the server keeps it, as `checksum` writes it."""
        self.length = length
        self._checksum = checksum
        self._key = key
        self._answer = answer  # it copies; below it is the socket's
        raw = getattr(answer, "_fp", None)
        self._raw: Any = raw if isinstance(raw, http.client.HTTPResponse) else answer

    def read(self) -> bytes:
        """All of it. Raises StoreUnavailableError if it ends early, or is not what the server says it has."""
        data: bytes = self._raw.read(self.length) if self.length else self._raw.read()
        if len(data) != self.length:
            raise self._short(len(data))
        if self._checksum and checksum([data]) != self._checksum:
            problem = f"{self.length} bytes came with another checksum than they were sent"
            raise StoreUnavailableError(self._key, problem)
        return data

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """All of it into the buffers, one after another. Raises StoreUnavailableError if it ends early."""
        left = self.length
        for buffer in buffers:
            rest = buffer[:left]
            while rest:
                count = self._raw.readinto(rest)
                if not count:
                    raise self._short(self.length - left)
                rest, left = rest[count:], left - count

    def close(self) -> None:
        """Gives the connection back if nothing more comes on it, else closes it."""
        if self._raw.closed or (self._raw is not self._answer and self._raw.isclosed()):
            self._answer.release_conn()
        else:
            self._answer.close()

    def _short(self, count: int) -> StoreUnavailableError:
        return StoreUnavailableError(self._key, f"the answer ended after {count} of {self.length} bytes")


Range = Callable[[str, int, int | None], AbstractContextManager[Body | None]]
"""(key, start, stop) → the bytes [start, stop), or as many as there are; None if there are none."""


def read(opened: Range, size: Callable[[str], int], key: str, start: int, stop: int | None) -> bytes:
    """`ObjectStore.read` of a bucket."""
    check_range(key, start, stop)
    key_parts(key)
    if start == stop:
        size(key)  # there is no empty range in HTTP; this finds out whether the object is there
        return b""
    with opened(key, start, stop) as body:
        return b"" if body is None else body.read()


def read_into(opened: Range, size: Callable[[str], int], key: str, start: int, buffers: Sequence[memoryview]) -> int:
    """`ObjectStore.read_into` of a bucket: from the socket into the buffers."""
    check_range(key, start, None)
    key_parts(key)
    views = byte_views(buffers)
    if not views:
        size(key)
        return 0
    with opened(key, start, start + bytes_wanted(views)) as body:
        if body is None:
            return 0
        body.read_into(views)
        return body.length


def checksum(views: Iterable[bytes | memoryview]) -> str:
    """crc32c of all bytes, as S3 and GCS write it."""
    digest = 0
    for view in views:
        digest = crc32c(view, digest)
    return checksum_text(digest)


def checksum_text(digest: int) -> str:
    """A crc32c as S3 and GCS write it: big-endian, base64."""
    return base64.b64encode(digest.to_bytes(4, "big")).decode()


def check_range_of(key: str, content_range: str, length: int, start: int, stop: int | None) -> None:
    """Raises StoreError unless an answer has just the bytes that were asked for, as far as there are any."""
    match = _CONTENT_RANGE.fullmatch(content_range)
    if match is None:  # the whole object: as asked for, or because it is empty
        first, size_bytes = (start, start) if length == 0 else (0, length)
    else:
        first, size_bytes = int(match[1]), int(match[3])
    expected = size_bytes if stop is None else min(stop, size_bytes)
    if first != start or length != expected - start:
        problem = f"asked for bytes [{start}, {'' if stop is None else stop}), {length} bytes from {first} on came"
        raise StoreError(key, problem)

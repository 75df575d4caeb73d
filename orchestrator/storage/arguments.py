"""What every back end refuses before it acts: keys, prefixes and ranges that mean nothing. And buffers as bytes.

Kept in one place so that a key which the memory store takes in a test is one that a folder takes in production.
Not here: which keys a job uses (`checkpoint/format`). Called by every back end.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from orchestrator.errors import StoreError
from orchestrator.storage.base import Piece

TEMPORARY_PREFIX = ".tmp-"
"""Starts the name of an unfinished write; never part of a key."""
_PROBE = re.compile(r"probe-[0-9a-f]{16}")


def key_parts(key: str) -> list[str]:
    """`key` split at its slashes. Raises StoreError when it is no relative path of plain names."""
    parts = key.split("/")
    for part in parts:
        _check_part(key, part)
    return parts


def is_key(text: str) -> bool:
    """Whether we can have written it; tools leave objects such as `folder/` in a bucket."""
    try:
        key_parts(text)
    except StoreError:
        return False
    return True


def probe_key() -> str:
    """A random key that no job uses, to try what is allowed."""
    return f"probe-{secrets.token_hex(8)}"


def is_probe(key: str) -> bool:
    """Whether this is what somebody wrote to try a store, and may not or could not delete."""
    return _PROBE.fullmatch(key) is not None


def prefix_parts(prefix: str) -> tuple[list[str], str]:
    """The folders that `prefix` names in full, and the beginning of a name that follows them (maybe empty).

    Raises StoreError when a folder is no plain name.
    """
    *folders, beginning = prefix.split("/")
    for part in folders:
        _check_part(prefix, part)
    if "\0" in beginning:
        raise StoreError(repr(prefix), "a prefix holds no NUL")
    return folders, beginning


def check_range(key: str, start: int, stop: int | None) -> None:
    """Raises StoreError unless 0 <= start <= stop."""
    if start < 0 or (stop is not None and stop < start):
        raise StoreError(key, f"there are no bytes [{start}, {stop})")


def byte_views(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The buffers as bytes, without the empty ones."""
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in buffers if view.nbytes]


def bytes_of(piece: Piece) -> memoryview:
    """The piece as bytes, whatever its shape."""
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")


def bytes_wanted(buffers: Sequence[memoryview]) -> int:
    """How many bytes the buffers hold."""
    return sum([view.nbytes for view in buffers])


def scatter(data: bytes | memoryview, buffers: Sequence[memoryview]) -> int:
    """Copy the data into the buffers, one after another, as far as it goes; its size in bytes."""
    rest = memoryview(data)
    for view in byte_views(buffers):
        piece = rest[: len(view)]
        view[: len(piece)] = piece
        rest = rest[len(piece) :]
    return len(data) - len(rest)


def _check_part(key: str, part: str) -> None:
    if part in ("", ".", ".."):
        raise StoreError(repr(key), f"a key is a relative path of plain names; {part!r} is none")
    if "\0" in part:
        raise StoreError(repr(key), "a key holds no NUL")
    if part.startswith(TEMPORARY_PREFIX):
        raise StoreError(repr(key), f"names that start with {TEMPORARY_PREFIX!r} are those of unfinished writes")

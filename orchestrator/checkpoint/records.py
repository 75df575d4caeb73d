"""Reading JSON records from the store: their size is checked before a byte is read; many are read ahead. No torch.

Also what all who make or read thousands of small objects do meanwhile: let the garbage collector rest.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from orchestrator.errors import FormatError
from orchestrator.storage.base import Entry, ObjectStore

SMALL_BYTES_MAX = 64 << 10
"""Claims, base and end records."""
LARGE_BYTES_MAX = 1 << 30
"""Receipts and indexes: they grow with tensors, blocks and values."""
READS_AT_ONCE_MAX = 16
"""Records that are asked for at once where many are read: a bucket takes tens of milliseconds for each."""
READ_AHEAD_BYTES_MAX = 64 << 20
"""Of records that were asked for and not yet used; one larger record is read alone."""


@contextmanager
def collector_resting() -> Iterator[None]:
    """Python's search for cycles rests while thousands of objects are made of which none is in a cycle.

    Each search would walk through all objects of the process: 0.2 s where torch is loaded, and several in one save.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_record(store: ObjectStore, key: str, bytes_max: int) -> bytes:
    """The object's bytes. Raises FormatError if it is larger than any record of its kind, NotFoundError, StoreError."""
    size_bytes = store.size(key)
    check_size(key, size_bytes, bytes_max)
    return store.read(key)


def read_in_order(store: ObjectStore, entries: Sequence[Entry], bytes_max: int) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of listed records in the given order, the next ones being read meanwhile.

    Each is asked for whole: of that a bucket knows the checksum. Raises FormatError for one that is larger than any
    of its kind, or no longer as it was listed; StoreError.
    """
    waiting = deque(entries)
    asked: deque[tuple[Entry, Future[bytes]]] = deque()
    asked_bytes = 0
    with ThreadPoolExecutor(min(READS_AT_ONCE_MAX, max(1, len(entries))), "read-ahead") as pool:
        try:
            while waiting or asked:
                while waiting and len(asked) < 2 * READS_AT_ONCE_MAX:
                    entry = waiting[0]
                    if asked and asked_bytes + entry.size_bytes > READ_AHEAD_BYTES_MAX:
                        break
                    check_size(entry.key, entry.size_bytes, bytes_max)
                    asked.append((entry, pool.submit(store.read, entry.key)))
                    asked_bytes += entry.size_bytes
                    waiting.popleft()
                entry, future = asked.popleft()
                data = future.result()
                asked_bytes -= entry.size_bytes
                if len(data) != entry.size_bytes:
                    raise FormatError(entry.key, f"has {len(data)} bytes, {entry.size_bytes} were listed")
                yield entry.key, data
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def check_size(key: str, size_bytes: int, bytes_max: int) -> None:
    """Nothing is read that is larger than any of its kind. Raises FormatError."""
    if size_bytes > bytes_max:
        raise FormatError(key, f"has {size_bytes} bytes; no record of its kind is larger than {bytes_max}")

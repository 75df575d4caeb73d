"""Reading a JSON record from the store: its size is checked before a byte of it is read. No torch."""

from __future__ import annotations

from orchestrator.errors import FormatError
from orchestrator.storage.base import ObjectStore

SMALL_BYTES_MAX = 64 << 10
"""Claims, base and end records."""
LARGE_BYTES_MAX = 1 << 30
"""Receipts and indexes: they grow with tensors and ranks."""


def read_record(store: ObjectStore, key: str, bytes_max: int) -> bytes:
    """The object's bytes. Raises FormatError if it is larger than any record of its kind, NotFoundError, StoreError."""
    size_bytes = store.size(key)
    if size_bytes > bytes_max:
        raise FormatError(key, f"has {size_bytes} bytes; no record of its kind is larger than {bytes_max}")
    return store.read(key)

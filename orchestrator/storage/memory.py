"""An object store in this process's memory: for tests and simulation.

It keeps every guarantee of the port except that nothing survives the process. Not for production: peers'
memory is reached through `storage/peers`. Called by tests and by `orchestrator.testing`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.errors import AlreadyExistsError, NotFoundError
from orchestrator.storage.arguments import bytes_wanted, check_range, key_parts, prefix_parts, scatter
from orchestrator.storage.base import Entry, Piece


class MemoryStore:
    """Objects in a dict. All threads of the process may share one."""

    def __init__(self, name: str = "test") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """`memory:` and the store's name."""
        return f"memory:{self._name}"

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port."""
        key_parts(key)
        content = b"".join(pieces)
        with self._lock:
            if key in self._objects:
                raise AlreadyExistsError(key, "is there already")
            self._objects[key] = content

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        check_range(key, start, stop)
        return self._content(key)[start:stop]

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port."""
        return scatter(self.read(key, start, start + bytes_wanted(buffers)), buffers)

    def size(self, key: str) -> int:
        """See the port."""
        return len(self._content(key))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port."""
        prefix_parts(prefix)
        with self._lock:
            found = [(key, len(content)) for key, content in self._objects.items() if key.startswith(prefix)]
        return iter([Entry(key=key, size_bytes=size_bytes) for key, size_bytes in sorted(found)])

    def delete(self, key: str) -> None:
        """See the port."""
        key_parts(key)
        with self._lock:
            self._objects.pop(key, None)

    def _content(self, key: str) -> bytes:
        key_parts(key)
        with self._lock:
            try:
                return self._objects[key]
            except KeyError:
                raise NotFoundError(key, "no such object") from None

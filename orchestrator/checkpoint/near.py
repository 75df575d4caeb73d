"""A job's store as a worker sees it at a restart: shards from where they are nearest, everything else from the store.

Nearest is a slot of this node, a slot of another node, the store: the node's agent knows (`agent.staged`). Used by
`training.session`; the digests that the index vouches for are checked all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from orchestrator.checkpoint import format as fmt
from orchestrator.storage.base import Entry, ObjectStore, Piece

NEAR_PREFIX = "near/"
"""Before a shard's key, in an agent's objects: from memory, if it is there."""


class NearStore:
    """Reads an agent's objects."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    @property
    def url(self) -> str:
        """See the port."""
        return self._objects.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port."""
        self._objects.create(key, pieces)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        return self._objects.read(_near(key), start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port."""
        return self._objects.read_into(_near(key), start, buffers)

    def size(self, key: str) -> int:
        """See the port."""
        return self._objects.size(_near(key))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port."""
        return self._objects.entries(prefix)

    def delete(self, key: str) -> None:
        """See the port."""
        self._objects.delete(key)


def _near(key: str) -> str:
    parsed = fmt.parse_checkpoint_key(key)
    is_shard = parsed is not None and parsed[1].startswith("shard-") and key.endswith(".safetensors")
    return NEAR_PREFIX + key if is_shard else key

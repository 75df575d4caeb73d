"""A job's store as a worker sees it at a restart: shards from where they are nearest, everything else from the store.

Nearest is a slot of this node, whose file the worker reads itself; then a slot of another node, which this node's agent
asks (`agent.staged`); then the store. Used by `training.session`; the digests that the index vouches for are checked
all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import HeldShard
from orchestrator.storage.base import Entry, ObjectStore, Piece
from orchestrator.storage.filesystem import FolderStore

NEAR_PREFIX = "near/"
"""Before a shard's key, in an agent's objects: from another node's memory, if it is there."""


class NearStore:
    """Reads this node's slots, an agent's objects, and the store."""

    def __init__(
        self, store: ObjectStore, agent: ObjectStore, held: Iterable[HeldShard], *, held_elsewhere: bool
    ) -> None:
        """`agent` has the objects of this node's agent; it is asked for shards only if other nodes may have some."""
        self._store = store
        self._agent = agent
        self._held = {(shard.checkpoint, shard.rank): shard for shard in held}
        self._held_elsewhere = held_elsewhere

    @property
    def url(self) -> str:
        """See the port."""
        return self._store.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port."""
        self._store.create(key, pieces)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        held = self._held_of(key)
        if held is not None:
            stop = held.size_bytes if stop is None else min(stop, held.size_bytes)
        source, place = self._nearest(key, held)
        return source.read(place, start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port. A slot may be longer than its shard; whoever reads a shard knows its size from the index."""
        source, place = self._nearest(key, self._held_of(key))
        return source.read_into(place, start, buffers)

    def size(self, key: str) -> int:
        """See the port."""
        held = self._held_of(key)
        if held is not None:
            return held.size_bytes
        source, place = self._nearest(key, None)
        return source.size(place)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port."""
        return self._store.entries(prefix)

    def delete(self, key: str) -> None:
        """See the port."""
        self._store.delete(key)

    def _held_of(self, key: str) -> HeldShard | None:
        shard = fmt.parse_shard_key(key)
        return None if shard is None else self._held.get(shard)

    def _nearest(self, key: str, held: HeldShard | None) -> tuple[ObjectStore, str]:
        """(whom to ask, for which key)."""
        if held is not None:
            return FolderStore(held.path.parent), held.path.name
        if self._held_elsewhere and fmt.parse_shard_key(key) is not None:
            return self._agent, NEAR_PREFIX + key
        return self._store, key

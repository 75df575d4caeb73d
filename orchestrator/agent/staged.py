"""Staged shards as objects: what a node's slots hold, for peers to read; and how a peer copies one.

Key: `staged/` and the key that the shard will have on the store; with `.crc32c` at the end, its digest as hexadecimal.
A slot may be freed and used again at any time: what is read counts only if the slot still holds the step afterwards.
With `near/` instead, the shard comes from another node's memory, if one is known to have it, else from the store.
Used by `agent.node`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import BinaryIO, TypeVar

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.digest import crc
from orchestrator.checkpoint.near import NEAR_PREFIX
from orchestrator.core.messages import CheckpointId, HandOver
from orchestrator.errors import DigestError, NotFoundError, StoreDeniedError, StoreError
from orchestrator.storage.arguments import bytes_wanted, scatter
from orchestrator.storage.base import Entry, ObjectStore, Piece

T = TypeVar("T")
PREFIX = "staged/"
DIGEST_SUFFIX = ".crc32c"
COPY_BYTES = 16 << 20

FindSlot = Callable[[CheckpointId, int], tuple[Path, int] | None]
"""(checkpoint, rank) → (slot file, shard bytes) while a slot of this node holds it."""


def staged_key(checkpoint: CheckpointId, rank: int, world_size: int) -> str:
    """Where a peer finds a staged shard."""
    return PREFIX + fmt.shard_key(checkpoint, rank, world_size)


def parse_staged_key(key: str) -> tuple[CheckpointId, int] | None:
    """(checkpoint, rank) of a staged shard's key, None for any other."""
    return fmt.parse_shard_key(key.removeprefix(PREFIX))


class Nearby:
    """What other nodes hold in memory of the base. One that has failed is not asked again: the store has it all."""

    def __init__(
        self,
        token: str,
        open_peer: Callable[[str, str], AbstractContextManager[ObjectStore]],
        url_of: Callable[[int], str | None],
    ) -> None:
        self._token = token
        self._open_peer = open_peer
        self._url_of = url_of
        self._failed: set[tuple[CheckpointId, str]] = set()
        self._peers: dict[str, ObjectStore] = {}
        self._opened = ExitStack()

    def ask(self, key: str, question: Callable[[ObjectStore, str], T]) -> T | None:
        """What another node answers of a staged shard; None if none is known to hold it, or it does not answer."""
        shard = parse_staged_key(key)
        url = None if shard is None else self._url_of(shard[1])
        if shard is None or url is None or (shard[0], url) in self._failed:
            return None
        try:
            return question(self._peer(url), key)
        except StoreError:
            self._failed.add((shard[0], url))
            return None

    def _peer(self, url: str) -> ObjectStore:
        if url not in self._peers:
            self._peers[url] = self._opened.enter_context(self._open_peer(url, self._token))
        return self._peers[url]

    def close(self) -> None:
        """Close what is open to other nodes."""
        self._opened.close()


class NodeObjects:
    """The store, and beside it what this node's slots hold: an `ObjectStore` that is only read."""

    def __init__(self, store: ObjectStore, find_slot: FindSlot, nearby: Nearby) -> None:
        self._store = store
        self._find_slot = find_slot
        self._nearby = nearby

    @property
    def url(self) -> str:
        """See the port."""
        return self._store.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """Refused: an agent alone writes."""
        raise StoreDeniedError(key, "an agent's objects are read only")

    def delete(self, key: str) -> None:
        """Refused: an agent alone deletes."""
        raise StoreDeniedError(key, "an agent's objects are read only")

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        if key.startswith(NEAR_PREFIX):
            return self._near(key, lambda source, there: source.read(there, start, stop))
        if not key.startswith(PREFIX):
            return self._store.read(key, start, stop)
        if key.endswith(DIGEST_SUFFIX):
            return self._digest(key)[start:stop]
        path, size_bytes = self._slot(key)
        stop = size_bytes if stop is None else min(stop, size_bytes)
        with _open(path, key) as file:
            data = os.pread(file.fileno(), max(0, stop - start), start)
        self._still_there(key, path, size_bytes)
        return data

    def _near(self, key: str, question: Callable[[ObjectStore, str], T]) -> T:
        """Ask another node, then the store. Whoever reads checks the digests, wherever it comes from."""
        key = key.removeprefix(NEAR_PREFIX)
        found = self._nearby.ask(PREFIX + key, question)
        return question(self._store, key) if found is None else found

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port."""
        if not key.startswith((PREFIX, NEAR_PREFIX)):
            return self._store.read_into(key, start, buffers)
        return scatter(self.read(key, start, start + bytes_wanted(buffers)), buffers)

    def size(self, key: str) -> int:
        """See the port."""
        if key.startswith(NEAR_PREFIX):
            return self._near(key, lambda source, there: source.size(there))
        if not key.startswith(PREFIX):
            return self._store.size(key)
        return len(self._digest(key)) if key.endswith(DIGEST_SUFFIX) else self._slot(key)[1]

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port; staged shards are not listed."""
        return self._store.entries(prefix)

    def _digest(self, key: str) -> bytes:
        shard_key = key.removesuffix(DIGEST_SUFFIX)
        path, size_bytes = self._slot(shard_key)
        with _open(path, shard_key) as file, mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as memory:
            digest = crc(memory)
        self._still_there(shard_key, path, size_bytes)
        return f"{digest:08x}".encode()

    def _slot(self, key: str) -> tuple[Path, int]:
        shard = parse_staged_key(key)
        found = None if shard is None else self._find_slot(*shard)
        if found is None:
            raise NotFoundError(key, "no slot of this node holds it")
        return found

    def _still_there(self, key: str, path: Path, size_bytes: int) -> None:
        if self._slot(key) != (path, size_bytes):
            raise NotFoundError(key, "its slot was used again while it was read")


def _open(path: Path, key: str) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:  # its gang was cleared, or its slot was used again, since we looked
        raise NotFoundError(key, "its slot was removed while it was read") from error


def copy_shard(source: ObjectStore, action: HandOver, target: Path) -> int:
    """Copy a peer's staged shard into a file of this node's memory; its size in bytes.

    Raises DigestError, StoreError, OSError (no memory left). A file that is not whole is removed.
    """
    checkpoint = CheckpointId(generation=action.generation, step=action.step)
    key = staged_key(checkpoint, action.rank, action.world_size)
    size_bytes = source.size(key)
    handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if size_bytes == 0:
            raise StoreError(key, "is empty")
        os.posix_fallocate(handle, 0, size_bytes)  # refused here, if at all, and not in the middle
        digest = 0
        for start in range(0, size_bytes, COPY_BYTES):
            stop = min(start + COPY_BYTES, size_bytes)
            piece = source.read(key, start, stop)
            if len(piece) != stop - start:
                raise StoreError(key, f"ended at byte {start + len(piece)} of {size_bytes}")
            os.pwrite(handle, piece, start)
            digest = crc(piece, digest)
        said = source.read(key + DIGEST_SUFFIX).decode("ascii", "replace")
        if said != f"{digest:08x}":
            raise DigestError(key, f"arrived with digest {digest:08x}, its node says {said[:16]}")
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return size_bytes

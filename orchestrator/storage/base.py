"""The port to object storage: what every back end guarantees.

Not here: retries (`storage/retrying`), key names (`checkpoint/format`), who may write what (only agents
and the command line hold a store). Back ends: `memory`, `filesystem`, `s3`, `gcs`, `peers` (read only).

Guarantees that the checkpoint protocol rests on:

1. `create` is atomic and exclusive: of any number of writers of one key, in any processes, exactly one
   returns; all others raise `AlreadyExistsError`. Nobody ever sees part of an object.
2. When `create` returns, the object survives a crash of this process and (folder, S3, GCS) of this machine.
3. `read` and `read_into` of a key that was created give exactly the created bytes until it is deleted.
4. `entries` lists only whole objects; an unfinished write is never listed.
5. Errors are those of `orchestrator.errors.StoreError`'s subtree, chained to what the back end raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Piece = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object in a listing."""

    key: str
    size_bytes: int


@runtime_checkable
class BoundedPieces(Protocol):
    """Pieces that say beforehand how many bytes they have at most, as a shard does that is still being staged.

    Stores choose the size of parts by it. Who wraps pieces of this kind passes the bound on.
    """

    @property
    def size_bytes_max(self) -> int | None:
        """No more bytes come; None if that is not known."""
        ...


@runtime_checkable
class DigestedPieces(Protocol):
    """Pieces whose digests somebody computes anyway: stores need not compute them once more.

    Who wraps pieces of this kind passes the digests on.
    """

    def crc32c(self, start: int, stop: int) -> int | None:
        """See `Digest`. May be asked in any thread, and waits for what is just being digested."""
        ...


Digest = Callable[[int, int], int | None]
"""crc32c of bytes [start, stop) of the pieces that were taken; None if nobody knows it without looking at them."""


def digest_of(pieces: Iterable[Piece]) -> Digest:
    """What the pieces know of their own digests."""
    return pieces.crc32c if isinstance(pieces, DigestedPieces) else lambda start, stop: None


def bytes_at_most(pieces: Iterable[Piece]) -> int | None:
    """How many bytes the pieces have at most, where that is known: exactly for a list, else if they say so."""
    if isinstance(pieces, list | tuple):
        return sum([memoryview(piece).nbytes for piece in pieces])
    return pieces.size_bytes_max if isinstance(pieces, BoundedPieces) else None


class ObjectStore(Protocol):
    """A flat key → bytes store with create-if-absent. Methods block and may be called from several threads."""

    @property
    def url(self) -> str:
        """Where this store is, for messages; never holds a secret."""
        ...

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """Write the concatenation of `pieces` under `key` if, and only if, nothing is there.

        The pieces may come slowly, and their memory must not change before this returns. If they raise, so does this,
        and nothing is there. A list says that all is known, and how much; `BoundedPieces` say how much at most.
        Raises AlreadyExistsError, StoreFullError, StoreDeniedError, StoreError.
        """
        ...

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of the object; `stop=None` means to the end. Short only at the object's end.

        Raises NotFoundError, StoreDeniedError, StoreError.
        """
        ...

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, one after another, with the bytes from `start` on; how many bytes were there.

        Fewer than the buffers hold only at the object's end. A buffer is writable, its memory without gaps. What lies
        in them after an error means nothing. Raises NotFoundError, StoreDeniedError, StoreError.
        """
        ...

    def size(self, key: str) -> int:
        """Size in bytes. Raises NotFoundError."""
        ...

    def entries(self, prefix: str) -> Iterator[Entry]:
        """All whole objects whose key starts with `prefix` (any depth), in key order; empty if there is none."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; removing one that is not there is no error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A write that has begun and has not ended: somebody is at it, or was killed."""

    key: str
    """The object that it is to become, or the folder where that would be."""
    token: str
    """What the store calls it."""


@runtime_checkable
class SweepableStore(Protocol):
    """A store in which killed writers leave something behind that costs space and is never listed as an object."""

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """All unfinished writes below `prefix`. Whose writer lives, nobody can tell. Raises StoreError."""
        ...

    def discard(self, write: Unfinished) -> None:
        """Remove what has arrived of it. Its writer, if it lives, fails and says so. No error if it is gone."""
        ...

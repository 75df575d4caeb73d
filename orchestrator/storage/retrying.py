"""Tries again what a store could not do just now: the only place that does, always bounded by a deadline.

`Patience` says for how long, and calls one action; `RetryingStore` gives it to every method of any store. Only
`StoreUnavailableError` is tried again: nothing else gets better by waiting. SDKs' own retries are switched off, or the
two would multiply. Called by `storage/opening` and, for the parts of one object, by `storage/s3` and `storage/gcs`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type

from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreUnavailableError
from orchestrator.storage.arguments import bytes_of
from orchestrator.storage.base import Entry, ObjectStore, Piece, SweepableStore, Unfinished, bytes_at_most, digest_of

_COMPARED_BYTES = 4 << 20
"""Read back at a time, where an object may be our own."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long, and how often, something is tried again. Waits double, each drawn at random from its upper half."""

    deadline_seconds: float = 60.0
    """No further try begins later than that after the first one began, or after the last progress."""
    first_wait_seconds: float = 0.2
    wait_seconds_max: float = 10.0
    """Also the most that a store's Retry-After is followed."""
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = field(default=random.random)
    """A number in [0, 1)."""

    def call(
        self,
        action: Callable[[], _Result],
        progress: Callable[[], float] | None = None,
        excused_seconds: Callable[[], float] = lambda: 0.0,
    ) -> _Result:
        """What the action returns, at the latest try. Raises what that raises.

        `progress` gives the instant of the last one, for what takes long and is still no failure; `excused_seconds`
        how long it has waited, in all, for what was not the store's doing.
        """
        began = self.monotonic()

        def over(state: RetryCallState) -> bool:
            last = began if progress is None else max(began, progress())
            return self.monotonic() + state.upcoming_sleep >= last + self.deadline_seconds + excused_seconds()

        tries = Retrying(
            retry=retry_if_exception_type(StoreUnavailableError),
            wait=self._wait_seconds,
            stop=over,
            sleep=self.sleep,
            reraise=True,
        )
        return tries(action)

    def _wait_seconds(self, state: RetryCallState) -> float:
        doubled = self.first_wait_seconds * 2.0 ** min(state.attempt_number - 1, 30)
        wait = min(doubled, self.wait_seconds_max) * (0.5 + 0.5 * self.draw())
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after_seconds if isinstance(error, StoreUnavailableError) else None
        return wait if asked is None else max(wait, min(asked, self.wait_seconds_max))


class Again(Protocol):
    """Calls what may be tried again on its own, as `Patience.call` does: a part of an object, say."""

    def __call__(self, action: Callable[[], Any], *, excused_seconds: Callable[[], float] = ...) -> Any: ...


def once(action: Callable[[], Any], **_: Any) -> Any:
    """Calls the action: no second try."""
    return action()


class RetryingStore:
    """A store that tries again. Its guarantees are those of the store within.

    A `create` whose answer was lost is decided by what is there afterwards: our very bytes are our success.
    """

    def __init__(self, within: ObjectStore, patience: Patience) -> None:
        self._within = within
        self._patience = patience

    @property
    def url(self) -> str:
        """That of the store within."""
        return self._within.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port. Pieces that were taken are kept until the end, to be sent again."""
        source = _Replayed(pieces, self._patience.monotonic)
        maybe_done = False

        def attempt() -> None:
            nonlocal maybe_done
            try:
                self._within.create(key, source.again())
            except StoreUnavailableError as error:
                maybe_done = maybe_done or error.maybe_done
                raise
            except AlreadyExistsError:
                if not (maybe_done and holds(self._within, key, source.again())):
                    raise

        self._patience.call(attempt, lambda: source.last_new_piece)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        return self._patience.call(lambda: self._within.read(key, start, stop))

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port."""
        return self._patience.call(lambda: self._within.read_into(key, start, buffers))

    def size(self, key: str) -> int:
        """See the port."""
        return self._patience.call(lambda: self._within.size(key))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port. The whole listing is read before the first entry comes."""
        return iter(self._patience.call(lambda: list(self._within.entries(prefix))))

    def delete(self, key: str) -> None:
        """See the port."""
        self._patience.call(lambda: self._within.delete(key))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """See SweepableStore; none where the store within leaves none."""
        within = self._within
        if not isinstance(within, SweepableStore):
            return iter(())
        return iter(self._patience.call(lambda: list(within.unfinished(prefix))))

    def discard(self, write: Unfinished) -> None:
        """See SweepableStore."""
        within = self._within
        if isinstance(within, SweepableStore):
            self._patience.call(lambda: within.discard(write))


def holds(store: ObjectStore, key: str, pieces: Iterable[Piece]) -> bool:
    """Whether the object is there, and its bytes are those of the pieces. Raises StoreError."""
    position, there = 0, memoryview(b"")
    try:
        size_bytes = store.size(key)
        for piece in pieces:
            view = bytes_of(piece)
            while view:
                there = there or memoryview(store.read(key, position, min(position + _COMPARED_BYTES, size_bytes)))
                count = min(len(there), len(view))
                if not count or there[:count] != view[:count]:
                    return False
                position, there, view = position + count, there[count:], view[count:]
    except NotFoundError:
        return False
    return position == size_bytes


class _Replayed:
    """Pieces that can be gone through several times; each is asked for once. What their source raises ends it."""

    def __init__(self, pieces: Iterable[Piece], monotonic: Callable[[], float]) -> None:
        self.last_new_piece = monotonic()
        self.size_bytes_max = bytes_at_most(pieces)
        self.crc32c = digest_of(pieces)
        self._monotonic = monotonic
        self._known = pieces if isinstance(pieces, list | tuple) else None
        self._taken: list[Piece] = []
        self._rest = iter(pieces)

    def again(self) -> Iterable[Piece]:
        """All pieces from the first one on; a list stays one, as stores learn the size from it."""
        return self if self._known is None else self._known

    def __iter__(self) -> Iterator[Piece]:
        yield from self._taken
        for piece in self._rest:
            self._taken.append(piece)
            self.last_new_piece = self._monotonic()
            yield piece

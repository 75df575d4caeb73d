"""Trying again: for how long, how often, and what becomes of a `create` whose answer was lost. No test waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreDeniedError, StoreError, StoreUnavailableError
from orchestrator.storage.base import Piece
from orchestrator.storage.memory import MemoryStore
from orchestrator.storage.retrying import Patience, RetryingStore


@dataclass
class Time:
    """A clock that only sleeping moves."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def patience(self, *, draw: float = 1.0, **settings: float) -> Patience:
        return Patience(monotonic=lambda: self.now, sleep=self.sleep, draw=lambda: draw, **settings)


def busy(*, maybe_done: bool = False, retry_after_seconds: float | None = None) -> StoreUnavailableError:
    return StoreUnavailableError("key", "busy", maybe_done=maybe_done, retry_after_seconds=retry_after_seconds)


def failing(*errors: Exception, then: int = 7) -> Callable[[], int]:
    """Raises these errors, one at a call; then it returns a number."""
    left = list(errors)

    def action() -> int:
        if left:
            raise left.pop(0)
        return then

    return action


# ---------------------------------------------------------------------------------------------- patience


def test_waits_double_up_to_the_longest() -> None:
    time = Time()
    patience = time.patience(first_wait_seconds=0.5, wait_seconds_max=3)
    assert patience.call(failing(*[busy() for _ in range(5)])) == 7
    assert time.slept == [0.5, 1, 2, 3, 3]


def test_waits_are_drawn_from_the_upper_half() -> None:
    time = Time()
    assert time.patience(draw=0.0, first_wait_seconds=1.0).call(failing(busy(), busy())) == 7
    assert time.slept == [0.5, 1.0]


def test_the_deadline_ends_it_with_the_last_error() -> None:
    time = Time()
    numbers = count()

    def action() -> None:
        raise StoreUnavailableError("key", f"try {next(numbers)}")

    with pytest.raises(StoreUnavailableError, match="try 5"):
        time.patience(first_wait_seconds=1.0, deadline_seconds=60.0, wait_seconds_max=100).call(action)
    assert time.slept == [1, 2, 4, 8, 16]  # another 32 would end after the deadline


def test_a_slow_action_counts() -> None:
    time = Time()

    def action() -> None:
        time.now += 40
        raise busy()

    with pytest.raises(StoreUnavailableError):
        time.patience(deadline_seconds=60.0).call(action)
    assert len(time.slept) == 1


def test_time_that_was_not_the_stores_doing_is_not_counted() -> None:
    time = Time()
    excused = [0.0]

    def action() -> None:
        if len(time.slept) < 3:
            time.now += 100.0
            excused[0] += 100.0
        raise busy()

    with pytest.raises(StoreUnavailableError):
        time.patience(first_wait_seconds=10.0, deadline_seconds=35.0).call(action, None, lambda: excused[0])
    assert time.slept == [10, 10, 10]


def test_progress_moves_the_deadline() -> None:
    time = Time()
    last = [0.0]

    def action() -> None:
        time.now += 40
        if len(time.slept) < 5:
            last[0] = time.now
        raise busy()

    with pytest.raises(StoreUnavailableError):
        time.patience(deadline_seconds=60.0).call(action, lambda: last[0])
    assert len(time.slept) == 6


def test_the_store_says_when_to_come_again() -> None:
    time = Time()
    patience = time.patience(first_wait_seconds=1.0, wait_seconds_max=10)
    asked = [busy(retry_after_seconds=seconds) for seconds in (5.0, 0.0, 3600.0)]
    assert patience.call(failing(*asked)) == 7
    assert time.slept == [5.0, 2.0, 10.0]


@pytest.mark.parametrize(
    "error",
    [StoreError("key", "x"), NotFoundError("key", "x"), StoreDeniedError("key", "x"), OSError("not the store's")],
)
def test_what_waiting_does_not_mend_is_not_tried_again(error: Exception) -> None:
    time = Time()
    with pytest.raises(type(error)):
        time.patience().call(failing(error))
    assert time.slept == []


# ---------------------------------------------------------------------------------------------- the store


class Flaky(MemoryStore):
    """A memory store whose next calls fail, before or after they act."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[StoreError] = []
        self.after: list[StoreError] = []
        self.reads = 0

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        if self.before:
            next(iter(pieces), None)
            raise self.before.pop(0)
        super().create(key, pieces)
        if self.after:
            raise self.after.pop(0)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.reads += 1
        if self.before:
            raise self.before.pop(0)
        return super().read(key, start, stop)


@pytest.fixture
def within() -> Flaky:
    return Flaky()


@pytest.fixture
def store(within: Flaky) -> RetryingStore:
    return RetryingStore(within, Time().patience())


def test_reads_again(within: Flaky, store: RetryingStore) -> None:
    store.create("key", [b"content"])
    within.before = [busy(), busy()]
    assert store.read("key") == b"content"
    within.before = [busy()]
    buffer = memoryview(bytearray(7))
    assert store.read_into("key", 0, [buffer]) == 7
    assert bytes(buffer) == b"content"


def test_pieces_that_can_be_had_once_are_sent_again(within: Flaky, store: RetryingStore) -> None:
    within.before = [busy(), busy()]
    taken = []

    def pieces() -> Iterator[bytes]:
        for piece in (b"one ", b"two ", b"three"):
            taken.append(piece)
            yield piece

    store.create("key", pieces())
    assert within.read("key") == b"one two three"
    assert len(taken) == 3


@pytest.mark.parametrize("pieces", [[b"mine"], [b"mi", b"", b"ne"]])
def test_a_create_whose_answer_was_lost_is_ours_if_our_bytes_are_there(
    pieces: list[bytes], within: Flaky, store: RetryingStore
) -> None:
    within.after = [busy(maybe_done=True)]
    store.create("key", iter(pieces))
    assert within.read("key") == b"mine"


@pytest.mark.parametrize("other", [b"", b"min", b"mink", b"mine, not yours", b"yours"])
def test_other_bytes_are_another_writers(other: bytes, within: Flaky, store: RetryingStore) -> None:
    within.before = [busy(maybe_done=True)]
    within._objects["key"] = other
    with pytest.raises(AlreadyExistsError):
        store.create("key", [b"mine"])
    assert within.read("key") == other


def test_a_create_that_was_refused_and_then_overtaken_loses_even_to_the_same_bytes(
    within: Flaky, store: RetryingStore
) -> None:
    """What the store certainly did not do, cannot be ours."""
    within.before = [busy(maybe_done=False)]
    within._objects["key"] = b"mine"
    with pytest.raises(AlreadyExistsError):
        store.create("key", [b"mine"])
    assert within.reads == 0


def test_the_first_try_loses_without_looking(within: Flaky, store: RetryingStore) -> None:
    store.create("key", [b"mine"])
    with pytest.raises(AlreadyExistsError):
        store.create("key", [b"mine"])
    assert within.reads == 0


def test_pieces_that_come_slowly_leave_the_patience_whole(within: Flaky) -> None:
    time = Time()
    within.before = [busy()]

    def pieces() -> Iterator[bytes]:
        time.now += 1000
        yield b"late"

    RetryingStore(within, time.patience()).create("key", pieces())
    assert within.read("key") == b"late"


def test_pieces_that_fail_are_not_tried_again(within: Flaky) -> None:
    time = Time()

    def pieces() -> Iterator[bytes]:
        yield b"first"
        raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"):
        RetryingStore(within, time.patience()).create("key", pieces())
    assert time.slept == []
    assert list(within.entries("")) == []

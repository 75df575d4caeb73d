"""A simulated object store: one truth, seen by each process through latency, failures and outages.

`SimulatedStore` is one process's view: an operation takes effect at one instant of its duration and may fail before
or after that instant. The truth is a `storage.memory.MemoryStore` that tells an observer of every write.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from orchestrator.errors import StoreError
from orchestrator.storage.base import Entry, ObjectStore, Piece
from orchestrator.storage.memory import MemoryStore
from orchestrator.testing.simulated_time import SimulatedProcess, pause

Written = Callable[[str, bytes, SimulatedProcess], None]


NEARER = 4
"""Times as fast as the store is the memory of a peer."""


class Weather:
    """How the store behaves at the moment; changed by faults."""

    def __init__(self, draw: random.Random, latency_seconds: float) -> None:
        self.random = draw
        self._thread = threading.get_ident()
        self.latency_seconds = latency_seconds
        self.fail_share = 0.0
        self.out = False
        self.failures = 0

    @property
    def is_simulated(self) -> bool:
        """Whether the caller lives in simulated time. Real threads (reading ahead) do not: drawing there would make a
        seed depend on how the machine happens to schedule them, so for them there is no weather."""
        return threading.get_ident() == self._thread

    def latency(self) -> float:
        """Part of an operation's time, with a long tail."""
        return self.latency_seconds * self.random.choice((0.2, 0.5, 1.0, 1.0, 6.0))

    def fails(self) -> bool:
        """Whether an operation fails at this point."""
        failed = self.out or (self.fail_share > 0 and self.random.random() < self.fail_share)
        self.failures += failed
        return failed


class SimulatedStore:
    """One process's view of the store; an `ObjectStore`."""

    def __init__(
        self, truth: MemoryStore, weather: Weather, process: SimulatedProcess, written: Written = lambda *_: None
    ) -> None:
        self._truth = truth
        self._weather = weather
        self._process = process
        self._written = written

    @property
    def url(self) -> str:
        """See the port."""
        return self._truth.url

    def _before(self, key: str) -> None:
        if not self._weather.is_simulated:
            return
        pause(self._weather.latency())
        if self._weather.fails():
            raise StoreError(key, "503 (simulated)")

    def _after(self, key: str) -> None:
        if not self._weather.is_simulated:
            return
        pause(self._weather.latency())
        if self._weather.fails():
            raise StoreError(key, "the answer was lost (simulated)")

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port; the pieces are read over a while, as an upload does."""
        self._before(key)
        content = bytearray()
        for piece in pieces:
            half = len(piece) // 2
            content += piece[:half]
            pause(self._weather.latency())
            content += piece[half:]
        self._truth.create(key, [bytes(content)])
        self._written(key, bytes(content), self._process)
        self._after(key)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        self._before(key)
        return self._truth.read(key, start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port."""
        self._before(key)
        return self._truth.read_into(key, start, buffers)

    def size(self, key: str) -> int:
        """See the port."""
        self._before(key)
        return self._truth.size(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port."""
        self._before(prefix)
        return self._truth.entries(prefix)

    def delete(self, key: str) -> None:
        """See the port."""
        self._before(key)
        self._truth.delete(key)
        self._after(key)


class SimulatedPeer:
    """What another node's object server serves, over the network: slow, but not subject to the store's weather."""

    def __init__(self, objects: ObjectStore, weather: Weather) -> None:
        self._objects = objects
        self._weather = weather

    @property
    def url(self) -> str:
        """See the port."""
        return self._objects.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port."""
        self._objects.create(key, pieces)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        pause(self._weather.latency() / NEARER)
        return self._objects.read(key, start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port."""
        pause(self._weather.latency() / NEARER)
        return self._objects.read_into(key, start, buffers)

    def size(self, key: str) -> int:
        """See the port."""
        pause(self._weather.latency() / NEARER)
        return self._objects.size(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port."""
        return self._objects.entries(prefix)

    def delete(self, key: str) -> None:
        """See the port."""
        self._objects.delete(key)

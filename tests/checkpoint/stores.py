"""Stores for tests: fresh ones of each kind, one that counts what is read, and threads that do things at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.errors import OrchestratorError
from orchestrator.storage.arguments import bytes_wanted, scatter
from orchestrator.storage.base import Entry, ObjectStore, Piece
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.memory import MemoryStore

ResultT = TypeVar("ResultT")


def new_store(kind: str, folder: Path) -> ObjectStore:
    return MemoryStore() if kind == "memory" else FolderStore(folder / "store")


@pytest.fixture(params=["memory", "folder"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """A store of each kind."""
    return new_store(request.param, tmp_path)


def at_once(calls: Sequence[Callable[[], ResultT]]) -> list[ResultT | OrchestratorError]:
    """The result, or the error of ours, of each call; all calls start together."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], ResultT]) -> ResultT | OrchestratorError:
        barrier.wait(10)
        try:
            return call()
        except OrchestratorError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


class CountingStore:
    """A store that remembers each range that was read."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.reads: list[tuple[str, int, int | None]] = []

    @property
    def url(self) -> str:
        return self.inner.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        self.inner.create(key, pieces)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.reads.append((key, start, stop))
        return self.inner.read(key, start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        return scatter(self.read(key, start, start + bytes_wanted(buffers)), buffers)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self.inner.entries(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)


class CutStore(CountingStore):
    """A store whose answers end early: `cut` says how many bytes of [start, stop) of a key arrive."""

    def __init__(self, inner: ObjectStore, cut: Callable[[str, int, int], int]) -> None:
        super().__init__(inner)
        self._cut = cut

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().read(key, start, stop)
        return data if stop is None else data[: self._cut(key, start, stop)]


def replace(store: ObjectStore, key: str, data: bytes) -> None:
    """What no writer of ours does: put other bytes under a key."""
    store.delete(key)
    store.create(key, [data])


def change_byte(store: ObjectStore, key: str, position: int) -> None:
    """Flip the bits of one byte, as a bad disk would."""
    data = bytearray(store.read(key))
    data[position] ^= 0xFF
    replace(store, key, bytes(data))

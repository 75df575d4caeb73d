"""Reading records ahead: in their order, a bounded number and amount at a time, sizes checked first."""

from __future__ import annotations

import threading

import pytest

from orchestrator.checkpoint import records
from orchestrator.checkpoint.records import READS_AT_ONCE_MAX, read_in_order
from orchestrator.errors import FormatError, NotFoundError
from orchestrator.storage.memory import MemoryStore


class SlowStore(MemoryStore):
    """Remembers how many reads were going on at once, and which were begun."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.most = 0
        self._now = 0
        self._count = threading.Lock()
        for number, size_bytes in enumerate(sizes):
            self.create(f"r/{number:03d}", [bytes([number]) * size_bytes])

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._count:
            self.begun.append(key)
            self._now += 1
            self.most = max(self.most, self._now)
        data = super().read(key, start, stop)
        with self._count:
            self._now -= 1
        return data


def test_many_are_read_in_their_order() -> None:
    store = SlowStore([number % 7 for number in range(200)])
    entries = list(store.entries("r/"))
    found = list(read_in_order(store, entries, 100))
    assert found == [(entry.key, store.read(entry.key)) for entry in entries]
    assert store.most <= READS_AT_ONCE_MAX


def test_none_is_no_error() -> None:
    assert list(read_in_order(MemoryStore(), [], 100)) == []


def test_no_more_is_asked_for_than_may_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is larger than all that may be read ahead is read alone."""
    monkeypatch.setattr(records, "READ_AHEAD_BYTES_MAX", 100)
    store = SlowStore([60, 60, 30, 30, 500, 10, 10])
    entries = list(store.entries("r/"))
    used = 0
    for key, data in read_in_order(store, entries, 1000):
        used += 1
        ahead = [entry.size_bytes for entry in entries if entry.key in store.begun][used - 1 :]
        assert sum(ahead) <= 100 or len(ahead) == 1, key
        assert len(data) == entries[used - 1].size_bytes
    assert used == len(entries)


def test_one_of_an_absurd_size_is_refused_before_it_is_read() -> None:
    store = SlowStore([10, 101])
    with pytest.raises(FormatError, match="has 101 bytes; no record of its kind is larger than 100"):
        list(read_in_order(store, list(store.entries("r/")), 100))
    assert "r/001" not in store.begun


def test_one_that_is_gone_by_then_is_an_error() -> None:
    store = SlowStore([1] * 50)
    entries = list(store.entries("r/"))
    store.delete("r/030")
    found: list[str] = []
    with pytest.raises(NotFoundError, match="r/030"):
        found.extend(key for key, _ in read_in_order(store, entries, 100))
    assert found == [f"r/{number:03d}" for number in range(30)]

"""When a store is tried, when it is not, and what is left behind. Bad stores of all kinds: test_bad_stores."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.checkpoint import generations
from orchestrator.checkpoint.generations import Claimant, open_generation, record_end
from orchestrator.cli import check, store_probe
from orchestrator.cli.run import Talk, check_store_before_start
from orchestrator.cli.store_probe import probe, require_fit
from orchestrator.core.messages import Outcome
from orchestrator.errors import ConfigError, FencedError, StoreDeniedError, StoreUnavailableError
from orchestrator.storage.base import Entry, ObjectStore, Piece
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.memory import MemoryStore

OWNER = Claimant(job="small", owner="here", claimant="one", take_over=False)


class Counting(MemoryStore):
    """Counts the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[str] = []

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        self.created.append(key)
        super().create(key, pieces)


class Keeping(Counting):
    """A store where nothing may be deleted."""

    def delete(self, key: str) -> None:
        raise StoreDeniedError(key, "these credentials do not allow DeleteObject")


class Silent(MemoryStore):
    """A store that answers when it is let."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.may_answer = threading.Event()

    @property
    def url(self) -> str:
        return self._url

    def entries(self, prefix: str) -> Iterator[Entry]:
        self.may_answer.wait(20)
        return super().entries(prefix)


class Away(MemoryStore):
    """A store that cannot be reached, and would show a secret if errors were quoted as they come."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        raise StoreUnavailableError(prefix, "http://127.0.0.1:1 cannot be reached")


def opened(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> None:
    """Whatever URL is opened, it is this store."""
    monkeypatch.setattr(store_probe, "open_store", lambda url, patience_seconds: store)


def test_a_good_store_is_left_as_it_was(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    found = probe(store)
    assert (found.problem, found.left_key, found.silent) == ("", "", False)
    assert list(tmp_path.iterdir()) == []


def test_a_job_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting()
    opened(monkeypatch, store)
    assert require_fit("memory", OWNER) == ""
    assert len(store.created) == 2
    assert list(store.entries("")) == []


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.CANCELLED])
def test_where_a_job_is_over_nothing_is_written(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    """The first agent says so, with the right status."""
    store = Counting()
    opened(monkeypatch, store)
    open_generation(store, OWNER, None, (), 1.0)
    record_end(store, OWNER, outcome, "a test", 2.0)
    written = list(store.created)
    assert require_fit("memory", OWNER) == ""
    assert store.created == written


def test_another_owners_job_is_fenced_without_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting()
    opened(monkeypatch, store)
    open_generation(store, OWNER, None, (), 1.0)
    written = list(store.created)
    other = Claimant(job="small", owner="elsewhere", claimant="two", take_over=False)
    with pytest.raises(FencedError, match="--take-over"):
        require_fit("memory", other)
    assert store.created == written


def test_a_gang_that_still_runs_gets_its_supervisor_back_whatever_the_store_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened(monkeypatch, Away())
    options: Any = SimpleNamespace(job_url="memory", take_over=False)
    for takes_back in (True, False):
        job: Any = SimpleNamespace(takes_back=takes_back, owner="here")
        if takes_back:
            check_store_before_start(job, options, "small", Talk(as_json=False))
        else:
            with pytest.raises(ConfigError, match="cannot be reached"):
                check_store_before_start(job, options, "small", Talk(as_json=False))


def test_a_probe_that_may_not_be_deleted_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the job's folder, and is not taken for somebody else's file by the claim."""
    store = Keeping()
    opened(monkeypatch, store)
    assert require_fit("memory", OWNER) == ""
    (left,) = store.entries("")
    assert left.key == store.created[0]
    assert require_fit("memory", OWNER) == ""
    assert generations.open_generation(store, OWNER, None, (), 1.0).generation == 1


def test_check_warns_of_a_probe_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.storage.opening.open_store", lambda url, patience_seconds: Keeping())
    fit, deletes = check.check_store("memory")
    assert (fit.level, deletes.level) == ("ok", "warn")
    assert "probe-" in deletes.found


def test_a_folder_that_is_slow_to_answer_is_told_and_a_bucket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be busy for a minute with what was saved before."""
    monkeypatch.setattr(store_probe, "PROBE_SECONDS_MAX", 0.05)
    for url in ("/data/small", "s3://bucket/small"):
        store = Silent(url)
        opened(monkeypatch, store)
        try:
            if url.startswith("/"):
                assert require_fit(url, OWNER).startswith(f"store: {url} has not answered within")
            else:
                with pytest.raises(ConfigError, match="has not answered within"):
                    require_fit(url, OWNER)
        finally:
            store.may_answer.set()


def test_a_bug_is_no_bad_store(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        probe(FolderStore(tmp_path), fail)

"""Going back to an older checkpoint: which steps can be named, what is written, and who goes on from where."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.catalog import Catalog, CatalogEntry, Standing, read_generations, survey
from orchestrator.checkpoint.generations import (
    Claimant,
    Opened,
    open_generation,
    read_base,
    read_end,
    record_end,
    roll_back,
)
from orchestrator.checkpoint.rollback import left_behind, rollback_target
from orchestrator.core.messages import CheckpointId, Outcome
from orchestrator.errors import FencedError, RollbackError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import checkpoint_id, save, upload_all

SMALL = {"w": torch.arange(30, dtype=torch.float32)}
ME = Claimant(job="job", owner="owner", claimant="process-1", take_over=False)
PERSON = changed(ME, claimant="a person's verb")
STRANGER = changed(ME, owner="stranger", claimant="process-9")


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore()


def start(store: ObjectStore, who: Claimant = ME, own: int | None = None, *, rollback_to: int | None = None) -> Opened:
    return open_generation(store, who, own, (), 1.0, rollback_to=rollback_to)


def saved(store: ObjectStore, folder: Path, *ids: tuple[int, int]) -> list[CheckpointId]:
    return [save(store, folder, SMALL, checkpoint=checkpoint_id(*one)).id for one in ids]


def catalog_of(*ids: tuple[int, int], others: tuple[tuple[int, int], ...] = ()) -> Catalog:
    entries = [
        CatalogEntry(
            id=CheckpointId(generation=generation, step=step),
            standing=Standing.QUARANTINED if (generation, step) in others else Standing.COMMITTED,
            size_bytes=1,
            world_size=1,
        )
        for generation, step in sorted({*ids, *others}, reverse=True)
    ]
    return Catalog(entries=tuple(entries), generations={})


@pytest.mark.parametrize(
    ("ids", "step", "expected"),
    [
        (((1, 10), (1, 20)), 10, (1, 10)),
        (((1, 10), (1, 20)), 20, (1, 20)),
        (((1, 10), (1, 20), (2, 20), (2, 30)), 20, (2, 20)),  # both were of step 20: the newer course counts
        (((1, 10), (1, 20), (1, 30), (2, 25)), 20, (1, 20)),
        (((1, 0), (1, 10)), 0, (1, 0)),
    ],
)
def test_the_target_is_of_that_very_step(
    ids: tuple[tuple[int, int], ...], step: int, expected: tuple[int, int]
) -> None:
    assert rollback_target(catalog_of(*ids), step) == checkpoint_id(*expected)


@pytest.mark.parametrize(
    ("catalog", "step", "said"),
    [
        (catalog_of((1, 10), (1, 20)), 15, "step 15 cannot be gone back to; these steps can: 20, 10"),
        (catalog_of((1, 10), (1, 20)), 9, "these steps can: 20, 10"),
        (catalog_of((1, 20), (1, 30), (2, 15)), 20, "these steps can: 15"),  # generation 2 began before 20
        (catalog_of((1, 10), (1, 30), others=((1, 20),)), 20, "these steps can: 30, 10"),
        (catalog_of(), 10, "there is no committed checkpoint"),
        (catalog_of(*((1, step) for step in range(1, 31))), 99, "20, 19 and 18 older ones"),
    ],
)
def test_other_steps_are_refused_with_those_that_would_do(catalog: Catalog, step: int, said: str) -> None:
    with pytest.raises(RollbackError, match=said):
        rollback_target(catalog, step)


def test_what_is_left_behind() -> None:
    catalog = catalog_of((1, 10), (1, 20), (2, 15), (2, 30), others=((1, 40),))
    assert left_behind(catalog, 15) == (checkpoint_id(2, 30), checkpoint_id(1, 20))


# ------------------------------------------------------------------------------------------- of a job that runs


def test_the_next_generation_starts_there_and_so_do_all_later_ones(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    saved(store, tmp_path, (1, 10), (1, 20), (1, 30))
    opened = start(store, own=1, rollback_to=20)
    assert (opened.generation, opened.base) == (2, checkpoint_id(1, 20))
    assert read_generations(store)[2].rollback_to == 20
    assert start(store, own=2).base == checkpoint_id(1, 20)  # nothing new was committed
    (new,) = saved(store, tmp_path, (3, 25))
    assert start(store, own=3).base == new


def test_an_unused_claim_without_the_step_is_not_taken_for_the_rollback(store: ObjectStore, tmp_path: Path) -> None:
    """The opener's first answer was lost after its claim; then a person asked for the rollback."""
    start(store)
    saved(store, tmp_path, (1, 10), (1, 20))

    class NoBase(Exception):
        pass

    class Breaks(MemoryStore):
        """Creates claims in the store, and dies at the base."""

        def create(self, key: str, pieces: object) -> None:
            if key.endswith(".base.json"):
                raise NoBase
            store.create(key, pieces)  # type: ignore[arg-type]

    broken = Breaks()
    broken._objects = store._objects  # type: ignore[attr-defined]
    with pytest.raises(NoBase):
        start(broken, own=1)
    assert set(read_generations(store)) == {1, 2}
    opened = start(store, own=1, rollback_to=10)
    assert (opened.generation, opened.base) == (3, checkpoint_id(1, 10))


def test_a_step_that_is_gone_claims_nothing(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    saved(store, tmp_path, (1, 10))
    with pytest.raises(RollbackError):
        start(store, own=1, rollback_to=5)
    assert set(read_generations(store)) == {1}


# -------------------------------------------------------------------------------------- of a job that has ended


def test_a_job_that_does_not_run_goes_on_from_there(any_store: ObjectStore, tmp_path: Path) -> None:
    start(any_store)
    older, _ = saved(any_store, tmp_path, (1, 10), (1, 20))
    assert roll_back(any_store, PERSON, 10, "me", 2.0) == older
    end = read_end(any_store, 2)
    assert end is not None
    assert (end.outcome, end.reason) == (Outcome.DRAINED, "rolled back to step 10 by me")
    assert read_base(any_store, 2) is None
    standings = {entry.id.step: entry.standing for entry in survey(any_store).entries}
    assert standings == {10: Standing.COMMITTED, 20: Standing.ROLLED_BACK}
    opened = start(any_store, changed(ME, claimant="process-2"))
    assert (opened.generation, opened.base) == (3, older)


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.CANCELLED, Outcome.FAILED])
def test_a_job_that_was_over_can_be_started_again(store: ObjectStore, tmp_path: Path, outcome: Outcome) -> None:
    start(store)
    older, _ = saved(store, tmp_path, (1, 10), (1, 20))
    record_end(store, ME, outcome, "it was over", 1.5)
    roll_back(store, PERSON, 10, "me", 2.0)
    assert start(store, changed(ME, claimant="process-2")).base == older


def test_twice(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    saved(store, tmp_path, (1, 10), (1, 20), (1, 30))
    roll_back(store, PERSON, 20, "me", 2.0)
    assert roll_back(store, changed(PERSON, claimant="again"), 10, "me", 2.0) == checkpoint_id(1, 10)
    with pytest.raises(RollbackError, match="these steps can: 10"):
        roll_back(store, changed(PERSON, claimant="and again"), 20, "me", 2.0)
    assert start(store, changed(ME, claimant="process-2")).base == checkpoint_id(1, 10)


def test_a_running_job_of_another_owner_is_not_touched(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    saved(store, tmp_path, (1, 10), (1, 20))
    with pytest.raises(FencedError, match="--take-over"):
        roll_back(store, STRANGER, 10, "me", 2.0)
    assert set(read_generations(store)) == {1}
    roll_back(store, changed(STRANGER, take_over=True), 10, "me", 2.0)
    with pytest.raises(FencedError, match="another run has taken over"):  # that other one stops at its next claim
        start(store, own=1)


def test_another_job_is_not_touched(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    saved(store, tmp_path, (1, 10))
    with pytest.raises(FencedError, match="belongs to the job"):
        roll_back(store, changed(PERSON, job="another", take_over=True), 10, "me", 2.0)
    assert set(read_generations(store)) == {1}


# ----------------------------------------------------------------------------------------- at the same time


def test_what_is_whole_counts_before_anything_is_claimed(store: ObjectStore, tmp_path: Path) -> None:
    """A later course has left a whole step without an index, lower than the one asked for: it would be the newest."""
    start(store)
    saved(store, tmp_path, (1, 10), (1, 20))
    upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(2, 15))
    with pytest.raises(RollbackError, match="step 20 cannot be gone back to; these steps can: 15, 10"):
        roll_back(store, PERSON, 20, "me", 2.0)
    with pytest.raises(RollbackError, match="these steps can: 15, 10"):
        start(store, own=1, rollback_to=20)
    assert set(read_generations(store)) == {1}
    assert roll_back(store, PERSON, 15, "me", 2.0) == checkpoint_id(2, 15)


def test_a_late_claim_takes_nothing_from_what_was_opened_in_its_stead(store: ObjectStore, tmp_path: Path) -> None:
    """An opener that was given up claims after another one has, and the job has trained on from there."""
    start(store)
    saved(store, tmp_path, (1, 10), (1, 20))
    start(store, own=1, rollback_to=10)
    trained = saved(store, tmp_path, (2, 30))[0]
    late = start(store, own=1, rollback_to=10)
    assert late.generation == 3
    assert late.base == trained
    assert read_generations(store)[3].rollback_through == 1
    assert start(store, own=2).base == trained


def test_a_rollback_after_a_late_claim_bounds_what_came_before_it(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    saved(store, tmp_path, (1, 10), (1, 20))
    start(store, own=1, rollback_to=10)
    saved(store, tmp_path, (2, 30))
    start(store, own=1, rollback_to=10)
    again = start(store, own=2, rollback_to=10)  # 3 is passed over: it bounds too little
    assert (again.generation, again.base) == (4, checkpoint_id(1, 10))
    assert read_generations(store)[4].rollback_through == 2


@pytest.mark.parametrize("call", range(1, 40))
def test_of_two_at_once_each_is_told_the_truth(call: int, tmp_path: Path) -> None:
    """Another person goes back further, whole, before any one call of the first one's to the store."""
    truth = MemoryStore()
    start(truth)
    saved(truth, tmp_path, (1, 10), (1, 20), (1, 30))
    calls = 0

    class Interrupted(MemoryStore):
        """The other rollback comes before the given call."""

        def __getattribute__(self, name: str) -> object:
            nonlocal calls
            if name in ("create", "read", "read_into", "size", "entries"):
                calls += 1
                if calls == call:
                    roll_back(truth, changed(PERSON, claimant="the other"), 10, "you", 2.0)
            return super().__getattribute__(name)

    seen = Interrupted()
    seen._objects = truth._objects
    try:
        assert roll_back(seen, PERSON, 20, "me", 2.0) == checkpoint_id(1, 20)
        is_told = True
    except (RollbackError, FencedError):
        is_told = False
    order = [record.rollback_to for _, record in sorted(read_generations(truth).items())]
    assert order in ([None, 20], [None, 10], [None, 20, 10])  # never 20 after 10, which would go back to 10
    assert 20 in order or not is_told
    expected = checkpoint_id(1, 10 if calls >= call else 20)
    assert start(truth, changed(ME, claimant="process-2")).base == expected

"""Generations on the store: one claimant each, roll forward, the base that all load, and how a job may start again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace as changed
from functools import partial
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import read_generations
from orchestrator.checkpoint.generations import (
    OWN_CLAIMS_MAX,
    Claimant,
    JobOverError,
    Opened,
    fruitless_runs,
    newest_committed,
    open_generation,
    read_end,
    record_end,
    roll_forward,
    successor,
)
from orchestrator.checkpoint.save import abandon, read_index
from orchestrator.core.messages import CheckpointId, Outcome
from orchestrator.errors import FencedError, FormatError, StoreError, VersionError
from orchestrator.storage.base import Entry, ObjectStore, Piece
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import checkpoint_id, place, save, stage, upload, upload_all
from tests.checkpoint.stores import CountingStore, at_once, new_store, replace

SMALL = {"w": torch.arange(30, dtype=torch.float32)}
ME = Claimant(job="job", owner="owner", claimant="process-1", take_over=False)
RESTARTED = changed(ME, claimant="process-2")
FOREIGN = changed(ME, owner="stranger", claimant="process-3")


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore()


def start(
    store: ObjectStore, who: Claimant = ME, own: int | None = None, avoid: tuple[CheckpointId, ...] = ()
) -> Opened:
    return open_generation(store, who, own, avoid, 1.0)


def base_of(store: ObjectStore, generation: int) -> CheckpointId | None:
    return fmt.load(fmt.BaseRecord, "base", store.read(fmt.base_key(generation))).id


# ------------------------------------------------------------------------------------------------------- claims


def test_the_first_start_is_generation_one_and_afresh(any_store: ObjectStore) -> None:
    """F79: no checkpoint is no error."""
    opened = start(any_store)
    assert opened == Opened(generation=1, base=None, rolled_forward=(), skipped=())
    record = read_generations(any_store)[1]
    assert (record.job, record.owner, record.claimant) == ("job", "owner", "process-1")
    assert base_of(any_store, 1) is None


def test_each_generation_takes_the_next_number(store: ObjectStore) -> None:
    assert [start(store, own=own).generation for own in (None, 1, 2)] == [1, 2, 3]
    assert start(store, RESTARTED).generation == 4  # the same owner, another process
    assert start(store, RESTARTED, own=4).generation == 5


def test_runs_of_an_owner_that_ended_and_committed_nothing(store: ObjectStore) -> None:
    for number, who in enumerate((FOREIGN, ME, RESTARTED), 1):
        start(store, who)
        record_end(store, who, Outcome.DRAINED, f"run {number}", 1.0)
    start(store, changed(ME, claimant="process-4"))  # which runs still
    assert newest_committed(store) is None
    assert [fruitless_runs(store, owner) for owner in ("owner", "stranger", "nobody")] == [2, 1, 0]


def test_a_loser_is_fenced(store: ObjectStore) -> None:
    """F93, F94: two runs of one job, one of them behind a network that came back: exactly one goes on."""
    start(store)
    start(store, RESTARTED)
    with pytest.raises(FencedError, match="generation 2"):
        start(store, own=1)
    assert set(read_generations(store)) == {1, 2}


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_of_many_claims_at_once_each_number_is_opened_once(kind: str, tmp_path: Path) -> None:
    """One process whose answers come late asks again and again: no two of its attempts open the same generation."""
    for turn in range(6):
        store = new_store(kind, tmp_path / str(turn))
        start(store)
        answers = at_once([partial(start, store, own=1)] * 16)
        numbers = [answer.generation for answer in answers if isinstance(answer, Opened)]
        assert len(numbers) == len(set(numbers)) >= 1
        assert all(isinstance(answer, Opened | StoreError | FencedError) for answer in answers)
        assert all(base_of(store, number) is None for number in numbers)


class ListsTogether(CountingStore):
    """Nobody goes on from the first listing of the claims before all have listed them."""

    def __init__(self, inner: ObjectStore, parties: int) -> None:
        super().__init__(inner)
        self._barrier = threading.Barrier(parties)
        self._listed = threading.local()

    def entries(self, prefix: str) -> Iterator[Entry]:
        found = super().entries(prefix)
        if prefix == "generations/" and not getattr(self._listed, "before", False):
            self._listed.before = True
            self._barrier.wait(10)
        return found


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_of_sixteen_claims_of_one_number_exactly_one_wins(kind: str, tmp_path: Path) -> None:
    """F93, F94: sixteen processes that all see generation 1 as the highest; the store lets one of them through."""
    for turn in range(4):
        inner = new_store(kind, tmp_path / str(turn))
        start(inner)
        store = ListsTogether(inner, 16)
        answers = at_once([partial(start, store, changed(ME, claimant=f"racer-{one}")) for one in range(16)])
        assert [answer.generation for answer in answers if isinstance(answer, Opened)] == [2]
        assert sum(isinstance(answer, FencedError) for answer in answers) == 15
        assert set(read_generations(inner)) == {1, 2}
        assert base_of(inner, 2) is None


def test_starters_at_once_each_get_their_own_number_or_are_fenced(tmp_path: Path) -> None:
    store = new_store("folder", tmp_path)
    calls = [lambda n=number: start(store, changed(ME, claimant=f"starter-{n}")) for number in range(8)]
    answers = at_once(calls)
    numbers = [answer.generation for answer in answers if isinstance(answer, Opened)]
    assert len(numbers) == len(set(numbers)) >= 1
    assert all(isinstance(answer, Opened | FencedError) for answer in answers)


class LosesAnswers(MemoryStore):
    """Creates the object, then fails as if the answer had been lost, for as long as `lost` says."""

    def __init__(self, *lost: str) -> None:
        super().__init__()
        self.lost = list(lost)

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        super().create(key, pieces)
        if self.lost and self.lost[0] in key:
            self.lost.pop(0)
            raise StoreError(key, "the answer got lost")


def test_an_own_claim_whose_answer_was_lost_is_used_or_skipped() -> None:
    """Without a base nothing was launched in it: the number is used. With one, it is skipped."""
    store = LosesAnswers()
    start(store)
    store.lost = ["generations/00000002.json", "generations/00000002.base.json"]
    for _ in range(2):
        with pytest.raises(StoreError, match="lost"):
            start(store, own=1)
    assert start(store, own=1).generation == 3
    assert {record.claimant for record in read_generations(store).values()} == {"process-1"}


def test_another_process_in_the_way_is_not_skipped() -> None:
    store = LosesAnswers()
    start(store)
    store.lost = ["generations/00000002.json"]
    with pytest.raises(StoreError, match="lost"):
        start(store, own=1)
    start(store, RESTARTED)  # takes 3
    with pytest.raises(FencedError, match="generation 3"):
        start(store, own=1)


def test_own_claims_that_lead_nowhere_come_to_an_end(store: ObjectStore) -> None:
    start(store)
    for number in range(2, 2 + OWN_CLAIMS_MAX):
        record = fmt.GenerationRecord(
            version=1, job="job", generation=number, owner="owner", claimant="process-1", wall_seconds=1.0
        )
        store.create(fmt.generation_key(number), [fmt.dump(record)])
        store.create(fmt.base_key(number), [b"{}"])
    with pytest.raises(FencedError, match="without being used"):
        start(store, own=1)


def test_a_store_that_lost_our_claim_is_not_started_afresh(store: ObjectStore, tmp_path: Path) -> None:
    """A folder that was renamed or unmounted under a running job: an empty one in its place is no fresh start."""
    assert start(store, own=None).generation == 1
    with pytest.raises(StoreError, match="our own claim is gone"):
        start(new_store("folder", tmp_path / "empty"), own=1)


def test_our_number_in_another_hand_is_fenced(store: ObjectStore) -> None:
    start(store)
    with pytest.raises(FencedError, match=r"another run has taken over .* generation 1 was claimed by owner owner"):
        start(store, RESTARTED, own=1)


class LateClaim(MemoryStore):
    """A store in which another start makes its claim just after this one has looked for claims."""

    def __init__(self, who: Claimant) -> None:
        super().__init__()
        self._who: Claimant | None = who

    def entries(self, prefix: str) -> Iterator[Entry]:
        found = list(super().entries(prefix))
        who, self._who = self._who, None
        if who is not None:
            start(self, who)
        return iter(found)


def test_a_claim_that_comes_meanwhile_is_no_foreign_folder() -> None:
    """A supervisor is started again while its first claim is still under way: it goes on from there."""
    assert start(LateClaim(ME), RESTARTED).generation == 2
    with pytest.raises(FencedError, match="belongs to owner"):
        start(LateClaim(ME), FOREIGN)


def test_a_foreign_owner_is_fenced_unless_it_takes_over(store: ObjectStore) -> None:
    start(store)
    with pytest.raises(FencedError, match="take-over") as caught:
        start(store, FOREIGN)
    assert "owner" in str(caught.value)
    assert start(store, changed(FOREIGN, take_over=True)).generation == 2
    with pytest.raises(FencedError):
        start(store, ME)  # now the job is the stranger's


@pytest.mark.parametrize("take_over", [False, True])
def test_another_job_is_fenced_whatever_it_says(store: ObjectStore, take_over: bool) -> None:
    start(store)
    with pytest.raises(FencedError, match="belongs to the job 'job', not to 'other'"):
        start(store, changed(ME, job="other", take_over=take_over))


def test_a_folder_of_something_else_is_refused(store: ObjectStore) -> None:
    store.create("holiday/photo.jpg", [b"x"])
    with pytest.raises(FencedError, match=r"holiday/photo\.jpg"):
        start(store)
    assert read_generations(store) == {}


def test_a_damaged_claim_stops_the_start(store: ObjectStore) -> None:
    """It may be the one that says who owns the job, or a rollback."""
    start(store)
    replace(store, fmt.generation_key(1), b"{")
    with pytest.raises(FormatError, match=r"generations/00000001\.json"):
        start(store, RESTARTED)


# ------------------------------------------------------------------------------------------------- end records


def test_the_first_end_record_stands(store: ObjectStore) -> None:
    start(store)
    assert read_end(store, 1) is None
    record_end(store, ME, Outcome.DRAINED, "a notice", 1.0)
    record_end(store, ME, Outcome.DONE, "too late", 2.0)
    end = read_end(store, 1)
    assert end is not None
    assert (end.outcome, end.reason) == (Outcome.DRAINED, "a notice")


@pytest.mark.parametrize("who", [RESTARTED, FOREIGN], ids=["same owner", "another owner"])
def test_a_job_that_is_done_is_not_started_again(store: ObjectStore, who: Claimant) -> None:
    start(store)
    record_end(store, ME, Outcome.DONE, "step 100 of 100", 1.0)
    with pytest.raises(JobOverError, match="step 100 of 100") as caught:
        start(store, who)
    assert caught.value.outcome is Outcome.DONE
    assert start(store, changed(who, take_over=True)).generation == 2


def test_a_cancelled_job_does_not_come_back_to_life_by_itself(store: ObjectStore) -> None:
    """The scheduler requeues the same owner: it must not go on. A person who starts it anew may."""
    start(store)
    record_end(store, ME, Outcome.CANCELLED, "by a person", 1.0)
    with pytest.raises(JobOverError) as caught:
        start(store, RESTARTED)
    assert caught.value.outcome is Outcome.CANCELLED
    assert start(store, FOREIGN).generation == 2


def test_a_cancelled_job_is_started_again_by_its_owner_with_take_over(store: ObjectStore) -> None:
    start(store)
    record_end(store, ME, Outcome.CANCELLED, "by a person", 1.0)
    assert start(store, changed(RESTARTED, take_over=True)).generation == 2


@pytest.mark.parametrize("outcome", [Outcome.DRAINED, Outcome.FAILED])
@pytest.mark.parametrize("who", [RESTARTED, FOREIGN], ids=["same owner", "another owner"])
def test_a_drained_or_failed_job_may_be_started_by_anyone(store: ObjectStore, outcome: Outcome, who: Claimant) -> None:
    start(store)
    record_end(store, ME, outcome, "why", 1.0)
    assert start(store, who).generation == 2


def test_the_end_is_that_of_the_last_own_claim_even_if_its_answer_was_lost() -> None:
    store = LosesAnswers()
    start(store)
    store.lost = ["generations/00000002.json"]
    with pytest.raises(StoreError, match="lost"):
        start(store, own=1)
    record_end(store, ME, Outcome.CANCELLED, "by a person", 1.0)
    assert read_end(store, 1) is None
    assert read_end(store, 2) is not None
    with pytest.raises(JobOverError):
        start(store, RESTARTED)


def test_nobody_ends_what_another_process_has_claimed(store: ObjectStore) -> None:
    """A fenced supervisor that says goodbye must not end the job of the one that took over."""
    start(store)
    start(store, RESTARTED)
    with pytest.raises(FencedError, match="generation 2 was claimed by owner owner at 1970-01-01 00:00:01 UTC"):
        record_end(store, ME, Outcome.FAILED, "fenced", 1.0)
    record_end(store, FOREIGN, Outcome.DONE, "what?", 1.0)
    assert read_end(store, 2) is None
    assert read_end(store, 1) is None


def test_only_a_higher_claim_of_another_process_makes_a_successor(store: ObjectStore) -> None:
    start(store)
    assert successor(store, ME, 1) is None
    start(store, own=1)
    assert successor(store, ME, 1) is None, "our own next one: an agent finishes what the older one has decided"
    start(store, RESTARTED)
    told = successor(store, ME, 1)
    assert told is not None
    assert "generation 3 was claimed by owner owner" in told
    assert "--take-over" in told
    assert successor(store, RESTARTED, 3) is None


def test_an_older_generations_end_does_not_count(store: ObjectStore) -> None:
    start(store)
    record_end(store, ME, Outcome.DONE, "done", 1.0)
    start(store, changed(RESTARTED, take_over=True))
    assert start(store, RESTARTED).generation == 3


# ------------------------------------------------------------------------------------------------ roll forward


def test_what_is_complete_is_committed_whoever_left_it(any_store: ObjectStore, tmp_path: Path) -> None:
    """F19, W3: all receipts were there, only the index was not: nothing is lost."""
    start(any_store)
    checkpoint = upload_all(any_store, tmp_path, SMALL, world_size=3)
    opened = start(any_store, RESTARTED)
    assert opened.rolled_forward == (checkpoint,)
    assert opened.base == checkpoint == base_of(any_store, 2)
    assert isinstance(read_index(any_store, checkpoint), fmt.Index)
    assert start(any_store, RESTARTED, own=2).rolled_forward == ()


def test_what_is_not_complete_stays_undecided(store: ObjectStore, tmp_path: Path) -> None:
    """F6, F24, W3: the folder is there, some of its files are: that is no checkpoint."""
    start(store)
    older = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10)).id
    newer = upload_all(store, tmp_path, SMALL, world_size=3, without=(1,), checkpoint=checkpoint_id(1, 20))
    opened = start(store, RESTARTED)
    assert (opened.rolled_forward, opened.base, opened.skipped) == ((), older, ())
    assert read_index(store, newer) is None


def test_a_shard_of_the_wrong_size_is_not_rolled_forward(store: ObjectStore, tmp_path: Path) -> None:
    checkpoint = upload_all(store, tmp_path, SMALL, world_size=2)
    replace(store, fmt.shard_key(checkpoint, 0, 2), b"short")
    assert roll_forward(store) == ()
    assert read_index(store, checkpoint) is None


def spoilt(store: ObjectStore, folder: Path) -> None:
    """A receipt that is cut."""
    checkpoint = upload_all(store, folder, SMALL, world_size=2)
    replace(store, fmt.receipt_key(checkpoint, 1, 2), b"{")


def mixed(store: ObjectStore, folder: Path) -> None:
    """All receipts of one world size and one of another."""
    upload_all(store, folder, SMALL, world_size=2)
    upload(store, place(4, 8), stage(folder, SMALL, place(4, 8)))


def disagreeing(store: ObjectStore, folder: Path) -> None:
    """Two ranks whose shards do not make the tensor."""
    upload_all(store, folder, lambda rank: {"w": torch.arange(30.0 + rank)}, world_size=2)


def incomplete_without_anyone(store: ObjectStore, folder: Path) -> None:
    """Everybody was to go, and one rank made it."""
    upload_all(store, folder, SMALL, world_size=2, absent=(0, 1), without=(1,))


@pytest.mark.parametrize("leave", [spoilt, mixed, disagreeing, incomplete_without_anyone])
def test_receipts_that_make_no_checkpoint_stop_no_start(
    store: ObjectStore, tmp_path: Path, leave: Callable[[ObjectStore, Path], None]
) -> None:
    """A job must not be kept from starting by what some attempt left; it stays undecided, for the sweep."""
    start(store)
    leave(store, tmp_path)
    opened = start(store, RESTARTED)
    assert (opened.base, opened.rolled_forward) == (None, ())
    assert read_index(store, checkpoint_id()) is None


def test_what_was_abandoned_stays_so(store: ObjectStore, tmp_path: Path) -> None:
    checkpoint = upload_all(store, tmp_path, SMALL)
    abandon(store, checkpoint, "torn")
    assert roll_forward(store) == ()
    assert start(store, changed(ME, claimant="x"), own=0).base is None


@pytest.mark.parametrize("marker", ["retired.json", "quarantine.json"])
def test_what_is_marked_is_not_rolled_forward(store: ObjectStore, tmp_path: Path, marker: str) -> None:
    checkpoint = upload_all(store, tmp_path, SMALL)
    store.create(f"{fmt.folder_key(checkpoint)}/{marker}", [b"{}"])
    assert roll_forward(store) == ()


def test_a_rollback_bounds_rolling_forward_for_ever(store: ObjectStore, tmp_path: Path) -> None:
    """What was rolled back must not come back by an upload that ended late."""
    start(store)
    kept = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10)).id
    record = fmt.GenerationRecord(
        version=1, job="job", generation=2, owner="owner", claimant="x", wall_seconds=1.0, rollback_to=10
    )
    store.create(fmt.generation_key(2), [fmt.dump(record)])
    late = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 20))
    fine = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 5))
    for _ in range(3):
        opened = start(store, RESTARTED)
        assert opened.base == kept
        assert read_index(store, late) is None
    assert isinstance(read_index(store, fine), fmt.Index)


# ------------------------------------------------------------------------------------------------------- bases


def test_the_base_is_the_newest_committed(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 900), world_size=4)
    start(store, own=1)
    newest = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(2, 30), world_size=3).id
    assert start(store, RESTARTED).base == newest == base_of(store, 3)


def test_step_zero_is_a_base(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    checkpoint = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 0)).id
    assert start(store, RESTARTED).base == checkpoint
    assert base_of(store, 2) == checkpoint


def test_a_damaged_newest_falls_back_with_a_reason(store: ObjectStore, tmp_path: Path) -> None:
    """F20: a truncated file must not block every restart."""
    start(store)
    older = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10)).id
    newer = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 20)).id
    store.delete(fmt.shard_key(newer, 0, 1))
    opened = start(store, RESTARTED)
    assert opened.base == older
    (reason,) = opened.skipped
    assert str(newer) in reason
    assert "is missing" in reason


def test_what_a_worker_could_not_read_is_avoided(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    older = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10)).id
    newer = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 20)).id
    opened = start(store, own=1, avoid=(newer,))
    assert opened.base == older
    assert opened.skipped == (f"{newer}: avoided: a worker could not read it, or starts from it kept failing",)
    assert start(store, own=2).base == newer  # nothing is condemned by it


def spoil(store: ObjectStore, checkpoint: CheckpointId, how: str) -> None:
    if how == "damaged":
        replace(store, fmt.index_key(checkpoint), b"{")
    elif how == "quarantined":
        store.create(f"{fmt.folder_key(checkpoint)}/quarantine.json", [b"{}"])


@pytest.mark.parametrize("how", ["damaged", "quarantined", "avoided"])
def test_where_nothing_can_be_read_the_job_does_not_begin_anew(store: ObjectStore, tmp_path: Path, how: str) -> None:
    """F6, F20: starting afresh would train over what a person could still save."""
    start(store)
    checkpoints = [save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, step)).id for step in (10, 20)]
    for checkpoint in checkpoints:
        spoil(store, checkpoint, how)
    with pytest.raises(FormatError, match="starting afresh would lose them") as caught:
        start(store, own=1, avoid=tuple(checkpoints) if how == "avoided" else ())
    assert all(str(checkpoint) in str(caught.value) for checkpoint in checkpoints)
    with pytest.raises(StoreError):
        store.read(fmt.base_key(2))


def test_an_index_of_a_newer_release_stops_the_start(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10))
    store.create(fmt.index_key(checkpoint_id(1, 20)), [b'{"version":2}'])
    with pytest.raises(VersionError):
        start(store, RESTARTED)


def test_claim_roll_forward_base_in_this_order(tmp_path: Path) -> None:
    order: list[str] = []

    class Watched(MemoryStore):
        def create(self, key: str, pieces: Iterable[Piece]) -> None:
            super().create(key, pieces)
            order.append(key)

    store = Watched()
    start(store)
    checkpoint = upload_all(store, tmp_path, SMALL)
    order.clear()
    start(store, RESTARTED)
    assert order == [fmt.generation_key(2), fmt.index_key(checkpoint), fmt.base_key(2)]


def test_a_base_is_written_once(any_store: ObjectStore) -> None:
    start(any_store)
    with pytest.raises(StoreError):
        any_store.create(fmt.base_key(1), [b"{}"])


def test_avoiding_does_not_hide_what_is_newer(store: ObjectStore, tmp_path: Path) -> None:
    start(store)
    older = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10)).id
    newer = save(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 20)).id
    opened = start(store, own=1, avoid=(older,))
    assert (opened.base, opened.skipped) == (newer, ())

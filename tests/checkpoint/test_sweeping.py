"""Deleting: marked first, by the highest generation alone, and never what somebody could still want."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace as changed
from pathlib import Path

import pytest
import torch

from orchestrator import telemetry
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.generations import Claimant, open_generation
from orchestrator.checkpoint.retention import Keep
from orchestrator.checkpoint.save import abandon, commit, read_index
from orchestrator.checkpoint.sweeping import Sweeper, SweepResult, delete_shards, retire
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import FencedError, FormatError, StoreDeniedError, StoreError, SweepRefusedError, VersionError
from orchestrator.storage.base import Entry, ObjectStore, Piece
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import checkpoint_id, save, upload_all
from tests.checkpoint.stores import replace

SMALL = {"w": torch.arange(30, dtype=torch.float32)}
WHO = Claimant(job="job", owner="owner", claimant="claimant", take_over=False)
GRACE_SECONDS = 100.0
ALL, ONE, TWO = Keep(), Keep(last=1), Keep(last=2)


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def opened(store: ObjectStore, own: int | None = None) -> int:
    """A generation that has chosen its base."""
    return open_generation(store, WHO, own, (), 1.0).generation


def saved(store: ObjectStore, folder: Path, *steps: int, generation: int = 1) -> list[CheckpointId]:
    return [save(store, folder, SMALL, checkpoint=checkpoint_id(generation, step), world_size=2).id for step in steps]


def left(store: ObjectStore, checkpoint: CheckpointId) -> list[str]:
    """File names in a checkpoint's folder."""
    prefix = fmt.folder_key(checkpoint) + "/"
    return [entry.key.removeprefix(prefix) for entry in store.entries(prefix)]


def standings(store: ObjectStore) -> dict[int, Standing]:
    return {entry.id.step: entry.standing for entry in survey(store).entries}


def sweep(
    store: ObjectStore, time: Time, generation: int = 1, keep: Keep = ONE, in_flight: tuple[CheckpointId, ...] = ()
) -> SweepResult:
    return Sweeper(store, time).sweep(generation, keep, in_flight, GRACE_SECONDS)


def sweep_late(
    store: ObjectStore, time: Time, in_flight: tuple[CheckpointId, ...] = (), keep: Keep = ALL
) -> SweepResult:
    """What a sweeper does that has seen all that is there for long enough."""
    sweeper = Sweeper(store, time)
    first = sweeper.sweep(1, keep, in_flight, GRACE_SECONDS)
    assert not first.abandoned
    assert first.unfinished == 0
    time.now += GRACE_SECONDS
    return sweeper.sweep(1, keep, in_flight, GRACE_SECONDS)


# --------------------------------------------------------------------------------------------- what is not kept


def test_older_ones_lose_their_shards_and_keep_their_index(any_store: ObjectStore, tmp_path: Path, time: Time) -> None:
    opened(any_store)
    old, middle, new = saved(any_store, tmp_path, 10, 20, 30)
    done = sweep(any_store, time, keep=TWO)
    assert done.retired == (old,)
    assert done.freed_bytes > 2 * 30 * 4
    assert left(any_store, old) == ["index.json", "retired.json"]
    assert standings(any_store) == {10: Standing.RETIRED, 20: Standing.COMMITTED, 30: Standing.COMMITTED}
    assert survey(any_store).newest() == survey(any_store).entries[0]
    assert len(left(any_store, middle)) == len(left(any_store, new)) == 5
    assert sweep(any_store, time, keep=TWO) == SweepResult()


def test_what_is_deleted_while_somebody_looks_is_not_taken_for_damaged(tmp_path: Path, time: Time) -> None:
    """A listing comes in pages: the mark's place was read before it was there, the shards' places after it."""

    class Slow(MemoryStore):
        deleting = False

        def entries(self, prefix: str) -> Iterator[Entry]:
            found = list(super().entries(prefix))
            if self.deleting and prefix == "checkpoints/":
                self.deleting = False
                sweep(self, time)
                still_there = {entry.key for entry in super().entries(prefix)}
                found = [entry for entry in found if entry.key in still_there]
            return iter(found)

    store = Slow()
    opened(store)
    saved(store, tmp_path, 10, 20)
    store.deleting = True
    assert standings(store) == {10: Standing.RETIRED, 20: Standing.COMMITTED}


def test_what_no_save_has_written_is_left_alone(any_store: ObjectStore, tmp_path: Path, time: Time) -> None:
    opened(any_store)
    old, _ = saved(any_store, tmp_path, 10, 20)
    for name in ("notes.txt", "export/model.safetensors", "export/shard-00000-of-00001.json"):
        any_store.create(f"{fmt.folder_key(old)}/{name}", [b"somebody's"])
    sweep(any_store, time)
    others = ["export/model.safetensors", "export/shard-00000-of-00001.json", "index.json", "notes.txt", "retired.json"]
    assert left(any_store, old) == others
    assert sweep(any_store, time) == SweepResult()


def test_the_marker_says_who_and_why(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    old, _ = saved(store, tmp_path, 10, 20)
    sweep(store, time)
    marker = fmt.load(fmt.Marker, "marker", store.read(fmt.retired_key(old)))
    assert (marker.generation, marker.step, marker.by_generation) == (1, 10, 1)
    assert marker.reason == "older than the newest 1"


def test_nothing_is_deleted_where_all_are_kept(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    saved(store, tmp_path, 10, 20)
    assert sweep(store, time, keep=ALL) == SweepResult()


def test_the_base_of_the_generation_that_runs_stays(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    (base,) = saved(store, tmp_path, 10)
    assert opened(store, own=1) == 2
    saved(store, tmp_path, 20, 30, 40, generation=2)
    sweep(store, time, generation=2)
    assert standings(store) == {
        10: Standing.COMMITTED,
        20: Standing.RETIRED,
        30: Standing.RETIRED,
        40: Standing.COMMITTED,
    }
    assert len(left(store, base)) == 5


# ---------------------------------------------------------------------------------------- the highest one alone


def test_an_older_generation_deletes_nothing(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    saved(store, tmp_path, 10, 20)
    opened(store, own=1)
    before = list(store.entries(""))
    with pytest.raises(FencedError, match="generation 2 is there"):
        sweep(store, time, generation=1)
    assert list(store.entries("")) == before


def test_a_claim_between_the_marks_and_the_deletes_stops_them(tmp_path: Path) -> None:
    """A zombie that wakes up in the middle: what the newer generation may have chosen keeps its bytes."""
    store = MemoryStore()
    opened(store)
    old, new = saved(store, tmp_path, 10, 20)
    catalog = survey(store)
    marked = retire(store, catalog, 1, ONE)
    assert marked == (old,)
    assert open_generation(store, WHO, 1, (), 1.0).base == new
    with pytest.raises(FencedError):
        delete_shards(store, 1, marked)
    assert left(store, old)[2:] == left(store, new)[1:]


def test_a_claim_before_the_marks_may_choose_what_is_marked_and_finds_it_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    opened(store)
    old, new = saved(store, tmp_path, 10, 20)
    catalog = survey(store)
    assert open_generation(store, WHO, 1, (new,), 1.0).base == old  # it avoids the newer one
    marked = retire(store, catalog, 1, ONE)
    with pytest.raises(FencedError):
        delete_shards(store, 1, marked)
    assert len(left(store, old)) == 6


def test_nothing_is_deleted_before_the_base_is_chosen(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    saved(store, tmp_path, 10, 20)
    claim = fmt.GenerationRecord(version=1, job="job", generation=2, owner="owner", claimant="c", wall_seconds=1.0)
    store.create(fmt.generation_key(2), [fmt.dump(claim)])
    with pytest.raises(SweepRefusedError, match="generation 2 has not chosen its base yet"):
        sweep(store, time, generation=2)
    assert standings(store) == {10: Standing.COMMITTED, 20: Standing.COMMITTED}


# ------------------------------------------------------------------------------------------------ fails closed


@pytest.mark.parametrize("what", ["a shard is missing", "the index is garbage", "the index is of a newer format"])
def test_nothing_is_deleted_while_something_cannot_be_read(tmp_path: Path, time: Time, what: str) -> None:
    store = MemoryStore()
    opened(store)
    _, bad, _ = saved(store, tmp_path, 10, 20, 30)
    match what:
        case "a shard is missing":
            store.delete(fmt.shard_key(bad, 1, 2))
        case "the index is garbage":
            replace(store, fmt.index_key(bad), b"garbage")
        case _:
            replace(store, fmt.index_key(bad), b'{"version":99}')
    before = list(store.entries(""))
    with pytest.raises(SweepRefusedError, match=str(bad)):
        sweep(store, time)
    assert list(store.entries("")) == before


def test_nothing_is_marked_where_nothing_may_be_deleted(tmp_path: Path, time: Time) -> None:
    """Marks alone would hide whole checkpoints, one after the other, and free nothing."""

    class Denied(MemoryStore):
        def delete(self, key: str) -> None:
            raise StoreDeniedError(key, "these credentials do not allow DeleteObject")

    store = Denied()
    opened(store)
    saved(store, tmp_path, 10, 20)
    with pytest.raises(SweepRefusedError, match="not allowed here: these credentials do not allow DeleteObject"):
        sweep(store, time)
    assert standings(store) == {10: Standing.COMMITTED, 20: Standing.COMMITTED}


def test_a_claim_that_a_stale_listing_does_not_show_stops_the_deletes(tmp_path: Path, time: Time) -> None:
    """File servers' clients may show an old listing for a while."""

    class Stale(MemoryStore):
        def entries(self, prefix: str) -> Iterator[Entry]:
            return iter([entry for entry in super().entries(prefix) if entry.key != fmt.generation_key(2)])

    store = Stale()
    opened(store)
    old, _ = saved(store, tmp_path, 10, 20)
    claim = fmt.GenerationRecord(version=1, job="job", generation=2, owner="owner", claimant="c", wall_seconds=1.0)
    store.create(fmt.generation_key(2), [fmt.dump(claim)])
    with pytest.raises(FencedError, match="generation 2 is there"):
        sweep(store, time)
    assert len(left(store, old)) == 6


class Failing(MemoryStore):
    """A store whose next calls of one method fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, int] = {}

    def _maybe(self, method: str, key: str) -> None:
        left = self.failing.get(method, -1)
        if left == 0:
            raise StoreError(key, "503")
        self.failing[method] = left - 1

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        self._maybe("create", key)
        super().create(key, pieces)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._maybe("read", key)
        return super().read(key, start, stop)

    def delete(self, key: str) -> None:
        self._maybe("delete", key)
        super().delete(key)


@pytest.mark.parametrize("method", ["create", "read", "delete"])
def test_a_sweep_that_fails_anywhere_is_completed_by_the_next(tmp_path: Path, time: Time, method: str) -> None:
    """After every call the store fails; nothing that is usable is ever half there."""
    for successes in range(60):
        store = Failing()
        opened(store)
        saved(store, tmp_path, 10, 20, 30)
        abandon(store, upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 25)), "torn")
        store.failing[method] = successes
        try:
            sweep(store, time)
            failed = False
        except StoreError:
            failed = True
        store.failing.clear()
        found = standings(store)
        assert Standing.DAMAGED not in found.values()
        assert found[30] is Standing.COMMITTED
        sweep(store, time)
        assert standings(store) == {
            10: Standing.RETIRED,
            20: Standing.RETIRED,
            25: Standing.ABANDONED,
            30: Standing.COMMITTED,
        }
        assert [left(store, checkpoint_id(1, step)) for step in (10, 20)] == [["index.json", "retired.json"]] * 2
        assert left(store, checkpoint_id(1, 25)) == ["index.json"]
        if not failed:
            return
    raise AssertionError("the sweep never got through")


@pytest.mark.parametrize("point", ["after-retired", "after-delete"])
def test_a_sweep_that_dies_is_completed_by_another(tmp_path: Path, time: Time, point: str) -> None:
    store = MemoryStore()
    opened(store)
    saved(store, tmp_path, 10, 20, 30)

    class Died(BaseException):
        pass

    def die(name: str, where: object) -> None:
        if name == point:
            raise Died

    telemetry.set_point_hook(die)
    try:
        with pytest.raises(Died):
            sweep(store, time)
    finally:
        telemetry.set_point_hook(None)
    assert standings(store)[30] is Standing.COMMITTED
    assert standings(store)[10] is Standing.RETIRED
    sweep(store, time)
    assert [left(store, checkpoint_id(1, step)) for step in (10, 20)] == [["index.json", "retired.json"]] * 2


# ------------------------------------------------------------------------------------ what nobody went on with


def test_an_undecided_folder_is_abandoned_and_emptied_after_the_grace_period(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    torn = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=2, without=(1,))
    sweeper = Sweeper(store, time)
    assert sweeper.sweep(1, ALL, (), GRACE_SECONDS) == SweepResult()
    time.now += GRACE_SECONDS - 1
    assert sweeper.sweep(1, ALL, (), GRACE_SECONDS) == SweepResult()
    time.now += 1
    done = sweeper.sweep(1, ALL, (), GRACE_SECONDS)
    assert done.abandoned == (torn,)
    assert done.freed_bytes > 0
    assert left(store, torn) == ["index.json"]
    index = read_index(store, torn)
    assert isinstance(index, fmt.AbandonedIndex)
    assert index.reason == "nobody went on with it for 100 s"


def test_a_folder_in_which_something_arrives_is_new_again(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=3, without=(1, 2))
    sweeper = Sweeper(store, time)
    sweeper.sweep(1, ALL, (), GRACE_SECONDS)
    time.now += GRACE_SECONDS - 1
    upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=3, without=(0, 2))
    assert sweeper.sweep(1, ALL, (), GRACE_SECONDS) == SweepResult()
    time.now += GRACE_SECONDS - 1
    assert sweeper.sweep(1, ALL, (), GRACE_SECONDS) == SweepResult()
    time.now += 1
    assert sweeper.sweep(1, ALL, (), GRACE_SECONDS).abandoned == (checkpoint_id(1, 10),)


def test_one_that_turns_out_to_be_whole_is_committed(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    whole = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=2)
    done = sweep_late(store, time)
    assert done.committed == (whole,)
    assert standings(store) == {10: Standing.COMMITTED}


def test_one_beyond_a_rollback_is_never_committed(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    beyond = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=2)
    claim = fmt.GenerationRecord(
        version=1, job="job", generation=2, owner="owner", claimant="c", wall_seconds=1.0, rollback_to=5
    )
    store.create(fmt.generation_key(2), [fmt.dump(claim)])
    base = fmt.BaseRecord(version=1, generation=2, checkpoint_generation=None, checkpoint_step=None)
    store.create(fmt.base_key(2), [fmt.dump(base)])
    sweeper = Sweeper(store, time)
    sweeper.sweep(2, ALL, (), GRACE_SECONDS)
    time.now += GRACE_SECONDS
    assert sweeper.sweep(2, ALL, (), GRACE_SECONDS).abandoned == (beyond,)


def test_what_is_in_flight_is_left_alone(tmp_path: Path, time: Time) -> None:
    store = FolderStore(tmp_path / "store")
    opened(store)
    running = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=2, without=(1,))
    (tmp_path / "store" / fmt.folder_key(running) / ".tmp-1").write_bytes(b"half")
    assert sweep_late(store, time, in_flight=(running,)) == SweepResult()


def test_a_committer_that_comes_late_meets_the_abandoned_index(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    late = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=2, without=(1,))
    sweep_late(store, time)
    upload_all(store, tmp_path, SMALL, checkpoint=late, world_size=2)
    assert commit(store, late) is False
    assert standings(store) == {10: Standing.ABANDONED}
    sweep(store, time)
    assert left(store, late) == ["index.json"]


def test_a_sweeper_that_comes_late_believes_the_committed_index(tmp_path: Path, time: Time) -> None:
    """Somebody commits between its look and its decision: the index decides, and nothing is deleted."""

    class Overtaken(MemoryStore):
        def create(self, key: str, pieces: Iterable[Piece]) -> None:
            if key.endswith("index.json") and b"nobody" in b"".join(pieces):
                upload_all(truth, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=2)
                assert commit(truth, checkpoint_id(1, 10))
            super().create(key, pieces)

    store = Overtaken()
    truth = MemoryStore()
    truth._objects = store._objects
    opened(store)
    upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10), world_size=2, without=(1,))
    done = sweep_late(store, time)
    assert done.abandoned == ()
    assert done.committed == (checkpoint_id(1, 10),)
    assert standings(store) == {10: Standing.COMMITTED}


def test_receipts_of_a_newer_format_are_left_to_a_newer_release(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    newer = upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 10))
    replace(store, fmt.receipt_key(newer, 0, 1), b'{"version":99}')
    sweeper = Sweeper(store, time)
    sweeper.sweep(1, ALL, (), GRACE_SECONDS)
    time.now += GRACE_SECONDS
    with pytest.raises(VersionError):
        sweeper.sweep(1, ALL, (), GRACE_SECONDS)
    assert standings(store) == {10: Standing.UNDECIDED}


def test_unfinished_writes_are_removed_after_the_grace_period(tmp_path: Path, time: Time) -> None:
    """Killed processes leave them for ever (F69)."""
    store = FolderStore(tmp_path / "store")
    opened(store)
    (checkpoint,) = saved(store, tmp_path, 10)
    for folder in (fmt.folder_key(checkpoint), "generations"):
        (tmp_path / "store" / folder / ".tmp-1").write_bytes(b"half")
    done = sweep_late(store, time)
    assert done.unfinished == 2
    assert list(store.unfinished("")) == []
    assert standings(store) == {10: Standing.COMMITTED}


def test_an_index_is_read_once(tmp_path: Path, time: Time) -> None:
    """A job may keep hundreds of checkpoints, and sweeps after each commit."""
    read: list[str] = []

    class Counting(MemoryStore):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            read.append(key)
            return super().read(key, start, stop)

    store = Counting()
    opened(store)
    saved(store, tmp_path, 10, 20, 30)
    sweeper = Sweeper(store, time)
    sweeper.sweep(1, Keep(last=2), (), GRACE_SECONDS)
    read.clear()
    saved(store, tmp_path, 40)
    read.clear()
    sweeper.sweep(1, Keep(last=2), (), GRACE_SECONDS)
    assert [key for key in read if key.endswith("index.json")] == [fmt.index_key(checkpoint_id(1, 40))]


def marked_late(store: ObjectStore, folder: Path) -> CheckpointId:
    """Generation 2 avoids the newest checkpoint and takes the one before, which a zombie of generation 1 then marks."""
    opened(store)
    saved(store, folder, 5)
    old, new = saved(store, folder, 10, 20)
    catalog = survey(store)
    assert open_generation(store, WHO, 1, (new,), 1.0).base == old
    assert old in retire(store, catalog, 1, ONE)
    assert fmt.RETIRED in left(store, old)
    return old


def test_a_base_that_a_zombie_marked_is_not_deleted_by_its_own_generation(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    base = marked_late(store, tmp_path)
    assert standings(store) == {5: Standing.RETIRED, 10: Standing.COMMITTED, 20: Standing.COMMITTED}
    saved(store, tmp_path, 30, 40, generation=2)
    sweep(store, time, generation=2)
    assert standings(store)[10] is Standing.COMMITTED
    assert len(left(store, base)) == 6
    assert left(store, checkpoint_id(1, 5)) == ["index.json", "retired.json"]


def test_a_base_that_a_zombie_marked_can_be_chosen_again(tmp_path: Path, time: Time) -> None:
    """And once no generation goes on from it any more, the marker counts: it is deleted like any other."""
    store = MemoryStore()
    base = marked_late(store, tmp_path)
    assert open_generation(store, WHO, 2, (checkpoint_id(1, 20),), 1.0).base == base
    saved(store, tmp_path, 30, 40, generation=3)
    assert open_generation(store, WHO, 3, (), 1.0).base == checkpoint_id(3, 40)
    sweep(store, time, generation=4)
    assert left(store, base) == ["index.json", "retired.json"]


def roll_back(store: ObjectStore, generation: int, step: int) -> None:
    """A person's record."""
    record = fmt.GenerationRecord(
        version=1,
        job="job",
        generation=generation,
        owner="owner",
        claimant="a person",
        wall_seconds=1.0,
        rollback_to=step,
    )
    store.create(fmt.generation_key(generation), [fmt.dump(record)])


def test_after_a_rollback_a_zombies_mark_makes_no_fresh_start(tmp_path: Path) -> None:
    store = MemoryStore()
    opened(store)
    old, _ = saved(store, tmp_path, 10, 20)
    catalog = survey(store)
    roll_back(store, 2, 10)
    assert open_generation(store, WHO, None, (), 1.0).base == old
    retire(store, catalog, 1, ONE)
    assert open_generation(store, WHO, 3, (), 1.0).base == old


@pytest.mark.parametrize("deleted", [False, True])
def test_a_rollback_to_what_was_retired_meanwhile_is_no_fresh_start(tmp_path: Path, deleted: bool) -> None:
    """The job would begin at step 0 without a word, and what was rolled back would be deleted in time."""
    store = MemoryStore()
    opened(store)
    old, _ = saved(store, tmp_path, 10, 20)
    marked = retire(store, survey(store), 1, ONE)
    if deleted:
        delete_shards(store, 1, marked)
    roll_back(store, 2, 10)
    how = "was retired$" if deleted else "was retired, and is not deleted yet$"
    with pytest.raises(FormatError, match=f"starting afresh would lose them: {old}: {how}"):
        open_generation(store, WHO, None, (), 1.0)


def test_a_rollback_to_before_all_checkpoints_is_a_fresh_start(tmp_path: Path, time: Time) -> None:
    store = MemoryStore()
    opened(store)
    saved(store, tmp_path, 10, 20)
    sweep(store, time)
    roll_back(store, 2, 0)
    assert open_generation(store, WHO, None, (), 1.0).base is None


def test_a_zombie_marks_nothing_by_the_count_of_newer_generations(tmp_path: Path) -> None:
    """It stood still after its look at the claims; of what it sees now the newer generation's are the newest."""
    store = MemoryStore()
    opened(store)
    saved(store, tmp_path, 10, 20)
    opened(store, own=1)
    saved(store, tmp_path, 30, 40, generation=2)
    before = list(store.entries(""))
    claims_seen_before = changed(survey(store), generations={1: survey(store).generations[1]})
    for catalog in (survey(store), claims_seen_before):
        with pytest.raises(FencedError, match="generation 2 is there"):
            retire(store, catalog, 1, ONE)
    assert list(store.entries("")) == before


def test_a_base_is_not_deleted_by_whoever_looked_before_it_was_chosen(tmp_path: Path) -> None:
    """Generation 2 has claimed and looked, a zombie marks what it chooses then, a person's prune sees the mark."""
    store = MemoryStore()
    opened(store)
    old, _ = saved(store, tmp_path, 10, 20)
    before = survey(store)
    claim = fmt.GenerationRecord(version=1, job="job", generation=2, owner="owner", claimant="c", wall_seconds=1.0)
    store.create(fmt.generation_key(2), [fmt.dump(claim)])
    retire(store, before, 1, ONE)
    catalog = survey(store)
    assert catalog.entries[1].standing is Standing.RETIRED
    base = fmt.BaseRecord(version=1, generation=2, checkpoint_generation=1, checkpoint_step=10)
    store.create(fmt.base_key(2), [fmt.dump(base)])
    assert retire(store, catalog, 2, ONE) == ()
    assert delete_shards(store, 2, [old]) == 0
    assert standings(store)[10] is Standing.COMMITTED


def test_own_claims_that_nobody_uses_are_not_in_the_way_but_a_later_one_is(tmp_path: Path, time: Time) -> None:
    """Two openers were asked, and the gang was formed with the first answer: nothing was deleted all its life."""
    store = MemoryStore()
    (base,) = saved(store, tmp_path, 5, generation=opened(store))
    assert (opened(store, 1), opened(store, 2)) == (2, 3)
    first, second, third = saved(store, tmp_path, 10, 20, 30, generation=2)
    sweeper = Sweeper(store, time)
    with pytest.raises(FencedError, match="generation 3 is there"):
        sweeper.sweep(2, ONE, (), GRACE_SECONDS)
    assert sweeper.sweep(2, ONE, (), GRACE_SECONDS, claimed_through=3).retired == (second, first)
    assert (len(left(store, base)), len(left(store, first)), len(left(store, third))) == (5, 2, 5)
    opened(store, 3)
    saved(store, tmp_path, 40, generation=2)
    with pytest.raises(FencedError, match="generation 4 is there"):
        sweeper.sweep(2, ONE, (), GRACE_SECONDS, claimed_through=3)


def test_what_an_unused_generation_chose_is_not_deleted_while_it_is_the_newest(tmp_path: Path, time: Time) -> None:
    """An older generation's mark on it is void: it would be taken for damaged."""
    store = MemoryStore()
    opened(store)
    first, second, _ = saved(store, tmp_path, 10, 20, 30)
    record = fmt.BaseRecord(version=1, generation=2, checkpoint_generation=1, checkpoint_step=10)
    opened(store, 1)
    store.delete(fmt.base_key(2))
    store.create(fmt.base_key(2), [fmt.dump(record)])
    sweeper = Sweeper(store, time)
    assert sweeper.sweep(1, ONE, (), GRACE_SECONDS, claimed_through=2).retired == (second,)
    assert sweeper.sweep(1, ONE, (), GRACE_SECONDS, claimed_through=2).retired == ()
    assert standings(store)[first.step] is Standing.COMMITTED

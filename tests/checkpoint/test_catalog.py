"""What is on the store and what may be used: judged by each checkpoint's own index, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import Standing, rollback_bound, survey
from orchestrator.checkpoint.save import abandon
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import VersionError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import checkpoint_id, save, upload_all
from tests.checkpoint.stores import replace

SMALL = {"w": torch.arange(30, dtype=torch.float32)}


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore()


def committed(store: ObjectStore, folder: Path, generation: int, step: int, **options: Any) -> CheckpointId:
    return save(store, folder, SMALL, checkpoint=checkpoint_id(generation, step), **options).id


def standings(store: ObjectStore) -> dict[str, Standing]:
    return {str(entry.id): entry.standing for entry in survey(store).entries}


def rollback(generation: int, to: int | None) -> fmt.GenerationRecord:
    return fmt.GenerationRecord(
        version=1, job="job", generation=generation, owner="o", claimant="c", wall_seconds=1.0, rollback_to=to
    )


def newest(store: ObjectStore, avoid: tuple[CheckpointId, ...] = ()) -> CheckpointId | None:
    entry = survey(store).newest(avoid)
    return None if entry is None else entry.id


def test_an_empty_store_has_nothing(store: ObjectStore) -> None:
    """F79: resuming if there is anything must work with nothing."""
    assert survey(store).entries == ()
    assert newest(store) is None


def test_newest_is_by_generation_then_step(store: ObjectStore, tmp_path: Path) -> None:
    """A later generation went on from where it chose; its lower step is newer than an earlier one's higher step."""
    old = committed(store, tmp_path, 1, 900)
    new = committed(store, tmp_path, 2, 40)
    assert newest(store) == new
    assert [entry.id for entry in survey(store).entries] == [new, old]
    assert newest(store, avoid=(new,)) == old
    assert newest(store, avoid=(new, old)) is None


def test_step_zero_counts(store: ObjectStore, tmp_path: Path) -> None:
    """W7: another system ignored step 0."""
    assert committed(store, tmp_path, 1, 0) == newest(store)


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_completeness_is_by_the_checkpoints_own_world_size(store: ObjectStore, tmp_path: Path, world_size: int) -> None:
    """F66, W7: a checkpoint of 16 ranks is found at any world size; nobody is asked what theirs is."""
    assert committed(store, tmp_path, 1, 10, world_size=world_size) == newest(store)
    (entry,) = survey(store).entries
    assert entry.world_size == world_size
    assert entry.size_bytes == sum(e.size_bytes for e in store.entries("checkpoints/") if "shard-" in e.key)


def test_what_has_no_index_is_undecided(store: ObjectStore, tmp_path: Path) -> None:
    """F20, F22, W5: neither a folder's name nor shards make a checkpoint, only its index."""
    upload_all(store, tmp_path, SMALL, checkpoint=checkpoint_id(1, 5))
    store.create("checkpoints/g00000001-s0000000099/model.safetensors", [b"x"])
    store.create("checkpoints/step-500/model.safetensors", [b"x"])
    assert standings(store) == {
        "g00000001-s0000000099": Standing.UNDECIDED,
        "g00000001-s0000000005": Standing.UNDECIDED,
    }
    assert newest(store) is None


@pytest.mark.parametrize(
    ("marker", "standing"), [("retired.json", Standing.RETIRED), ("quarantine.json", Standing.QUARANTINED)]
)
def test_marked_checkpoints_are_passed_over(
    store: ObjectStore, tmp_path: Path, marker: str, standing: Standing
) -> None:
    old, new = committed(store, tmp_path, 1, 10), committed(store, tmp_path, 1, 20)
    store.create(f"{fmt.folder_key(new)}/{marker}", [b"{}"])
    assert standings(store)[str(new)] is standing
    assert newest(store) == old


def test_a_retired_checkpoint_may_lose_its_shards(store: ObjectStore, tmp_path: Path) -> None:
    """Deleting goes marker first, then shards: half a delete is no damage."""
    checkpoint = committed(store, tmp_path, 1, 10)
    store.create(f"{fmt.folder_key(checkpoint)}/retired.json", [b"{}"])
    store.delete(fmt.shard_key(checkpoint, 0, 1))
    assert standings(store) == {str(checkpoint): Standing.RETIRED}


def test_an_abandoned_one_says_why(store: ObjectStore, tmp_path: Path) -> None:
    checkpoint = upload_all(store, tmp_path, SMALL)
    abandon(store, checkpoint, "rank 3 went on")
    (entry,) = survey(store).entries
    assert (entry.standing, entry.problem) == (Standing.ABANDONED, "rank 3 went on")


def test_a_missing_or_cut_shard_is_damage_with_its_name(store: ObjectStore, tmp_path: Path) -> None:
    """F20, F24: every restart goes past it to the one before, and says why."""
    old, new = committed(store, tmp_path, 1, 10), committed(store, tmp_path, 1, 20, world_size=2)
    key = fmt.shard_key(new, 1, 2)
    data = store.read(key)
    replace(store, key, data[:-1])
    entry = survey(store).entries[0]
    assert entry.standing is Standing.DAMAGED
    assert entry.problem is not None
    assert f"shard-00001-of-00002.safetensors has {len(data) - 1} bytes" in entry.problem
    store.delete(key)
    entry = survey(store).entries[0]
    assert entry.problem is not None
    assert "shard-00001-of-00002.safetensors is missing" in entry.problem
    assert newest(store) == old


@pytest.mark.parametrize("how", ["missing", "cut", "longer"])
def test_a_receipt_that_is_not_whole_is_damage(store: ObjectStore, tmp_path: Path, how: str) -> None:
    """Without its block digests nothing of a shard can be read."""
    old, new = committed(store, tmp_path, 1, 10), committed(store, tmp_path, 1, 20, world_size=2)
    key = fmt.receipt_key(new, 1, 2)
    data = store.read(key)
    store.delete(key)
    if how != "missing":
        store.create(key, [data[:-1] if how == "cut" else data + b" "])
    entry = survey(store).entries[0]
    assert entry.standing is Standing.DAMAGED
    assert "shard-00001-of-00002.json " + ("is missing" if how == "missing" else "has ") in str(entry.problem)
    assert newest(store) == old


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"version":1,"x":NaN}'])
def test_a_damaged_index_is_damage(store: ObjectStore, tmp_path: Path, content: bytes) -> None:
    old, new = committed(store, tmp_path, 1, 10), committed(store, tmp_path, 1, 20)
    replace(store, fmt.index_key(new), content)
    assert standings(store)[str(new)] is Standing.DAMAGED
    assert newest(store) == old


def test_a_copied_folder_is_damage(store: ObjectStore, tmp_path: Path) -> None:
    """Its index speaks of another checkpoint."""
    old = committed(store, tmp_path, 1, 10)
    copied = CheckpointId(generation=5, step=10)
    for entry in list(store.entries(fmt.folder_key(old))):
        store.create(entry.key.replace(str(old), str(copied)), [store.read(entry.key)])
    assert standings(store)[str(copied)] is Standing.DAMAGED
    assert newest(store) == old


def test_an_index_of_a_newer_release_is_told_from_damage(store: ObjectStore, tmp_path: Path) -> None:
    committed(store, tmp_path, 1, 10)
    store.create(fmt.index_key(checkpoint_id(1, 20)), [b'{"version":2,"state":"committed"}'])
    entry = survey(store).entries[0]
    assert entry.standing is Standing.NEWER_FORMAT
    assert entry.problem is not None
    assert "version 2" in entry.problem


# --------------------------------------------------------------------------------------------------- rollback


def test_a_rollback_bounds_every_earlier_generation_for_ever(store: ObjectStore, tmp_path: Path) -> None:
    kept = [committed(store, tmp_path, 1, 10), committed(store, tmp_path, 1, 20)]
    gone = [committed(store, tmp_path, 1, 30), committed(store, tmp_path, 2, 40)]
    for generation, to in ((1, None), (2, None), (3, 20), (4, None), (5, 35)):
        store.create(fmt.generation_key(generation), [fmt.dump(rollback(generation, to))])
    assert [standings(store)[str(one)] for one in gone] == [Standing.ROLLED_BACK] * 2
    assert newest(store) == kept[1]
    after = committed(store, tmp_path, 4, 33)
    assert newest(store) == after  # generation 4 came after the rollback to 20, before the one to 35
    beyond = committed(store, tmp_path, 4, 36)
    assert standings(store)[str(beyond)] is Standing.ROLLED_BACK
    again = committed(store, tmp_path, 5, 30)
    assert newest(store) == again  # the generation that rolled back is not bounded by its own record


@pytest.mark.parametrize(
    ("generation", "bound"), [(1, 20), (2, 20), (3, 35), (4, 35), (5, float("inf")), (6, float("inf"))]
)
def test_the_bound_of_each_generation(generation: int, bound: float) -> None:
    records = {number: rollback(number, to) for number, to in ((1, None), (3, 20), (4, 50), (5, 35), (6, None))}
    assert rollback_bound(records, generation) == bound


def test_a_claim_that_comes_late_bounds_what_it_was_asked_to() -> None:
    late = rollback(4, 20).model_copy(update={"rollback_through": 2})
    assert [rollback_bound({4: late}, generation) for generation in (1, 2, 3)] == [20, 20, float("inf")]


def test_a_rollback_to_step_zero_keeps_step_zero(store: ObjectStore, tmp_path: Path) -> None:
    start = committed(store, tmp_path, 1, 0)
    committed(store, tmp_path, 1, 1)
    store.create(fmt.generation_key(2), [fmt.dump(rollback(2, 0))])
    assert newest(store) == start


# ------------------------------------------------------------------------------------------------- base records


@pytest.mark.parametrize("name", ["00000001.base.json", "00000009.base.json", "00000001 (copy).base.json"])
def test_a_base_record_that_cannot_be_read_hides_no_checkpoint(store: ObjectStore, tmp_path: Path, name: str) -> None:
    """Nobody goes on from it: the next generation chooses anew."""
    one = committed(store, tmp_path, 1, 10)
    store.create(f"generations/{name}", [b"garbage"])
    assert newest(store) == one


def test_a_base_record_of_a_newer_format_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    committed(store, tmp_path, 1, 10)
    store.create(fmt.base_key(1), [b'{"version":99}'])
    with pytest.raises(VersionError):
        survey(store)


def test_a_copy_of_a_base_record_is_none(store: ObjectStore, tmp_path: Path) -> None:
    """Tools that copy or synchronise folders leave such names: what the newest record says is what counts."""
    old, new = committed(store, tmp_path, 1, 10), committed(store, tmp_path, 1, 20)
    for generation, base in ((2, old), (3, new)):
        record = fmt.BaseRecord(
            version=1, generation=generation, checkpoint_generation=base.generation, checkpoint_step=base.step
        )
        store.create(fmt.base_key(generation), [fmt.dump(record)])
    store.create("generations/00000002 (copy).base.json", [store.read(fmt.base_key(2))])
    marker = fmt.Marker(version=1, generation=1, step=20, by_generation=1, reason="a zombie's")
    store.create(fmt.retired_key(new), [fmt.dump(marker)])
    assert newest(store) == new

"""A second node's look at what a first one could not read: only bytes that both find changed condemn a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.generations import Claimant, open_generation
from orchestrator.checkpoint.quarantine import second_reading, set_aside
from orchestrator.checkpoint.save import abandon
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import FormatError, NotFoundError, VersionError
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import checkpoint_id, save, upload_all
from tests.checkpoint.stores import CountingStore, change_byte, replace

WEIGHTS = {"w": torch.arange(1_000_000, dtype=torch.float32)}
WHO = Claimant(job="job", owner="owner", claimant="claimant", take_over=False)


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    found = MemoryStore()
    open_generation(found, WHO, None, (), 1.0)
    save(found, tmp_path, WEIGHTS, checkpoint=checkpoint_id(1, 10), world_size=2)
    save(found, tmp_path, WEIGHTS, checkpoint=checkpoint_id(1, 20), world_size=2)
    return found


BASE = checkpoint_id(1, 20)


def shard(rank: int) -> str:
    return fmt.shard_key(BASE, rank, 2)


def test_what_is_whole_here_condemns_nothing(store: MemoryStore) -> None:
    """The first node has a bad memory, cable or cache."""
    assert second_reading(store, BASE, f"DigestError: {shard(1)}: block 1 does not match its digest") is None


def test_what_is_bad_here_too_is_named(store: MemoryStore) -> None:
    change_byte(store, shard(1), 1_500_000)
    found = second_reading(store, BASE, f"DigestError: {shard(1)}: block 1 does not match its digest")
    assert found == f"{shard(1)}: block 1 (bytes from 1048576) does not match its digest"


def test_another_size_is_a_mismatch_too(store: MemoryStore) -> None:
    replace(store, shard(0), store.read(shard(0))[:-1])
    found = second_reading(store, BASE, "DigestError: something")
    assert found is not None
    assert found.startswith(f"{shard(0)}: has ")


def test_a_changed_receipt_is_a_mismatch_too(store: MemoryStore) -> None:
    change_byte(store, fmt.receipt_key(BASE, 1, 2), 10)
    assert "is not the receipt that was committed" in (second_reading(store, BASE, "anything") or "")


def test_only_what_the_first_one_named_is_read(store: MemoryStore) -> None:
    """A checkpoint may have terabytes."""
    change_byte(store, shard(0), 1_500_000)
    counting = CountingStore(store)
    assert second_reading(counting, BASE, f"DigestError: {shard(1)}: block 1") is None
    assert {key for key, *_ in counting.reads if key.endswith(".safetensors")} == {shard(1)}
    assert second_reading(counting, BASE, f"DigestError: {fmt.receipt_key(BASE, 0, 2)}: is another") is not None
    assert second_reading(counting, BASE, "FormatError: no name in here") is not None


def test_what_is_missing_or_of_a_newer_format_is_no_mismatch(store: MemoryStore, tmp_path: Path) -> None:
    """Whoever removed it knows why, or a newer release can read it: nothing is condemned by that."""
    store.delete(shard(0))
    with pytest.raises(NotFoundError):
        second_reading(store, BASE, "NotFoundError")
    replace(store, fmt.index_key(BASE), b'{"version":99}')
    with pytest.raises(VersionError):
        second_reading(store, BASE, "VersionError")
    undecided = upload_all(store, tmp_path, WEIGHTS, checkpoint=checkpoint_id(1, 30))
    with pytest.raises((FormatError, NotFoundError)):
        second_reading(store, undecided, "anything")
    abandon(store, undecided, "torn")
    with pytest.raises((FormatError, NotFoundError)):
        second_reading(store, undecided, "anything")


def test_what_is_set_aside_is_never_chosen_again_and_keeps_its_bytes(store: MemoryStore) -> None:
    before = {entry.key: entry.size_bytes for entry in store.entries("")}
    set_aside(store, BASE, 1, "rank 1 on a: block 1; b: block 1")
    set_aside(store, BASE, 1, "somebody was faster")
    standings = {entry.id.step: entry.standing for entry in survey(store).entries}
    assert standings == {10: Standing.COMMITTED, 20: Standing.QUARANTINED}
    assert open_generation(store, WHO, 1, (), 1.0).base == CheckpointId(generation=1, step=10)
    marker = fmt.load(fmt.Marker, "marker", store.read(fmt.quarantine_key(BASE)))
    assert marker.reason == "rank 1 on a: block 1; b: block 1"
    assert {entry.key: entry.size_bytes for entry in store.entries("")}.items() >= before.items()

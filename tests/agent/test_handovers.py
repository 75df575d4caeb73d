"""Staged shards as a peer sees them, and copying one: digests, slots that are used again, memory that is full."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from orchestrator.agent.objects import HttpObjectServer
from orchestrator.agent.staged import DIGEST_SUFFIX, Nearby, NodeObjects, copy_shard, staged_key
from orchestrator.checkpoint.digest import crc
from orchestrator.core.messages import CheckpointId, HandOver
from orchestrator.errors import DigestError, NotFoundError, StoreDeniedError, StoreError
from orchestrator.storage.memory import MemoryStore
from orchestrator.storage.peers import PeerStore

CHECKPOINT = CheckpointId(generation=3, step=20)
NOBODY_NEAR = Nearby("token", PeerStore, lambda _: None)
KEY = staged_key(CHECKPOINT, 1, 2)
CONTENT = os.urandom(3 << 20) + b"the end"
ACTION = HandOver(
    node="peer", generation=3, step=20, rank=1, world_size=2, absent=(1,), source_url="http://127.0.0.1:1"
)


class Node:
    """A node with one slot."""

    def __init__(self, folder: Path) -> None:
        self.slot = folder / "slot-0"
        self.slot.write_bytes(CONTENT + bytes(4096))  # a slot is longer than the shard in it
        self.holds = True
        self.asked = 0
        self.freed_after: int | None = None
        self.store = MemoryStore()
        self.store.create("a", [b"of the store"])
        self.objects = NodeObjects(self.store, self.find, NOBODY_NEAR)

    def find(self, checkpoint: CheckpointId, rank: int) -> tuple[Path, int] | None:
        self.asked += 1
        if self.freed_after is not None and self.asked > self.freed_after:
            self.holds = False
        return (self.slot, len(CONTENT)) if self.holds and (checkpoint, rank) == (CHECKPOINT, 1) else None


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_staged_shard_is_read_in_ranges_and_the_store_beside_it(node: Node) -> None:
    objects = node.objects
    assert objects.size(KEY) == len(CONTENT)
    assert objects.read(KEY, 5, 99) == CONTENT[5:99]
    assert objects.read(KEY, 1 << 20) == CONTENT[1 << 20 :]
    assert objects.read(KEY + DIGEST_SUFFIX) == f"{crc(CONTENT):08x}".encode()
    assert objects.size(KEY + DIGEST_SUFFIX) == 8
    assert objects.read("a") == b"of the store"
    assert [entry.key for entry in objects.entries("")] == ["a"]


@pytest.mark.parametrize(
    "key", [staged_key(CHECKPOINT, 0, 2), "staged/", "staged/../slot-0", "staged/checkpoints/x", KEY + ".crc32"]
)
def test_what_no_slot_holds_is_not_found(node: Node, key: str) -> None:
    with pytest.raises(NotFoundError):
        node.objects.read(key)
    with pytest.raises(NotFoundError):
        node.objects.size(key)


def test_peers_only_read(node: Node) -> None:
    with pytest.raises(StoreDeniedError):
        node.objects.create("b", [b""])
    with pytest.raises(StoreDeniedError):
        node.objects.delete("a")


def test_a_copy_is_the_shard_byte_for_byte(node: Node, tmp_path: Path) -> None:
    target = tmp_path / "held"
    assert copy_shard(node.objects, ACTION, target) == len(CONTENT)
    assert target.read_bytes() == CONTENT
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("asked", [1, 2, 3, 4])
def test_a_slot_that_is_used_again_meanwhile_gives_no_copy(node: Node, tmp_path: Path, asked: int) -> None:
    """F119: at no moment of the copy does a torn one pass for the shard."""
    node.freed_after = asked
    with pytest.raises(NotFoundError):
        copy_shard(node.objects, ACTION, tmp_path / "held")
    assert not (tmp_path / "held").exists()


@pytest.mark.parametrize("suffix", ["", DIGEST_SUFFIX])
def test_a_slot_that_is_removed_after_it_was_found_is_not_there(node: Node, suffix: str) -> None:
    """Its gang was cleared: whoever asks goes on to the store."""
    node.slot.unlink()
    with pytest.raises(NotFoundError, match="was removed"):
        node.objects.read(KEY + suffix)


def test_bytes_that_change_while_they_are_copied_are_found_out(node: Node, tmp_path: Path) -> None:
    class Changing(NodeObjects):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            data = super().read(key, start, stop)
            node.slot.write_bytes(bytes(len(CONTENT) + 4096))
            return data

    with pytest.raises(DigestError, match="arrived with digest"):
        copy_shard(Changing(node.store, node.find, NOBODY_NEAR), ACTION, tmp_path / "held")
    assert not (tmp_path / "held").exists()


def test_a_peer_that_ends_too_early_is_found_out(node: Node, tmp_path: Path) -> None:
    node.slot.write_bytes(CONTENT[:100])
    with pytest.raises(StoreError, match="ended at byte 100"):
        copy_shard(node.objects, ACTION, tmp_path / "held")


async def test_a_copy_over_a_real_port(node: Node, tmp_path: Path) -> None:
    """As two agents do it: the peer has the run's token, the workers another, nobody else gets anything."""
    server = HttpObjectServer()
    url = await server.start(node.objects, ("of the workers", "of the run"), "127.0.0.1")
    try:
        with PeerStore(url, "of the run") as peer:
            assert await asyncio.to_thread(copy_shard, peer, ACTION, tmp_path / "held") == len(CONTENT)
        assert (tmp_path / "held").read_bytes() == CONTENT
        with PeerStore(url, "of the workers") as worker:
            assert await asyncio.to_thread(worker.read, "a") == b"of the store"
        with PeerStore(url, "of another run") as stranger, pytest.raises(StoreDeniedError):
            await asyncio.to_thread(copy_shard, stranger, ACTION, tmp_path / "stolen")
        assert not (tmp_path / "stolen").exists()
    finally:
        await server.stop()

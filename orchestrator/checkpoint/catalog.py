"""What is on the store: every checkpoint and where it stands; the choice of the newest usable one. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.records import SMALL_BYTES_MAX, read_in_order
from orchestrator.checkpoint.save import read_index
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import FormatError, VersionError
from orchestrator.storage.base import ObjectStore


class Standing(StrEnum):
    """Where a checkpoint stands."""

    COMMITTED = "committed"
    ABANDONED = "abandoned"
    UNDECIDED = "undecided"
    RETIRED = "retired"
    QUARANTINED = "quarantined"
    ROLLED_BACK = "rolled back"
    DAMAGED = "damaged"
    NEWER_FORMAT = "of a newer format"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One checkpoint folder."""

    id: CheckpointId
    standing: Standing
    size_bytes: int
    world_size: int | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All checkpoints, newest first, and all claims."""

    entries: tuple[CatalogEntry, ...]
    generations: Mapping[int, fmt.GenerationRecord]

    def newest(self, avoid: Collection[CheckpointId] = ()) -> CatalogEntry | None:
        """The newest committed checkpoint that is none of `avoid`."""
        usable = (entry for entry in self.entries if entry.standing is Standing.COMMITTED and entry.id not in avoid)
        return next(usable, None)


def read_generations(store: ObjectStore) -> dict[int, fmt.GenerationRecord]:
    """All claims by number."""
    claims = [entry for entry in store.entries("generations/") if fmt.parse_generation_key(entry.key) is not None]
    found: dict[int, fmt.GenerationRecord] = {}
    for key, data in read_in_order(store, claims, SMALL_BYTES_MAX):  # there may be hundreds: not one after another
        record = fmt.load(fmt.GenerationRecord, key, data)
        number = fmt.parse_generation_key(key)
        assert number is not None
        found[number] = record
    return found


def survey(store: ObjectStore) -> Catalog:
    """Read every index and judge every checkpoint folder by it alone; sizes are compared with the listing."""
    generations = read_generations(store)
    folders: dict[CheckpointId, dict[str, int]] = {}
    for entry in store.entries("checkpoints/"):
        parsed = fmt.parse_checkpoint_key(entry.key)
        if parsed is not None:
            folders.setdefault(parsed[0], {})[parsed[1]] = entry.size_bytes
    entries = [_judge(store, checkpoint, folders[checkpoint], generations) for checkpoint in sorted(folders)]
    return Catalog(entries=tuple(reversed(entries)), generations=generations)


def _judge(
    store: ObjectStore,
    checkpoint: CheckpointId,
    files: Mapping[str, int],
    generations: Mapping[int, fmt.GenerationRecord],
) -> CatalogEntry:
    standing, world_size, problem = Standing.UNDECIDED, None, None
    if "index.json" in files:
        try:
            index = read_index(store, checkpoint)
        except VersionError as error:
            index, standing, problem = None, Standing.NEWER_FORMAT, str(error)
        except FormatError as error:
            index, standing, problem = None, Standing.DAMAGED, str(error)
        if isinstance(index, fmt.AbandonedIndex):
            standing, problem = Standing.ABANDONED, index.reason
        elif isinstance(index, fmt.Index):
            world_size = index.world_size
            standing, problem = _judge_committed(index, files, generations)
    size_bytes = sum(size for name, size in files.items() if name.startswith("shard-"))
    return CatalogEntry(id=checkpoint, standing=standing, size_bytes=size_bytes, world_size=world_size, problem=problem)


def _judge_committed(
    index: fmt.Index, files: Mapping[str, int], generations: Mapping[int, fmt.GenerationRecord]
) -> tuple[Standing, str | None]:
    if "quarantine.json" in files:
        return Standing.QUARANTINED, None
    if "retired.json" in files:
        return Standing.RETIRED, None
    if index.step > rollback_bound(generations, index.generation):
        return Standing.ROLLED_BACK, None
    for shard in index.shards:
        for key, size_bytes in (
            (fmt.shard_key(index.id, shard.rank, index.world_size), shard.size_bytes),
            (fmt.receipt_key(index.id, shard.rank, index.world_size), shard.receipt_bytes),
        ):
            name = key.rpartition("/")[2]
            if files.get(name) != size_bytes:
                found = "is missing" if name not in files else f"has {files[name]} bytes"
                return Standing.DAMAGED, f"{name} {found}, the index says {size_bytes} bytes"
    return Standing.COMMITTED, None


def rollback_bound(generations: Mapping[int, fmt.GenerationRecord], generation: int) -> float:
    """The highest step of `generation` that may be used: every later rollback record bounds it."""
    bounds = [
        record.rollback_to
        for number, record in generations.items()
        if number > generation and record.rollback_to is not None
    ]
    return min(bounds, default=float("inf"))

"""What is on the store: every checkpoint and where it stands; the choice of the newest usable one. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.records import SMALL_BYTES_MAX, read_in_order, read_record
from orchestrator.checkpoint.save import read_index
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import FormatError, NotFoundError, VersionError
from orchestrator.storage.base import Entry, ObjectStore


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


def claimed(store: ObjectStore) -> list[int]:
    """The numbers of all claims, from the listing alone."""
    numbers = (fmt.parse_generation_key(entry.key) for entry in store.entries("generations/"))
    return [number for number in numbers if number is not None]


def read_generations(store: ObjectStore) -> dict[int, fmt.GenerationRecord]:
    """All claims by number."""
    return _read_claims(store, store.entries("generations/"))


def _read_claims(store: ObjectStore, listed: Iterable[Entry]) -> dict[int, fmt.GenerationRecord]:
    claims = [entry for entry in listed if fmt.parse_generation_key(entry.key) is not None]
    found: dict[int, fmt.GenerationRecord] = {}
    for key, data in read_in_order(store, claims, SMALL_BYTES_MAX):  # there may be hundreds: not one after another
        record = fmt.load(fmt.GenerationRecord, key, data)
        number = fmt.parse_generation_key(key)
        assert number is not None
        found[number] = record
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What an index says about its checkpoint: all that the judgement needs of it."""

    abandoned: str | None
    """Why, if it was."""
    world_size: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """File name → bytes, of every shard and receipt that must be there."""


KnownIndexes = dict[CheckpointId, Decided]
"""Indexes that were read before: they are written once, so whoever looks often need not read them again."""


def survey(store: ObjectStore, known: KnownIndexes | None = None) -> Catalog:
    """Every checkpoint folder and where it stands: by its index, its markers, and the sizes in the listing.

    Where something is missing it is all looked at again: it may just have been deleted, while the listing was read. The
    mark came first, so it is seen now. Raises FormatError for a claim that is none, StoreError.
    """
    catalog = _survey(store, known)
    if any(entry.standing is Standing.DAMAGED for entry in catalog.entries):
        catalog = _survey(store, known)
    return catalog


def _survey(store: ObjectStore, known: KnownIndexes | None) -> Catalog:
    listed = list(store.entries("generations/"))
    generations = _read_claims(store, listed)
    known = {} if known is None else known
    files = checkpoint_files(store)
    base = _last_base(store, listed)
    if base is not None and fmt.RETIRED in files.get(base.id, {}) and _is_void(store, base):
        del files[base.id][fmt.RETIRED]
    entries = [_judge(store, checkpoint, files[checkpoint], generations, known) for checkpoint in sorted(files)]
    return Catalog(entries=tuple(reversed(entries)), generations=generations)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What the newest generation that has chosen its base has chosen."""

    id: CheckpointId
    generation: int


def _last_base(store: ObjectStore, listed: Iterable[Entry]) -> _Base | None:
    """None if there is no base record yet, it is of a fresh start, or cannot be read."""
    number = max((number for entry in listed if (number := fmt.parse_base_key(entry.key)) is not None), default=None)
    if number is None:
        return None
    key = fmt.base_key(number)
    try:
        record = fmt.load(fmt.BaseRecord, key, read_record(store, key, SMALL_BYTES_MAX))
    except VersionError:
        raise
    except FormatError:  # it is asked only whether a mark is void: no reason to give up every checkpoint
        return None
    return None if record.id is None else _Base(id=record.id, generation=number)


def _is_void(store: ObjectStore, base: _Base) -> bool:
    """Whether the marker on a base is of an older generation than the one that chose it.

    That one would have seen the marker if it had been there, so it came later: a zombie's, which deletes nothing
    after it (it looks at the claims first), and which shall not hide from the newer generations what they go on from.
    """
    key = fmt.retired_key(base.id)
    try:
        marker = fmt.load(fmt.Marker, key, read_record(store, key, SMALL_BYTES_MAX))
    except FormatError:  # whatever a marker contains, it is heeded
        return False
    return marker.by_generation < base.generation


def checkpoint_files(store: ObjectStore) -> dict[CheckpointId, dict[str, int]]:
    """Of every checkpoint folder: file name → bytes."""
    folders: dict[CheckpointId, dict[str, int]] = {}
    for entry in store.entries("checkpoints/"):
        parsed = fmt.parse_checkpoint_key(entry.key)
        if parsed is not None:
            folders.setdefault(parsed[0], {})[parsed[1]] = entry.size_bytes
    return folders


def _judge(
    store: ObjectStore,
    checkpoint: CheckpointId,
    files: Mapping[str, int],
    generations: Mapping[int, fmt.GenerationRecord],
    known: KnownIndexes,
) -> CatalogEntry:
    standing, world_size, problem = Standing.UNDECIDED, None, None
    if fmt.RETIRED in files:
        standing = Standing.RETIRED
    elif fmt.INDEX in files:
        try:
            decided = known.get(checkpoint) or _decided(store, checkpoint)
            known[checkpoint] = decided
            world_size = decided.world_size
            standing, problem = _judge_decided(checkpoint, decided, files, generations)
        except VersionError as error:
            standing, problem = Standing.NEWER_FORMAT, str(error)
        except FormatError as error:
            standing, problem = Standing.DAMAGED, str(error)
    size_bytes = sum(size for name, size in files.items() if name.startswith("shard-"))
    return CatalogEntry(id=checkpoint, standing=standing, size_bytes=size_bytes, world_size=world_size, problem=problem)


def _decided(store: ObjectStore, checkpoint: CheckpointId) -> Decided:
    index = read_index(store, checkpoint)
    if index is None:
        raise NotFoundError(fmt.index_key(checkpoint), "it was there a moment ago, and is gone")
    if isinstance(index, fmt.AbandonedIndex):
        return Decided(abandoned=index.reason)
    sizes = {}
    for shard in index.shards:
        sizes[_name(fmt.shard_key(index.id, shard.rank, index.world_size))] = shard.size_bytes
        sizes[_name(fmt.receipt_key(index.id, shard.rank, index.world_size))] = shard.receipt_bytes
    return Decided(abandoned=None, world_size=index.world_size, sizes=sizes)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _judge_decided(
    checkpoint: CheckpointId,
    decided: Decided,
    files: Mapping[str, int],
    generations: Mapping[int, fmt.GenerationRecord],
) -> tuple[Standing, str | None]:
    if decided.abandoned is not None:
        return Standing.ABANDONED, decided.abandoned
    if fmt.QUARANTINE in files:
        return Standing.QUARANTINED, None
    if checkpoint.step > rollback_bound(generations, checkpoint.generation):
        return Standing.ROLLED_BACK, None
    for name, size_bytes in decided.sizes.items():
        if files.get(name) != size_bytes:
            found = "is missing" if name not in files else f"has {files[name]} bytes"
            return Standing.DAMAGED, f"{name} {found}, the index says {size_bytes} bytes"
    return Standing.COMMITTED, None


def rollback_bound(generations: Mapping[int, fmt.GenerationRecord], generation: int) -> float:
    """The highest step of `generation` that may be used: every later rollback record that reaches back to it bounds it.

    A claim that comes late, after the generation that was opened in its stead, bounds only what it was asked to.
    """
    bounds = [
        record.rollback_to
        for number, record in generations.items()
        if record.rollback_to is not None and generation <= _highest_bounded(number, record)
    ]
    return min(bounds, default=float("inf"))


def _highest_bounded(number: int, record: fmt.GenerationRecord) -> int:
    earlier = number - 1
    return earlier if record.rollback_through is None else min(record.rollback_through, earlier)

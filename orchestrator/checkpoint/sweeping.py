"""Deleting on the store: checkpoints that are not kept, what was abandoned, what killed writers left. Blocking.

Order (must), so that neither a crash nor another run makes anything of a half deleted checkpoint:

1. `retired.json` beside each index that goes. From then on nobody chooses it.
2. Look which generation is the highest. A claim is followed by a look at the checkpoints, so either the one who
   claimed saw the markers, or we see the claim here and delete nothing.
3. Receipts and shards. Index and marker stay, so what is half deleted is never taken for damaged, nor made anew.

What is undecided is decided before it is touched: committed if it is whole, else abandoned, and only then deleted.
It must have lain there unchanged for the grace period, on this process's own monotonic clock; wall time and the
store's dates decide nothing.

Used by `agent.actions` and `orchestrator checkpoints prune`. Which ones go is decided in `checkpoint.retention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import (
    Catalog,
    KnownIndexes,
    Standing,
    checkpoint_files,
    claimed,
    rollback_bound,
    survey,
)
from orchestrator.checkpoint.generations import read_base
from orchestrator.checkpoint.retention import Fate, Keep, choose, obstacle
from orchestrator.checkpoint.save import abandon, commit_draft, draft_if_whole
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import (
    AlreadyExistsError,
    FencedError,
    NotFoundError,
    StoreDeniedError,
    SweepRefusedError,
)
from orchestrator.storage.arguments import probe_key
from orchestrator.storage.base import ObjectStore, SweepableStore, Unfinished
from orchestrator.telemetry import reached

DELETES_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What one sweep has done."""

    retired: tuple[CheckpointId, ...] = ()
    abandoned: tuple[CheckpointId, ...] = ()
    committed: tuple[CheckpointId, ...] = ()
    """Undecided ones that turned out to be whole."""
    unfinished: int = 0
    """Writes of which something had arrived, and whose writers are gone."""
    freed_bytes: int = 0
    """Of shards and receipts."""


class Sweeper:
    """Sweeps one job's folder, again and again: it remembers since when it has seen what is undecided."""

    def __init__(self, store: ObjectStore, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._monotonic = monotonic
        self._known: KnownIndexes = {}
        self._undecided = Ages[tuple[CheckpointId, frozenset[tuple[str, int]]]]()
        """With what is in their folders: one in which something arrives is new again."""
        self._unfinished = Ages[Unfinished]()

    def sweep(
        self,
        generation: int,
        keep: Keep,
        in_flight: Collection[CheckpointId],
        grace_seconds: float,
        *,
        claimed_through: int = 0,
    ) -> SweepResult:
        """One sweep by `generation`; `in_flight` are its decided steps that are not settled, which it leaves alone.

        `claimed_through`: up to there the job has claimed generations itself, which nobody will use any more.
        Raises FencedError if a higher generation is there, SweepRefusedError with what is in the way, StoreError,
        FormatError. What was done until then stays done, and the next sweep goes on with it.
        """
        catalog = survey(self._store, self._known)
        check_highest(catalog.generations, generation, claimed_through)
        abandoned, committed = self._decide(catalog, in_flight, grace_seconds)
        if abandoned or committed:
            catalog = survey(self._store, self._known)
        retired = retire(self._store, catalog, generation, keep, claimed_through)
        over = (Standing.ABANDONED, Standing.RETIRED)
        garbage = {entry.id for entry in catalog.entries if entry.standing in over and entry.size_bytes}
        going = sorted({*retired, *garbage} - set(in_flight))
        freed_bytes = delete_shards(self._store, generation, going, claimed_through)
        return SweepResult(
            retired=retired,
            abandoned=abandoned,
            committed=committed,
            unfinished=self._discard(in_flight, grace_seconds),
            freed_bytes=freed_bytes,
        )

    def _decide(
        self, catalog: Catalog, in_flight: Collection[CheckpointId], grace_seconds: float
    ) -> tuple[tuple[CheckpointId, ...], tuple[CheckpointId, ...]]:
        """What has lain there undecided for too long: (abandoned, committed)."""
        undecided = {entry.id for entry in catalog.entries if entry.standing is Standing.UNDECIDED} - set(in_flight)
        files = checkpoint_files(self._store) if undecided else {}
        waiting = [(checkpoint, frozenset(files.get(checkpoint, {}).items())) for checkpoint in sorted(undecided)]
        abandoned, committed = list[CheckpointId](), list[CheckpointId]()
        for checkpoint, _ in self._undecided.overdue(waiting, self._monotonic(), grace_seconds):
            bounded = checkpoint.step > rollback_bound(catalog.generations, checkpoint.generation)
            draft = None if bounded else draft_if_whole(self._store, checkpoint)
            reason = f"nobody went on with it for {grace_seconds:.0f} s"
            is_committed = (
                abandon(self._store, checkpoint, reason)
                if draft is None
                else commit_draft(self._store, checkpoint, draft)
            )
            (committed if is_committed else abandoned).append(checkpoint)
        return tuple(abandoned), tuple(committed)

    def _discard(self, in_flight: Collection[CheckpointId], grace_seconds: float) -> int:
        """What has been unfinished for too long; how many such writes."""
        if not isinstance(self._store, SweepableStore):
            return 0
        busy = tuple(f"{fmt.folder_key(checkpoint)}/" for checkpoint in in_flight)
        found = [write for write in self._store.unfinished("") if not f"{write.key}/".startswith(busy)]
        overdue = self._unfinished.overdue(found, self._monotonic(), grace_seconds)
        for write in overdue:
            self._store.discard(write)
        return len(overdue)


ThingT = TypeVar("ThingT", bound=Hashable)


class Ages(Generic[ThingT]):
    """Since when each thing has been seen, by a monotonic clock. What is not there at one look is forgotten."""

    def __init__(self) -> None:
        self._since: dict[ThingT, float] = {}

    def overdue(self, present: Iterable[ThingT], now_seconds: float, grace_seconds: float) -> list[ThingT]:
        """Of all that is there now, what has been seen for at least that long."""
        self._since = {thing: self._since.get(thing, now_seconds) for thing in present}
        return [thing for thing, since in self._since.items() if now_seconds - since >= grace_seconds]


def retire(
    store: ObjectStore, catalog: Catalog, generation: int, keep: Keep, claimed_through: int = 0
) -> tuple[CheckpointId, ...]:
    """Mark what is not kept; which ones. Nothing of them is deleted yet. What an unused generation chose stays as well.

    Raises FencedError if the catalog shows a higher generation at work: by whose checkpoints would it be counted?
    Raises SweepRefusedError, StoreError.
    """
    there = [*catalog.generations, *(entry.id.generation for entry in catalog.entries)]
    check_highest(there, generation, claimed_through)
    bases = _bases(store, generation, claimed_through)
    going = [fate for fate in fates(store, catalog, generation, keep) if not fate.keep and fate.id not in bases]
    if going:
        check_may_delete(store)
    for fate in reversed(going):  # the oldest first: whatever stops this, the newest are left
        marker = fmt.Marker.on(fate.id, generation, fate.reason)
        with contextlib.suppress(AlreadyExistsError):
            store.create(fmt.retired_key(fate.id), [fmt.dump(marker)])
        reached("after-retired", step=fate.id.step)
    return tuple(fate.id for fate in going)


def check_may_delete(store: ObjectStore) -> None:
    """Raises SweepRefusedError if these credentials may not: marks alone would hide checkpoints and free nothing.

    Asked by deleting what is not there: that is no error where it is allowed.
    """
    try:
        store.delete(probe_key())
    except StoreDeniedError as error:
        raise SweepRefusedError(f"nothing is deleted, because that is not allowed here: {error.problem}") from error


def fates(store: ObjectStore, catalog: Catalog, generation: int, keep: Keep) -> tuple[Fate, ...]:
    """What is kept and what is not. Raises SweepRefusedError if that cannot be said for certain, StoreError."""
    problem = obstacle(catalog.entries)
    if problem is not None:
        raise SweepRefusedError(f"nothing is deleted while something cannot be read: {problem}")
    if generation not in catalog.generations:
        raise SweepRefusedError(
            "nothing is deleted: there is no claim of the job here, so it cannot be told what is used"
        )
    base = read_base(store, generation)
    if base is None:
        raise SweepRefusedError(f"nothing is deleted now: generation {generation} has not chosen its base yet")
    return choose(catalog.entries, keep, base.id)


def delete_shards(
    store: ObjectStore, generation: int, checkpoints: Sequence[CheckpointId], claimed_through: int = 0
) -> int:
    """Delete receipts and shards of checkpoints that are retired or abandoned; how many bytes that were.

    The generation's base stays: its mark may be void, and whoever looked before it was chosen does not know that.
    Raises FencedError if a higher generation is there by now, StoreError, FormatError.
    """
    if not checkpoints:
        return 0
    next_claim = _next_claim(store, max(generation, claimed_through))
    check_highest([*claimed(store), *next_claim], generation, claimed_through)
    bases = _bases(store, generation, claimed_through)
    freed_bytes = 0
    with ThreadPoolExecutor(DELETES_AT_ONCE, thread_name_prefix="delete") as pool:
        for checkpoint in checkpoints:
            if checkpoint in bases:
                continue
            entries = [entry for entry in store.entries(fmt.folder_key(checkpoint) + "/") if _goes(entry.key)]
            for deletion in [pool.submit(store.delete, entry.key) for entry in entries]:
                deletion.result()
            freed_bytes += sum(entry.size_bytes for entry in entries)
            reached("after-delete", step=checkpoint.step)
    return freed_bytes


def _goes(key: str) -> bool:
    """Only what a save has written: somebody may have put files of their own beside it."""
    parsed = fmt.parse_checkpoint_key(key)
    return parsed is not None and (fmt.parse_shard_key(key) or fmt.parse_receipt_name(parsed[1])) is not None


def _bases(store: ObjectStore, generation: int, claimed_through: int) -> set[CheckpointId]:
    """What this generation started from, and what the newest of the unused ones would have."""
    found = (read_base(store, number) for number in {generation, max(generation, claimed_through)})
    return {base.id for base in found if base is not None and base.id is not None}


def check_highest(generations: Collection[int], generation: int, claimed_through: int = 0) -> None:
    """Raises FencedError if there is a higher generation that is not one of our own, unused: it alone deletes."""
    highest = max(generations, default=generation)
    if highest > max(generation, claimed_through):
        raise FencedError(f"generation {highest} is there: generation {generation} deletes nothing any more")


def _next_claim(store: ObjectStore, generation: int) -> list[int]:
    """Whether the next number is taken, by asking for that very object: a file server's listing may be old."""
    try:
        store.size(fmt.generation_key(generation + 1))
    except NotFoundError:
        return []
    return [generation + 1]

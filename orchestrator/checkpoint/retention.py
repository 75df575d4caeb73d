"""Which checkpoints are kept and which are deleted: pure, each with its reason.

Newest first by (generation, step), as numbers; only committed checkpoints count. Nothing is chosen for deletion while
anything there cannot be read or understood. How deleting is done, so that no crash makes a half deleted checkpoint
usable, is in `checkpoint.sweeping`. Called by that and by `orchestrator checkpoints prune`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.checkpoint.catalog import CatalogEntry, Standing
from orchestrator.core.messages import CheckpointId

_UNREADABLE = (Standing.DAMAGED, Standing.NEWER_FORMAT)
_DELETABLE = (Standing.COMMITTED, Standing.ROLLED_BACK, Standing.QUARANTINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What the user wants to keep: the newest `last` (0: all), and one for every `every_steps` steps (0: none)."""

    last: int = 0
    every_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one checkpoint that was committed, and why."""

    id: CheckpointId
    keep: bool
    reason: str
    size_bytes: int


def obstacle(entries: Sequence[CatalogEntry]) -> str | None:
    """Why nothing may be deleted, if there is a reason: the newest checkpoint that cannot be read."""
    for entry in entries:
        if entry.standing in _UNREADABLE:
            return f"{entry.id} is {entry.standing}: {entry.problem}"
    return None


def choose(entries: Sequence[CatalogEntry], keep: Keep, base: CheckpointId | None) -> tuple[Fate, ...]:
    """The fate of each checkpoint that was committed, newest first as `entries` are.

    Kept are the newest `keep.last` that are committed, `base`, and of those that are committed the first one of every
    `keep.every_steps` steps. What was rolled back or found bad is kept until as many newer ones are there.
    """
    firsts = _first_of_each_window(entries, keep.every_steps)
    fates, committed = [], 0
    for entry in entries:
        if entry.standing not in _DELETABLE:
            continue
        kept = _why_kept(entry, keep, base, firsts, newer=committed)
        reason = kept or f"older than the newest {keep.last}"
        fates.append(Fate(id=entry.id, keep=kept is not None, reason=reason, size_bytes=entry.size_bytes))
        committed += entry.standing is Standing.COMMITTED
    return tuple(fates)


def _why_kept(
    entry: CatalogEntry, keep: Keep, base: CheckpointId | None, firsts: set[CheckpointId], *, newer: int
) -> str | None:
    """None: it is not."""
    if entry.id == base:
        return "the present generation started from it"
    if keep.last == 0:
        return "all are kept"
    if newer < keep.last:
        counted = entry.standing is Standing.COMMITTED
        return f"one of the newest {keep.last}" if counted else f"{entry.standing}; only {newer} newer ones are there"
    if entry.id in firsts:
        start = entry.id.step - entry.id.step % keep.every_steps
        return f"the first of steps {start} to {start + keep.every_steps - 1}"
    return None


def _first_of_each_window(entries: Sequence[CatalogEntry], every_steps: int) -> set[CheckpointId]:
    """Of every `every_steps` steps the committed checkpoint of the lowest step; of two of one step the newer one."""
    if every_steps == 0:
        return set()
    firsts: dict[int, CheckpointId] = {}
    for entry in entries:
        if entry.standing is Standing.COMMITTED:
            window = entry.id.step // every_steps
            first = firsts.get(window)
            if first is None or entry.id.step < first.step:
                firsts[window] = entry.id
    return set(firsts.values())

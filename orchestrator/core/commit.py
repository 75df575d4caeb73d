"""The bookkeeping of one decided step: staged, durable, committable. Pure; called by `core.job`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.core.messages import CheckpointId, Mode
from orchestrator.core.ranks import NOBODY, RankSet
from orchestrator.core.values import Changeable

NOTICE_SECONDS_ASSUMED = 120.0  # how long absent ranks are awaited where their notice gave no deadline


class SaveState(StrEnum):
    """Where a decided step stands."""

    STAGING = "staging"
    UPLOADING = "uploading"
    COMMITTING = "committing"
    ABANDONING = "abandoning"


@dataclass(frozen=True, kw_only=True)
class Save(Changeable):
    """One decided step of one generation, from the decision to the index."""

    id: CheckpointId
    mode: Mode
    world_size: int
    absent: RankSet
    decided_at_seconds: float
    deadline_seconds: float | None
    state: SaveState = SaveState.STAGING
    staged: RankSet = NOBODY
    durable: RankSet = NOBODY
    given_up: RankSet = NOBODY
    """Absent ranks that went past the step or could not upload: nothing of theirs comes, and nothing is missed."""
    size_bytes: int = 0
    largest_bytes: int = 0
    """Of the largest shard that was staged."""
    complete_at_seconds: float = 0.0
    """When the last required rank had staged: since then it is uploaded."""
    asked: Mapping[int, str] = field(default_factory=dict)
    """Hand-over: rank → the peer that was asked to copy its shard."""
    held: RankSet = NOBODY
    """Ranks whose shard that peer holds: it outlives their node."""
    failed: RankSet = NOBODY
    """Ranks whose own node could not upload while a peer was asked."""
    bad_peers: frozenset[str] = frozenset()
    """Peers that could not; they are not asked again for this step."""
    committer: str | None = None
    commit_asked_at_seconds: float = 0.0
    attempts: int = 1
    retry_at_seconds: float = 0.0
    """No index is written before: the last attempt failed."""

    @property
    def required(self) -> RankSet:
        """The ranks without which the checkpoint cannot be committed."""
        return RankSet.below(self.world_size) - self.absent

    @property
    def complete(self) -> bool:
        """Every rank outside the absent set has staged."""
        return self.required <= self.staged


def staging_over(save: Save, *, gone: RankSet, now_seconds: float) -> bool:
    """Whether all staging that can still happen has happened.

    Absent ranks stage their rank-scoped state as well; they are awaited until they are gone or the deadline is over.
    """
    if not save.complete:
        return False
    everyone = RankSet.below(save.world_size)
    return everyone <= save.staged | save.given_up | gone or _overdue(save, now_seconds)


def committable(save: Save, *, gone: RankSet, exited: RankSet, now_seconds: float) -> bool:
    """Whether the index may and should be written now: all required receipts, and no other worth waiting for.

    An absent rank that has yet to stage is worth it: its random numbers and its place in the data are its own.
    `exited` ranks stage no more. What a peer holds is worth it after the deadline as well: it was handed over
    because it is large and nobody else's.
    """
    if not save.required <= save.durable or now_seconds < save.retry_at_seconds:
        return False
    can_come = RankSet.below(save.world_size) - (exited - save.staged)
    still_coming = can_come - save.durable - save.given_up - gone
    if _overdue(save, now_seconds):
        still_coming &= save.held
    return not still_coming


def hopeless(save: Save, *, gone: RankSet) -> RankSet:
    """Required ranks whose receipt can no longer come."""
    return (save.required - save.durable) & gone


def _overdue(save: Save, now_seconds: float) -> bool:
    if save.deadline_seconds is None:
        return now_seconds >= save.decided_at_seconds + NOTICE_SECONDS_ASSUMED
    return now_seconds >= save.deadline_seconds

"""What follows when a generation fails: the same base again, an older checkpoint, or the end. Pure.

The cheapest rung first; each is tried until it has failed more often than allowed, and only a newly committed
checkpoint leads back to the first. Nothing is condemned by that: an older checkpoint is tried because starts from the
newest one do not get anywhere, whoever's fault that is. Losses of nodes and announced leaves are no failures and never
climb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.messages import CheckpointId

FREE_RESTARTS = 3  # generations in a row without a commit that are started without a pause
FIRST_PAUSE_SECONDS = 2.0
PAUSE_SECONDS_MAX = 300.0
HOW_TOLD_MAX = 200  # characters of each attempt's end in the evidence
RUNGS = 2  # the newest checkpoint, an older one
EVIDENCE_MAX = 8  # attempts told when the job is ended; older ones are in the event log


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A generation that failed."""

    generation: int
    base: CheckpointId | None
    """The newest checkpoint when it failed, its own included: from which the next one would start."""
    how: str

    def __str__(self) -> str:
        base = "a fresh start" if self.base is None else str(self.base)
        return f"generation {self.generation} from {base}: {self.how[:HOW_TOLD_MAX]}"


class Rung(StrEnum):
    """What is tried next."""

    AGAIN = "same base again"
    OLDER = "an older checkpoint"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """The next rung, and why."""

    rung: Rung
    reason: str


def climb(attempts: Sequence[Attempt], *, failures_max: int) -> Climb:
    """Decide after a failure; `attempts` are all failed generations since the last commit, the newest last.

    A rung is left after `failures_max` + 1 failures, and so is the whole ladder after that many for each of its rungs:
    bases that turn out unreadable one after another are a rung each and do not lengthen it.
    """
    last = attempts[-1]
    here = [attempt for attempt in attempts if attempt.base == last.base]
    base = "a fresh start" if last.base is None else f"checkpoint {last.base}"
    count = f"failure {len(here)} from {base} without a new checkpoint in between (the limit is {failures_max})"
    if len(here) <= failures_max and len(attempts) < RUNGS * (failures_max + 1):
        return Climb(rung=Rung.AGAIN, reason=count)
    older = len({attempt.base for attempt in attempts}) == 1 and last.base is not None
    if older and failures_max:
        return Climb(rung=Rung.OLDER, reason=count)
    return Climb(rung=Rung.STOP, reason=f"{count}; {evidence(attempts)}")


def may_read_memory(attempts: Sequence[Attempt], base: CheckpointId) -> bool:
    """Whether a start from this base may take it from memory; not once a start from it has failed."""
    return sum(attempt.base == base for attempt in attempts) <= 1


def evidence(attempts: Sequence[Attempt]) -> str:
    """The failed generations, their bases and their ends, for the person who has to look."""
    if not attempts:
        return ""
    told = [str(attempt) for attempt in attempts[-EVIDENCE_MAX:]]
    hidden = len(attempts) - len(told)
    return f"tried: {f'{hidden} earlier ones; ' if hidden else ''}{'; '.join(told)}"


def pause_seconds(generations_without_commit: int) -> float:
    """How long to wait before another generation is formed: nothing at first, then longer each time."""
    return growing_seconds(generations_without_commit - FREE_RESTARTS, FIRST_PAUSE_SECONDS, PAUSE_SECONDS_MAX)


def growing_seconds(times: int, first_seconds: float, seconds_max: float) -> float:
    """A pause that doubles with each time, up to a limit; none before the first."""
    if times <= 0:
        return 0.0
    return min(first_seconds * 2.0 ** min(times - 1, 32), seconds_max)

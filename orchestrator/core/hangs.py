"""A gang that takes no step: how long is too long, whose fault it is, and how certain that is. Pure.

Nobody looks into the training itself. What there is: the published steps, and what each node sees of its workers from
outside (`RankLook`). The more a look could also be that of a rank that computes, the longer is waited before anything
is done about it (`PATIENCE`). Used by `core.hanging`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from types import MappingProxyType

from orchestrator.core.membership import Gang
from orchestrator.core.messages import Looked, RankLook
from orchestrator.core.values import Changeable

STEPS_QUIET = 10
PACES = 9  # from which a step's time is taken: their median, so that a pause does not count
PAUSES_QUIET = 2
RUNNABLE, STOPPED, UNINTERRUPTIBLE = "R", "T", "D"
IDLE_SECONDS = 0.1  # of processor time in a look's second: less is nothing
RANKS_TOLD_MAX = 8


class Sign(StrEnum):
    """What speaks for a hang."""

    STOPPED = "stopped"
    BLOCKED = "blocked"
    SILENT = "silent"
    IDLE = "idle"
    BUSY = "busy"
    ALL_BLOCKED = "all blocked"


PATIENCE: Mapping[Sign, float | None] = MappingProxyType(
    {Sign.STOPPED: 1.0, Sign.BLOCKED: 3.0, Sign.SILENT: 3.0, Sign.IDLE: 3.0, Sign.BUSY: 10.0, Sign.ALL_BLOCKED: None}
)
"""How many times the limit has to pass before the gang is ended; None: that would not help, so never."""


@dataclass(frozen=True, kw_only=True)
class Quiet(Changeable):
    """The time without a step, and an inquiry into it."""

    since_seconds: float = 0.0
    """The last step, or the end of what does not count."""
    watched_at_seconds: float = 0.0
    """When this was last looked at: a supervisor that stood still saw nothing."""
    paces_seconds: tuple[float, ...] = ()
    """What a step took, of the last few times that steps came; a pause may be among them."""
    longest_seconds: float = 0.0
    """The longest time without a step that ended with one, but for the first step of a generation."""
    presumed_seconds: float = 0.0
    """After which the last gang was ended, as long as that may have been a pause that comes again."""
    presumed_step: int = 0
    """The step after which it was: who gets past it has not paused there."""
    ended_after_seconds: float = 0.0
    """The longest time without a step after which a gang was ended."""
    pauses: Mapping[str, float] = field(default_factory=dict)
    """Node → until when one of its ranks said that no step would come."""
    asked_at_seconds: float | None = None
    """The nodes were asked what their workers do; None: nothing is suspected."""
    looks: Mapping[str, Looked] = field(default_factory=dict)
    told: str = ""
    """What was said of this inquiry last."""
    blamed: str | None = None
    """The node whose rank was named as the culprit of the last hang."""


NOTHING_SEEN = Quiet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Who holds the others up, as far as it can be seen."""

    sign: Sign
    ranks: tuple[int, ...]
    """Empty: nobody stands out."""
    words: str


def limit_seconds(quiet: Quiet, least_seconds: float) -> float:
    """A time without a step that is suspicious: ten steps' time, and twice the longest pause that was no hang."""
    step_seconds = median(quiet.paces_seconds) if quiet.paces_seconds else 0.0
    pause_seconds = max(quiet.longest_seconds, quiet.presumed_seconds)
    return max(least_seconds, STEPS_QUIET * step_seconds, PAUSES_QUIET * pause_seconds)


def ending_seconds(quiet: Quiet, limit_seconds: float, sign: Sign) -> float | None:
    """When the gang is ended for it; None: never. Twice as late as the last time, unless a rank is stopped."""
    patience = PATIENCE[sign]
    if patience is None or sign is Sign.STOPPED:
        return None if patience is None else patience * limit_seconds
    return max(patience * limit_seconds, PAUSES_QUIET * quiet.ended_after_seconds)


def judge(gang: Gang, looks: Iterable[RankLook]) -> Judgement | None:
    """Name the culprits from one look at each rank; None if no node has answered.

    Whoever cannot run comes first, then whoever is behind, then whoever is not where the others wait, then whose node
    does not answer.
    """
    seen = sorted(looks, key=lambda look: look.rank)
    if not seen:
        return None
    held = [look for look in seen if _is_held(look)]
    if held:
        return _held(gang, seen, held)
    culprits = _behind(seen) or _elsewhere(seen)
    if culprits:
        idle = all(_is_idle(look) for look in culprits)
        doing = "no processor time passes there" if idle else "processor time passes there"
        words = f"{_names(gang, [look.rank for look in culprits])} {_how(seen, culprits)}; {doing}{_where(culprits)}"
        return _judgement(Sign.IDLE if idle else Sign.BUSY, culprits, words)
    answered = {look.rank for look in seen}
    silent = tuple(rank for place in gang.places for rank in place.ranks if rank not in answered)
    if silent:
        return Judgement(sign=Sign.SILENT, ranks=silent, words=f"the agent of {_names(gang, silent)} does not answer")
    idle = all(_is_idle(look) for look in seen)
    doing = "no processor time passes" if idle else "processor time passes"
    words = f"no rank stands out; {doing}{_where(seen)}"
    return _judgement(Sign.IDLE if idle else Sign.BUSY, [], words)


def _is_held(look: RankLook) -> bool:
    return look.state == STOPPED or (look.state == UNINTERRUPTIBLE and _is_idle(look))


def _is_idle(look: RankLook) -> bool:
    """It takes no processor time, and does not wait for a processor either."""
    return look.busy_seconds < IDLE_SECONDS and look.state != RUNNABLE


def _held(gang: Gang, seen: list[RankLook], held: list[RankLook]) -> Judgement:
    stopped = [look for look in held if look.state == STOPPED]
    if stopped:
        words = f"{_names(gang, [look.rank for look in stopped])} {_is(stopped)} stopped (state T)"
        return _judgement(Sign.STOPPED, stopped, words)
    names = _names(gang, [look.rank for look in held])
    why = "state D: a disk or a network file system"
    words = f"{names} {_is(held)} in a wait that cannot be interrupted ({why}){_where(held)}"
    if len(held) == len(seen):
        return _judgement(
            Sign.ALL_BLOCKED, [], f"{words}; so is every rank that can be seen: ending them would not help"
        )
    return _judgement(Sign.BLOCKED, held, words)


def _behind(seen: list[RankLook]) -> list[RankLook]:
    """The ranks at the lowest step, but for those of them that wait for another one; nobody if all are at one step."""
    lowest = [look for look in seen if look.step == min(one.step for one in seen)]
    if len(lowest) == len(seen):
        return []
    return [look for look in lowest if look.waits is not True] or lowest


def _elsewhere(seen: list[RankLook]) -> list[RankLook]:
    """All are at one step: the ranks that are not where the others wait."""
    waiting = [look for look in seen if look.waits]
    if waiting:
        return [look for look in seen if not look.waits]
    place, count = Counter(look.where for look in seen).most_common(1)[0]
    return [look for look in seen if look.where != place] if place and 2 * count > len(seen) else []


def _how(seen: list[RankLook], culprits: list[RankLook]) -> str:
    highest = max(look.step for look in seen)
    if culprits[0].step < highest:
        return f"{_is(culprits)} behind, at step {culprits[0].step} of {highest}"
    return f"{_is(culprits)} not where the others wait"


def _is(looks: list[RankLook]) -> str:
    return "is" if len(looks) == 1 else "are"


def _judgement(sign: Sign, looks: Iterable[RankLook], words: str) -> Judgement:
    return Judgement(sign=sign, ranks=tuple(look.rank for look in looks), words=words)


def _names(gang: Gang, ranks: Iterable[int]) -> str:
    known = list(ranks)
    told = [f"rank {rank} on {gang.node_of(rank)}" for rank in known[:RANKS_TOLD_MAX]]
    more = f" and {len(known) - RANKS_TOLD_MAX} more" if len(known) > RANKS_TOLD_MAX else ""
    return ", ".join(told) + more


def _where(looks: list[RankLook]) -> str:
    places = list(dict.fromkeys(look.where for look in looks if look.where))
    return f" ({'; '.join(places[:2])})" if places else ""

"""The rhythm of periodic saves, and what follows from workers' exits. Pure; each answer carries its reason."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from orchestrator.core.causes import Cause, cause_of, last_words, root_of
from orchestrator.core.messages import RankExited, Verdict
from orchestrator.errors import ExitCode

GROWTH_SHARE = 0.25  # of the node-seconds that a restart costs, that new nodes wait before all restart for them
HINTED_SAVES_TIMES = 4  # as many periodic saves while a hint stands
ARM_AHEAD_SECONDS = 1.0  # a periodic save is armed this long before its step, so that no rank has to wait for it


def periodic_step(*, last: int, every: int, until: int | None) -> int | None:
    """The next periodic save after step `last`: a multiple of `every`, or the job's last step; None if none is left."""
    step = (last // every + 1) * every if every > 0 else None
    if until is not None and last < until:
        return until if step is None else min(step, until)
    return step if until is None else None


def steps_between(*, every: int, hinted: bool) -> int:
    """Steps from one periodic save to the next: as the user says, or fewer while a node of the gang may go."""
    return max(every // HINTED_SAVES_TIMES, 1) if hinted and every > 0 else every


def arm_now(*, step: int, highest: int, step_seconds: float, margin: int) -> bool:
    """Whether it is time to propose a periodic save at `step`; never later than a proposal's margin allows."""
    ahead = max(2 * margin, math.ceil(ARM_AHEAD_SECONDS / max(step_seconds, 1e-4)))
    return step - highest <= ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Whether to let waiting nodes in now, and the arithmetic."""

    worth_it: bool
    reason: str


def worth_growing(
    *,
    waited_node_seconds: float,
    members: int,
    restart_seconds: float,
    trained_seconds: float,
    rest_seconds: float | None,
) -> Growth:
    """Whether new nodes have waited for a share of what a restart of all members costs (rent or buy).

    Never before the gang has trained for that share of a restart's time, so that not all of it goes into growing, and
    never when the rest of the job is not longer than a restart. `rest_seconds` None: there is no last step.
    """
    price = GROWTH_SHARE * members * restart_seconds
    reason = f"they have waited {waited_node_seconds:.0f} node-seconds, {price:.0f} are the price of a restart"
    soon_over = rest_seconds is not None and rest_seconds <= restart_seconds
    worth_it = waited_node_seconds >= price and trained_seconds >= GROWTH_SHARE * restart_seconds and not soon_over
    return Growth(worth_it=worth_it, reason=reason)


class Consequence(StrEnum):
    """What follows from a cause."""

    STOP = "stop"
    """Restarting would end in the same way."""
    RESTART = "restart"
    """A failure: how often, is `core.ladder`'s affair."""
    ELSEWHERE = "restart elsewhere"
    """The same, and without its node, if the job can do without it."""
    FREE = "restart for free"
    """No failure of the job's."""


CONSEQUENCES: Mapping[Cause, Consequence] = MappingProxyType(
    {
        Cause.REFUSED: Consequence.STOP,
        Cause.PREEMPTED: Consequence.FREE,
        Cause.OUT_OF_MEMORY: Consequence.RESTART,
        Cause.DEVICE_OUT_OF_MEMORY: Consequence.RESTART,
        Cause.DEVICE_FAILED: Consequence.ELSEWHERE,
        Cause.DISK_FULL: Consequence.RESTART,
        Cause.PEERS_LOST: Consequence.RESTART,
        Cause.KILLED: Consequence.RESTART,
        Cause.HUNG: Consequence.RESTART,
        Cause.CRASHED: Consequence.RESTART,
        Cause.UNKNOWN: Consequence.RESTART,
        Cause.FINISHED: Consequence.FREE,
    }
)
KILLED = (Cause.KILLED, Cause.OUT_OF_MEMORY, Cause.PREEMPTED)
"""Somebody ended it by a signal: no mistake of the script's, even before attach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterExit:
    """What follows from the workers' exits: restart, or stop with a status."""

    restart: bool
    counts_as_failure: bool
    exit_code: int
    reason: str
    cause: Cause | None = None
    avoid_node: str | None = None
    """The node that the failure speaks against."""


def after_exits(
    exits: Sequence[RankExited], *, ever_attached: bool, fault: str | None, going: Collection[str] = ()
) -> AfterExit:
    """Judge a broken generation by the exits that were not our doing, in order of arrival.

    `fault` is what was wrong with it where its workers were ended for that, `going` the nodes that a notice has named.
    How often a failure may be followed by another start is `core.ladder`'s affair.
    """
    own = [event for event in exits if not event.ended_by_us]
    refused = next((event for event in own if cause_of(event).cause is Cause.REFUSED), None)
    if refused is not None:
        how = "refused to go on" if refused.verdict is Verdict.REFUSED else "exited with status 78, never restart"
        return _stop(ExitCode.NEVER_RESTART, f"rank {refused.rank} {how}: {last_words(refused)}", Cause.REFUSED)
    if fault is not None:  # how the others fell down then is its consequence
        return AfterExit(restart=True, counts_as_failure=True, exit_code=0, reason=fault, cause=Cause.HUNG)
    failed = root_of(own, going)
    if failed is None:
        return AfterExit(restart=True, counts_as_failure=False, exit_code=0, reason="no worker failed by itself")
    found = cause_of(failed, going)
    what = f"rank {failed.rank} {found.words}"
    killed = found.cause in KILLED and (failed.exit_code or 0) < 0
    if not ever_attached and not killed:
        code = failed.exit_code if failed.exit_code is not None and failed.exit_code > 0 else int(ExitCode.FAILED)
        reason = f"{what} before it called orchestrator.attach() and run.steps(): {last_words(failed)}"
        return _stop(code, reason, found.cause)
    consequence = CONSEQUENCES[found.cause]
    return AfterExit(
        restart=True,
        counts_as_failure=consequence is not Consequence.FREE,
        exit_code=0,
        reason=f"{what}: {last_words(failed)}",
        cause=found.cause,
        avoid_node=failed.node if consequence is Consequence.ELSEWHERE else None,
    )


def _stop(exit_code: int, reason: str, cause: Cause) -> AfterExit:
    return AfterExit(restart=False, counts_as_failure=True, exit_code=int(exit_code), reason=reason, cause=cause)

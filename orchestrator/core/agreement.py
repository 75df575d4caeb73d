"""Which step to save: proposals, echoes and the decision. Pure; called by `core.job`.

A proposal names a future step T. Each worker echoes the ballot when it reads the proposal at a boundary at or
before T, and waits at T for the decision; a rank that was already at T without an echo refuses. Only when all
ranks have echoed may T be decided: then no rank can have passed T, so all stage the same step.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from orchestrator.core.ranks import NOBODY, RankSet

PROGRESS_DELAY_SECONDS = 0.15  # how old a rank's published step may be when a proposal reaches its control block


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An open proposal; `refused_by` is the first rank that could not keep to it."""

    ballot: int
    step: int
    echoes: RankSet = NOBODY
    refused_by: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """The step to propose, or None where no step is left, with the arithmetic behind it."""

    step: int | None
    reason: str


def margin_steps(step_seconds: float, attempt: int = 1) -> int:
    """How many steps ahead a proposal must be to reach every rank in time; grows with each refused attempt."""
    delay_seconds = PROGRESS_DELAY_SECONDS * attempt
    return 1 + math.ceil(delay_seconds / max(step_seconds, 1e-4))


def choose_step(
    *, highest: int, step_seconds: float, until: int | None, after: int | None, attempt: int = 1
) -> StepChoice:
    """The nearest step that every rank can still reach: highest published step plus a margin.

    `after` is a decided step that is not staged everywhere yet: the choice comes later than it.
    """
    margin = margin_steps(step_seconds, attempt)
    step = highest + margin
    reason = f"highest published step {highest} + {margin} (a step takes {step_seconds:.3f} s)"
    if after is not None and step <= after:
        step, reason = after + 1, f"first step after the decided step {after}"
    if until is not None and step > until:
        if highest >= until or (after is not None and after >= until):
            return StepChoice(step=None, reason=f"no step is left before the job's last step {until}")
        step, reason = until, f"the job's last step {until}"
    return StepChoice(step=step, reason=reason)


def echo(proposal: Proposal, *, ballot: int, ranks: Collection[int]) -> Proposal:
    """Count echoes of this very ballot; those of any other are ignored."""
    if ballot != proposal.ballot:
        return proposal
    return replace(proposal, echoes=proposal.echoes | RankSet.of(ranks))


def refuse(proposal: Proposal, *, ballot: int, rank: int) -> Proposal:
    """One refusal is enough to need a higher ballot."""
    if ballot != proposal.ballot or proposal.refused_by is not None:
        return proposal
    return replace(proposal, refused_by=rank)


def agreed(proposal: Proposal, *, world_size: int) -> bool:
    """True when every rank has echoed and none refused."""
    return proposal.refused_by is None and len(proposal.echoes) == world_size

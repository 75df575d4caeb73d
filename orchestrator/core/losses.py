"""What ranks find about the training loss that their script tells: an event, and nothing else. Pure; see `core.states`.

Not the loss of nodes. Each rank judges its own values (`health.loss`). Where gradients are summed over all ranks, one
bad step troubles all of them at once, so it is said once: when the first rank tells it, once more if a spike becomes
what is no number, and when the last rank is well.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.messages import LossReported
from orchestrator.core.ranks import NOBODY
from orchestrator.core.states import Job, LossTrouble
from orchestrator.core.turn import Turn

LOSS_TROUBLE = "loss trouble"
LOSS_WELL = "loss well"


def begin(turn: Turn) -> None:
    """Another gang: it trains from a checkpoint, and its ranks remember nothing."""
    turn.set(loss_trouble=None)


def on_reported(turn: Turn, event: LossReported) -> None:
    """A rank's trouble has begun, has become worse, or is over."""
    if not turn.is_present(event.generation):
        return
    if event.problem is None:
        _is_well(turn, event)
    else:
        _is_troubled(turn, event, event.problem)


def _is_troubled(turn: Turn, event: LossReported, problem: str) -> None:
    known = turn.job.loss_trouble
    ranks = (NOBODY if known is None else known.ranks).plus(event.rank)
    if known is not None and (isinstance(known.value, str) or not isinstance(event.value, str)):
        turn.set(loss_trouble=replace(known, ranks=ranks))
        return
    words = f"rank {event.rank}: {problem}; {_remedy(turn.job, event.good_step)}"
    trouble = LossTrouble(
        rank=event.rank, step=event.step, value=event.value, usual=event.usual, words=words, ranks=ranks
    )
    turn.set(loss_trouble=trouble)
    turn.note(
        LOSS_TROUBLE,
        words,
        node=event.node,
        rank=event.rank,
        step=event.step,
        facts=turn.facts(value=event.value, usual=event.usual, good_step=event.good_step),
    )


def _remedy(job: Job, good_step: int | None) -> str:
    """What a person can do; of the checkpoints the core knows the newest one alone."""
    newest = job.newest_committed
    if newest is None:
        return "nothing is committed yet that it could go back to"
    if good_step is not None and newest.step <= good_step:
        return f"to go back: orchestrator rollback {job.spec.name} --to {newest.step}"
    return (
        f"to go back: orchestrator rollback {job.spec.name} --to STEP, to an earlier checkpoint than that of step "
        f"{newest.step} (orchestrator checkpoints list STORE --job {job.spec.name})"
    )


def _is_well(turn: Turn, event: LossReported) -> None:
    known = turn.job.loss_trouble
    if known is None or event.rank not in known.ranks:
        return
    ranks = known.ranks.minus(event.rank)
    if ranks:
        turn.set(loss_trouble=replace(known, ranks=ranks))
        return
    turn.set(loss_trouble=None)
    now = "" if event.usual is None else f", and {event.usual:.4g} is usual"
    before = "" if known.usual is None else f"; {known.usual:.4g} was before"
    turn.note(
        LOSS_WELL,
        f"rank {event.rank}: the loss is {_short(event.value)} at step {event.step}{now}{before}",
        node=event.node,
        rank=event.rank,
        step=event.step,
        facts=turn.facts(value=event.value, usual=event.usual),
    )


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"

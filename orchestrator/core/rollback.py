"""A person wants to go on from an older checkpoint: the generation ends unsaved, the next one's claim says so. Pure.

While a gang trains, one of its nodes looks first whether there is such a checkpoint: a wrong number costs nothing. The
claim bounds for ever every generation that there was when it was asked for, uploads that end late included.
See `core.states`.
"""

from __future__ import annotations

from orchestrator.core import breaking
from orchestrator.core.finishing import NOT_ROLLED_BACK
from orchestrator.core.messages import CheckRollback, GenerationOpened, GenerationRefused, Requested, RollbackChecked
from orchestrator.core.states import Job, RollbackCheck, Trigger
from orchestrator.core.turn import Turn

CHECKED_WITHIN_SECONDS = 60.0
"""Without an answer by then the job goes back unchecked: who opens the next generation looks as well."""
SWEPT_WITHIN_SECONDS = 60.0
"""A sweep that has not ended by then is not waited for any longer."""


def ask(turn: Turn, event: Requested) -> None:
    """A request that comes while another one is looked into takes its place."""
    assert event.step is not None
    turn.set(rollback_refusal=None)
    node = next((name for name in turn.gang_nodes() if name not in turn.job.going), None)
    if turn.job.ending is not None or turn.job.phase not in breaking.ACTIVE or node is None:
        _go_back(turn, event.step, event.by)
        return
    turn.set(rollback_check=RollbackCheck(step=event.step, by=event.by, node=node, since_seconds=turn.now))
    turn.do(CheckRollback(node=node, step=event.step))


def on_checked(turn: Turn, event: RollbackChecked) -> None:
    """The job goes back if there is such a checkpoint; else it trains on, and a note says why."""
    check = turn.job.rollback_check
    if check is None or (check.node, check.step) != (event.node, event.step):
        return
    turn.set(rollback_check=None)
    if event.problem is None:
        _go_back(turn, check.step, check.by)
    else:
        _refuse(turn, f"{event.problem}; the job trains on", event.node)


def limit_checking(turn: Turn) -> None:
    """A node that is lost, or does not answer, holds nothing up: the job goes back unchecked."""
    job, check = turn.job, turn.job.rollback_check
    if check is None or (check.node in job.nodes and turn.now - check.since_seconds <= CHECKED_WITHIN_SECONDS):
        return
    turn.set(rollback_check=None)
    _go_back(turn, check.step, check.by)


def _go_back(turn: Turn, step: int, by: str) -> None:
    """Nothing is saved: what has been trained since then is not wanted."""
    job = turn.job
    if job.ending is not None:
        _refuse(turn, f"the job is ending: {job.ending.reason}; ask again once it has ended")
        return
    avoid = tuple(checkpoint for checkpoint in job.avoid if checkpoint.step != step)
    turn.set(rollback_to=step, avoid=avoid, attempts=(), barren=0, retry_at_seconds=turn.now)
    breaking.break_gang(turn, f"rolled back to step {step} by {by}")
    turn.set(trouble=job.trouble)  # a save that was given up for this has not failed


def has_to_wait(turn: Turn) -> bool:
    """Whether a sweep may still delete the very checkpoint that is gone back to, which only the claim would keep."""
    job = turn.job
    is_swept = job.sweeper in job.nodes and turn.now - job.swept_at_seconds < SWEPT_WITHIN_SECONDS
    return job.rollback_to is not None and is_swept


def is_answered(job: Job, event: GenerationOpened) -> bool:
    """Whether a generation was claimed with the step that is wanted now, if one is."""
    return job.rollback_to in (None, event.rollback_to)


def on_opened(turn: Turn, event: GenerationOpened) -> None:
    """The claim is on the store, and bounds what came before, whether its generation is used or not."""
    if turn.job.rollback_to is None or not is_answered(turn.job, event):
        return
    base = f"checkpoint {event.base}" if event.base else "a fresh start"
    turn.note(
        "rolled back",
        f"to step {turn.job.rollback_to}: {base}; nothing of earlier generations counts beyond that step",
        generation=event.generation,
        step=turn.job.rollback_to,
    )
    turn.set(rollback_to=None)


def on_refused(turn: Turn, event: GenerationRefused) -> None:
    """The checkpoint has gone since the person looked: the job goes on from its newest one, or is rolled back further.

    Who has asked again in the meantime has asked for another step.
    """
    if turn.job.rollback_to == event.rollback_to:
        turn.set(rollback_to=None)
        then = "the job goes on from its newest checkpoint"
    else:
        then = f"step {turn.job.rollback_to} was asked for meanwhile"
    _refuse(turn, f"{event.reason}; {then}", event.node)
    turn.go(Trigger.OPEN_FAILED)


def _refuse(turn: Turn, reason: str, node: str | None = None) -> None:
    turn.note(NOT_ROLLED_BACK, reason, node=node)
    turn.set(rollback_refusal=reason)

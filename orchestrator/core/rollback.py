"""A person wants to go on from an older checkpoint: the generation ends at once, the next one's claim says so. Pure.

The claim bounds every earlier generation for ever, uploads that end late included. See `core.states`.
"""

from __future__ import annotations

from orchestrator.core import breaking
from orchestrator.core.messages import GenerationOpened, GenerationRefused, Requested
from orchestrator.core.states import Trigger
from orchestrator.core.turn import Turn

NOT_ROLLED_BACK = "not rolled back"


def ask(turn: Turn, event: Requested) -> None:
    """Nothing is saved: what has been trained since then is not wanted."""
    job = turn.job
    assert event.step is not None
    if job.ending is not None:
        turn.note(NOT_ROLLED_BACK, f"the job is ending: {job.ending.reason}; ask again once it has ended")
        return
    avoid = tuple(checkpoint for checkpoint in job.avoid if checkpoint.step != event.step)
    turn.set(rollback_to=event.step, avoid=avoid, attempts=(), barren=0, retry_at_seconds=turn.now)
    breaking.break_gang(turn, f"rolled back to step {event.step} by {event.by}")


def on_opened(turn: Turn, event: GenerationOpened) -> bool:
    """Whether the generation is what was asked for; one that was asked for before the rollback is not."""
    if turn.job.rollback_to != event.rollback_to:
        return turn.job.rollback_to is None
    if event.rollback_to is not None:
        turn.set(rollback_to=None)
        base = f"checkpoint {event.base}" if event.base else "a fresh start"
        turn.note(
            "rolled back",
            f"to step {event.rollback_to}: {base}; nothing of earlier generations counts beyond that step",
            generation=event.generation,
            step=event.rollback_to,
        )
    return True


def on_refused(turn: Turn, event: GenerationRefused) -> None:
    """The checkpoint has gone since the person looked: the job goes on from its newest one."""
    turn.set(rollback_to=None)
    turn.note(NOT_ROLLED_BACK, f"{event.reason}; the job goes on from its newest checkpoint", node=event.node)
    turn.go(Trigger.OPEN_FAILED)

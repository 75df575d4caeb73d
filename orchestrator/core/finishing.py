"""How a job ends: its end record, and the last word to the supervisor. Pure; see `core.states`."""

from __future__ import annotations

from orchestrator.core import sweeping
from orchestrator.core.messages import EndRecorded, Finish, Outcome, RecordEnd, ReleaseNode, Superseded
from orchestrator.core.states import Job, Phase, Trigger
from orchestrator.core.turn import Turn
from orchestrator.errors import ExitCode

NOT_ROLLED_BACK = "not rolled back"


def conclude(turn: Turn) -> None:
    """End from GATHERING: with an end record if a generation of ours may exist and somebody can write it."""
    if (turn.job.opener is not None or turn.job.own is not None) and turn.job.nodes:
        turn.go(Trigger.CONCLUDED)
        record(turn)
        return
    assert turn.job.ending is not None
    turn.go(Trigger.RECORDED)
    finish(turn, turn.job.ending.exit_code, reason_of(turn.job))


def reason_of(job: Job) -> str:
    """Why the job ends; and what is lost, if it was to leave with a save that failed."""
    assert job.ending is not None
    if job.trouble is None or job.ending.outcome is not Outcome.DRAINED:
        return job.ending.reason
    newest = f"the newest checkpoint is {job.newest_committed}" if job.newest_committed else "there is no checkpoint"
    return f"{job.ending.reason}; its last save failed ({job.trouble}): {newest}"


def record(turn: Turn) -> None:
    """Ask an agent for the end record; without any agent the job ends without one."""
    job = turn.job
    assert job.ending is not None
    node = next((name for name, state in job.nodes.items() if not state.going), next(iter(job.nodes), None))
    if node is None:
        turn.go(Trigger.RECORDED)
        finish(turn, job.ending.exit_code, reason_of(job))
        return
    turn.set(opener=node)
    if job.ending.outcome is Outcome.DONE:
        sweeping.sweep_last(turn, node)
    turn.do(RecordEnd(node=node, outcome=job.ending.outcome, reason=reason_of(job)))


def limit_recording(turn: Turn) -> None:
    """Nobody confirms the end record: end without it, with the same status."""
    job = turn.job
    assert job.ending is not None
    if turn.now - job.since_seconds > job.spec.open_seconds:
        turn.note("store failed", f"the end record was not confirmed within {job.spec.open_seconds:.0f} s")
        turn.go(Trigger.RECORDED)
        finish(turn, job.ending.exit_code, reason_of(job))


def on_end_recorded(turn: Turn, event: EndRecorded) -> None:
    """The end record is written; the job is over."""
    job = turn.job
    if job.phase is not Phase.ENDING or event.node != job.opener:
        return
    assert job.ending is not None
    if event.reason is not None:
        turn.note("store failed", f"the end record could not be written: {event.reason}", node=event.node)
    turn.go(Trigger.RECORDED)
    finish(turn, job.ending.exit_code, reason_of(job))


def on_superseded(turn: Turn, event: Superseded) -> None:
    """The job is another run's: stop at once, whatever the phase. What is staged or decided here is not missed."""
    turn.go(Trigger.SUPERSEDED)
    finish(turn, int(ExitCode.FENCED), event.reason)


def finish(turn: Turn, exit_code: int, reason: str) -> None:
    """Give every node back and tell the supervisor to end."""
    for name in list(turn.job.nodes):
        turn.do(ReleaseNode(node=name, reason="the job is over"))
    turn.set(nodes={})
    step = turn.job.rollback_pending
    if step is not None:
        turn.note(NOT_ROLLED_BACK, f"the job ends before it has gone back to step {step}; ask again")
    turn.note("ended", reason, facts=turn.facts(exit_code=exit_code))
    turn.do(Finish(exit_code=exit_code, reason=reason))

"""The age of the newest commit as an alarm: training goes on, but a person should know. Pure; see `core.states`.

Time counts while the gang trains only, from one generation to the next.
"""

from __future__ import annotations

from orchestrator.core.turn import Turn

SAVES_OVERDUE = 3  # periodic saves' time without a commit


def watch(turn: Turn) -> None:
    """In RUNNING: give the alarm, once until the next commit."""
    job = turn.job
    if job.overdue or job.spec.save_every_steps == 0:
        return
    since = max(job.since_seconds, job.committed_at_seconds or 0.0)
    age_seconds = job.uncommitted_seconds + turn.now - since
    limit_seconds = max(SAVES_OVERDUE * job.spec.save_every_steps * job.step_seconds, job.spec.overdue_seconds)
    if age_seconds <= limit_seconds:
        return
    turn.set(overdue=True)
    why = f": {job.trouble}" if job.trouble else ""
    turn.note(
        "commit overdue",
        f"nothing was committed in {age_seconds:.0f} s of training{why}",
        step=job.highest_step,
        facts=turn.facts(
            age_seconds=age_seconds,
            limit_seconds=limit_seconds,
            newest_step=job.newest_committed.step if job.newest_committed else None,
            failed_saves=job.failed_saves,
        ),
    )

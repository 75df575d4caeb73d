"""When the store is swept, and by whom: one node at a time, while the gang trains. Pure; see `core.states`.

After each commit where not all checkpoints are kept, and now and then for what was left undecided. What a sweep may
delete is decided on the store (`checkpoint.sweeping`). One that fails costs nothing: the next one goes on with it.
While something is wrong with the loss all checkpoints are kept: a person may want to go back to an older one.
"""

from __future__ import annotations

from orchestrator.core.messages import Sweep, Swept
from orchestrator.core.states import Phase
from orchestrator.core.turn import Turn

STORE_SWEPT = "store swept"
SWEEP_FAILED = "sweep failed"


def consider(turn: Turn) -> None:
    """In RUNNING: ask for a sweep if one is due. The same node again, if it can: it knows how old things are."""
    job = turn.job
    if job.sweeper is not None and job.sweeper not in job.nodes:
        turn.set(sweeper=None)
        job = turn.job
    due = job.sweep_wanted or turn.now - job.swept_at_seconds >= job.spec.sweep_seconds
    if job.phase is not Phase.RUNNING or job.gang is None or job.sweeper is not None or not due:
        return
    node = next((name for name in turn.gang_nodes() if name not in job.going), None)
    if node is None:
        return
    _ask(turn, node)


def sweep_last(turn: Turn, node: str) -> None:
    """The job is done: what its last checkpoint made superfluous. The node writes the end record after that."""
    if turn.job.sweep_wanted and turn.job.gang is not None:
        _ask(turn, node)


def _ask(turn: Turn, node: str) -> None:
    job = turn.job
    assert job.gang is not None
    turn.set(sweeper=node, swept_at_seconds=turn.now, sweep_wanted=False)
    turn.do(
        Sweep(
            node=node,
            generation=job.gang.generation,
            keep_last=0 if job.loss_trouble is not None else job.spec.keep_last,
            keep_every_steps=job.spec.keep_every_steps,
            in_flight=tuple(sorted(job.saves)),
            grace_seconds=job.spec.sweep_grace_seconds,
            claimed_through=job.own if job.own is not None and job.own > job.gang.generation else 0,
        )
    )


def want(turn: Turn) -> None:
    """A checkpoint was committed: another one may be too old now."""
    if turn.job.spec.keep_last:
        turn.set(sweep_wanted=True)


def on_swept(turn: Turn, event: Swept) -> None:
    """It has ended. The same problem is told once."""
    if event.node == turn.job.sweeper:
        turn.set(sweeper=None)
    if not turn.is_present(event.generation):
        return
    told = turn.job.sweep_problem
    turn.set(sweep_problem=event.problem)
    if event.problem is not None:
        if event.problem != told:
            turn.note(SWEEP_FAILED, event.problem, node=event.node)
        return
    done = [
        f"{len(found)} {what}"
        for what, found in (("retired", event.retired), ("abandoned", event.abandoned), ("committed", event.committed))
        if found
    ]
    if event.unfinished:
        done.append(f"{event.unfinished} unfinished writes removed")
    if done or event.freed_bytes:
        names = ", ".join(str(one) for one in (*event.retired, *event.abandoned, *event.committed))
        reason = "; ".join(done) or "what was left of checkpoints deleted earlier"
        turn.note(
            STORE_SWEPT,
            reason + (f": {names}" if names else ""),
            node=event.node,
            facts=turn.facts(freed_bytes=event.freed_bytes, unfinished=event.unfinished),
        )

"""What ends a gang: it breaks, or it leaves once the agreed step is staged. Pure; see `core.states`.

Where the job goes on from there is `clearing`'s affair.
"""

from __future__ import annotations

from orchestrator.core import settling
from orchestrator.core.commit import SaveState, staging_over
from orchestrator.core.messages import EndWorkers
from orchestrator.core.states import Phase, Trigger
from orchestrator.core.turn import Turn

STEPS_TO_REACH_MAX = 10  # steps' time that a rank may take to the agreed step, beside the fixed limit
MISSING_TOLD_MAX = 16  # ranks that are named in an event
ACTIVE = (Phase.STARTING, Phase.RUNNING, Phase.LEAVING)


def break_gang(turn: Turn, reason: str) -> None:
    """The generation cannot go on: end all of its workers at once."""
    if turn.job.phase not in ACTIVE:
        return
    if turn.job.broken_at_seconds is None:
        turn.set(broken_at_seconds=turn.now)
    turn.note("gang broken", reason, step=turn.job.highest_step)
    _end_workers(turn, reason, Trigger.BROKEN)


def fail_gang(turn: Turn, reason: str) -> None:
    """The generation is ended for something that counts as a failure of it."""
    turn.set(fault=reason)
    break_gang(turn, reason)


def do_without(turn: Turn, node: str, why: str) -> None:
    """Something speaks against a node: it is given back before the next gang is formed, if that leaves enough nodes."""
    job = turn.job
    rest = sum(name != node and name not in job.unwanted for name in job.available)
    if rest >= min(job.spec.nodes_min, job.wanted_nodes):
        turn.set(unwanted={**job.unwanted, node: why})


def limit_starting(turn: Turn) -> None:
    """Not all ranks attach: some hang while they start, or wait for ever for one that is not there any more."""
    job = turn.job
    if job.spec.attached or turn.now - job.since_seconds <= job.spec.start_seconds:
        return
    missing = list(job.ranks.everyone - job.ranks.attached)
    more = f" and {len(missing) - MISSING_TOLD_MAX} more" if len(missing) > MISSING_TOLD_MAX else ""
    fail_gang(turn, f"ranks {missing[:MISSING_TOLD_MAX]}{more} did not attach within {job.spec.start_seconds:.0f} s")


def leave_gang(turn: Turn, reason: str) -> None:
    """The agreed step is staged: the old processes are not needed any more."""
    turn.note("left", reason, step=turn.job.highest_step)
    _end_workers(turn, reason, Trigger.LEFT)


def _end_workers(turn: Turn, reason: str, trigger: Trigger) -> None:
    turn.set(proposal=None, ended_at_seconds=turn.now)
    turn.go(trigger)
    assert turn.job.gang is not None
    if not turn.job.spec.attached:
        for node in turn.gang_nodes():
            turn.do(EndWorkers(node=node, generation=turn.job.gang.generation, reason=reason))
    settling.abandon_unstaged(turn, reason)


def limit_leaving(turn: Turn) -> None:
    """Not all ranks get to the agreed step: a part of the gang is gone and the others hang, or one hangs by itself."""
    job, save = turn.job, turn.leaving_save()
    if save is None or save.complete:
        return
    if job.lost_at_seconds is not None and turn.now - job.lost_at_seconds > job.spec.leave_seconds:
        break_gang(turn, f"step {save.id.step} was not staged within {job.spec.leave_seconds:.0f} s of a loss")
        return
    limit_seconds = job.spec.reach_seconds + STEPS_TO_REACH_MAX * job.step_seconds
    if turn.now - job.since_seconds > limit_seconds:
        late = sorted(save.required - save.staged)
        break_gang(turn, f"ranks {late} did not stage step {save.id.step} within {limit_seconds:.0f} s")


def leave_if_over(turn: Turn) -> None:
    """In LEAVING: go when all that can still be staged is staged, or when the step is given up."""
    job = turn.job
    if job.phase is not Phase.LEAVING:
        return
    save = turn.leaving_save()
    why = job.leave.reason if job.leave else ""
    if save is None or save.state is SaveState.ABANDONING:
        leave_gang(turn, f"the agreed step is given up, {why}")
    elif staging_over(save, gone=job.gone_ranks, now_seconds=turn.now):
        leave_gang(turn, f"step {save.id.step} is staged, {why}")

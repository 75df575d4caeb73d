"""Between two generations: exits are confirmed, decided steps settled, and the end of the gang is judged. Pure.

`core.job` calls `clear` at the end of every turn, so that nothing else has to know when a gang is cleared.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import breaking, finishing, ladder, settling, shards, suspects
from orchestrator.core.causes import Cause, cause_of
from orchestrator.core.ladder import Attempt, Rung
from orchestrator.core.messages import Outcome, ReleaseNode, Verdict
from orchestrator.core.policy import AfterExit, after_exits
from orchestrator.core.states import Ending, Phase, Trigger
from orchestrator.core.turn import Turn
from orchestrator.core.wording import counted
from orchestrator.errors import ExitCode


def clear(turn: Turn) -> None:
    """In CLEARING: once every exit is confirmed and every decided step is settled, form again or end."""
    job = turn.job
    if job.phase is not Phase.CLEARING or job.gang is None:
        return
    waited = turn.now - job.since_seconds
    if not job.spec.attached and waited > job.spec.exit_seconds:
        _exclude_silent(turn)
    if waited > job.spec.upload_seconds:
        for save in list(turn.job.saves.values()):
            settling.end_waiting(turn, save, f"not durable within {job.spec.upload_seconds:.0f} s")
    if waited > job.spec.upload_seconds + job.spec.exit_seconds:
        for save in list(turn.job.saves.values()):
            settling.give_up(turn, save, "nobody answers; its folder stays undecided")
    job = turn.job
    running = job.ranks.everyone - job.ranks.exited - job.gone_ranks
    if running and not job.spec.attached:
        return
    settling.abandon_unstaged(turn, "its workers are gone")
    if turn.job.saves:
        return
    _judge(turn)
    _pace(turn)
    trigger = Trigger.CONCLUDED if turn.job.ending is not None else Trigger.CLEARED
    turn.go(trigger)
    if trigger is Trigger.CONCLUDED:
        finishing.record(turn)


def _pace(turn: Turn) -> None:
    """Generation after generation without a commit: each waits longer, so that there are never thousands of them."""
    job = turn.job
    pause_seconds = ladder.pause_seconds(job.barren)
    if pause_seconds and job.ending is None:
        reason = f"{counted(job.barren, 'generation')} without a new checkpoint: {pause_seconds:.0f} s of pause"
        turn.note("restart delayed", reason)
        turn.set(retry_at_seconds=turn.now + pause_seconds)


def _exclude_silent(turn: Turn) -> None:
    """A node whose workers' exits are not confirmed in time may still be writing: it is not used again."""
    job = turn.job
    assert job.gang is not None
    if job.ranks.everyone - job.gone_ranks <= job.ranks.exited:
        return
    for place in job.gang.places:
        silent = [rank for rank in place.ranks if rank not in job.ranks.exited]
        if silent and place.node in turn.job.nodes:
            reason = f"ranks {silent} were not confirmed dead within {job.spec.exit_seconds:.0f} s"
            turn.remove_node(place.node)
            turn.lose_member(place.node)
            turn.do(ReleaseNode(node=place.node, reason=reason))
            turn.note("node excluded", reason, node=place.node)
    shards.move_saves(turn)


def _judge(turn: Turn) -> None:
    """Decide between restarting and stopping, from the exits that were not our doing."""
    if _last_step_is_lost(turn):
        _run_last_steps_again(turn)
        return
    job = turn.job
    exits = job.ranks.known_exits()
    own_exits = [event for event in exits if not event.ended_by_us]
    if job.ending is not None and job.ending.outcome is not Outcome.DRAINED:
        return
    if job.rollback_to is not None:  # what becomes of a course that is left says nothing of the one that is taken
        return
    refused = any(cause_of(event).cause is Cause.REFUSED for event in own_exits)
    suspects.remember(turn)
    if job.lost_in_gang and not refused:
        _judge_loss(turn)
        return
    after = after_exits(
        exits,
        ever_attached=job.ever_attached or job.base is not None or any(event.attached for event in exits),
        fault=job.fault,
        going=job.going,
    )
    if after.avoid_node is not None:
        breaking.do_without(turn, after.avoid_node, after.reason)
    if after.counts_as_failure:
        after = _climb(turn, after)
    job = turn.job
    if job.spec.attached and job.ending is None:
        reason = f"attached workers are gone: {after.reason}"
        turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.FAILED), reason=reason))
    elif not after.restart and job.ending is None:
        turn.set(ending=Ending(outcome=Outcome.FAILED, exit_code=after.exit_code, reason=after.reason))


def _climb(turn: Turn, after: AfterExit) -> AfterExit:
    """Count a failure; where the same base has been tried often enough, take the next rung of the ladder."""
    job = turn.job
    assert job.gang is not None
    base = job.newest_committed
    attempt = Attempt(generation=job.gang.generation, base=base, how=after.reason)
    turn.set(failures=job.failures + 1, attempts=(*job.attempts, attempt))
    cause = str(after.cause)
    if not after.restart:
        turn.note("failure judged", after.reason, facts=turn.facts(restart=False, cause=cause))
        return after
    choice = ladder.climb(turn.job.attempts, failures_max=job.spec.failures_max)
    if choice.rung is Rung.AGAIN and base in job.avoid:
        choice = replace(choice, rung=Rung.OLDER)  # it could not be read: no use in trying that again
    reason = f"{after.reason}: {choice.reason}"
    restart = choice.rung is not Rung.STOP
    turn.note("failure judged", reason, facts=turn.facts(restart=restart, next=str(choice.rung), cause=cause))
    if not restart:
        return replace(after, restart=False, exit_code=int(ExitCode.NEVER_RESTART), reason=reason)
    if choice.rung is Rung.OLDER and base is not None and base not in job.avoid:
        turn.set(avoid=(*job.avoid, base))
    return after


def _judge_loss(turn: Turn) -> None:
    """Nodes went without a word. That is no failure of the job, but it may not go on for ever without any progress."""
    job = turn.job
    if job.ending is not None:
        return
    lost = ", ".join(job.lost_in_gang)
    if job.spec.attached:
        reason = f"the agent of the attached script has ended ({lost})"
        turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.FAILED), reason=reason))
        return
    fruitless = job.fruitless + 1
    turn.set(fruitless=fruitless)
    if fruitless > job.spec.fruitless_max:
        reason = (
            f"{counted(fruitless, 'generation')} in a row lost nodes before they committed anything, at last {lost}"
        )
        turn.set(ending=Ending(outcome=Outcome.FAILED, exit_code=int(ExitCode.NEVER_RESTART), reason=reason))


def _last_step_is_lost(turn: Turn) -> bool:
    """All ranks are done, but the state after the job's last step did not get to the store."""
    job = turn.job
    if job.ending is None or job.ending.outcome is not Outcome.DONE or job.until is None:
        return False
    finished = any(event.verdict is Verdict.FINISHED for event in job.ranks.known_exits())
    if not finished:  # the script never attached, or left its loop early: that is its own affair
        return False
    if job.until <= (job.base.step if job.base else 0):  # there was nothing to do
        return False
    return job.newest_committed is None or job.newest_committed.step < job.until


def _run_last_steps_again(turn: Turn) -> None:
    """The job is not done before its last step is safe: start from the newest checkpoint again.

    Limited like other failures, but a loss of nodes does not count. Attached workers cannot be started again: their job
    ends resumable in the store.
    """
    job = turn.job
    what = f"all ranks are done, but step {job.until} is not on the store"
    failures = job.failures if job.lost_in_gang else job.failures + 1
    turn.note("save failed", f"{what}; the newest checkpoint is {job.newest_committed}", step=job.until)
    turn.set(failures=failures, ending=None)
    if job.spec.attached:
        turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.FAILED), reason=what))
    elif failures > job.spec.failures_max:
        reason = f"{what}, failure {failures} without a new checkpoint in between"
        turn.set(ending=Ending(outcome=Outcome.FAILED, exit_code=int(ExitCode.NEVER_RESTART), reason=reason))

"""How a generation and a job end: exits, lost nodes, clearing, the end record. Pure; see `core.states`."""

from __future__ import annotations

from orchestrator.core import saving
from orchestrator.core.messages import (
    EndRecorded,
    EndWorkers,
    Finish,
    NodeLost,
    Outcome,
    RankExited,
    RecordEnd,
    ReleaseNode,
    Request,
    Requested,
    Verdict,
)
from orchestrator.core.policy import after_exits, describe_exit
from orchestrator.core.states import Ending, Leave, Phase, Trigger, Turn
from orchestrator.errors import ExitCode

STEPS_TO_REACH_MAX = 10  # steps' time that a rank may take to the agreed step, beside the fixed limit
ACTIVE = (Phase.STARTING, Phase.RUNNING, Phase.LEAVING)


def on_rank_exited(turn: Turn, event: RankExited) -> None:
    """A worker is gone: finished, failed, or ended by us."""
    job = turn.job
    if job.gang is None or job.gang.generation != event.generation or event.rank not in job.ranks:
        return
    if job.ranks[event.rank].exited is not None:
        return
    turn.set_rank(event.rank, exited=event)
    if job.phase in ACTIVE and not event.ended_by_us:
        how = describe_exit(event.exit_code)
        turn.note("worker exited", f"rank {event.rank} {how}", node=event.node, rank=event.rank, step=job.highest_step)
        if event.exit_code == 0:
            _finished(turn)
        elif _may_go(turn, event.rank):
            turn.set(lost_at_seconds=turn.now)
        else:
            break_gang(turn, f"rank {event.rank} {how}")
    clear(turn)


def _may_go(turn: Turn, rank: int) -> bool:
    """Whether a rank has done its part before the others: it has staged the step at which all leave."""
    if turn.job.phase is not Phase.LEAVING:
        return False
    save = turn.leaving_save()
    return turn.job.spec.attached or save is None or rank in save.staged


def _finished(turn: Turn) -> None:
    job = turn.job
    exits = [rank.exited for rank in job.ranks.values()]
    if not all(event is not None and event.exit_code == 0 for event in exits):
        return
    if any(event is not None and event.attached for event in exits):
        reason = f"all {len(exits)} ranks are done at step {job.highest_step}"
        if job.until is not None and job.highest_step < job.until:
            saved = job.newest_committed.step if job.newest_committed else "none"
            reason += (
                f", before the last step {job.until}: they left the loop; the newest checkpoint is of step {saved}"
            )
    else:
        reason = "the command ended without ever calling orchestrator.attach(): nothing was saved"
    turn.set(ending=Ending(outcome=Outcome.DONE, exit_code=int(ExitCode.DONE), reason=reason))
    turn.go(Trigger.ALL_DONE if job.phase is not Phase.LEAVING else Trigger.LEFT)


def on_node_lost(turn: Turn, event: NodeLost) -> None:
    """The scheduler is certain that a node is gone, with its workers and its memory."""
    job = turn.job
    if event.node not in job.nodes:
        in_gang = job.gang is not None and event.node in job.gang.nodes
        if not in_gang:
            turn.set(nodes_requested=max(0, job.nodes_requested - 1))
            turn.note("node lost", f"{event.reason}, before it joined", node=event.node)
            return
    member = job.gang is not None and event.node in job.gang.nodes and event.node not in job.lost_in_gang
    announced = event.node in job.nodes and job.nodes[event.node].going
    turn.set(nodes={key: value for key, value in job.nodes.items() if key != event.node})
    turn.note("node lost", event.reason + (" (announced)" if announced else ""), node=event.node, step=job.highest_step)
    if member:
        turn.set(lost_in_gang=(*job.lost_in_gang, event.node), lost_at_seconds=turn.now)
        assert job.gang is not None
        if job.phase in (Phase.STARTING, Phase.RUNNING):
            break_gang(turn, f"{event.node} is lost: {event.reason}")
        elif job.phase is Phase.LEAVING and not _left_without(turn, event.node):
            break_gang(turn, f"{event.node} is lost before the agreed step was staged")
    if job.phase is Phase.OPENING and event.node == job.opener:
        turn.go(Trigger.OPEN_FAILED)
    if job.phase is Phase.ENDING and event.node == job.opener:
        record(turn)
    saving.move_saves(turn)
    clear(turn)


def _left_without(turn: Turn, node: str) -> bool:
    """Whether the agreed step can do without this node's workers: it is staged, or they are absent from it."""
    save = turn.leaving_save()
    assert turn.job.gang is not None
    return save is None or save.complete or set(turn.job.gang.ranks_of(node)) <= save.absent


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


def on_requested(turn: Turn, event: Requested) -> None:
    """A person asked to drain, resize or cancel."""
    job = turn.job
    if job.phase in (Phase.ENDING, Phase.ENDED):
        return
    turn.note("requested", f"{event.request} by {event.by}" + (f", {event.nodes} nodes" if event.nodes else ""))
    match event.request:
        case Request.DRAIN:
            reason = f"drained by {event.by}"
            if job.ending is None:
                turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.RESUMABLE), reason=reason))
            _leave(turn, "drain")
        case Request.CANCEL:
            reason = f"cancelled by {event.by}"
            if job.ending is None or job.ending.outcome is not Outcome.DONE:
                turn.set(ending=Ending(outcome=Outcome.CANCELLED, exit_code=int(ExitCode.FAILED), reason=reason))
            if job.phase in ACTIVE:
                break_gang(turn, reason)
        case Request.RESIZE:
            assert event.nodes is not None
            turn.set(wanted_nodes=event.nodes)
            if job.gang is not None and (len(job.gang.nodes) > event.nodes or saving.could_join(turn)):
                _leave(turn, f"resize to {event.nodes} nodes")
    saving.drive(turn)


def _leave(turn: Turn, reason: str) -> None:
    if turn.job.phase is Phase.STARTING:
        break_gang(turn, reason)
    elif turn.job.phase is Phase.RUNNING:
        turn.set(leave=Leave(reason=reason, since_seconds=turn.now))


def break_gang(turn: Turn, reason: str) -> None:
    """The generation cannot go on: end all of its workers at once."""
    if turn.job.phase not in ACTIVE:
        return
    if turn.job.broken_at_seconds is None:
        turn.set(broken_at_seconds=turn.now)
    turn.note("gang broken", reason, step=turn.job.highest_step)
    _end_workers(turn, reason, Trigger.BROKEN)


def leave_gang(turn: Turn, reason: str) -> None:
    """The agreed step is staged: the old processes are not needed any more."""
    turn.note("left", reason, step=turn.job.highest_step)
    _end_workers(turn, reason, Trigger.LEFT)


def _end_workers(turn: Turn, reason: str, trigger: Trigger) -> None:
    turn.set(proposal=None)
    turn.go(trigger)
    assert turn.job.gang is not None
    if not turn.job.spec.attached:
        for node in turn.gang_nodes():
            turn.do(EndWorkers(node=node, generation=turn.job.gang.generation, reason=reason))
    saving.abandon_unstaged(turn, reason)
    clear(turn)


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
            saving.abandon(turn, save, f"not durable within {job.spec.upload_seconds:.0f} s")
    if waited > job.spec.upload_seconds + job.spec.exit_seconds:
        for save in list(turn.job.saves.values()):
            saving.give_up(turn, save, "nobody answers; its folder stays undecided")
    job = turn.job
    running = [rank for rank, state in job.ranks.items() if state.exited is None and rank not in job.gone_ranks]
    if running and not job.spec.attached:
        return
    saving.abandon_unstaged(turn, "its workers are gone")
    if turn.job.saves:
        return
    _judge(turn)
    trigger = Trigger.CONCLUDED if turn.job.ending is not None else Trigger.CLEARED
    turn.go(trigger)
    if trigger is Trigger.CONCLUDED:
        record(turn)


def _exclude_silent(turn: Turn) -> None:
    """A node whose workers' exits are not confirmed in time may still be writing: it is not used again."""
    job = turn.job
    assert job.gang is not None
    for place in job.gang.places:
        silent = [rank for rank in place.ranks if job.ranks[rank].exited is None]
        if silent and place.node in turn.job.nodes:
            reason = f"ranks {silent} were not confirmed dead within {job.spec.exit_seconds:.0f} s"
            turn.set(nodes={key: value for key, value in turn.job.nodes.items() if key != place.node})
            turn.set(lost_in_gang=(*turn.job.lost_in_gang, place.node))
            turn.do(ReleaseNode(node=place.node, reason=reason))
            turn.note("node excluded", reason, node=place.node)
    saving.move_saves(turn)


def _judge(turn: Turn) -> None:
    """Decide between restarting and stopping, from the exits that were not our doing."""
    if _last_step_is_lost(turn):
        _run_last_steps_again(turn)
        return
    job = turn.job
    exits = [state.exited for state in job.ranks.values() if state.exited is not None]
    own_exits = [event for event in exits if not event.ended_by_us]
    if job.ending is not None and job.ending.outcome is not Outcome.DRAINED:
        return
    refused = any(event.verdict is Verdict.REFUSED for event in own_exits)
    if job.base is not None and any(event.verdict is Verdict.UNREADABLE for event in own_exits):
        turn.set(avoid=(*job.avoid, job.base))
    if job.lost_in_gang and not refused:
        _judge_loss(turn)
        return
    verdict = after_exits(
        exits,
        ever_attached=job.ever_attached or job.base is not None or any(event.attached for event in exits),
        failures=job.failures,
        failures_max=job.spec.failures_max,
    )
    if verdict.counts_as_failure:
        turn.set(failures=job.failures + 1)
        turn.note("failure judged", verdict.reason, facts=turn.facts(restart=verdict.restart))
    if job.spec.attached and job.ending is None:
        verdict_reason = f"attached workers are gone: {verdict.reason}"
        turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.FAILED), reason=verdict_reason))
    elif not verdict.restart and job.ending is None:
        turn.set(ending=Ending(outcome=Outcome.FAILED, exit_code=verdict.exit_code, reason=verdict.reason))


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
        reason = f"{fruitless} generations in a row lost nodes before they committed anything, at last {lost}"
        turn.set(ending=Ending(outcome=Outcome.FAILED, exit_code=int(ExitCode.NEVER_RESTART), reason=reason))


def _last_step_is_lost(turn: Turn) -> bool:
    """All ranks are done, but the state after the job's last step did not get to the store."""
    job = turn.job
    if job.ending is None or job.ending.outcome is not Outcome.DONE or job.until is None:
        return False
    finished = [state.exited is not None and state.exited.verdict is Verdict.FINISHED for state in job.ranks.values()]
    if not any(finished):  # the script never attached, or left its loop early: that is its own affair
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


def conclude(turn: Turn) -> None:
    """End from GATHERING: with an end record if a generation of ours may exist and somebody can write it."""
    if turn.job.opener is not None and turn.job.nodes:
        turn.go(Trigger.CONCLUDED)
        record(turn)
        return
    assert turn.job.ending is not None
    turn.go(Trigger.RECORDED)
    finish(turn, turn.job.ending.exit_code, turn.job.ending.reason)


def record(turn: Turn) -> None:
    """Ask an agent for the end record; without any agent the job ends without one."""
    job = turn.job
    assert job.ending is not None
    node = next((name for name, state in job.nodes.items() if not state.going), next(iter(job.nodes), None))
    if node is None:
        turn.go(Trigger.RECORDED)
        finish(turn, job.ending.exit_code, job.ending.reason)
        return
    turn.set(opener=node)
    turn.do(RecordEnd(node=node, outcome=job.ending.outcome, reason=job.ending.reason))


def limit_recording(turn: Turn) -> None:
    """Nobody confirms the end record: end without it, with the same status."""
    job = turn.job
    assert job.ending is not None
    if turn.now - job.since_seconds > job.spec.open_seconds:
        turn.note("store failed", f"the end record was not confirmed within {job.spec.open_seconds:.0f} s")
        turn.go(Trigger.RECORDED)
        finish(turn, job.ending.exit_code, job.ending.reason)


def on_end_recorded(turn: Turn, event: EndRecorded) -> None:
    """The end record is written; the job is over."""
    job = turn.job
    if job.phase is not Phase.ENDING or event.node != job.opener:
        return
    assert job.ending is not None
    if event.reason is not None:
        turn.note("store failed", f"the end record could not be written: {event.reason}", node=event.node)
    turn.go(Trigger.RECORDED)
    finish(turn, job.ending.exit_code, job.ending.reason)


def finish(turn: Turn, exit_code: int, reason: str) -> None:
    """Give every node back and tell the supervisor to end."""
    for name in list(turn.job.nodes):
        turn.do(ReleaseNode(node=name, reason="the job is over"))
    turn.set(nodes={})
    turn.note("ended", reason, facts=turn.facts(exit_code=exit_code))
    turn.do(Finish(exit_code=exit_code, reason=reason))

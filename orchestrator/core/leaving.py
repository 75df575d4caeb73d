"""Why everybody shall leave: notices, and what a person asks for. Pure; see `core.states`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import breaking, courses, growing, proposing, rollback
from orchestrator.core.messages import NoticeKind, NoticeReceived, Outcome, Request, Requested, WatcherReported
from orchestrator.core.states import Ending, Leave, Node, Phase, StandingNotice
from orchestrator.core.turn import Turn
from orchestrator.core.wording import counted
from orchestrator.errors import ExitCode


def on_notice(turn: Turn, event: NoticeReceived) -> None:
    """A node will go: earliest deadline wins, the same notice counts once, a cancel undoes only its own."""
    node = turn.job.nodes.get(event.node)
    if node is None:
        return
    if event.kind == NoticeKind.CANCEL:
        _cancel_notice(turn, event, node)
        return
    known = event.notice_id in (notice.notice_id for notice in node.notices)
    if event.kind == NoticeKind.HINT:
        if not known and event.notice_id not in node.hints:
            turn.set_node(event.node, hints=(*node.hints, event.notice_id))
            turn.set(save_asked=True)
            turn.note("notice received", f"{event.source}: a hint, saving soon", node=event.node)
        return
    if known:
        return
    deadline = None if event.remaining_seconds is None else turn.now + max(event.remaining_seconds, 0.0)
    seconds = None if deadline is None else deadline - turn.now
    notice = StandingNotice(notice_id=event.notice_id, deadline_seconds=deadline, notice_seconds=seconds)
    _set_notices(turn, event.node, (*node.notices, notice))
    left = "no deadline" if seconds is None else f"{seconds:.1f} s left"
    turn.note(
        "notice received",
        f"{event.source}: {event.kind}, {left}",
        node=event.node,
        step=turn.job.highest_step,
        facts=turn.facts(remaining_seconds=event.remaining_seconds),
    )
    node_is_going(turn, event.node)


def _set_notices(turn: Turn, name: str, notices: tuple[StandingNotice, ...]) -> None:
    """The earliest deadline wins, the first of those that are as early."""
    known = (notice for notice in notices if notice.deadline_seconds is not None)
    earliest = min(known, key=lambda notice: notice.deadline_seconds or 0.0, default=None)
    turn.set_node(
        name,
        going=bool(notices),
        notices=notices,
        deadline_seconds=None if earliest is None else earliest.deadline_seconds,
        notice_seconds=None if earliest is None else earliest.notice_seconds,
    )


def _cancel_notice(turn: Turn, event: NoticeReceived, node: Node) -> None:
    rest = tuple(notice for notice in node.notices if notice.notice_id != event.notice_id)
    what = "notice"
    if event.notice_id in node.hints:
        what = "hint"
        turn.set_node(event.node, hints=tuple(hint for hint in node.hints if hint != event.notice_id))
    elif len(rest) == len(node.notices):
        return
    _set_notices(turn, event.node, rest)
    then = "a notice stands: the node will go" if rest else "the node stays"
    turn.note("notice withdrawn", f"{event.source} withdrew a {what}; {then}", node=event.node)
    _node_stays(turn)


def on_watcher_reported(turn: Turn, event: WatcherReported) -> None:
    """Whether a node can see a source's notices: an alarm, once, and its end."""
    node = turn.job.nodes.get(event.node)
    if node is None or (event.problem is not None) is (event.source in node.blind):
        return
    if event.problem is None:
        turn.set_node(event.node, blind=tuple(source for source in node.blind if source != event.source))
        turn.note("watcher sees again", f"notices of {event.source} can be read", node=event.node)
        return
    turn.set_node(event.node, blind=(*node.blind, event.source))
    reason = f"notices of {event.source} cannot be read, so one may be missed: {event.problem}"
    turn.note("watcher blind", reason, node=event.node)


def node_is_going(turn: Turn, name: str) -> None:
    """A notice named a node: if it is in the gang, everybody leaves at an agreed step."""
    job = turn.job
    if job.gang is None or name not in job.gang:
        return
    if job.spec.attached and job.ending is None:
        reason = f"a notice reached {name}"
        turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.RESUMABLE), reason=reason))
    if job.phase is Phase.RUNNING:
        _leave_for(turn, name)
    elif job.phase is Phase.STARTING and not job.taken_back and not limit_start_under_notice(turn):
        turn.note("start goes on", f"{name} will go, but there is time to start, to train and to save", node=name)


def _leave_for(turn: Turn, name: str) -> None:
    """Where all may train on for the time being, what there is now is saved at once: a deadline may be wrong."""
    job = turn.job
    before = job.leave
    may_wait = (before is None or before.may_wait) and job.ending is None and not job.spec.attached
    leave = Leave(reason=f"{name} will go", since_seconds=turn.now, may_wait=may_wait)
    if before is not None and before.choice is not None:
        leave = replace(leave, choice=before.choice, deadline_seconds=before.deadline_seconds)
    turn.set(leave=leave)
    if _is_urgent(turn, name, leave) and not courses.follow(turn):
        return
    leave = turn.job.leave or leave
    if not leave.is_due and job.highest_step > job.ranks.base_step:
        turn.set(save_asked=True)
    proposing.drive(turn)


def limit_start_under_notice(turn: Turn) -> bool:
    """In STARTING: end the gang if a member will go too soon for the start to be of use. True: it is ended."""
    going = turn.going_members()
    if not going or turn.job.taken_back or courses.can_finish_start(turn):
        return False
    breaking.break_gang(turn, f"{going[-1]} will go, and nothing is trained yet")
    return True


def _is_urgent(turn: Turn, name: str, leave: Leave) -> bool:
    """Whether this notice may change the course at once; one of many with a later deadline is left to the next tick."""
    deadline_seconds, known = turn.job.nodes[name].deadline_seconds, leave.deadline_seconds
    if leave.choice is None or known is None:
        return True
    return deadline_seconds is not None and deadline_seconds < known


def _node_stays(turn: Turn) -> None:
    """A notice was withdrawn: do not leave for it, unless the decision is made or there is another reason."""
    job = turn.job
    if job.phase is not Phase.RUNNING or job.leave is None or turn.going_ranks() or job.ending is not None:
        return
    assert job.gang is not None
    if len(job.gang.nodes) <= job.wanted_nodes:
        turn.set(leave=None)


def on_requested(turn: Turn, event: Requested) -> None:
    """A person asked to drain, resize, roll back or cancel."""
    job = turn.job
    if job.phase in (Phase.ENDING, Phase.ENDED):
        return
    turn.note(
        "requested",
        f"{event.request} by {event.by}"
        + (f", {counted(event.nodes, 'node')}" if event.nodes else "")
        + (f", to step {event.step}" if event.step is not None else ""),
    )
    match event.request:
        case Request.DRAIN:
            reason = f"drained by {event.by}"
            if job.ending is None:
                turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.RESUMABLE), reason=reason))
            leave(turn, "drain")
        case Request.CANCEL:
            reason = f"cancelled by {event.by}"
            if job.ending is None or job.ending.outcome is not Outcome.DONE:
                turn.set(ending=Ending(outcome=Outcome.CANCELLED, exit_code=int(ExitCode.FAILED), reason=reason))
            if job.phase in breaking.ACTIVE:
                breaking.break_gang(turn, reason)
        case Request.RESIZE:
            assert event.nodes is not None
            turn.set(wanted_nodes=event.nodes)
            if job.gang is not None and (len(job.gang.nodes) > event.nodes or growing.could_grow(turn)):
                leave(turn, f"resize to {counted(event.nodes, 'node')}")
        case Request.ROLLBACK:
            rollback.ask(turn, event)
    proposing.drive(turn)


def leave(turn: Turn, reason: str) -> None:
    """For a reason that can wait for an agreed step. Where nothing is trained yet there is nothing to save."""
    if turn.job.phase is Phase.STARTING and not turn.job.taken_back:
        breaking.break_gang(turn, reason)
    elif turn.job.phase is Phase.RUNNING:
        turn.set(leave=Leave(reason=reason, since_seconds=turn.now))

"""Workers that are gone and nodes that are lost: what that means for the gang. Pure; see `core.states`."""

from __future__ import annotations

from orchestrator.core import breaking, finishing, shards
from orchestrator.core.causes import Cause, cause_of
from orchestrator.core.messages import NodeLost, Outcome, RankExited
from orchestrator.core.ranks import RankSet
from orchestrator.core.states import Ending, Phase, Trigger
from orchestrator.core.turn import Turn
from orchestrator.core.wording import all_of
from orchestrator.errors import ExitCode


def on_rank_exited(turn: Turn, event: RankExited) -> None:
    """A worker is gone: finished, failed, or ended by us."""
    job = turn.job
    if job.gang is None or job.gang.generation != event.generation or event.rank not in job.ranks:
        return
    if event.rank in job.ranks.exited:
        return
    turn.set(ranks=job.ranks.exit(event))
    if event.ended_by_us:
        return
    found = cause_of(event, job.going)
    active = job.phase in breaking.ACTIVE
    if active or found.cause is not Cause.PEERS_LOST:  # what the first loss does to all others need not be told
        turn.note(
            "worker exited",
            f"rank {event.rank} {found.words}",
            node=event.node,
            rank=event.rank,
            step=job.highest_step,
            facts=turn.facts(cause=str(found.cause)),
        )
    if not active:
        return
    if event.exit_code == 0:
        _finished(turn)
    elif _may_go(turn, event.rank):
        turn.set(lost_at_seconds=turn.now)
    else:
        breaking.break_gang(turn, f"rank {event.rank} {found.words}")


def _may_go(turn: Turn, rank: int) -> bool:
    """Whether a rank has done its part before the others: it has staged the step at which all leave."""
    if turn.job.phase is not Phase.LEAVING:
        return False
    save = turn.leaving_save()
    return turn.job.spec.attached or save is None or rank in save.staged


def _finished(turn: Turn) -> None:
    job = turn.job
    if not job.ranks.everyone <= job.ranks.finished:
        return
    exits = job.ranks.known_exits()
    if any(event.attached for event in exits):
        reason = f"{all_of(len(exits), 'rank is', 'ranks are')} done at step {job.highest_step}"
        if job.until is not None and job.highest_step < job.until:
            newest = job.newest_committed
            saved = f"the newest checkpoint is of step {newest.step}" if newest else "there is no checkpoint"
            reason += f", before the last step {job.until}: they left the loop; {saved}"
    else:
        reason = "the command ended without ever calling orchestrator.attach() and run.steps(): nothing was saved"
    turn.set(ending=Ending(outcome=Outcome.DONE, exit_code=int(ExitCode.DONE), reason=reason))
    turn.go(Trigger.ALL_DONE if job.phase is not Phase.LEAVING else Trigger.LEFT)


def on_node_lost(turn: Turn, event: NodeLost) -> None:
    """The scheduler is certain that a node is gone, with its workers and its memory."""
    turn.set(places={name: place for name, place in turn.job.places.items() if name != event.node})
    job = turn.job
    if event.node not in job.nodes:
        in_gang = job.gang is not None and event.node in job.gang
        if event.node in job.expected:
            turn.set(expected=job.expected - {event.node})
            turn.note("node lost", f"{event.reason}, before it reported again", node=event.node)
            return
        if not in_gang:
            turn.set(nodes_requested=max(0, job.nodes_requested - 1))
            turn.note("node lost", f"{event.reason}, before it joined", node=event.node)
            return
    member = job.gang is not None and event.node in job.gang and event.node not in job.lost_in_gang
    announced = event.node in job.nodes and job.nodes[event.node].going
    turn.remove_node(event.node)
    if event.node in job.returned:
        turn.set(returned={name: value for name, value in job.returned.items() if name != event.node})
    turn.set(expected=job.expected - {event.node})
    turn.note("node lost", event.reason + (" (announced)" if announced else ""), node=event.node, step=job.highest_step)
    if member:
        turn.lose_member(event.node)
        turn.set(lost_at_seconds=turn.now)
        if job.phase in (Phase.STARTING, Phase.RUNNING):
            breaking.break_gang(turn, f"{event.node} is lost: {event.reason}")
        elif job.phase is Phase.LEAVING and not _left_without(turn, event.node):
            breaking.break_gang(turn, f"{event.node} is lost before the agreed step was staged")
    if job.phase is Phase.OPENING and event.node == job.opener:
        turn.go(Trigger.OPEN_FAILED)
    if job.phase is Phase.ENDING and event.node == job.opener:
        finishing.record(turn)
    shards.move_saves(turn)


def _left_without(turn: Turn, node: str) -> bool:
    """Whether the agreed step can do without this node's workers: it is staged, or they are absent from it."""
    save = turn.leaving_save()
    assert turn.job.gang is not None
    return save is None or save.complete or RankSet.of(turn.job.gang.ranks_of(node)) <= save.absent

"""What becomes of a decided step once its shards are there: committed, abandoned, settled. Pure.

Bookkeeping only: nothing here ends a gang or proposes a step. Called by `breaking`, `shards` and what is above them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from orchestrator.core import sweeping
from orchestrator.core.commit import Save, SaveState, committable, hopeless
from orchestrator.core.ladder import PAUSE_SECONDS_MAX, growing_seconds
from orchestrator.core.messages import Abandon, CheckpointId, Commit, IndexDecided, IndexFailed, Mode, Settled
from orchestrator.core.ranks import RankSet
from orchestrator.core.states import Phase
from orchestrator.core.turn import Turn

COMMIT_ATTEMPTS_MAX = 3
HAND_OVER_ANSWER_SECONDS = 5.0
COMMIT_RETRY_SECONDS = 1.0  # before the second attempt, twice that before the third


def move_save(turn: Turn, save: Save) -> None:
    """Move one decided step on: commit it when the receipts are there, abandon it when one cannot come any more."""
    job = turn.job
    writer_lost = save.committer is not None and save.committer not in job.nodes
    if save.state is SaveState.ABANDONING and writer_lost:
        _write_abandoned(turn, save, f"{save.committer}, which was to write this, is lost")
    if save.state is SaveState.COMMITTING and writer_lost:
        save = save.changed(state=SaveState.UPLOADING)
    if save.mode is Mode.LEAVE and job.phase is Phase.LEAVING:
        return  # absent ranks may still stage: the index waits until all have left
    if save.state is SaveState.UPLOADING:
        gone = _out_of_reach(turn, save)
        lost = hopeless(save, gone=gone)
        if lost:
            abandon(turn, save, f"the shards of ranks {list(lost)} went with their node")
        elif committable(save, gone=gone, exited=job.ranks.exited, now_seconds=turn.now):
            _commit(turn, save)


def _out_of_reach(turn: Turn, save: Save) -> RankSet:
    """Ranks of which nothing can still come: their node is lost or has failed, and no living peer has their shard.

    A peer that was asked may have it while its word is on the way, so for a short time after a loss it counts as well.
    """
    job = turn.job
    if not save.asked:
        return job.gone_ranks | save.failed
    soon = job.lost_at_seconds is not None and turn.now - job.lost_at_seconds <= HAND_OVER_ANSWER_SECONDS
    waiting = RankSet.of(rank for rank, peer in save.asked.items() if peer in job.nodes)
    kept = waiting if soon else (waiting & save.held) | (waiting - job.gone_ranks)
    return (job.gone_ranks | save.failed) - kept


def _commit(turn: Turn, save: Save) -> None:
    committer = _any_node(turn, but=save.committer)
    if committer is None:
        give_up(turn, save, "no node is left to write the index: the next generation rolls it forward")
        return
    turn.set_save(save.changed(state=SaveState.COMMITTING, committer=committer, commit_asked_at_seconds=turn.now))
    turn.note("uploaded", f"{len(save.durable)} of {save.world_size} receipts are on the store", step=save.id.step)
    turn.do(Commit(node=committer, generation=save.id.generation, step=save.id.step))


def on_index_decided(turn: Turn, event: IndexDecided) -> None:
    """The checkpoint is real, or will never be."""
    save = save_of(turn, event.generation, event.step)
    if save is None:
        return
    _settle(turn, save, committed=event.committed)
    if event.committed:
        if save.state is SaveState.COMMITTING:
            took = turn.now - save.commit_asked_at_seconds
            turn.set(measured=replace(turn.job.measured, commit_seconds=took))
        known = turn.job.newest_committed
        newest = save.id if known is None else max(known, save.id)
        turn.commit_is_new()
        sweeping.want(turn)
        turn.set(newest_committed=newest, committed_at_seconds=turn.now)
        seconds = turn.now - save.decided_at_seconds
        facts = turn.facts(seconds_since_agreed=seconds, size_bytes=save.size_bytes, mode=str(save.mode))
        if turn.job.leave is not None and save.mode is Mode.LEAVE:
            facts["seconds_since_reason"] = turn.now - turn.job.leave.since_seconds
        if save.deadline_seconds is not None:
            facts["seconds_before_deadline"] = save.deadline_seconds - turn.now
        turn.note(
            "committed",
            f"{len(save.durable)} of {save.world_size} shards, {seconds:.2f} s after the decision",
            step=event.step,
            facts=facts,
        )
    else:
        turn.note("abandoned", "its index says so", step=event.step)


def on_index_failed(turn: Turn, event: IndexFailed) -> None:
    """The index could not be written: another agent tries; in the end the step stays undecided."""
    save = save_of(turn, event.generation, event.step)
    if save is None or save.state not in (SaveState.COMMITTING, SaveState.ABANDONING):
        return
    if save.state is SaveState.COMMITTING and save.attempts < COMMIT_ATTEMPTS_MAX:
        retry_at = turn.now + COMMIT_RETRY_SECONDS * save.attempts
        turn.set_save(save.changed(state=SaveState.UPLOADING, attempts=save.attempts + 1, retry_at_seconds=retry_at))
        return
    turn.note("save failed", f"the index could not be written: {event.reason}", node=event.node, step=event.step)
    store_failed(turn, event.reason)
    _settle(turn, save, committed=False)


def store_failed(turn: Turn, reason: str) -> None:
    """The store failed a save: training goes on, and the next periodic save comes after a pause that grows."""
    job = turn.job
    failed_saves = job.failed_saves + 1
    pause_seconds = growing_seconds(failed_saves, job.spec.store_retry_seconds, PAUSE_SECONDS_MAX)
    turn.set(failed_saves=failed_saves, save_not_before_seconds=turn.now + pause_seconds, trouble=reason)


def end_waiting(turn: Turn, save: Save, reason: str) -> None:
    """Too long: commit without what is not required, or give the step up."""
    if save.state is SaveState.UPLOADING and save.required <= save.durable and turn.now >= save.retry_at_seconds:
        _commit(turn, save)
    elif save.state is not SaveState.COMMITTING:
        abandon(turn, save, reason)


def abandon(turn: Turn, save: Save, reason: str) -> None:
    """Give a decided step up: its folder gets an abandoned index, its slots become free."""
    if save.state is SaveState.ABANDONING:
        return
    turn.note("abandoned", reason, step=save.id.step)
    turn.set(trouble=reason)
    _write_abandoned(turn, save, reason)


def abandon_unstaged(turn: Turn, reason: str) -> None:
    """Nothing will be staged any more: give up every decided step that is not complete."""
    for save in list(turn.job.saves.values()):
        if save.state is SaveState.STAGING:
            abandon(turn, save, f"not all ranks staged it: {reason}")


def give_up(turn: Turn, save: Save, reason: str) -> None:
    """Nobody can write the index now: the step is forgotten here and stays undecided on the store."""
    turn.note("save failed", reason, step=save.id.step)
    _settle(turn, save, committed=False)


def _write_abandoned(turn: Turn, save: Save, reason: str) -> None:
    node = _any_node(turn)
    if node is None:
        _settle(turn, save, committed=False)
        return
    turn.set_save(save.changed(state=SaveState.ABANDONING, committer=node))
    turn.do(Abandon(node=node, generation=save.id.generation, step=save.id.step, reason=reason))


def _settle(turn: Turn, save: Save, *, committed: bool) -> None:
    turn.drop_save(save)
    for node in turn.gang_nodes():
        turn.do(Settled(node=node, generation=save.id.generation, step=save.id.step, committed=committed))


def _any_node(turn: Turn, but: str | None = None) -> str | None:
    """A node to act on the store: one that stays, of the gang, and not the one that has just failed, if possible."""
    job = turn.job
    spares = (node for node in job.nodes if job.gang is None or node not in job.gang)
    nodes = itertools.chain(turn.gang_nodes(), spares)
    return min(nodes, key=lambda node: (node == but, node in job.going), default=None)


def staging_save(turn: Turn) -> Save | None:
    """The decided step that is not complete yet, if any."""
    return next((save for save in turn.job.saves.values() if save.state is SaveState.STAGING), None)


def save_of(turn: Turn, generation: int, step: int) -> Save | None:
    """A decided step that is not settled."""
    return turn.job.saves.get(CheckpointId(generation=generation, step=step))

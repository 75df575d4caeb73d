"""Hand-over: a node that stays copies a staged shard out of the memory of one that goes, and uploads it. Pure.

Asked for where the shard would not get to the store before its node is gone. The node that goes uploads it as well:
whoever is first, the store has it once. Called by `shards` and the tick; see `core.deadline`.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import settling
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.deadline import needs_hand_over
from orchestrator.core.messages import HandedOver, HandOver, UploadFailed
from orchestrator.core.ranks import RankSet
from orchestrator.core.turn import Turn


def ask(turn: Turn) -> None:
    """Ask peers for the shards that would be lost with their nodes, each once, of every complete step."""
    if not turn.job.going:
        return
    victims = turn.going_ranks()
    for save in list(turn.job.saves.values()):
        if save.state is SaveState.UPLOADING and save.staged & victims:
            _ask_for(turn, save)


def _ask_for(turn: Turn, save: Save) -> None:
    job = turn.job
    assert job.gang is not None
    asked = {rank: peer for rank, peer in save.asked.items() if peer in job.nodes}
    peers = [name for name in _peers(turn) if name not in save.bad_peers]
    for name in turn.going_members():
        ranks = [rank for rank in job.gang.ranks_of(name) if rank in save.staged and rank not in save.durable]
        for rank in ranks:
            if rank in asked or not peers or not _would_be_lost(turn, save, name, rank):
                continue
            peer = peers[len(asked) % len(peers)]
            asked[rank] = peer
            turn.note("hand-over asked", f"{peer} shall copy it from {name}", node=peer, step=save.id.step, rank=rank)
            turn.do(
                HandOver(
                    node=peer,
                    generation=save.id.generation,
                    step=save.id.step,
                    rank=rank,
                    world_size=save.world_size,
                    absent=tuple(save.absent),
                    source_url=job.nodes[name].objects_url,
                )
            )
    if asked != save.asked:
        turn.set_save(save.changed(asked=asked, held=save.held & RankSet.of(asked)))


def _peers(turn: Turn) -> list[str]:
    """Nodes that stay: sound ones of the gang if possible, for they have an interest in it."""
    staying = [name for name in turn.gang_nodes() if name not in turn.job.going]
    sound = [name for name in staying if name not in turn.job.condemned]
    return sound or staying or list(turn.job.available)


def _would_be_lost(turn: Turn, save: Save, name: str, rank: int) -> bool:
    job = turn.job
    node = job.nodes[name]
    if not node.objects_url:
        return False
    sizes = job.ranks.unique_bytes if rank in save.absent else job.ranks.slot_bytes
    return needs_hand_over(
        size_bytes=sizes[rank],
        uploading_seconds=turn.now - save.complete_at_seconds,
        remaining_seconds=None if node.deadline_seconds is None else node.deadline_seconds - turn.now,
        measured=job.measured,
    )


def on_handed_over(turn: Turn, event: HandedOver) -> None:
    """A peer holds the shard: from now on it outlives its node."""
    if event.seconds > 0 and event.size_bytes > 0:
        rate = event.size_bytes / event.seconds
        turn.set(measured=replace(turn.job.measured, peer_bytes_per_second=rate))
    save = settling.save_of(turn, event.generation, event.step)
    if save is None or save.asked.get(event.rank) != event.node:
        return
    turn.set_save(save.changed(held=save.held.plus(event.rank)))
    turn.note(
        "handed over",
        f"{event.size_bytes / 2**20:.1f} MiB in {event.seconds:.1f} s",
        node=event.node,
        step=event.step,
        rank=event.rank,
        facts=turn.facts(size_bytes=event.size_bytes, seconds=event.seconds),
    )


def outlives_failure(turn: Turn, save: Save, event: UploadFailed) -> bool:
    """Whether a shard may still become durable after this failure: two nodes try it where it was handed over."""
    peer = save.asked.get(event.rank)
    if peer is None:
        return False
    if peer == event.node:
        asked = {rank: name for rank, name in save.asked.items() if rank != event.rank}
        bad_peers = save.bad_peers | {peer}
        turn.set_save(save.changed(asked=asked, held=save.held.minus(event.rank), bad_peers=bad_peers))
        return event.rank not in save.failed and event.rank not in turn.job.gone_ranks
    turn.set_save(save.changed(failed=save.failed.plus(event.rank)))
    return peer in turn.job.nodes

"""A supervisor that was started again takes the running gang back: the nodes that were left running report to it.

Nothing is restarted if every rank of the newest generation is accounted for; otherwise what returned is ended and the
job forms anew. Pure; see `core.states`.
"""

from __future__ import annotations

from orchestrator.core import breaking, shards
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.membership import Gang, Place
from orchestrator.core.messages import CheckpointId, Decide, EndWorkers, GangReturned, NodesFound, TakeBack
from orchestrator.core.ranks import Ranks, RankSet
from orchestrator.core.states import Phase, Trigger
from orchestrator.core.turn import Turn


def on_nodes_found(turn: Turn, event: NodesFound) -> None:
    """Nodes of an earlier supervisor's are still there: they are awaited before anything is formed."""
    turn.set(expected=frozenset(event.nodes), expect_until_seconds=turn.now + turn.job.spec.return_seconds)
    if event.nodes:
        turn.note("nodes found", f"{len(event.nodes)} nodes were left running: they may take some time to report")


def on_gang_returned(turn: Turn, event: GangReturned) -> None:
    """A node says what it runs. It is too late once a generation of this supervisor's has been opened."""
    if turn.job.phase is Phase.GATHERING and turn.job.gang is None:
        turn.set(returned={**turn.job.returned, event.node: event})
    elif not turn.is_present(event.generation):
        _end(turn, event, "the job has gone on without it")


def _end(turn: Turn, event: GangReturned, reason: str) -> None:
    turn.note("not taken back", reason, node=event.node, generation=event.generation)
    turn.do(EndWorkers(node=event.node, generation=event.generation, reason=reason))


def decide(turn: Turn) -> bool:
    """In GATHERING: whether forming has to wait for nodes that may return, or is not needed: the gang is back."""
    job = turn.job
    missing = sorted(job.expected - job.nodes.keys())
    waiting = bool(missing) and turn.now < job.expect_until_seconds
    if not job.returned:
        return waiting
    newest = max(event.generation for event in job.returned.values())
    members = [event for event in job.returned.values() if event.generation == newest]
    if sum(event.count for event in members) == members[0].world_size:
        _take_back(turn, sorted(members, key=lambda event: event.first_rank))
        return True
    if waiting:
        return True
    for event in job.returned.values():
        _end(turn, event, f"of generation {newest} only {len(members)} nodes are back")
    turn.set(returned={}, expected=frozenset(), own=newest)
    return False


def _take_back(turn: Turn, members: list[GangReturned]) -> None:
    first = members[0]
    generation, base = first.generation, first.base
    for event in turn.job.returned.values():
        if event.generation != generation:
            _end(turn, event, f"generation {generation} is newer")
    gang = Gang(
        generation=generation,
        places=tuple(Place(node=event.node, first_rank=event.first_rank, count=event.count) for event in members),
    )
    committed = max((event.committed_step for event in members if event.committed_step is not None), default=None)
    newest = base if committed is None else CheckpointId(generation=generation, step=committed)
    saves = _saves(turn, gang, members)
    base_step = base.step if base else 0
    turn.set(
        own=generation,
        gang=gang,
        members=gang.nodes,
        base=base,
        ranks=Ranks.starting(gang.world_size, base_step),
        newest_committed=newest,
        ballot=max(event.ballot for event in members),
        saves={save.id: save for save in saves.values()},
        last_save_step=max([base_step, committed or 0, *saves]),
        ever_attached=True,
        taken_back=True,
        returned={},
        expected=frozenset(),
    )
    turn.note(
        "taken back",
        f"all {gang.world_size} ranks of generation {generation} go on, under a new supervisor",
        facts=turn.facts(world_size=gang.world_size, nodes=" ".join(gang.nodes)),
    )
    turn.go(Trigger.TAKEN_BACK)
    for event in members:
        turn.do(TakeBack(node=event.node, generation=generation))
        _repeat_decision(turn, event, saves)
    for save in saves.values():
        if save.state is SaveState.UPLOADING:
            shards.upload(turn, save)
    if any(event.ended for event in members):
        breaking.break_gang(turn, "its workers were ended before the supervisor was started again")


def _saves(turn: Turn, gang: Gang, members: list[GangReturned]) -> dict[int, Save]:
    """Every decided step that any node knows of and none knows as committed."""
    saves: dict[int, Save] = {}
    for found in (found for event in members for found in event.decided):
        if any(found.step == event.committed_step for event in members):
            continue
        save = saves.get(found.step) or Save(
            id=CheckpointId(generation=gang.generation, step=found.step),
            mode=found.mode,
            world_size=gang.world_size,
            absent=RankSet.of(found.absent),
            decided_at_seconds=turn.now,
            deadline_seconds=None,
        )
        save = save.changed(staged=save.staged | RankSet.of(found.staged))
        state = SaveState.UPLOADING if save.complete else SaveState.STAGING
        saves[found.step] = save.changed(state=state, complete_at_seconds=turn.now if save.complete else 0.0)
    return saves


def _repeat_decision(turn: Turn, event: GangReturned, saves: dict[int, Save]) -> None:
    """The decision may have reached some nodes only: ranks that still wait get it now, the others have passed."""
    save = saves.get(event.proposed_step) if event.proposed_step is not None else None
    if save is not None:
        turn.do(
            Decide(
                node=event.node,
                generation=event.generation,
                ballot=event.ballot,
                step=save.id.step,
                mode=save.mode,
                absent=tuple(save.absent),
                remaining_seconds=None,
            )
        )

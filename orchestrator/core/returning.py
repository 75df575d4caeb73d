"""A supervisor that was started again takes the running gang back: the nodes that were left running report to it.

Nothing is restarted if every rank of the newest generation is accounted for. Otherwise what returned is taken back to
be cleared like any gang that has lost a node: its exits are confirmed and its complete steps settled before the job
forms anew. Pure; see `core.states`.
"""

from __future__ import annotations

from orchestrator.core import breaking, shards
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.membership import Gang, Place
from orchestrator.core.messages import (
    CheckpointId,
    Decide,
    EndWorkers,
    GangReturned,
    NodesFound,
    Outcome,
    ReleaseNode,
    TakeBack,
)
from orchestrator.core.ranks import Ranks, RankSet
from orchestrator.core.states import Phase, Trigger
from orchestrator.core.turn import Turn
from orchestrator.core.wording import counted


def on_nodes_found(turn: Turn, event: NodesFound) -> None:
    """Nodes of an earlier supervisor's are still there: they are awaited before anything is formed."""
    turn.set(expected=frozenset(event.nodes), expect_until_seconds=turn.now + turn.job.spec.return_seconds)
    if event.nodes:
        turn.note(
            "nodes found",
            f"{counted(len(event.nodes), 'node was', 'nodes were')} left running; reporting may take some time",
        )


def on_gang_returned(turn: Turn, event: GangReturned) -> None:
    """A node says what it runs. It is too late once this supervisor has a gang, or opens a generation, without it."""
    if turn.job.phase is Phase.GATHERING and turn.job.gang is None:
        turn.set(returned={**turn.job.returned, event.node: event})
    elif not (turn.is_present(event.generation) and event.node in turn.gang_nodes()):
        _end(turn, event, "the job has gone on without it")


def _end(turn: Turn, event: GangReturned, reason: str) -> None:
    turn.note("not taken back", reason, node=event.node, generation=event.generation)
    turn.do(EndWorkers(node=event.node, generation=event.generation, reason=reason))


def decide(turn: Turn) -> bool:
    """In GATHERING: whether forming has to wait for nodes that may return, or is not needed yet: a gang is back."""
    job = turn.job
    newest = max((event.generation for event in job.returned.values()), default=0)
    members = sorted(
        (event for event in job.returned.values() if event.generation == newest), key=lambda event: event.first_rank
    )
    whole = bool(members) and sum(event.count for event in members) == members[0].world_size
    awaited = job.expected - job.nodes.keys()
    if awaited and not whole and turn.now < job.expect_until_seconds:
        return True
    if members:
        _take_back(turn, members)
    return bool(members)


def give_back_silent(turn: Turn) -> None:
    """A node that was found and is silent may still train, hold memory and devices: its scheduler ends it."""
    job = turn.job
    if not job.expected or turn.now < job.expect_until_seconds:
        return
    silent = sorted(job.expected - job.nodes.keys())
    turn.set(expected=frozenset(), given_back=job.given_back.union(silent))
    if silent:
        turn.note("nodes silent", f"{', '.join(silent)} did not report: they are given back, the job goes on without")
    for node in silent:
        turn.do(ReleaseNode(node=node, reason="it did not report to a supervisor that was started again"))


def _take_back(turn: Turn, members: list[GangReturned]) -> None:
    """Go on with the gang, or end it in order if a part of it is missing: what it has staged is made durable first."""
    gang, missing = _gang_of(members)
    generation, base = gang.generation, members[0].base
    for event in turn.job.returned.values():
        if event.generation != generation:
            _end(turn, event, f"generation {generation} is newer")
    committed = max((event.committed_step for event in members if event.committed_step is not None), default=None)
    newest = base if committed is None else CheckpointId(generation=generation, step=committed)
    saves = _saves(turn, gang, members, missing)
    base_step = base.step if base else 0
    turn.set(
        own=max(generation, turn.job.own or 0),
        gang=gang,
        members=gang.nodes,
        base=base,
        ranks=_ranks(gang, base_step, members),
        progress_at_seconds=turn.now,
        newest_committed=newest,
        ballot=max(event.ballot for event in members),
        saves={save.id: save for save in saves.values()},
        last_save_step=max([base_step, committed or 0, *saves]),
        ever_attached=True,
        taken_back=True,
        returned={},
    )
    turn.note(
        "taken back",
        f"{gang.world_size - len(missing)} of {gang.world_size} ranks of generation {generation} have a new supervisor",
        facts=turn.facts(world_size=gang.world_size, nodes=" ".join(event.node for event in members)),
    )
    turn.go(Trigger.TAKEN_BACK)
    for event in members:
        turn.do(TakeBack(node=event.node, generation=generation))
        _repeat_decision(turn, event, saves)
    for save in saves.values():
        if save.state is SaveState.UPLOADING:
            shards.upload(turn, save)
    _break_if_useless(turn, members)


def _gang_of(members: list[GangReturned]) -> tuple[Gang, RankSet]:
    """The gang as it was, and the ranks whose node has not come back: that stands under a name of ours."""
    places = [Place(node=event.node, first_rank=event.first_rank, count=event.count) for event in members]
    ends = (0, *(place.first_rank + place.count for place in places))
    starts = (*(place.first_rank for place in places), members[0].world_size)
    gaps = [
        Place(node=f"node-of-rank-{end}", first_rank=end, count=start - end)
        for end, start in zip(ends, starts, strict=True)
        if end < start
    ]
    places = sorted((*places, *gaps), key=lambda place: place.first_rank)
    missing = RankSet.of(rank for gap in gaps for rank in gap.ranks)
    return Gang(generation=members[0].generation, places=tuple(places)), missing


def _ranks(gang: Gang, base_step: int, members: list[GangReturned]) -> Ranks:
    ranks = Ranks.starting(gang.world_size, base_step)
    for known in (known for event in members for known in event.progress):
        ranks = ranks.progress(
            known.rank, step=known.step, step_seconds=known.step_seconds, free_slots=known.free_slots
        )
    return ranks


def _saves(turn: Turn, gang: Gang, members: list[GangReturned], missing: RankSet) -> dict[int, Save]:
    """Every decided step that any node knows of and none knows as committed.

    What missing ranks have staged and made durable nobody can say here: it is presumed, and the receipts decide.
    """
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
            staged=missing,
            durable=missing,
        )
        save = save.changed(staged=save.staged | RankSet.of(found.staged))
        state = SaveState.UPLOADING if save.complete else SaveState.STAGING
        saves[found.step] = save.changed(state=state, complete_at_seconds=turn.now if save.complete else 0.0)
    return saves


def _break_if_useless(turn: Turn, members: list[GangReturned]) -> None:
    """A part of the gang is missing, or it was ended, or the job shall end, or go back, without another save."""
    gang, ending = turn.job.gang, turn.job.ending
    assert gang is not None
    for name in sorted({*gang.nodes} - {event.node for event in members}):
        turn.lose_member(name)
    if turn.job.lost_in_gang:
        turn.set(lost_at_seconds=turn.now)
        breaking.break_gang(turn, f"ranks {list(turn.job.gone_ranks)} did not come back")
    elif any(event.ended for event in members):
        breaking.break_gang(turn, "its workers were ended before the supervisor was started again")
    elif ending is not None and ending.outcome is not Outcome.DRAINED:
        breaking.break_gang(turn, ending.reason)
    elif turn.job.rollback_to is not None:
        breaking.break_gang(turn, f"rolled back to step {turn.job.rollback_to}")


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

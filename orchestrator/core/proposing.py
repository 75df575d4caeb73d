"""Which step is saved next: proposals, echoes, the decision, and why a save is due. Pure; see `core.states`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import agreement, breaking, courses, hanging, settling, shards, straggling
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.messages import CheckpointId, Decide, Echoed, Mode, Passed, Prepare, Progress, Refused, SaveAsked
from orchestrator.core.policy import arm_now, periodic_step, steps_between
from orchestrator.core.ranks import NOBODY, RankSet
from orchestrator.core.states import Phase, Trigger
from orchestrator.core.turn import Turn
from orchestrator.core.wording import all_of, counted


def on_save_asked(turn: Turn, event: SaveAsked) -> None:
    """`run.save()`: at the next step that all ranks can agree on."""
    if turn.is_present(event.generation):
        turn.set(save_asked=True)
        drive(turn)


def on_progress(turn: Turn, event: Progress) -> None:
    """New published steps."""
    if not turn.is_present(event.generation):
        return
    ranks = turn.job.ranks
    for new in event.ranks:
        ranks = ranks.progress(new.rank, step=new.step, step_seconds=new.step_seconds, free_slots=new.free_slots)
    steps = (ranks.steps.highest or 0) - turn.job.highest_step
    turn.set(ranks=ranks)
    if steps > 0:
        turn.set(progress_at_seconds=turn.now)
        hanging.on_steps(turn, steps)
    job = turn.job
    if job.awaiting_first_step and job.phase is Phase.RUNNING and ranks.everyone <= ranks.moved:
        turn.set(awaiting_first_step=False)
        if job.ended_at_seconds is not None:
            turn.set(measured=replace(job.measured, restart_seconds=turn.now - job.ended_at_seconds))
        since = job.broken_at_seconds
        facts = turn.facts(seconds=None if since is None else turn.now - since)
        turn.note("first good step", f"step {job.lowest_step} is done", step=job.lowest_step, facts=facts)
        turn.set(broken_at_seconds=None)
    straggling.on_progress(turn, event, first=steps > 0)
    if job.taken_back:
        _find_missed(turn, event)
    drive(turn)


def _find_missed(turn: Turn, event: Progress) -> None:
    """A gang that was taken back has told of all its shards: who is past a decided step without one will not stage it.

    It was settled, and not every node had heard of it when the earlier supervisor died. The index says how. An absent
    rank may have passed it as well: that is not told again, and the index would be kept waiting.
    """
    for rank in event.ranks:
        for save in list(turn.job.saves.values()):
            is_open = save.state in (SaveState.STAGING, SaveState.UPLOADING)
            if is_open and rank.step > save.id.step and rank.rank not in save.staged | save.given_up:
                _missed(turn, save, rank.rank, f"is at step {rank.step} and holds no shard of it any more")


def on_echoed(turn: Turn, event: Echoed) -> None:
    """Workers have read the proposal in time."""
    proposal = turn.job.proposal
    if proposal is not None and turn.is_present(event.generation):
        turn.set(proposal=agreement.echo(proposal, ballot=event.ballot, ranks=event.ranks))
        drive(turn)


def on_refused(turn: Turn, event: Refused) -> None:
    """A rank was past the proposed step: a higher ballot is needed."""
    proposal = turn.job.proposal
    if proposal is None or not turn.is_present(event.generation):
        return
    _rank_is_at(turn, event.rank, event.step)
    turn.set(proposal=agreement.refuse(proposal, ballot=event.ballot, rank=event.rank))
    drive(turn)


def on_passed(turn: Turn, event: Passed) -> None:
    """A rank went on without staging: the step is torn and must not be used, unless it can do without that rank."""
    if not turn.is_present(event.generation):
        return
    _rank_is_at(turn, event.rank, event.step)
    job = turn.job
    save = job.saves.get(CheckpointId(generation=event.generation, step=event.step))
    if save is not None:
        _missed(turn, save, event.rank, "went on without staging it")
    elif job.proposal is not None and job.proposal.step == event.step:
        turn.set(proposal=agreement.refuse(job.proposal, ballot=job.proposal.ballot, rank=event.rank))
        drive(turn)


def _missed(turn: Turn, save: Save, rank: int, how: str) -> None:
    if rank in save.absent:
        turn.set_save(save.changed(given_up=save.given_up.plus(rank)))
        shards.move_saves(turn)
        return
    settling.abandon(turn, save, f"rank {rank} {how}")
    if save.mode is Mode.LEAVE:
        breaking.break_gang(turn, f"rank {rank} missed the agreed step {save.id.step}")
    drive(turn)


def _rank_is_at(turn: Turn, rank: int, step: int) -> None:
    """A rank is known to have reached a step before its progress was reported."""
    ranks = turn.job.ranks
    if rank in ranks and step > ranks.steps[rank]:
        turn.set(ranks=ranks.reach(rank, step))


def drive(turn: Turn) -> None:
    """In RUNNING: move the agreement on as far as what is known allows."""
    if turn.job.phase is not Phase.RUNNING:
        return
    proposal = turn.job.proposal
    if proposal is None:
        _propose_if_due(turn)
        return
    assert turn.job.gang is not None
    if proposal.refused_by is not None:
        turn.set(proposal=None, attempt=min(turn.job.attempt + 1, 8))
        _propose_if_due(turn)
    elif _is_due(turn) and _nearer_step(turn) is not None:
        turn.set(proposal=None)
        _propose_if_due(turn)
    elif agreement.agreed(proposal, world_size=turn.job.gang.world_size):
        blocking = settling.staging_save(turn)
        if (blocking is None or proposal.step < blocking.id.step) and courses.follow(turn):
            if blocking is not None:
                settling.abandon(turn, blocking, f"all ranks leave at step {proposal.step} before it")
            _decide(turn, proposal)


def _is_due(turn: Turn) -> bool:
    leave = turn.job.leave
    return leave is not None and leave.is_due


def _nearer_step(turn: Turn) -> int | None:
    """A step at which everybody could leave much sooner than at the open proposal's."""
    job = turn.job
    assert job.proposal is not None
    margin = agreement.margin_steps(job.step_seconds, job.attempt)
    near = job.highest_step + margin
    return near if job.proposal.step > near + margin else None


def _propose_if_due(turn: Turn) -> None:
    job = turn.job
    if job.leave is not None and job.leave.waits:
        return
    urgent = _is_due(turn)
    if urgent or job.save_asked:
        if not urgent and settling.staging_save(turn) is not None:
            return
        choice = courses.next_step(turn)
        if choice.step is not None:
            _propose(turn, choice.step, job.leave.reason if job.leave else "a save was asked for", choice.reason)
        return
    if settling.staging_save(turn) is None:
        _propose_periodic(turn)


def _propose_periodic(turn: Turn) -> None:
    job = turn.job
    margin = agreement.margin_steps(job.step_seconds, job.attempt)
    reachable = job.highest_step + margin - 1
    if job.until is not None:
        reachable = min(reachable, job.until - 1)
    last = max(job.last_save_step, reachable)
    every = steps_between(every=job.spec.save_every_steps, hinted=_is_hinted(turn))
    step = periodic_step(last=last, every=every, until=job.until)
    if step is None or job.highest_step >= step:
        return
    _note_skipped(turn, step)
    if not arm_now(step=step, highest=job.highest_step, step_seconds=job.step_seconds, margin=margin):
        return
    final = step == job.until
    if not final and (job.ranks.busy or turn.now < job.save_not_before_seconds):
        return  # an upload may end in time; once the step is out of reach, it is noted as skipped
    why = "the job's last step" if final else f"every {counted(every, 'step')}"
    if every != job.spec.save_every_steps and not final:
        why += ", as a node may go"
    _propose(turn, step, why, f"next save after step {job.last_save_step}")


def _is_hinted(turn: Turn) -> bool:
    """Whether a node of the gang may go, as a hint said."""
    job = turn.job
    return job.gang is not None and any(name in job.gang for name in job.hinted)


def _note_skipped(turn: Turn, step: int) -> None:
    """The periodic step before `step` passed without a save: say so, once."""
    job = turn.job
    missed = periodic_step(last=job.last_save_step, every=job.spec.save_every_steps, until=job.until)
    if missed is None or missed >= step:
        return
    turn.set(last_save_step=step - 1)
    busy = list(job.ranks.busy)
    why = f"both slots of ranks {busy} are still needed" if busy else "no step could be agreed in time"
    if turn.now < job.save_not_before_seconds:
        why = f"the store has failed {counted(job.failed_saves, 'save')} in a row: {job.trouble}"
    turn.note("save skipped", f"{why}; the next one is at step {step}", step=missed)


def _propose(turn: Turn, step: int, why: str, arithmetic: str) -> None:
    job = turn.job
    assert job.gang is not None
    ballot = job.ballot + 1
    turn.set(ballot=ballot, proposal=agreement.Proposal(ballot=ballot, step=step))
    turn.note("step proposed", f"{why}: {arithmetic}", step=step, facts=turn.facts(ballot=ballot))
    for node in turn.gang_nodes():
        turn.do(Prepare(node=node, generation=job.gang.generation, ballot=ballot, step=step))


def _decide(turn: Turn, proposal: agreement.Proposal) -> None:
    job = turn.job
    assert job.gang is not None
    leave = job.leave if _is_due(turn) else None
    absent, deadline = _absent(turn)
    mode = Mode.LEAVE if leave else Mode.STAY
    save = Save(
        id=CheckpointId(generation=job.gang.generation, step=proposal.step),
        mode=mode,
        world_size=job.gang.world_size,
        absent=absent,
        decided_at_seconds=turn.now,
        deadline_seconds=deadline,
    )
    turn.set_save(save)
    turn.set(proposal=None, attempt=1, save_asked=False, last_save_step=max(job.last_save_step, proposal.step))
    remaining = None if deadline is None else max(deadline - turn.now, 0.0)
    choice = leave.choice if leave else None
    why = leave.reason if leave else f"{all_of(job.gang.world_size, 'rank')} echoed"
    arithmetic = f"; {choice.reason}" if choice else ""
    without = f"; without ranks {list(absent)}" if absent else ""
    facts = turn.facts(fits=choice.makes_it) if choice else {}
    turn.note("step agreed", f"{mode}: {why}{arithmetic}{without}", step=proposal.step, facts=facts)
    excepted = tuple(absent)
    for node in turn.gang_nodes():
        turn.do(
            Decide(
                node=node,
                generation=job.gang.generation,
                ballot=proposal.ballot,
                step=proposal.step,
                mode=mode,
                absent=excepted,
                remaining_seconds=remaining,
            )
        )
    if leave:
        turn.set(broken_at_seconds=leave.since_seconds)
        turn.go(Trigger.LEAVE_DECIDED)


def _absent(turn: Turn) -> tuple[RankSet, float | None]:
    """The ranks of which no tensor is wanted, and the earliest deadline. What only they hold is wanted all the same.

    They will go, or their node is condemned, and what its devices hold may be wrong: where somebody else holds it,
    theirs is taken. Those that will go come first, and of condemned nodes one is left out at most: the others' slots
    have room for the loss of one node, and a save for which they have none would be given up, again and again.
    """
    job = turn.job
    assert job.gang is not None
    absent = job.ranks.dispensable(turn.going_ranks())
    members = turn.gang_nodes()
    condemned = [name for name in members if name in job.condemned]
    if not absent and len(condemned) < len(members):
        each = (job.ranks.dispensable(turn.ranks_on(frozenset({name}))) for name in condemned)
        absent = next(filter(None, each), NOBODY)
    known = (job.nodes[name].deadline_seconds for name in turn.going_members())
    deadlines = [seconds for seconds in known if seconds is not None]
    return absent, min(deadlines, default=None)

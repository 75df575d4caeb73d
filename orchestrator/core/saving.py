"""Saves of the running gang: propose, agree, decide, complete, commit, abandon. Pure; see `core.states`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import agreement, ending, preflight
from orchestrator.core.commit import Save, SaveState, committable, hopeless, staging_over
from orchestrator.core.membership import choose_members
from orchestrator.core.messages import (
    Abandon,
    CheckpointId,
    Commit,
    Decide,
    Echoed,
    IndexDecided,
    IndexFailed,
    Mode,
    Outcome,
    Passed,
    Prepare,
    Progress,
    Refused,
    SaveAsked,
    Settled,
    Staged,
    Upload,
    Uploaded,
    UploadFailed,
)
from orchestrator.core.policy import arm_now, fit_deadline, periodic_step
from orchestrator.core.states import Ending, Leave, Phase, Trigger, Turn
from orchestrator.errors import ExitCode

COMMIT_ATTEMPTS_MAX = 3
COMMIT_RETRY_SECONDS = 1.0  # before the second attempt, twice that before the third


# ----------------------------------------------------------------------------------- why to leave or save


def node_is_going(turn: Turn, name: str) -> None:
    """A notice named a node: if it is in the gang, everybody leaves at an agreed step."""
    job = turn.job
    if job.gang is None or name not in job.gang.nodes:
        return
    if job.spec.attached and job.ending is None:
        reason = f"a notice reached {name}"
        turn.set(ending=Ending(outcome=Outcome.DRAINED, exit_code=int(ExitCode.RESUMABLE), reason=reason))
    if job.phase is Phase.RUNNING:
        turn.set(leave=Leave(reason=f"{name} will go", since_seconds=turn.now))
        drive(turn)
    elif job.phase is Phase.STARTING:
        ending.break_gang(turn, f"{name} will go, and nothing is trained yet")


def node_stays(turn: Turn) -> None:
    """A notice was withdrawn: do not leave for it, unless the decision is made or there is another reason."""
    job = turn.job
    if job.phase is not Phase.RUNNING or job.leave is None or _going_ranks(turn) or job.ending is not None:
        return
    assert job.gang is not None
    if len(job.gang.nodes) <= job.wanted_nodes:
        turn.set(leave=None)


def on_save_asked(turn: Turn, event: SaveAsked) -> None:
    """`run.save()`: at the next step that all ranks can agree on."""
    if _present(turn, event.generation):
        turn.set(save_asked=True)
        drive(turn)


def on_progress(turn: Turn, event: Progress) -> None:
    """New published steps."""
    if not _present(turn, event.generation):
        return
    ranks = dict(turn.job.ranks)
    for new in event.ranks:
        ranks[new.rank] = replace(
            ranks[new.rank], step=new.step, step_seconds=new.step_seconds, free_slots=new.free_slots
        )
    turn.set(ranks=ranks)
    job = turn.job
    base_step = job.base.step if job.base else 0
    if job.awaiting_first_step and job.phase is Phase.RUNNING and job.lowest_step > base_step:
        turn.set(awaiting_first_step=False)
        since = job.broken_at_seconds
        facts = turn.facts(seconds=None if since is None else turn.now - since)
        turn.note("first good step", f"step {job.lowest_step} is done", step=job.lowest_step, facts=facts)
        turn.set(broken_at_seconds=None)
    drive(turn)


# --------------------------------------------------------------------------------------------- agreement


def on_echoed(turn: Turn, event: Echoed) -> None:
    """Workers have read the proposal in time."""
    proposal = turn.job.proposal
    if proposal is not None and _present(turn, event.generation):
        turn.set(proposal=agreement.echo(proposal, ballot=event.ballot, ranks=event.ranks))
        drive(turn)


def on_refused(turn: Turn, event: Refused) -> None:
    """A rank was past the proposed step: a higher ballot is needed."""
    proposal = turn.job.proposal
    if proposal is None or not _present(turn, event.generation):
        return
    _rank_is_at(turn, event.rank, event.step)
    turn.set(proposal=agreement.refuse(proposal, ballot=event.ballot, rank=event.rank))
    drive(turn)


def on_passed(turn: Turn, event: Passed) -> None:
    """A rank went on without staging: the step is torn and must not be used, unless it can do without that rank."""
    if not _present(turn, event.generation):
        return
    _rank_is_at(turn, event.rank, event.step)
    job = turn.job
    save = job.saves.get(CheckpointId(generation=event.generation, step=event.step))
    if save is not None and event.rank in save.absent:
        turn.set_save(replace(save, given_up=save.given_up | {event.rank}))
        move_saves(turn)
    elif save is not None:
        abandon(turn, save, f"rank {event.rank} saw no decision in time and went on")
        if save.mode is Mode.LEAVE:
            ending.break_gang(turn, f"rank {event.rank} missed the agreed step {event.step}")
        drive(turn)
    elif job.proposal is not None and job.proposal.step == event.step:
        turn.set(proposal=agreement.refuse(job.proposal, ballot=job.proposal.ballot, rank=event.rank))
        drive(turn)


def _rank_is_at(turn: Turn, rank: int, step: int) -> None:
    """A rank is known to have reached a step before its progress was reported."""
    if rank in turn.job.ranks and step > turn.job.ranks[rank].step:
        turn.set_rank(rank, step=step)


def drive(turn: Turn) -> None:
    """In RUNNING: move the agreement on as far as what is known allows."""
    if turn.job.phase is not Phase.RUNNING:
        return
    _want_to_grow(turn)
    proposal = turn.job.proposal
    if proposal is None:
        _propose_if_due(turn)
        return
    assert turn.job.gang is not None
    if proposal.refused_by is not None:
        turn.set(proposal=None, attempt=min(turn.job.attempt + 1, 8))
        _propose_if_due(turn)
    elif turn.job.leave is not None and _nearer_step(turn) is not None:
        turn.set(proposal=None)
        _propose_if_due(turn)
    elif agreement.agreed(proposal, world_size=turn.job.gang.world_size):
        blocking = _staging_save(turn)
        if blocking is None or proposal.step < blocking.id.step:
            if blocking is not None:
                abandon(turn, blocking, f"all ranks leave at step {proposal.step} before it")
            _decide(turn, proposal)


def _nearer_step(turn: Turn) -> int | None:
    """A step at which everybody could leave much sooner than at the open proposal's."""
    job = turn.job
    assert job.proposal is not None
    assert job.leave is not None
    if job.leave.at_next_save:
        return None
    margin = agreement.margin_steps(job.step_seconds, job.attempt)
    near = job.highest_step + margin
    return near if job.proposal.step > near + margin else None


def _propose_if_due(turn: Turn) -> None:
    job = turn.job
    urgent = job.leave is not None and not job.leave.at_next_save
    if urgent or job.save_asked:
        staging = _staging_save(turn)
        if not urgent and staging is not None:
            return
        blocking = staging.id.step if staging is not None else None
        near = job.highest_step + agreement.margin_steps(job.step_seconds, job.attempt)
        after = blocking if blocking is not None and blocking <= near else None
        choice = agreement.choose_step(
            highest=job.highest_step, step_seconds=job.step_seconds, until=job.until, after=after, attempt=job.attempt
        )
        if choice.step is not None:
            _propose(turn, choice.step, job.leave.reason if job.leave else "a save was asked for", choice.reason)
        return
    if _staging_save(turn) is None:
        _propose_periodic(turn)


def _propose_periodic(turn: Turn) -> None:
    job = turn.job
    margin = agreement.margin_steps(job.step_seconds, job.attempt)
    reachable = job.highest_step + margin - 1
    if job.until is not None:
        reachable = min(reachable, job.until - 1)
    last = max(job.last_save_step, reachable)
    step = periodic_step(last=last, every=job.spec.save_every_steps, until=job.until)
    if step is None or job.highest_step >= step:
        return
    _note_skipped(turn, step)
    if not arm_now(step=step, highest=job.highest_step, step_seconds=job.step_seconds, margin=margin):
        return
    final = step == job.until
    if not final and any(rank.free_slots == 0 for rank in job.ranks.values()):
        return  # an upload may end in time; once the step is out of reach, it is noted as skipped
    why = "the job's last step" if final else f"every {job.spec.save_every_steps} steps"
    _propose(turn, step, why, f"next save after step {job.last_save_step}")


def _note_skipped(turn: Turn, step: int) -> None:
    """The periodic step before `step` passed without a save: say so, once."""
    job = turn.job
    missed = periodic_step(last=job.last_save_step, every=job.spec.save_every_steps, until=job.until)
    if missed is None or missed >= step:
        return
    turn.set(last_save_step=step - 1)
    busy = [rank for rank, state in job.ranks.items() if state.free_slots == 0]
    why = f"both slots of ranks {busy} are still needed" if busy else "no step could be agreed in time"
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
    leave = job.leave
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
    remaining = None if deadline is None else deadline - turn.now
    fit = fit_deadline(
        steps_away=max(0, proposal.step - job.highest_step),
        step_seconds=job.step_seconds,
        stage_seconds=job.stage_seconds,
        size_bytes=max((rank.slot_bytes for rank in job.ranks.values()), default=0),
        bandwidth_bytes_per_second=job.bandwidth_bytes_per_second,
        remaining_seconds=remaining,
    )
    why = f"{leave.reason}; {fit.reason}" if leave else f"all {job.gang.world_size} ranks echoed"
    without = f"; without ranks {sorted(absent)}" if absent else ""
    turn.note("step agreed", f"{mode}: {why}{without}", step=proposal.step, facts=turn.facts(fits=fit.fits))
    for node in turn.gang_nodes():
        turn.do(
            Decide(
                node=node,
                generation=job.gang.generation,
                ballot=proposal.ballot,
                step=proposal.step,
                mode=mode,
                absent=tuple(sorted(absent)),
                remaining_seconds=remaining,
            )
        )
    if leave:
        turn.set(broken_at_seconds=leave.since_seconds)
        turn.go(Trigger.LEAVE_DECIDED)


def _absent(turn: Turn) -> tuple[frozenset[int], float | None]:
    """The ranks that may not be waited for, and the earliest deadline; nobody if everybody is going."""
    job = turn.job
    assert job.gang is not None
    going = _going_ranks(turn)
    members = [job.nodes[name] for name in turn.gang_nodes()]
    deadlines = [node.deadline_seconds for node in members if node.going and node.deadline_seconds is not None]
    everyone = len(going) == job.gang.world_size
    return (frozenset() if everyone else going), min(deadlines, default=None)


def _going_ranks(turn: Turn) -> frozenset[int]:
    job = turn.job
    if job.gang is None:
        return frozenset()
    return frozenset(rank for name, node in job.nodes.items() if node.going for rank in job.gang.ranks_of(name))


def _want_to_grow(turn: Turn) -> None:
    """Nodes have joined that the gang could use: everybody leaves at the next periodic save to let them in."""
    job = turn.job
    growing = job.leave is not None and job.leave.at_next_save
    if job.proposal is None or (job.leave is not None and not growing):
        return
    new = could_join(turn)
    last = job.until is not None and job.proposal.step >= job.until
    if growing and (last or not new):
        turn.set(leave=None)
    elif new and not last and not growing:
        turn.set(leave=Leave(reason=f"{', '.join(new)} can join", since_seconds=turn.now, at_next_save=True))


def could_join(turn: Turn) -> tuple[str, ...]:
    """Nodes outside the gang with which it would be larger."""
    job = turn.job
    if job.gang is None or job.spec.attached:
        return ()
    choice = choose_members(
        available=job.available,
        previous=job.gang.nodes,
        nodes_min=1,
        nodes_wanted=job.wanted_nodes,
        workers_per_node=job.spec.workers_per_node,
        allowed_world_sizes=job.allowed_world_sizes,
    )
    if choice.nodes is None or len(choice.nodes) <= len(job.gang.nodes):
        return ()
    return tuple(node for node in choice.nodes if node not in job.gang.nodes)


# ------------------------------------------------------------------------------ staged, durable, decided


def on_staged(turn: Turn, event: Staged) -> None:
    """A rank's shard is in its slot; when the step is complete, uploads start everywhere."""
    save = _save_of(turn, event.generation, event.step)
    if save is None or save.state is SaveState.ABANDONING or event.rank in save.staged:
        return
    save = replace(save, staged=save.staged | {event.rank}, size_bytes=save.size_bytes + event.size_bytes)
    turn.set_save(save)
    turn.set(stage_seconds=event.seconds)
    if save.complete and save.state is SaveState.STAGING:
        save = replace(save, state=SaveState.UPLOADING)
        turn.set_save(save)
        size = f"{save.size_bytes / 2**20:.1f} MiB"
        turn.note("staged", f"{len(save.staged)} ranks hold {size} in memory", step=event.step)
        for node in turn.gang_nodes():
            turn.do(
                Upload(
                    node=node,
                    generation=event.generation,
                    step=event.step,
                    world_size=save.world_size,
                    absent=tuple(sorted(save.absent)),
                )
            )
    move_saves(turn)


def on_uploaded(turn: Turn, event: Uploaded) -> None:
    """A receipt is on the store."""
    save = _save_of(turn, event.generation, event.step)
    if event.seconds > 0 and event.size_bytes > 0:
        first = turn.job.bandwidth_bytes_per_second is None
        turn.set(bandwidth_bytes_per_second=event.size_bytes / event.seconds)
        if first:
            preflight.report(turn)
    if save is not None:
        turn.set_save(replace(save, durable=save.durable | {event.rank}))
        move_saves(turn)


def on_upload_failed(turn: Turn, event: UploadFailed) -> None:
    """A shard cannot be made durable: the step is abandoned, training goes on, the old checkpoint stays."""
    save = _save_of(turn, event.generation, event.step)
    if save is None:
        return
    turn.note("save failed", event.reason, node=event.node, step=event.step, rank=event.rank)
    if event.rank in save.absent:
        turn.set_save(replace(save, given_up=save.given_up | {event.rank}))
    else:
        abandon(turn, save, f"rank {event.rank} could not upload: {event.reason}")
    move_saves(turn)


def move_saves(turn: Turn) -> None:
    """Move every decided step on: leave when staging is over, commit when the receipts are there."""
    _leave_if_over(turn)
    for key in list(turn.job.saves):
        save = turn.job.saves.get(key)
        if save is not None:
            _move_save(turn, save)
    _leave_if_over(turn)


def _leave_if_over(turn: Turn) -> None:
    """In LEAVING: go when all that can still be staged is staged, or when the step is given up."""
    job, save = turn.job, turn.leaving_save()
    if job.phase is not Phase.LEAVING:
        return
    why = job.leave.reason if job.leave else ""
    if save is None or save.state is SaveState.ABANDONING:
        ending.leave_gang(turn, f"the agreed step is given up, {why}")
    elif staging_over(save, gone=job.gone_ranks, now_seconds=turn.now):
        ending.leave_gang(turn, f"step {save.id.step} is staged, {why}")


def _move_save(turn: Turn, save: Save) -> None:
    job = turn.job
    writer_lost = save.committer is not None and save.committer not in job.nodes
    if save.state is SaveState.ABANDONING and writer_lost:
        _write_abandoned(turn, save, f"{save.committer}, which was to write this, is lost")
    if save.state is SaveState.COMMITTING and writer_lost:
        save = replace(save, state=SaveState.UPLOADING)
    if save.mode is Mode.LEAVE and job.phase is Phase.LEAVING:
        return  # absent ranks may still stage: the index waits until all have left
    if save.state is SaveState.UPLOADING:
        lost = hopeless(save, gone=job.gone_ranks)
        if lost:
            abandon(turn, save, f"the shards of ranks {sorted(lost)} went with their node")
        elif committable(save, gone=job.gone_ranks, now_seconds=turn.now):
            _commit(turn, save)


def _commit(turn: Turn, save: Save) -> None:
    committer = _any_node(turn, but=save.committer)
    if committer is None:
        give_up(turn, save, "no node is left to write the index: the next generation rolls it forward")
        return
    turn.set_save(replace(save, state=SaveState.COMMITTING, committer=committer))
    turn.note("uploaded", f"{len(save.durable)} of {save.world_size} receipts are on the store", step=save.id.step)
    turn.do(Commit(node=committer, generation=save.id.generation, step=save.id.step))


def on_index_decided(turn: Turn, event: IndexDecided) -> None:
    """The checkpoint is real, or will never be."""
    save = _save_of(turn, event.generation, event.step)
    if save is None:
        return
    _settle(turn, save, committed=event.committed)
    if event.committed:
        known = turn.job.newest_committed
        newest = save.id if known is None else max(known, save.id)
        turn.set(newest_committed=newest, committed_at_seconds=turn.now, failures=0, fruitless=0)
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
    save = _save_of(turn, event.generation, event.step)
    if save is None or save.state not in (SaveState.COMMITTING, SaveState.ABANDONING):
        return
    if save.state is SaveState.COMMITTING and save.attempts < COMMIT_ATTEMPTS_MAX:
        retry_at = turn.now + COMMIT_RETRY_SECONDS * save.attempts
        turn.set_save(replace(save, state=SaveState.UPLOADING, attempts=save.attempts + 1, retry_at_seconds=retry_at))
        return
    turn.note("save failed", f"the index could not be written: {event.reason}", node=event.node, step=event.step)
    _settle(turn, save, committed=False)


def abandon(turn: Turn, save: Save, reason: str) -> None:
    """Give a decided step up: its folder gets an abandoned index, its slots become free."""
    if save.state is SaveState.ABANDONING:
        return
    turn.note("abandoned", reason, step=save.id.step)
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
    turn.set_save(replace(save, state=SaveState.ABANDONING, committer=node))
    turn.do(Abandon(node=node, generation=save.id.generation, step=save.id.step, reason=reason))


def _settle(turn: Turn, save: Save, *, committed: bool) -> None:
    turn.drop_save(save)
    for node in turn.gang_nodes():
        turn.do(Settled(node=node, generation=save.id.generation, step=save.id.step, committed=committed))


def _any_node(turn: Turn, but: str | None = None) -> str | None:
    """A node to act on the store: one that stays, of the gang, and not the one that has just failed, if possible."""
    members = turn.gang_nodes()
    nodes = members + [node for node in turn.job.nodes if node not in members]
    return min(nodes, key=lambda node: (node == but, turn.job.nodes[node].going), default=None)


def _staging_save(turn: Turn) -> Save | None:
    """The decided step that is not complete yet, if any."""
    return next((save for save in turn.job.saves.values() if save.state is SaveState.STAGING), None)


def _save_of(turn: Turn, generation: int, step: int) -> Save | None:
    return turn.job.saves.get(CheckpointId(generation=generation, step=step))


def _present(turn: Turn, generation: int) -> bool:
    return turn.job.gang is not None and turn.job.gang.generation == generation

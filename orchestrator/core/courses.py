"""What is done about a notice: ask `core.deadline`, say what it chose and why, act on it. Pure; see `core.states`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import agreement, breaking, deadline, growing, settling
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.deadline import Choice, Course, Pending, Situation
from orchestrator.core.ranks import RankSet
from orchestrator.core.states import Node, Phase
from orchestrator.core.turn import Turn

COURSE_CHOSEN = "course chosen"
CANNOT_MAKE_IT = "cannot make it"


def follow(turn: Turn) -> bool:
    """While a notice waits for its leave: choose the course, and act where no new save is it. False: propose nothing.

    Asked when a notice comes, at every tick, and before a decision to leave: time goes by, and a step may take longer
    than it did. Attached workers cannot be started again elsewhere, so with them the save is tried in any case.
    """
    job = turn.job
    leave = job.leave
    victims = turn.going_ranks()
    if job.phase is not Phase.RUNNING or leave is None or not victims:
        return True
    first = _first_to_go(turn)
    may_wait = leave.may_wait and not growing.is_replaced(turn)
    situation = _situation(turn, victims, first, may_wait=may_wait)
    choice = deadline.choose(situation)
    _tell(turn, leave.choice, choice, situation.remaining_seconds)
    trains_on = choice.course is Course.TRAIN
    since_seconds = leave.since_seconds if trains_on or leave.is_due else turn.now
    deadline_seconds = None if first is None else first.deadline_seconds
    turn.set(
        leave=replace(
            leave,
            since_seconds=since_seconds,
            may_wait=trains_on,
            choice=choice,
            deadline_seconds=deadline_seconds,
        )
    )
    if job.spec.attached or choice.makes_it:
        return True
    if choice.course is Course.WAIT:
        turn.set(proposal=None)
    elif choice.course is Course.UPLOAD:
        breaking.break_gang(turn, f"{leave.reason}: step {choice.step} can still be uploaded, nothing newer saved")
    else:
        breaking.break_gang(turn, f"{leave.reason}: {_standing(turn)} stands")
    return False


def can_finish_start(turn: Turn) -> bool:
    """In STARTING, with members that will go: whether there is ample time to train, save and leave after the start."""
    job = turn.job
    first, restart_seconds = _first_to_go(turn), job.measured.restart_seconds
    if first is None or restart_seconds is None or job.spec.attached or job.ending is not None:
        return False
    situation = _situation(turn, turn.going_ranks(), first, may_wait=not growing.is_replaced(turn))
    assert situation.remaining_seconds is not None
    rest_seconds = max(restart_seconds - (turn.now - job.since_seconds), 0.0)
    situation = replace(situation, remaining_seconds=situation.remaining_seconds - rest_seconds, idle_seconds=0.0)
    return deadline.choose(situation).course is Course.TRAIN


def _tell(turn: Turn, before: Choice | None, choice: Choice, remaining_seconds: float | None) -> None:
    """Record the choice, where it differs from the one before."""
    if before is not None and (before.course, before.hand_over) == (choice.course, choice.hand_over):
        return
    trained = turn.job.highest_step > turn.job.ranks.base_step
    facts = turn.facts(
        course=str(choice.course),
        hand_over=choice.hand_over,
        needed_seconds=choice.needed_seconds,
        remaining_seconds=remaining_seconds,
    )
    kind = COURSE_CHOSEN if choice.makes_it or not trained else CANNOT_MAKE_IT
    turn.note(kind, choice.reason, step=choice.step, facts=facts)


def next_step(turn: Turn) -> agreement.StepChoice:
    """The nearest step that an urgent save can be agreed on; one that is being staged comes first if it is as near."""
    job = turn.job
    staging = settling.staging_save(turn)
    near = job.highest_step + agreement.margin_steps(job.step_seconds, job.attempt)
    after = staging.id.step if staging is not None and staging.id.step <= near else None
    return agreement.choose_step(
        highest=job.highest_step, step_seconds=job.step_seconds, until=job.until, after=after, attempt=job.attempt
    )


def _situation(turn: Turn, victims: RankSet, first: Node | None, *, may_wait: bool) -> Situation:
    job = turn.job
    deadline_seconds = None if first is None else first.deadline_seconds
    step = next_step(turn).step
    if job.proposal is not None:
        step = job.proposal.step if step is None else min(step, job.proposal.step)
    dispensable = job.ranks.dispensable(victims)
    own_bytes = [
        job.ranks.unique_bytes[rank] if rank in dispensable else job.ranks.slot_bytes[rank] for rank in victims
    ]
    if not dispensable and not job.condemned and job.shard_bytes:  # nobody will be absent: a slot has room for more
        own_bytes = [min(max(own_bytes, default=0), job.shard_bytes)]
    return Situation(
        remaining_seconds=None if deadline_seconds is None else max(deadline_seconds - turn.now, 0.0),
        trained=job.highest_step > job.ranks.base_step,
        next_step=step,
        steps_away=0 if step is None else max(0, step - job.highest_step),
        idle_seconds=turn.now - job.progress_at_seconds,
        unique_bytes=max(own_bytes, default=0),
        pending=_pending(turn, victims),
        can_hand_over=job.available_count > 0 and all(job.nodes[name].objects_url for name in turn.going_members()),
        standing=_standing(turn),
        measured=replace(job.measured, step_seconds=job.ranks.step_seconds.highest or job.measured.step_seconds),
        notice_seconds=first.notice_seconds if first is not None and may_wait else None,
    )


def _first_to_go(turn: Turn) -> Node | None:
    """The first of the gang's nodes that will be gone; None where no deadline is known."""
    going = (turn.job.nodes[name] for name in turn.going_members())
    known = (node for node in going if node.deadline_seconds is not None)
    return min(known, key=lambda node: node.deadline_seconds or 0.0, default=None)


def _standing(turn: Turn) -> str:
    committed = turn.job.newest_committed
    return "a fresh start" if committed is None else f"checkpoint {committed}"


def _pending(turn: Turn, victims: RankSet) -> tuple[Pending, ...]:
    """Decided steps that are not durable yet, newest first."""
    saves = [save for save in turn.job.saves.values() if save.state is not SaveState.ABANDONING]
    return tuple(_as_pending(turn, save, victims) for save in sorted(saves, key=lambda save: save.id, reverse=True))


def _largest_bytes(turn: Turn, save: Save, needed: RankSet) -> int:
    """Of the shards of these ranks: as they are staged if that is known, else as large as their slots."""
    if needed and needed <= save.staged and save.largest_bytes:
        return save.largest_bytes
    return max((turn.job.ranks.slot_bytes[rank] for rank in needed), default=0)


def _as_pending(turn: Turn, save: Save, victims: RankSet) -> Pending:
    complete = save.state is not SaveState.STAGING
    needed = (save.required & victims) - save.durable - save.held
    return Pending(
        step=save.id.step,
        complete=complete,
        steps_away=max(0, save.id.step - turn.job.highest_step),
        size_bytes=_largest_bytes(turn, save, needed),
        uploading_seconds=turn.now - save.complete_at_seconds if complete else 0.0,
    )

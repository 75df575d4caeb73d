"""What is done about a notice: ask `core.deadline`, say what it chose and why, act on it. Pure; see `core.states`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import agreement, breaking, deadline, settling
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.deadline import Choice, Course, Pending, Situation
from orchestrator.core.ranks import RankSet
from orchestrator.core.states import Phase
from orchestrator.core.turn import Turn

MAKES_IT = "course chosen"
CANNOT_MAKE_IT = "cannot make it"


def follow(turn: Turn) -> bool:
    """While a notice waits for its leave: choose the course, and act where no new save is it. False: propose nothing.

    Asked when a notice comes, at every tick, and before a decision to leave: time goes by, and a step may take longer
    than it did. Attached workers cannot be started again elsewhere, so with them the save is tried in any case.
    """
    job = turn.job
    leave = job.leave
    victims = turn.going_ranks()
    if job.phase is not Phase.RUNNING or leave is None or leave.at_next_save or not victims:
        return True
    first_seconds = _first_deadline(turn)
    remaining_seconds = None if first_seconds is None else max(first_seconds - turn.now, 0.0)
    choice = deadline.choose(_situation(turn, victims, remaining_seconds))
    _tell(turn, leave.choice, choice, remaining_seconds)
    turn.set(leave=replace(leave, choice=choice, deadline_seconds=first_seconds))
    if job.spec.attached or choice.course in (Course.SAVE, Course.END):
        return True
    if choice.course is Course.WAIT:
        turn.set(proposal=None)
    elif choice.course is Course.UPLOAD:
        breaking.break_gang(turn, f"{leave.reason}: step {choice.step} can still be uploaded, nothing newer saved")
    else:
        breaking.break_gang(turn, f"{leave.reason}: {_standing(turn)} stands")
    return False


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
    kind = MAKES_IT if choice.makes_it or not trained else CANNOT_MAKE_IT
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


def _situation(turn: Turn, victims: RankSet, remaining_seconds: float | None) -> Situation:
    job = turn.job
    step = next_step(turn).step
    if job.proposal is not None:
        step = job.proposal.step if step is None else min(step, job.proposal.step)
    everyone = job.ranks.everyone <= victims
    sizes = job.ranks.slot_bytes if everyone else job.ranks.unique_bytes
    return Situation(
        remaining_seconds=remaining_seconds,
        trained=job.highest_step > job.ranks.base_step,
        next_step=step,
        steps_away=0 if step is None else max(0, step - job.highest_step),
        idle_seconds=turn.now - job.progress_at_seconds,
        unique_bytes=max((sizes[rank] for rank in victims), default=0),
        pending=_pending(turn, victims),
        can_hand_over=job.available_count > 0 and all(job.nodes[name].objects_url for name in turn.going_members()),
        standing=_standing(turn),
        measured=replace(job.measured, step_seconds=job.ranks.step_seconds.highest or job.measured.step_seconds),
    )


def _first_deadline(turn: Turn) -> float | None:
    """When the first of the gang's nodes is gone."""
    deadlines = (turn.job.nodes[name].deadline_seconds for name in turn.going_members())
    return min((seconds for seconds in deadlines if seconds is not None), default=None)


def _standing(turn: Turn) -> str:
    committed = turn.job.newest_committed
    return "a fresh start" if committed is None else f"checkpoint {committed}"


def _pending(turn: Turn, victims: RankSet) -> tuple[Pending, ...]:
    """Decided steps that are not durable yet, newest first."""
    saves = [save for save in turn.job.saves.values() if save.state is not SaveState.ABANDONING]
    return tuple(_as_pending(turn, save, victims) for save in sorted(saves, key=lambda save: save.id, reverse=True))


def _as_pending(turn: Turn, save: Save, victims: RankSet) -> Pending:
    complete = save.state is not SaveState.STAGING
    needed = (save.required & victims) - save.durable - save.held
    return Pending(
        step=save.id.step,
        complete=complete,
        steps_away=max(0, save.id.step - turn.job.highest_step),
        size_bytes=max((turn.job.ranks.slot_bytes[rank] for rank in needed), default=0),
        uploading_seconds=turn.now - save.complete_at_seconds if complete else 0.0,
    )

"""No rank takes a step any more: suspect, ask the nodes, name the culprit, start again. Pure; see `core.states`.

Asked at every tick, in RUNNING alone: starting and leaving have limits of their own. What a supervisor or an agent did
not see while it stood still itself counts for nobody. How a hang is told from a pause is `core.hangs`' affair.
"""

from __future__ import annotations

from orchestrator.core import breaking
from orchestrator.core.hangs import PACES, Judgement, Sign, ending_seconds, judge, limit_seconds
from orchestrator.core.messages import Look, Looked, Paused
from orchestrator.core.states import Job, Phase
from orchestrator.core.turn import Turn

STOOD_STILL_SECONDS = 5.0  # between two ticks: more than any load makes of a tenth of a second
ANSWER_SECONDS = 10.0  # that a node has to say what its workers do
ASK_AGAIN_SECONDS = 2.0
HANG_SUSPECTED = "hang suspected"
HANG_JUDGED = "hang judged"
HANG_OVER = "hang over"


def on_steps(turn: Turn, steps: int) -> None:
    """The highest step has risen by so many; how long that took is a pause that was no hang."""
    job = turn.job
    if job.phase is not Phase.RUNNING:
        return
    quiet = job.quiet
    took = _quiet_seconds(turn.job, turn.now)
    if quiet.asked_at_seconds is not None:
        turn.note(HANG_OVER, f"step {job.highest_step} came after {took:.0f} s", step=job.highest_step)
    if not job.awaiting_first_step and not _stood_still(turn):
        paces = (*quiet.paces_seconds, took / steps)[-PACES:]
        quiet = quiet.changed(paces_seconds=paces, longest_seconds=max(quiet.longest_seconds, took))
    if job.highest_step > quiet.presumed_step:  # no pause that comes at this step, so it was a hang
        quiet = quiet.changed(presumed_seconds=0.0)
    turn.set(quiet=quiet.changed(since_seconds=turn.now, asked_at_seconds=None, looks={}, told=""))


def seconds_without_step(job: Job, now_seconds: float) -> float | None:
    """While steps are to be expected: how long none has come, as far as that counts."""
    return _quiet_seconds(job, now_seconds) if job.phase is Phase.RUNNING else None


def suspicion(job: Job) -> str | None:
    """What is known of a hang that is suspected just now."""
    if job.quiet.asked_at_seconds is None:
        return None
    return job.quiet.told or "suspected: the nodes are asked what their workers do"


def begin(turn: Turn) -> None:
    """Another gang, perhaps of another size: what was learnt of pauses stays, but not how fast it is."""
    turn.set(quiet=turn.job.quiet.changed(paces_seconds=(), pauses={}, asked_at_seconds=None, looks={}, told=""))


def on_paused(turn: Turn, event: Paused) -> None:
    """A script has said that no step comes for a while, or that this is over; both are signs of life."""
    if not turn.is_present(event.generation):
        return
    pauses = {node: until for node, until in turn.job.quiet.pauses.items() if node != event.node}
    if event.remaining_seconds is not None:
        pauses[event.node] = turn.now + event.remaining_seconds
    turn.set(quiet=turn.job.quiet.changed(pauses=pauses))
    _let_be(turn, "the script pauses" if event.remaining_seconds is not None else "a pause is over")


def on_looked(turn: Turn, event: Looked) -> None:
    """A node has looked at its workers."""
    job = turn.job
    quiet = job.quiet
    asked = quiet.asked_at_seconds is not None and event.step == job.highest_step
    if job.phase is not Phase.RUNNING or not asked or not turn.is_present(event.generation):
        return
    if any(look.step > event.step for look in event.ranks):
        _let_be(turn, f"{event.node} has seen a later step")
    elif event.awake_seconds < job.spec.hang_seconds:  # its workers may have stood still with it
        _let_be(turn, f"the agent of {event.node} stood still itself, {event.awake_seconds:.0f} s ago")
    elif traced := [look.rank for look in event.ranks if look.traced]:
        _let_be(turn, f"a debugger holds ranks {traced} on {event.node}")
    else:
        turn.set(quiet=quiet.changed(looks={**quiet.looks, event.node: event}))
        _judge_if_known(turn)


def watch(turn: Turn) -> None:
    """In RUNNING, at every tick."""
    job = turn.job
    stood_still = _stood_still(turn)
    turn.set(quiet=job.quiet.changed(watched_at_seconds=turn.now))
    if job.phase is not Phase.RUNNING or not _applies(turn):
        return
    if stood_still:
        _let_be(turn, "the supervisor stood still itself")
        return
    limit = _limit_seconds(turn)
    asked = job.quiet.asked_at_seconds
    if asked is None:
        if _quiet_seconds(turn.job, turn.now) > limit:
            _suspect(turn, limit)
        return
    waited, known = turn.now - asked, len(job.quiet.looks) == len(turn.gang_nodes())
    if waited >= max(limit, ASK_AGAIN_SECONDS if known else ANSWER_SECONDS + ASK_AGAIN_SECONDS):
        _ask(turn)
    elif waited >= ANSWER_SECONDS:
        _judge_if_known(turn, all_have_answered=True)


def _applies(turn: Turn) -> bool:
    """Whether steps are to be expected: nobody has ended, and the last one is not done."""
    job = turn.job
    return job.spec.hang_seconds > 0 and not job.ranks.exited and (job.until is None or job.highest_step < job.until)


def _stood_still(turn: Turn) -> bool:
    watched = turn.job.quiet.watched_at_seconds
    return turn.now - max(watched, turn.job.since_seconds) > STOOD_STILL_SECONDS


def _quiet_seconds(job: Job, now_seconds: float) -> float:
    paused_until = min(max(job.quiet.pauses.values(), default=0.0), now_seconds)
    return now_seconds - max(job.quiet.since_seconds, job.since_seconds, paused_until)


def _limit_seconds(turn: Turn) -> float:
    """The first step compiles: it has the time that a start has."""
    job = turn.job
    limit = limit_seconds(job.quiet, job.spec.hang_seconds)
    return max(limit, job.spec.start_seconds) if job.awaiting_first_step else limit


def _let_be(turn: Turn, why: str) -> None:
    """Time begins anew."""
    quiet = turn.job.quiet
    if quiet.asked_at_seconds is not None and quiet.told != why:
        turn.note(HANG_OVER, why, step=turn.job.highest_step)
    turn.set(quiet=quiet.changed(since_seconds=turn.now, asked_at_seconds=None, looks={}, told=why))


def _suspect(turn: Turn, limit: float) -> None:
    job = turn.job
    lowest = job.lowest_step
    behind = [rank for rank, step in enumerate(job.ranks.steps) if step == lowest]
    alike = len(behind) == job.ranks.world_size
    told, more = behind[: breaking.MISSING_TOLD_MAX], len(behind) - breaking.MISSING_TOLD_MAX
    others = f" and {more} more" if more > 0 else ""
    who = f"all ranks are at step {lowest}" if alike else f"ranks {told}{others} are behind, at step {lowest}"
    seconds = _quiet_seconds(job, turn.now)
    turn.note(
        HANG_SUSPECTED,
        f"no step after {job.highest_step} for {seconds:.0f} s (the limit is {limit:.0f} s): {who}",
        step=job.highest_step,
        facts=turn.facts(quiet_seconds=seconds, limit_seconds=limit),
    )
    _ask(turn)


def _ask(turn: Turn) -> None:
    job = turn.job
    assert job.gang is not None
    turn.set(quiet=job.quiet.changed(asked_at_seconds=turn.now, looks={}))
    for node in turn.gang_nodes():
        turn.do(Look(node=node, generation=job.gang.generation, step=job.highest_step))


def _judge_if_known(turn: Turn, *, all_have_answered: bool = False) -> None:
    """Once every node has answered, or has had its time to."""
    job = turn.job
    assert job.gang is not None
    looks = job.quiet.looks
    if not all_have_answered and any(node not in looks for node in turn.gang_nodes()):
        return
    judgement = judge(job.gang, [look for answer in looks.values() for look in answer.ranks])
    if judgement is None:
        return  # nobody answers: the supervisor may be the one that is cut off
    quiet_seconds, limit = _quiet_seconds(turn.job, turn.now), _limit_seconds(turn)
    _tell(turn, judgement, quiet_seconds)
    needed_seconds = ending_seconds(job.quiet, limit, judgement.sign)
    if job.spec.attached or needed_seconds is None:
        return
    if job.awaiting_first_step:  # it has a limit that is ample already
        needed_seconds = limit
    if quiet_seconds >= needed_seconds:
        _end(turn, judgement, quiet_seconds)


def _tell(turn: Turn, judgement: Judgement, quiet_seconds: float) -> None:
    job = turn.job
    if judgement.words == job.quiet.told:
        return
    turn.set(quiet=job.quiet.changed(told=judgement.words))
    turn.note(
        HANG_JUDGED,
        judgement.words,
        node=_node(turn, judgement),
        rank=judgement.ranks[0] if len(judgement.ranks) == 1 else None,
        step=job.highest_step,
        facts=turn.facts(sign=str(judgement.sign), quiet_seconds=quiet_seconds),
    )


def _node(turn: Turn, judgement: Judgement) -> str | None:
    """The one node that all culprits are on."""
    gang = turn.job.gang
    assert gang is not None
    nodes = {gang.node_of(rank) for rank in judgement.ranks}
    return nodes.pop() if len(nodes) == 1 else None


def _end(turn: Turn, judgement: Judgement, quiet_seconds: float) -> None:
    """A failure; what may have been a pause all the same is waited for longer next time."""
    job = turn.job
    node, quiet = _node(turn, judgement), job.quiet
    if judgement.sign is not Sign.STOPPED:
        quiet = quiet.changed(
            presumed_seconds=quiet_seconds,
            presumed_step=job.highest_step,
            ended_after_seconds=max(quiet.ended_after_seconds, quiet_seconds),
        )
    if node is not None and node == quiet.blamed:
        breaking.do_without(turn, node, "its ranks held the others up twice in a row")
    turn.set(quiet=quiet.changed(blamed=node))
    breaking.fail_gang(turn, f"hang: no step after {job.highest_step} for {quiet_seconds:.0f} s; {judgement.words}")

"""From nodes to a running gang: gathering, opening a generation, starting its workers. Pure; see `core.states`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core import (
    breaking,
    finishing,
    hanging,
    hosts,
    leaving,
    losses,
    nearby,
    preflight,
    proposing,
    returning,
    rollback,
    shards,
    straggling,
)
from orchestrator.core.ladder import evidence, growing_seconds
from orchestrator.core.membership import Gang, choose_size, form, order
from orchestrator.core.messages import (
    CheckpointId,
    GenerationOpened,
    GenerationRefused,
    LaunchWorkers,
    NodeJoined,
    NodeUnfit,
    OpenGeneration,
    Outcome,
    RankAttached,
    RankPlanned,
    Refusal,
    ReleaseNode,
    RequestNodes,
)
from orchestrator.core.ranks import NOBODY, Ranks, RankSet
from orchestrator.core.states import Ending, Job, Leave, Phase, Trigger
from orchestrator.core.turn import Turn
from orchestrator.core.wording import all_of, counted
from orchestrator.errors import ExitCode

FIRST_OPEN_RETRIES_MAX = 4  # at the very start of a job; later a failing store is asked for ever
UNFIT_PAUSE_SECONDS_FIRST, UNFIT_PAUSE_SECONDS_MAX = 5.0, 60.0  # before another node, after several unfit in a row
OPEN_PAUSE_SECONDS_MAX = 60.0  # between two attempts to open a generation while the store fails


def on_node_joined(turn: Turn, event: NodeJoined) -> None:
    """A node connected for the first time."""
    job = turn.job
    if event.node in job.nodes or event.node in job.given_back:
        return
    turn.add_node(event.node, event.objects_url)
    turn.set(nodes_requested=max(0, job.nodes_requested - 1), unfit=0, request_at_seconds=0.0)
    turn.note("node joined", f"{counted(event.workers, 'worker')} can run there", node=event.node)
    if event.returned is not None:
        returning.on_gang_returned(turn, event.returned)


def on_node_unfit(turn: Turn, event: NodeUnfit) -> None:
    """A node has found its devices not fit for a worker: it is given back, and never joins.

    Where the scheduler has nothing else, another one is that same machine again: each is asked for later than the last.
    """
    job = turn.job
    if event.node in job.nodes or event.node in job.given_back:
        return
    pause_seconds = growing_seconds(job.unfit, UNFIT_PAUSE_SECONDS_FIRST, UNFIT_PAUSE_SECONDS_MAX)
    turn.set(nodes_requested=max(0, job.nodes_requested - 1), expected=job.expected - {event.node})
    turn.set(unfit=job.unfit + 1, request_at_seconds=turn.now + pause_seconds)
    then = f"; another one is asked for in {pause_seconds:.0f} s" if pause_seconds else ""
    turn.note("node unfit", event.reason + then, node=event.node)
    turn.do(ReleaseNode(node=event.node, reason=event.reason))


def consider(turn: Turn) -> None:
    """In GATHERING: ask for missing nodes, give back those that are going or too many, form when it is time."""
    job = turn.job
    if job.phase is not Phase.GATHERING:
        return
    if returning.decide(turn):
        return
    if job.ending is not None:
        finishing.conclude(turn)
        return
    _give_back(turn)
    request_missing(turn)
    job = turn.job
    if turn.now < job.retry_at_seconds:
        turn.set(ended_at_seconds=None)
        return
    size = choose_size(
        available=job.available_count,
        nodes_min=min(job.spec.nodes_min, job.wanted_nodes),
        nodes_wanted=job.wanted_nodes,
        workers_per_node=job.spec.workers_per_node,
        allowed_world_sizes=job.allowed_world_sizes,
    )
    is_patient = job.own is None or job.condemned
    patience = job.spec.gather_seconds if is_patient else job.spec.reform_seconds
    if size.count is None:
        if not size.could_grow:
            turn.set(ending=Ending(outcome=Outcome.FAILED, exit_code=int(ExitCode.USAGE), reason=size.reason))
            finishing.conclude(turn)
        # patience begins when there are enough nodes to form at all
        turn.set(since_seconds=turn.now, ended_at_seconds=None)
        return
    since_seconds = job.since_seconds if job.ended_at_seconds is None else job.ended_at_seconds
    if (size.could_grow or job.condemned) and turn.now - since_seconds < patience:
        return
    if rollback.has_to_wait(turn):
        return
    previous = job.gang.nodes if job.gang else ()
    members = order(available=job.available, previous=previous, places=job.places)[: size.count]
    opener = members[job.open_failures % len(members)]  # one that cannot reach the store must not stop everybody
    turn.set(members=_led_by(opener, members), opener=opener)
    turn.do(OpenGeneration(node=opener, own=job.own, avoid=job.avoid, rollback_to=job.rollback_to))
    turn.go(Trigger.ENOUGH_NODES)


def _led_by(opener: str, members: Sequence[str]) -> tuple[str, ...]:
    """The opener has rank 0: there the workers meet."""
    return opener, *(name for name in members if name != opener)


def request_missing(turn: Turn) -> None:
    """Ask the scheduler for the nodes that are wanted and neither there nor asked for.

    In place of a condemned node another one is asked for once its gang has ended: it may train on for long.
    """
    job = turn.job
    if job.ending is not None or job.spec.attached or turn.now < job.request_at_seconds:
        return
    there = job.sound_count if job.phase is Phase.GATHERING else job.available_count
    missing = job.wanted_nodes - there - job.nodes_requested
    if missing > 0:
        turn.set(nodes_requested=job.nodes_requested + missing)
        turn.do(RequestNodes(count=missing, reason=f"{there} of {job.wanted_nodes} wanted nodes are there"))


def _give_back(turn: Turn) -> None:
    for name in sorted(turn.job.condemned - turn.job.going):
        breaking.do_without(turn, name, "; ".join(turn.job.nodes[name].condemned.values()))
    job = turn.job
    too_many = job.nodes_requested == 0 and job.available_count > job.wanted_nodes
    unwanted = {name: why for name, why in job.unwanted.items() if name in job.nodes}
    if job.spec.attached or not (too_many or job.going or unwanted):
        return
    staying = [name for name in job.available if name not in unwanted]
    extra = set(staying[job.wanted_nodes :]) if too_many else set()
    for name, node in list(job.nodes.items()):
        if node.going:
            release(turn, name, "it was announced to go, and nothing of it is needed any more")
        elif name in unwanted:
            release(turn, name, unwanted[name])
        elif name in extra:
            release(turn, name, f"the job runs on {counted(job.wanted_nodes, 'node')} now")


def release(turn: Turn, name: str, reason: str) -> None:
    """Give a node back; from now on it does not exist for the job."""
    turn.remove_node(name)
    turn.do(ReleaseNode(node=name, reason=reason))
    turn.note("node released", reason, node=name)


def on_generation_opened(turn: Turn, event: GenerationOpened) -> None:
    """The generation is ours: launch, unless a member has gone in the meantime.

    A member that was given up as opener and answers after all will do: where every opening takes too long, no other
    would ever count. But its base was chosen when it was asked: after another gang has trained, it is an old one.
    """
    job = turn.job
    turn.set(own=max(event.generation, job.own or 0))
    if job.phase is not Phase.OPENING or event.node not in job.members or _is_outdated(job, event):
        return
    if job.ending is not None and event.node != job.opener:
        return  # the opener may still claim a higher number: an end record before that would not be the last word
    turn.set(opener=event.node, members=_led_by(event.node, job.members))
    unused = _why_unused(turn.job, event)
    rollback.on_opened(turn, event)
    if unused is None:
        _note_opened(turn, event)
        _launch(turn, event)
        return
    turn.note("generation unused", f"it was opened, and {unused}", generation=event.generation)
    if job.ending is not None:
        turn.go(Trigger.CONCLUDED)
        finishing.record(turn)
    else:
        turn.go(Trigger.OPEN_FAILED)
        consider(turn)


def _why_unused(job: Job, event: GenerationOpened) -> str | None:
    """What has come in between since this generation was asked for; None: nothing, it is launched."""
    if job.ending is not None:
        return f"the job ends: {job.ending.reason}"
    if event.generation != job.own:
        return f"generation {job.own} is there already"
    if event.base in job.avoid:
        return f"its base {event.base} is avoided by now"
    if not rollback.is_answered(job, event):
        return f"the job is to go back to step {job.rollback_to}"
    lacking = [name for name in job.members if name not in job.nodes or name in job.going]
    if lacking:
        return f"{lacking[0]} goes, or is gone"
    if len(job.members) > job.wanted_nodes:
        return f"the job shall have {counted(job.wanted_nodes, 'node')} now"
    return None


def _note_opened(turn: Turn, event: GenerationOpened) -> None:
    job = turn.job
    base = f"checkpoint {event.base}" if event.base else "a fresh start"
    turn.note(
        "generation opened",
        f"{counted(len(job.members), 'node loads', 'nodes load')} {base}"
        + (f", {event.rolled_forward} rolled forward" if event.rolled_forward else ""),
        generation=event.generation,
        step=event.base.step if event.base else 0,
        facts=turn.facts(world_size=len(job.members) * job.spec.workers_per_node, nodes=" ".join(job.members)),
    )
    for problem in event.skipped:
        turn.note("checkpoint skipped", problem, generation=event.generation)


def _is_outdated(job: Job, event: GenerationOpened) -> bool:
    """Whether it was asked for before the last gang was formed: it knows nothing of what that one has committed."""
    return job.gang is not None and event.after is not None and event.after < job.gang.generation


def _launch(turn: Turn, event: GenerationOpened) -> None:
    job = turn.job
    _note_restart(turn, event, job.gang.world_size if job.gang else None)
    gang = form(generation=event.generation, nodes=job.members, workers_per_node=job.spec.workers_per_node)
    if _is_progress(turn, event):
        turn.commit_is_new()
    base_gang = nearby.gang_of_base(turn.job, event.base)
    holders = nearby.holders(turn.job, base_gang, event.base)
    turn.set(base_gang=base_gang, gang=gang)
    _begin(turn, gang, event.base)
    for name in gang.nodes:
        if name in job.condemned:
            turn.note(hosts.HOST_TROUBLE, "it is used again: there are too few other nodes", node=name)
    turn.go(Trigger.OPENED)
    for place in gang.places:
        turn.do(
            LaunchWorkers(
                node=place.node,
                generation=gang.generation,
                world_size=gang.world_size,
                first_rank=place.first_rank,
                count=place.count,
                base=event.base,
                meeting_address=event.meeting_address,
                meeting_port=event.meeting_port,
                holders=holders(place),
            )
        )


def _begin(turn: Turn, gang: Gang, base: CheckpointId | None) -> None:
    """What is remembered of a generation begins anew; how long a step takes is learnt from the one before."""
    job, step = turn.job, base.step if base else 0
    step_seconds = job.ranks.step_seconds.highest or job.measured.step_seconds
    turn.set(
        measured=replace(job.measured, step_seconds=step_seconds),
        base=base,
        newest_committed=base,
        committed_at_seconds=job.committed_at_seconds if base == job.newest_committed else None,
        ranks=Ranks.starting(gang.world_size, step),
        lost_in_gang=(),
        gone_ranks=NOBODY,
        lost_at_seconds=None,
        proposal=None,
        attempt=1,
        ballot=0,
        saves={},
        shard_bytes=0,
        last_save_step=step,
        leave=None,
        fault=None,
        barren=job.barren + 1,
        open_failures=0,
        awaiting_first_step=True,
        taken_back=False,
    )
    hanging.begin(turn)
    straggling.begin(turn)
    losses.begin(turn)


def _note_restart(turn: Turn, event: GenerationOpened, old_size: int | None) -> None:
    if old_size is None:
        return
    size = len(turn.job.members) * turn.job.spec.workers_per_node
    where = {"generation": event.generation, "step": event.base.step if event.base else 0}
    if size == old_size:
        turn.note("restarted", f"same world size {size}", **where)
    else:
        turn.note("remapped", f"world size {old_size} becomes {size}", **where)


def _is_progress(turn: Turn, event: GenerationOpened) -> bool:
    """Whether the base is newer than what was known as committed: rolled forward by the opener."""
    known = turn.job.newest_committed
    return event.base is not None and (known is None or event.base > known)


def on_generation_refused(turn: Turn, event: GenerationRefused) -> None:
    """Fenced or over: stop. A failing store: try again, at the very start a few times only.

    A store that may not be used is at the very start the user's mistake, and later one that may still be mended.
    """
    job = turn.job
    if job.phase is not Phase.OPENING or event.node != job.opener:
        return
    if event.refusal is Refusal.ROLLBACK:
        rollback.on_refused(turn, event)
        return
    started = job.own is not None or job.ever_attached
    hopeful = event.refusal is Refusal.STORE and job.open_failures < FIRST_OPEN_RETRIES_MAX
    if hopeful or (started and event.refusal in (Refusal.STORE, Refusal.DENIED)):
        turn.note("store failed", f"no generation could be opened: {event.reason}", node=event.node)
        turn.go(Trigger.OPEN_FAILED)
        pause_seconds = growing_seconds(job.open_failures + 1, job.spec.store_retry_seconds, OPEN_PAUSE_SECONDS_MAX)
        turn.set(retry_at_seconds=turn.now + pause_seconds, open_failures=job.open_failures + 1)
        return
    codes = {
        Refusal.FENCED: ExitCode.FENCED,
        Refusal.DONE: ExitCode.DONE,
        Refusal.CANCELLED: ExitCode.FAILED,
        Refusal.STORE: ExitCode.FAILED,
        Refusal.DENIED: ExitCode.FAILED,
        Refusal.FORMAT: ExitCode.NEVER_RESTART,
    }
    turn.go(Trigger.REFUSED)
    tried = f"; {evidence(job.attempts)}" if event.refusal is Refusal.FORMAT and job.attempts else ""
    finishing.finish(turn, int(codes[event.refusal]), event.reason + tried)


def on_rank_attached(turn: Turn, event: RankAttached) -> None:
    """A rank has restored its state; when all have, the job runs."""
    job = turn.job
    if job.phase is not Phase.STARTING or not turn.is_present(event.generation):
        return
    turn.set(ranks=job.ranks.attach(event.rank, pid=event.pid, step=event.step))
    turn.set(ever_attached=True, until=event.until, allowed_world_sizes=event.allowed_world_sizes)
    job = turn.job
    assert job.gang is not None
    allowed = event.allowed_world_sizes
    if allowed is not None and job.gang.world_size not in allowed:
        breaking.break_gang(
            turn, f"world size {job.gang.world_size} does not divide the global batch; {list(allowed)} do"
        )
        return
    if job.ranks.everyone <= job.ranks.attached:
        turn.go(Trigger.ALL_ATTACHED)
        turn.set(progress_at_seconds=turn.now)
        turn.note("running", f"{all_of(job.gang.world_size, 'rank')} attached at step {event.step}", step=event.step)
        _resume_leaving(turn)
        proposing.drive(turn)


def _resume_leaving(turn: Turn) -> None:
    """What the gang's nodes have been told since it was started, or what it had been told before it was taken back."""
    if turn.leaving_save() is not None:
        turn.set(leave=Leave(reason="it was decided before the supervisor was started again", since_seconds=turn.now))
        turn.go(Trigger.LEAVE_DECIDED)
        shards.move_saves(turn)
    for name in turn.going_members():
        leaving.node_is_going(turn, name)
    if turn.job.ending is not None:
        leaving.leave(turn, turn.job.ending.reason)
    elif turn.job.gang is not None and len(turn.job.gang.nodes) > turn.job.wanted_nodes:
        leaving.leave(turn, f"the job shall have {counted(turn.job.wanted_nodes, 'node')} now")


def on_rank_planned(turn: Turn, event: RankPlanned) -> None:
    """Preflight: print once, for the whole gang, what saving will need."""
    if not turn.is_present(event.generation):
        return
    ranks = turn.job.ranks.plan(
        event.rank,
        slot_bytes=event.slot_bytes,
        unique_bytes=event.unique_bytes,
        twins=tuple(map(RankSet.of, event.twins)),
    )
    turn.set(ranks=ranks)
    preflight.report(turn)

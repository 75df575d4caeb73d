"""Whether nodes that are there but not in the gang are worth a restart of it. Pure; see `core.states`.

`leaving` and `courses` ask whether there are any; `core.job` lets the gang grow at its ticks.
"""

from __future__ import annotations

from orchestrator.core.membership import choose_size, order
from orchestrator.core.policy import worth_growing
from orchestrator.core.states import Leave, Phase
from orchestrator.core.turn import Turn

RESTART_SECONDS_ASSUMED = 10.0  # before any restart was measured


def grow_if_worth_it(turn: Turn) -> bool:
    """In RUNNING: all leave at the nearest step to let nodes in that have waited long enough. True: they do."""
    job = turn.job
    if job.phase is not Phase.RUNNING or job.leave is not None or job.awaiting_first_step or not could_grow(turn):
        return False
    assert job.gang is not None
    new = _could_join(turn)
    restart_seconds = job.measured.restart_seconds or RESTART_SECONDS_ASSUMED
    answer = worth_growing(
        waited_node_seconds=sum(turn.now - max(job.since_seconds, job.nodes[name].joined_at_seconds) for name in new),
        members=len(job.gang.nodes),
        restart_seconds=restart_seconds,
        trained_seconds=turn.now - job.since_seconds,
        rest_seconds=None if job.until is None else (job.until - job.highest_step) * job.step_seconds,
    )
    if answer.worth_it:
        turn.set(leave=Leave(reason=f"{', '.join(new)} can join: {answer.reason}", since_seconds=turn.now))
    return answer.worth_it


def could_grow(turn: Turn) -> bool:
    """Whether the gang would be larger with the nodes that are there. Asked often: counts only."""
    return _size(turn) > (len(turn.job.gang.nodes) if turn.job.gang else 0)


def is_replaced(turn: Turn) -> bool:
    """Whether a gang of the nodes that stay would be as large as the present one."""
    return turn.job.gang is not None and _size(turn) >= len(turn.job.gang.nodes)


def _size(turn: Turn) -> int:
    """How many nodes a new gang would have of those that are there and sound; 0 if no other gang can be formed."""
    job = turn.job
    if job.gang is None or job.spec.attached:
        return 0
    size = choose_size(
        available=job.sound_count,
        nodes_min=1,
        nodes_wanted=job.wanted_nodes,
        workers_per_node=job.spec.workers_per_node,
        allowed_world_sizes=job.allowed_world_sizes,
    )
    return size.count or 0


def _could_join(turn: Turn) -> list[str]:
    """The nodes outside the gang that would be in the larger one."""
    job = turn.job
    assert job.gang is not None
    members = set(job.gang.nodes)
    sound = [name for name in job.available if name not in job.condemned]
    chosen = order(available=sound, previous=job.gang.nodes, places=job.places)[: _size(turn)]
    return [node for node in chosen if node not in members]

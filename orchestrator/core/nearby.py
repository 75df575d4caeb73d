"""Whose memory may still hold the base's shards, so that a restart need not read them from the store. Pure.

Only a hint: a node that has freed a shard, or is gone, is passed over by whoever reads. Called by `core.forming`.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.core.ladder import may_read_memory
from orchestrator.core.membership import Gang, Place
from orchestrator.core.messages import CheckpointId, Holder
from orchestrator.core.states import Job

HOLDERS_MAX = 64
"""Nodes of which every node is told; of larger gangs only the one with its own ranks, or the words would be n × n."""


def gang_of_base(job: Job, base: CheckpointId | None) -> Gang | None:
    """The gang that staged the base: the one before, or the one whose checkpoint that one had loaded."""
    known = (job.gang, job.base_gang)
    return next((gang for gang in known if gang and base and gang.generation == base.generation), None)


def holders(job: Job, gang: Gang | None, base: CheckpointId | None) -> Callable[[Place], tuple[Holder, ...]]:
    """What the node at a place of the new gang is told; `gang` staged the base."""
    if gang is None or base is None or not may_read_memory(job.attempts, base):
        return lambda place: ()
    found = {place.first_rank: holder for place in gang.places if (holder := _holder(job, place))}
    if len(gang.places) <= HOLDERS_MAX:
        everyone = tuple(found.values())
        return lambda place: everyone
    return lambda place: (found[place.first_rank],) if place.first_rank in found else ()


def _holder(job: Job, place: Place) -> Holder | None:
    node = job.nodes.get(place.node)
    if node is None or not node.objects_url:
        return None
    return Holder(first_rank=place.first_rank, count=place.count, objects_url=node.objects_url)

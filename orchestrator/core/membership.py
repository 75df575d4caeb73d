"""Who is in the next generation. Pure; called by `core.job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.core.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node's share of the ranks: first_rank … first_rank + count - 1."""

    node: str
    first_rank: int
    count: int

    @property
    def ranks(self) -> range:
        """The ranks that live on this node."""
        return range(self.first_rank, self.first_rank + self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A generation's fixed membership, ranks in node order."""

    generation: int
    places: tuple[Place, ...]
    nodes: tuple[str, ...] = field(init=False, repr=False)
    """The nodes, in rank order."""
    world_size: int = field(init=False, repr=False)
    """Number of ranks."""
    _by_node: Mapping[str, Place] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_node = {place.node: place for place in self.places}
        object.__setattr__(self, "_by_node", by_node)
        object.__setattr__(self, "nodes", tuple(by_node))
        object.__setattr__(self, "world_size", sum(place.count for place in self.places))

    def __contains__(self, node: str) -> bool:
        return node in self._by_node

    def ranks_of(self, node: str) -> range:
        """The ranks on a node; empty if it is not a member."""
        place = self._by_node.get(node)
        return range(0) if place is None else place.ranks

    def node_of(self, rank: int) -> str:
        """The node a rank lives on."""
        return next(place.node for place in self.places if rank in place.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many nodes to form with (None: cannot form yet), whether waiting could give more, and why."""

    count: int | None
    could_grow: bool
    reason: str


def choose_size(
    *,
    available: int,
    nodes_min: int,
    nodes_wanted: int,
    workers_per_node: int,
    allowed_world_sizes: Sequence[int] | None,
) -> Size:
    """The size of the largest allowed gang out of so many available nodes."""
    largest = largest_allowed(nodes_wanted, workers_per_node, allowed_world_sizes)
    count = largest_allowed(min(available, nodes_wanted), workers_per_node, allowed_world_sizes)
    if largest < nodes_min or largest == 0:
        return Size(
            count=None,
            could_grow=False,
            reason=f"no number of nodes from {nodes_min} to {nodes_wanted} with "
            f"{counted(workers_per_node, 'worker')} each gives an allowed world size {list(allowed_world_sizes or ())}",
        )
    if count < nodes_min or count == 0:
        return Size(
            count=None,
            could_grow=True,
            reason=f"{counted(available, 'node is', 'nodes are')} available, {nodes_min} needed",
        )
    spare = available - count
    reason = f"{count} of {nodes_wanted} wanted nodes" + (f", {spare} spare" if spare else "")
    return Size(count=count, could_grow=count < largest, reason=reason)


def order(
    *, available: Sequence[str], previous: Sequence[str], places: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """The nodes in the order in which they get ranks: survivors first, so that they keep their ranks' order.

    Newcomers that stand near each other get ranks beside each other; those of which that is not known come first.
    """
    there = set(available)
    survivors = [node for node in previous if node in there]
    newcomers = there.difference(survivors)
    return (*survivors, *sorted(newcomers, key=lambda node: (places.get(node, ""), len(node), node)))


def largest_allowed(nodes: int, workers_per_node: int, allowed_world_sizes: Sequence[int] | None) -> int:
    """The largest number of whole nodes, at most `nodes`, whose world size the job allows; 0 if there is none."""
    if allowed_world_sizes is None:
        return nodes
    counts = (size // workers_per_node for size in allowed_world_sizes if size % workers_per_node == 0)
    return max((count for count in counts if 0 < count <= nodes), default=0)


def form(*, generation: int, nodes: Sequence[str], workers_per_node: int) -> Gang:
    """Assign ranks to nodes in order."""
    places = tuple(
        Place(node=node, first_rank=index * workers_per_node, count=workers_per_node)
        for index, node in enumerate(nodes)
    )
    return Gang(generation=generation, places=places)

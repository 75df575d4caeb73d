"""Who is in the next generation. Pure; called by `core.job`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(place.count for place in self.places)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes, in rank order."""
        return tuple(place.node for place in self.places)

    def ranks_of(self, node: str) -> range:
        """The ranks on a node; empty if it is not a member."""
        return next((place.ranks for place in self.places if place.node == node), range(0))

    def node_of(self, rank: int) -> str:
        """The node a rank lives on."""
        return next(place.node for place in self.places if rank in place.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The nodes to form with (None: cannot form yet), whether waiting could give more, and why."""

    nodes: tuple[str, ...] | None
    could_grow: bool
    reason: str


def choose_members(
    *,
    available: Sequence[str],
    previous: Sequence[str],
    nodes_min: int,
    nodes_wanted: int,
    workers_per_node: int,
    allowed_world_sizes: Sequence[int] | None,
) -> Membership:
    """The largest allowed gang out of the available nodes; survivors first, so that they keep their ranks' order."""
    survivors = [node for node in previous if node in available]
    newcomers = [node for node in available if node not in survivors]
    ordered = survivors + sorted(newcomers, key=lambda node: (len(node), node))
    largest = largest_allowed(nodes_wanted, workers_per_node, allowed_world_sizes)
    count = largest_allowed(min(len(ordered), nodes_wanted), workers_per_node, allowed_world_sizes)
    if largest < nodes_min or largest == 0:
        return Membership(
            nodes=None,
            could_grow=False,
            reason=f"no number of nodes from {nodes_min} to {nodes_wanted} with {workers_per_node} workers each gives "
            f"an allowed world size {list(allowed_world_sizes or ())}",
        )
    if count < nodes_min or count == 0:
        return Membership(
            nodes=None, could_grow=True, reason=f"{len(ordered)} nodes are available, {nodes_min} are needed"
        )
    spare = len(ordered) - count
    reason = f"{count} of {nodes_wanted} wanted nodes" + (f", {spare} spare" if spare else "")
    return Membership(nodes=tuple(ordered[:count]), could_grow=count < largest, reason=reason)


def largest_allowed(nodes: int, workers_per_node: int, allowed_world_sizes: Sequence[int] | None) -> int:
    """The largest number of whole nodes, at most `nodes`, whose world size the job allows; 0 if there is none."""
    if allowed_world_sizes is None:
        return nodes
    allowed = set(allowed_world_sizes)
    return next((count for count in range(nodes, 0, -1) if count * workers_per_node in allowed), 0)


def form(*, generation: int, nodes: Sequence[str], workers_per_node: int) -> Gang:
    """Assign ranks to nodes in order."""
    places = tuple(
        Place(node=node, first_rank=index * workers_per_node, count=workers_per_node)
        for index, node in enumerate(nodes)
    )
    return Gang(generation=generation, places=places)

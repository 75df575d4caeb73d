"""Which part of a sharded tensor each rank holds, and which ranks hold the same part. Pure, no torch, no communication.

A mesh is ranks in a grid; a tensor is cut along some of the mesh's dimensions, one cut after another, and alike along
the others. Cuts follow `torch.chunk`: equal parts but for the last one, which may be shorter or empty. Where two mesh
dimensions cut the same dimension of the tensor, the order counts; torch's own offsets are wrong there for uneven
parts, so they are computed here in the order in which the cuts were made. Called by `checkpoint.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from orchestrator.checkpoint.boxes import Box, is_range, strides


@dataclass(frozen=True, slots=True)
class Cut:
    """A mesh dimension cuts this dimension of the tensor, after others have cut it into `factor` parts."""

    dimension: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """In row-major order."""

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands. Raises ValueError if it is not in the mesh."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in its mesh of {len(self.ranks)} ranks")
        place, found = self.ranks.index(rank), []
        for stride in strides(self.shape):
            index, place = divmod(place, stride)
            found.append(index)
        return tuple(found)

    def at(self, coordinate: Sequence[int]) -> int:
        """The rank at a place."""
        return self.ranks[sum(index * stride for index, stride in zip(coordinate, strides(self.shape), strict=True))]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a sharded tensor."""

    box: Box
    holders: tuple[int, ...]
    """The ranks that hold the same part, by rising rank."""
    ranges: bool
    """Whether every rank's part is one range of the tensor's elements."""


Cuts = Sequence[Cut | None]
"""What each dimension of the mesh does: cut the tensor, or hold it alike (None)."""


def share(shape: Sequence[int], mesh: Mesh, cuts: Cuts, rank: int) -> Share:
    """What `rank` holds. Raises ValueError if the cuts' order cannot be, or the rank is not in the mesh."""
    coordinate = mesh.coordinate(rank)
    offsets, lengths, kinds = [], [], []
    for dimension, size in enumerate(shape):
        order = cut_order(dimension, mesh, cuts)
        counts = [mesh.shape[place] for place in order]
        offset, length = _part(size, counts, [coordinate[place] for place in order])
        offsets.append(offset)
        lengths.append(length)
        kinds.append(_lengths(size, counts))
    ranges = all(is_range(some, shape) for some in product(*kinds))
    free = [(coordinate[place],) if cuts[place] is not None else range(size) for place, size in enumerate(mesh.shape)]
    holders = tuple(sorted(mesh.at(place) for place in product(*free)))
    return Share(Box(tuple(offsets), tuple(lengths)), holders, ranges)


def cut_order(dimension: int, mesh: Mesh, cuts: Cuts) -> list[int]:
    """The mesh dimensions that cut this dimension of the tensor, the first cut first.

    A cut with a factor came after later mesh dimensions of that many parts together; others before all later ones.
    """
    order: list[int] = []
    for place in reversed(range(len(cuts))):
        cut = cuts[place]
        if cut is None or cut.dimension != dimension:
            continue
        before = next((n for n in range(len(order) + 1) if _parts(order[:n], mesh) == cut.factor), None)
        if before is None:
            raise ValueError(f"no order of cuts has {cut.factor} parts before the cut by mesh dimension {place}")
        order.insert(before, place)
    return order


def _parts(order: Sequence[int], mesh: Mesh) -> int:
    return prod(mesh.shape[place] for place in order)


def _part(size: int, counts: Sequence[int], indices: Sequence[int]) -> tuple[int, int]:
    """(offset, length) after cuts into so many parts, of which these are taken."""
    offset = 0
    for count, index in zip(counts, indices, strict=True):
        chunk = -(-size // count)
        start = min(chunk * index, size)
        offset, size = offset + start, min(chunk, size - start)
    return offset, size


def _lengths(size: int, counts: Sequence[int]) -> set[int]:
    """All lengths that parts have, empty ones aside."""
    sizes = {size}
    for count in counts:
        chunks = {(size, -(-size // count)) for size in sizes}
        sizes = {
            min(chunk, size - start) for size, chunk in chunks if size for start in (0, (size - 1) // chunk * chunk)
        }
    return sizes - {0}


def with_copies(mesh: Mesh, root: Mesh) -> Mesh:
    """The mesh with one more dimension in front: its copies in the root mesh, which hold the same.

    A mesh that is a part of another stands in it several times: once for each place of the dimensions that it lacks.
    Raises ValueError if it is no such part.
    """
    if not mesh.ranks or not set(mesh.ranks) <= set(root.ranks):
        raise ValueError(f"its ranks {list(mesh.ranks)} are not in the mesh of {len(root.ranks)} ranks")
    places = [root.coordinate(rank) for rank in mesh.ranks]
    varying = [len({place[axis] for place in places}) > 1 for axis in range(len(root.shape))]
    spanned = prod(size for size, varies in zip(root.shape, varying, strict=True) if varies)
    if spanned != len(set(mesh.ranks)):
        raise ValueError(f"its ranks {list(mesh.ranks)} are no dimensions of the mesh {list(root.shape)}")
    others = [(0,) if varies else range(size) for size, varies in zip(root.shape, varying, strict=True)]
    copies = [
        tuple(
            root.at([own if varies else other for own, other, varies in zip(place, fixed, varying, strict=True)])
            for place in places
        )
        for fixed in product(*others)
    ]
    return Mesh((len(copies), *mesh.shape), tuple(rank for copy in copies for rank in copy))

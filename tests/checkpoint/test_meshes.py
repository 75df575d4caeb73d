"""Who holds what of a sharded tensor, against cutting it in the order in which the cuts are made."""

from __future__ import annotations

import itertools
import random
from math import prod

import pytest
import torch

from orchestrator.checkpoint.boxes import is_range
from orchestrator.checkpoint.meshes import Cut, Mesh, cut_order, share, with_copies
from tests.checkpoint.sharded import cut, plain_mesh, random_cuts


def cut_one_by_one(tensor: torch.Tensor, mesh: Mesh, cuts: list[Cut | None], rank: int) -> torch.Tensor:
    """What the rank has after all cuts, each made by `torch.chunk`."""
    coordinate = mesh.coordinate(rank)
    for dimension in range(tensor.dim()):
        for place in cut_order(dimension, mesh, cuts):
            chunks = tensor.chunk(mesh.shape[place], dimension)
            index = coordinate[place]
            tensor = chunks[index] if index < len(chunks) else tensor.narrow(dimension, 0, 0)
    return tensor


def test_shares_are_what_cutting_gives(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        mesh = plain_mesh(tuple(draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))))
        shape = tuple(draw.choice([1, 2, 3, 5, 7, 37]) for _ in range(draw.randrange(1, 4)))
        cuts = random_cuts(draw, mesh, len(shape))
        tensor = torch.arange(prod(shape)).reshape(shape)
        shares = [share(shape, mesh, cuts, rank) for rank in mesh.ranks]
        seen: dict[int, set[int]] = {}
        for rank, mine in enumerate(shares):
            assert torch.equal(cut(tensor, mine.box), cut_one_by_one(tensor, mesh, cuts, rank)), (shape, mesh, cuts)
            assert rank in mine.holders
            assert mine.holders == tuple(sorted(mine.holders))
            for element in cut(tensor, mine.box).flatten().tolist():
                seen.setdefault(element, set()).add(rank)
            if mine.box.elements:
                alike = [other for other in mesh.ranks if shares[other].box == mine.box]
                assert list(mine.holders) == alike
        assert set(seen) == set(range(prod(shape)))  # nothing is lost
        for element, ranks in seen.items():  # and whoever has it has the same part
            assert ranks == set(shares[min(ranks)].holders), element
        assert {mine.ranges for mine in shares} == {all(is_range(mine.box.lengths, shape) for mine in shares)}


def test_where_torchs_own_offsets_are_wrong() -> None:
    """37 rows, cut by 2 first and then by 3: rank 4 has 5 rows from 14 on; torch's helper says 6."""
    mesh = plain_mesh((3, 2))
    boxes = [share((37, 4), mesh, [Cut(0, 2), Cut(0)], rank).box for rank in range(6)]
    rows = [(box.offsets[0], box.lengths[0]) for box in boxes]
    assert rows == [(0, 7), (19, 6), (7, 7), (25, 6), (14, 5), (31, 6)]


def test_an_order_of_cuts_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no order of cuts has 3 parts before the cut by mesh dimension 0"):
        share((8,), plain_mesh((2, 2)), [Cut(0, 3), Cut(0)], 0)


def test_a_part_of_a_mesh_has_its_copies_in_it() -> None:
    root = plain_mesh((2, 3, 2))
    assert with_copies(Mesh((3,), (1, 3, 5)), root) == Mesh((4, 3), (0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11))
    flat = with_copies(Mesh((6,), (6, 7, 8, 9, 10, 11)), root)
    assert flat == Mesh((2, 6), tuple(range(12)))
    assert with_copies(root, root) == Mesh((1, 2, 3, 2), root.ranks)
    assert with_copies(Mesh((1,), (3,)), root).ranks == root.ranks


@pytest.mark.parametrize("ranks", [(0, 3), (0, 2), (0, 12), ()])
def test_a_mesh_that_is_no_part_of_the_other_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"in the mesh of 12|no dimensions of the mesh"):
        with_copies(Mesh((len(ranks),), ranks), plain_mesh((2, 3, 2)))


def test_every_rank_computes_the_same(seed: int) -> None:
    """No rank asks another: their copies of a mesh are the same, whichever of them they begin with."""
    draw = random.Random(seed)
    for _ in range(50):
        root = plain_mesh(tuple(draw.randrange(1, 4) for _ in range(3)))
        dimensions = sorted(draw.sample(range(3), draw.randrange(1, 3)))
        found = set()
        for rank in root.ranks:
            place = root.coordinate(rank)
            axes = [range(size) if axis in dimensions else (place[axis],) for axis, size in enumerate(root.shape)]
            mine = Mesh(tuple(root.shape[axis] for axis in dimensions), tuple(map(root.at, itertools.product(*axes))))
            found.add(with_copies(mine, root))
        assert len(found) == 1

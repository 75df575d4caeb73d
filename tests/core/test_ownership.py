"""Who writes what of shared state: every element once, in equal parts, and nothing on a node that may vanish (F59)."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.ownership import Span, equal_windows, owned_spans, present_ranks

WIDTHS = (1, 2, 4, 8, 16)


def random_sizes(draw: random.Random) -> list[tuple[int, int]]:
    """(elements, bytes per element) of a few tensors: empty, single, small and large ones."""
    return [
        (draw.choice([0, 0, 1, 2, draw.randint(1, 50), draw.randint(1, 5000)]), draw.choice(WIDTHS))
        for _ in range(draw.randint(0, 12))
    ]


def spans_of_all(sizes: list[tuple[int, int]], world_size: int, absent: frozenset[int]) -> list[list[Span]]:
    """Each rank's spans."""
    return [owned_spans(sizes, rank=rank, holders=range(world_size), absent=absent) for rank in range(world_size)]


def owners_of(spans: list[list[Span]], tensor: int, elements: int) -> list[list[int]]:
    """For each element of a tensor, the ranks that own it."""
    owners: list[list[int]] = [[] for _ in range(elements)]
    for rank, mine in enumerate(spans):
        for span in mine:
            if span.tensor == tensor:
                for element in range(span.start, span.stop):
                    owners[element].append(rank)
    return owners


def test_every_element_has_exactly_one_owner_and_the_parts_are_equal(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        sizes, world_size = random_sizes(draw), draw.randint(1, 9)
        absent = frozenset(draw.sample(range(world_size), draw.randint(0, world_size)))
        spans = spans_of_all(sizes, world_size, absent)
        for tensor, (elements, _) in enumerate(sizes):
            assert all(len(owners) == 1 for owners in owners_of(spans, tensor, elements))
        check_balance(sizes, spans, world_size, absent)


def check_balance(
    sizes: list[tuple[int, int]], spans: list[list[Span]], world_size: int, absent: frozenset[int]
) -> None:
    """Present ranks own their N-th part to within one element; absent ones nothing while anybody is present."""
    present = present_ranks(world_size, absent)
    total = sum(elements * width for elements, width in sizes)
    widest = max((width for _, width in sizes), default=0)
    for rank, mine in enumerate(spans):
        owned = sum((span.stop - span.start) * sizes[span.tensor][1] for span in mine)
        if rank in present:
            assert abs(owned - total / len(present)) <= widest
        else:
            assert mine == []


def test_an_empty_tensor_belongs_to_the_first_present_rank_alone(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        sizes, world_size = random_sizes(draw), draw.randint(1, 6)
        absent = frozenset(draw.sample(range(world_size), draw.randint(0, world_size - 1)))
        first = present_ranks(world_size, absent)[0]
        for rank, mine in enumerate(spans_of_all(sizes, world_size, absent)):
            empty = [span for span in mine if span.start == span.stop]
            expected = [index for index, (elements, _) in enumerate(sizes) if elements == 0] if rank == first else []
            assert [span.tensor for span in empty] == expected


def test_spans_are_in_order_and_each_tensor_is_one_piece_per_rank(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        mine = owned_spans(random_sizes(draw), rank=0, holders=range(draw.randint(1, 5)), absent=())
        tensors = [span.tensor for span in mine]
        assert tensors == sorted(set(tensors))


@pytest.mark.parametrize(
    ("world_size", "absent", "present"),
    [(3, (), (0, 1, 2)), (3, (1,), (0, 2)), (3, (0, 1, 2), (0, 1, 2)), (1, (0,), (0,)), (2, (5,), (0, 1))],
)
def test_present_ranks(world_size: int, absent: tuple[int, ...], present: tuple[int, ...]) -> None:
    assert present_ranks(world_size, absent) == present


def test_fewer_elements_than_ranks() -> None:
    """Six rows on four ranks, one scalar on four ranks: somebody owns nothing, and that is legal (F59)."""
    assert [len(mine) for mine in spans_of_all([(1, 8)], 4, frozenset())] == [1, 0, 0, 0]
    six = spans_of_all([(6, 4)], 4, frozenset())
    assert [sum(span.stop - span.start for span in mine) for mine in six] == [2, 1, 2, 1]


def test_the_windows_of_all_ranks_at_once_are_those_of_each(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        sizes, count = random_sizes(draw), draw.randint(1, 9)
        each = spans_of_all(sizes, count, frozenset())
        assert equal_windows(sizes, count) == [[span for span in mine if span.start < span.stop] for mine in each]

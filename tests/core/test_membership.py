"""Who is in the next generation, and which ranks they get (F56, F65, F90)."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.membership import Size, choose_size, form, largest_allowed, order

CASES: list[tuple[str, list[str], list[str], int, int, list[int] | None, tuple[str, ...] | None, bool]] = [
    # what, available, previous, at least, wanted, allowed world sizes, members, could grow
    ("all are there", ["b", "a"], [], 1, 2, None, ("a", "b"), False),
    ("one is missing", ["a"], [], 1, 2, None, ("a",), True),
    ("too few", ["a"], [], 2, 3, None, None, True),
    ("none", [], [], 1, 2, None, None, True),
    ("more than wanted", ["c", "b", "a"], [], 1, 2, None, ("a", "b"), False),
    ("survivors first, in their order", ["a", "c", "b"], ["c", "b"], 1, 3, None, ("c", "b", "a"), False),
    ("a lost one leaves no hole", ["d", "c", "a"], ["a", "b", "c"], 1, 3, None, ("a", "c", "d"), False),
    ("numbers sort as numbers", ["node-10", "node-9"], [], 1, 2, None, ("node-9", "node-10"), False),
    ("three ranks each do not divide", ["a", "b", "c"], [], 1, 3, [2, 4, 8], ("a", "b"), False),
    ("a larger one would be allowed", ["a", "b", "c"], [], 1, 4, [2, 4, 8], ("a", "b"), True),
    ("the allowed one is below the smallest", ["a", "b", "c"], [], 3, 3, [2], None, False),
    ("nothing is allowed", ["a", "b", "c"], [], 1, 3, [5], None, False),
    ("nothing is allowed ever", ["a"], [], 1, 3, [], None, False),
]


def choose(
    available: list[str], previous: list[str], counts: tuple[int, int, int], allowed: list[int] | None
) -> tuple[tuple[str, ...] | None, Size]:
    """With (at least, wanted, workers per node): the members, if a gang can be formed, and the size with its reason."""
    least, wanted, workers = counts
    size = choose_size(
        available=len(available),
        nodes_min=least,
        nodes_wanted=wanted,
        workers_per_node=workers,
        allowed_world_sizes=allowed,
    )
    members = None if size.count is None else order(available=available, previous=previous)[: size.count]
    return members, size


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].replace(" ", "-"))
def test_members(
    case: tuple[str, list[str], list[str], int, int, list[int] | None, tuple[str, ...] | None, bool],
) -> None:
    _, available, previous, least, wanted, allowed, members, could_grow = case
    chosen, size = choose(available, previous, (least, wanted, 1), allowed)
    assert (chosen, size.could_grow) == (members, could_grow)
    assert size.reason


@pytest.mark.parametrize(
    ("nodes", "workers", "allowed", "largest"),
    [(4, 2, None, 4), (4, 2, [8], 4), (4, 2, [2, 4], 2), (4, 2, [3, 5], 0), (0, 2, [2], 0), (4, 3, [6, 7, 8], 2)],
)
def test_largest_allowed(nodes: int, workers: int, allowed: list[int] | None, largest: int) -> None:
    assert largest_allowed(nodes, workers, allowed) == largest


def test_ranks_are_contiguous_on_each_node_and_every_rank_has_one_node() -> None:
    gang = form(generation=4, nodes=("b", "a"), workers_per_node=3)
    assert (gang.generation, gang.world_size, gang.nodes) == (4, 6, ("b", "a"))
    assert (list(gang.ranks_of("b")), list(gang.ranks_of("a")), list(gang.ranks_of("c"))) == ([0, 1, 2], [3, 4, 5], [])
    assert [gang.node_of(rank) for rank in range(6)] == ["b"] * 3 + ["a"] * 3


def test_whatever_is_available_the_choice_keeps_its_promises(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"node-{number}" for number in range(8)]
    for _ in range(500):
        available = draw.sample(names, draw.randint(0, 8))
        previous = draw.sample(names, draw.randint(0, 8))
        allowed = draw.choice([None, sorted(draw.sample(range(1, 17), draw.randint(0, 6)))])
        least, workers = draw.randint(1, 3), draw.randint(1, 3)
        wanted = draw.randint(least, 8)
        chosen, size = choose(available, previous, (least, wanted, workers), allowed)
        if chosen is None:
            continue
        assert set(chosen) <= set(available)
        assert len(set(chosen)) == len(chosen) == size.count
        assert least <= len(chosen) <= wanted
        assert allowed is None or len(chosen) * workers in allowed
        survivors = [node for node in previous if node in available]
        assert list(chosen)[: len(survivors)] == survivors[: len(chosen)]


@pytest.mark.parametrize(
    ("previous", "places", "expected"),
    [
        ([], {}, ("a", "b", "c", "d")),
        ([], {"a": "z1/x", "b": "z2/y", "c": "z1/x", "d": "z2/x"}, ("a", "c", "d", "b")),
        (["d", "a"], {"a": "z1", "b": "z2", "c": "z1", "d": "z2"}, ("d", "a", "c", "b")),
        ([], {"a": "z1"}, ("b", "c", "d", "a")),
    ],
    ids=["not known", "near ones together", "survivors keep theirs", "one is known"],
)
def test_newcomers_that_stand_together_get_ranks_together(
    previous: list[str], places: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert order(available=["d", "b", "a", "c"], previous=previous, places=places) == expected

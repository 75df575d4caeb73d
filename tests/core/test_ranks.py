"""Sets and columns of ranks behave as Python's own sets and lists do, and never change a value that was given away."""

from __future__ import annotations

import random

from orchestrator.core.messages import RankExited, Verdict
from orchestrator.core.ranks import BLOCK_LENGTH, Column, Numbers, Ranks, RankSet

SIZES = (1, BLOCK_LENGTH - 1, BLOCK_LENGTH, BLOCK_LENGTH + 1, 3 * BLOCK_LENGTH + 7)


def test_a_rank_set_is_a_set(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        size = draw.choice(SIZES)
        left, right = (set(draw.sample(range(size), draw.randint(0, size))) for _ in range(2))
        one, other = RankSet.of(left), RankSet.of(right)
        rank = draw.randrange(size)
        assert (list(one | other), list(one & other)) == (sorted(left | right), sorted(left & right))
        assert (list(one - other), one <= other) == (sorted(left - right), left <= right)
        assert (list(one.plus(rank)), list(one.minus(rank))) == (sorted(left | {rank}), sorted(left - {rank}))
        assert (len(one), bool(one), rank in one, one == other) == (len(left), bool(left), rank in left, left == right)
        assert list(one) == sorted(left)
        assert list(RankSet.below(size)) == list(range(size))


def test_columns_are_lists_with_the_highest_at_hand(seed: int) -> None:
    draw = random.Random(seed)
    for size in SIZES:
        numbers, column, model = Numbers.filled(3, size), Column.filled(3, size), [3] * size
        for _ in range(400):
            rank, value = draw.randrange(size), draw.randint(0, 9)
            before, told = numbers, list(numbers)
            numbers, column, model[rank] = numbers.put(rank, value), column.put(rank, value), value
            assert list(before) == told
            assert (list(numbers), list(column)) == (model, model)
            assert (numbers.highest, numbers[rank], column[rank]) == (max(model), value, value)
    assert Numbers.filled(3, 0).highest is None


def test_ranks_keep_what_the_decisions_ask_for() -> None:
    new = Ranks.starting(3, 10)
    ranks = new.attach(2, pid=7, step=10)
    for rank, slot_bytes in ((2, 100), (0, 50), (2, 80)):
        ranks = ranks.plan(rank, slot_bytes=slot_bytes, unique_bytes=rank)
    ranks = ranks.progress(0, step=11, step_seconds=0.5, free_slots=0).progress(
        1, step=12, step_seconds=0.2, free_slots=2
    )
    gone = RankExited(
        node="a",
        generation=1,
        rank=1,
        exit_code=0,
        attached=True,
        verdict=Verdict.NONE,
        ended_by_us=False,
        evidence="",
    )
    ranks = ranks.exit(gone)
    assert (ranks.steps.highest, ranks.step_seconds.highest, ranks.slot_bytes.highest) == (12, 0.5, 80)
    assert (ranks.staging_bytes, list(ranks.planned), list(ranks.attached)) == (130, [0, 2], [2])
    assert (list(ranks.moved), list(ranks.busy), list(ranks.exited), list(ranks.finished)) == ([0, 1], [0], [1], [1])
    assert ranks.known_exits() == [gone]
    assert list(ranks.progress(0, step=11, step_seconds=0.5, free_slots=1).busy) == []
    assert ({rank: state.step for rank, state in ranks.items()}, ranks[2].pid) == ({0: 11, 1: 12, 2: 10}, 7)
    assert (3 in ranks, -1 in ranks, len(ranks)) == (False, False, 3)
    assert new == Ranks.starting(3, 10)

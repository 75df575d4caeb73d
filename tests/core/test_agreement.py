"""Which step is proposed, and when a proposal counts as agreed (F1, W6)."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.core.agreement import Proposal, agreed, choose_step, echo, margin_steps, refuse

PROPOSAL = Proposal(ballot=3, step=10)


@pytest.mark.parametrize(
    ("step_seconds", "attempt", "margin"),
    [(1.0, 1, 2), (0.15, 1, 2), (0.1, 1, 3), (0.01, 1, 16), (0.01, 2, 31), (0.01, 8, 121), (1.0, 8, 3), (0.0, 1, 1501)],
)
def test_the_margin_covers_the_delay_of_a_report_and_grows_with_each_refusal(
    step_seconds: float, attempt: int, margin: int
) -> None:
    assert margin_steps(step_seconds, attempt) == margin


@pytest.mark.parametrize(
    ("highest", "until", "after", "step"),
    [
        (5, None, None, 7),
        (0, None, None, 2),
        (5, None, 6, 7),
        (5, None, 7, 8),
        (5, None, 20, 21),
        (5, 100, None, 7),
        (5, 6, None, 6),
        (6, 6, None, None),
        (7, 6, None, None),
        (5, 8, 7, 8),
        (5, 7, 7, None),
        (5, 6, 6, None),
    ],
)
def test_the_nearest_step_that_all_can_reach(highest: int, until: int | None, after: int | None, step: int) -> None:
    choice = choose_step(highest=highest, step_seconds=1.0, until=until, after=after)
    assert choice.step == step
    assert choice.reason


def test_a_choice_is_always_ahead_of_what_is_published_and_of_the_decided_step() -> None:
    for highest, after, until, attempt in itertools.product(range(12), [None, 3, 9], [None, 8, 11], range(1, 9)):
        choice = choose_step(highest=highest, step_seconds=0.1, until=until, after=after, attempt=attempt)
        if choice.step is None:
            assert until is not None
            assert max(highest, after or 0) >= until
        else:
            assert choice.step > highest
            assert after is None or choice.step > after
            assert until is None or choice.step <= until


@pytest.mark.parametrize(
    ("echoes", "refusals", "result"),
    [
        ([], [], False),
        ([(3, [0, 1])], [], False),
        ([(3, [0, 1, 2])], [], True),
        ([(3, [0]), (3, [1]), (3, [2])], [], True),
        ([(3, [0]), (3, [0]), (3, [0])], [], False),
        ([(3, [0, 1]), (2, [2])], [], False),
        ([(3, [0, 1]), (4, [2])], [], False),
        ([(3, [0, 1, 2])], [(3, 1)], False),
        ([(3, [0, 1, 2])], [(2, 1)], True),
    ],
)
def test_only_the_echoes_of_every_rank_for_this_very_ballot_agree(
    echoes: list[tuple[int, list[int]]], refusals: list[tuple[int, int]], result: bool
) -> None:
    proposal = PROPOSAL
    for ballot, rank in refusals:
        proposal = refuse(proposal, ballot=ballot, rank=rank)
    for ballot, ranks in echoes:
        proposal = echo(proposal, ballot=ballot, ranks=ranks)
    assert agreed(proposal, world_size=3) is result


def test_the_first_refusal_is_remembered() -> None:
    proposal = refuse(refuse(PROPOSAL, ballot=3, rank=1), ballot=3, rank=0)
    assert proposal.refused_by == 1

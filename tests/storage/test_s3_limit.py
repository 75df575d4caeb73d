"""How many parts are under way at once: halved at a refusal, slowly more again."""

from __future__ import annotations

import random

from orchestrator.storage.s3.limit import GROW_AFTER, AdaptiveLimit, RequestOutcome


def begun(limit: AdaptiveLimit) -> list[int]:
    """Tickets of all that may begin now."""
    tickets = []
    while (ticket := limit.begin()) is not None:
        tickets.append(ticket)
    return tickets


def test_no_more_than_the_limit_begin() -> None:
    limit = AdaptiveLimit(at_once_max=4)
    tickets = begun(limit)
    assert len(tickets) == 4
    limit.end(tickets[0], RequestOutcome.ARRIVED)
    assert len(begun(limit)) == 1


def test_refusals_of_one_moment_halve_once() -> None:
    limit = AdaptiveLimit(at_once_max=8)
    for ticket in begun(limit):
        limit.end(ticket, RequestOutcome.SLOWED)
    assert limit.at_once == 4
    for ticket in begun(limit):
        limit.end(ticket, RequestOutcome.SLOWED)
    assert limit.at_once == 2


def test_it_goes_down_to_one_and_no_further() -> None:
    limit = AdaptiveLimit(at_once_max=5)
    seen = []
    for _ in range(4):
        ticket = limit.begin()
        assert ticket is not None
        limit.end(ticket, RequestOutcome.SLOWED)
        seen.append(limit.at_once)
    assert seen == [2, 1, 1, 1]


def test_it_grows_by_one_after_a_run_of_arrivals() -> None:
    limit = AdaptiveLimit(at_once_max=4)

    def one(outcome: RequestOutcome) -> int:
        ticket = limit.begin()
        assert ticket is not None
        limit.end(ticket, outcome)
        return limit.at_once

    assert one(RequestOutcome.SLOWED) == 2
    assert [one(RequestOutcome.ARRIVED) for _ in range(GROW_AFTER)] == [2] * (GROW_AFTER - 1) + [3]
    for _ in range(GROW_AFTER - 1):
        assert one(RequestOutcome.ARRIVED) == 3
    assert one(RequestOutcome.SLOWED) == 1, "and the run begins anew"
    for _ in range(3 * GROW_AFTER):
        one(RequestOutcome.ARRIVED)
    assert limit.at_once == 4
    for _ in range(3 * GROW_AFTER):
        assert one(RequestOutcome.ARRIVED) == 4


def test_other_failures_change_nothing() -> None:
    limit = AdaptiveLimit(at_once_max=4)
    for _ in range(20):
        for ticket in begun(limit):
            limit.end(ticket, RequestOutcome.FAILED)
    assert limit.at_once == 4


def test_in_any_order_it_stays_within_its_bounds(seed: int) -> None:
    draw = random.Random(seed)
    limit = AdaptiveLimit(at_once_max=8)
    tickets: list[int] = []
    for _ in range(3000):
        ticket = limit.begin() if draw.random() < 0.5 else None
        if ticket is not None:
            assert limit.under_way <= limit.at_once
            tickets.append(ticket)
        elif tickets:
            limit.end(tickets.pop(draw.randrange(len(tickets))), draw.choice(list(RequestOutcome)))
        assert 1 <= limit.at_once <= 8
        assert limit.under_way == len(tickets)

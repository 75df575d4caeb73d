"""The accounting and the formulas."""

from __future__ import annotations

import math

import pytest

from orchestrator.simulation.goodput import (
    Cause,
    Ledger,
    Outcome,
    Segment,
    daly_interval,
    goodput_bound,
    goodput_bound_without_notice,
    over_time,
    young_interval,
)


def small_account() -> Outcome:
    """10 s of training on 2 nodes with one spare, 3 steps kept of 4; then 5 s of restarting on 3."""
    ledger = Ledger()
    ledger.occupy(Cause.USEFUL, {Cause.USEFUL: 2, Cause.SPARE: 1})
    ledger.advance(10)
    ledger.trained(Segment(start_us=0, step_us=2, nodes=2, first_step=5, steps=4))
    ledger.occupy(Cause.RESTARTING, {Cause.RESTARTING: 3})
    ledger.roll_back(8)
    ledger.advance(15)
    return ledger.close(interruptions={"loss": 1}, restarts=1, saves=0)


def test_every_node_microsecond_has_one_cause() -> None:
    outcome = small_account()
    found = {cause: us for cause, us in outcome.node_us.items() if us}
    assert found == {Cause.USEFUL: 12, Cause.REDONE: 8, Cause.SPARE: 10, Cause.RESTARTING: 15}
    assert outcome.available_us == 45
    assert outcome.goodput == 12 / 45
    assert outcome.wall_goodput == 6 / 15
    assert outcome.lost_seconds_per_interruption == pytest.approx((4 + 5) / 1e6)


def test_rolling_back_drops_whole_segments_and_parts() -> None:
    ledger = Ledger()
    ledger.occupy(Cause.USEFUL, {Cause.USEFUL: 1})
    ledger.advance(30)
    for start, first in ((0, 0), (10, 10), (20, 20)):
        ledger.trained(Segment(start_us=start, step_us=1, nodes=1, first_step=first, steps=10))
    ledger.roll_back(13)
    outcome = ledger.close(interruptions={}, restarts=0, saves=0)
    assert [segment.steps for segment in outcome.segments] == [10, 3]
    assert outcome.node_us[Cause.REDONE] == 17


def test_no_nodes_at_all() -> None:
    ledger = Ledger()
    ledger.occupy(Cause.WAITING, {})
    ledger.advance(10)
    outcome = ledger.close(interruptions={}, restarts=0, saves=0)
    assert (outcome.goodput, outcome.wall_goodput, outcome.lost_seconds_per_interruption) == (0.0, 0.0, None)


def test_over_time_gives_means_per_part() -> None:
    available, training, goodput = over_time(small_account(), 3)
    assert available == [3.0, 3.0, 3.0]
    assert training == [2.0, 2.0, 0.0]
    assert goodput == pytest.approx([2 / 3, 2 / 15, 0.0])
    assert over_time(Ledger().close(interruptions={}, restarts=0, saves=0), 3) == ([], [], [])


def test_young() -> None:
    assert young_interval(save_seconds=2, mean_seconds=100) == 20


def test_daly_is_near_young_for_cheap_saves_and_bounded_for_dear_ones() -> None:
    assert daly_interval(save_seconds=2, mean_seconds=100) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert daly_interval(save_seconds=500, mean_seconds=100) == 100
    cheap = daly_interval(save_seconds=0.001, mean_seconds=10_000)
    assert cheap == pytest.approx(young_interval(save_seconds=0.001, mean_seconds=10_000), rel=0.001)


def test_daly_loses_no_more_than_its_neighbours() -> None:
    """Against Daly's own exact cost, exp((T + S)/M)/T."""
    save, mean = 60.0, 3600.0

    def cost(interval: float) -> float:
        return (math.exp((interval + save) / mean) - 1) / interval

    best = daly_interval(save_seconds=save, mean_seconds=mean)
    assert cost(best) < min(
        cost(best * 0.97), cost(best * 1.03), cost(young_interval(save_seconds=60, mean_seconds=3600))
    )


def test_bounds() -> None:
    bound = goodput_bound(saves_per_interruption=1, save_seconds=2, restart_seconds=10, mean_seconds=100)
    assert bound == pytest.approx(0.88)
    assert goodput_bound_without_notice(save_seconds=2, restart_seconds=10, mean_seconds=100) == pytest.approx(0.7)
    assert goodput_bound(saves_per_interruption=1, save_seconds=2, restart_seconds=10, mean_seconds=None) == 1
    assert goodput_bound(saves_per_interruption=1, save_seconds=2, restart_seconds=10, mean_seconds=5) == 0
    assert goodput_bound_without_notice(save_seconds=2, restart_seconds=10, mean_seconds=None) == 1

"""Whole replays: small ones worked out by hand, and random ones whose causes must add up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.simulation import gang, model
from orchestrator.simulation.comparison import compare, save_every_steps, theory
from orchestrator.simulation.goodput import Cause, Outcome
from orchestrator.simulation.model import Replay
from orchestrator.simulation.periodic import PeriodicPolicy, PeriodicReplay, best_periodic
from orchestrator.simulation.traces import Trace
from tests.simulation.small_traces import random_trace, scenario, trace_of

OPENING_SECONDS = 4 * model.MESSAGE_US / 1e6 + model.OPEN_US / 1e6
"""Joined, told to open, opened, told to launch: four messages and the store."""


def node_seconds(outcome: Outcome) -> dict[str, float]:
    """What is not zero."""
    return {str(cause): us / 1e6 for cause, us in outcome.node_us.items() if us}


def check_account(outcome: Outcome, trace: Trace, nodes_max: int) -> None:
    """Causes sum to all there was; the kept steps are each done once, from 0 on without a gap."""
    assert outcome.available_us == trace.node_us(nodes_max)
    assert sum(outcome.wall_us.values()) == trace.duration_us
    assert min(outcome.node_us.values()) >= 0
    step = 0
    for segment in outcome.segments:
        assert segment.first_step == step
        step += segment.steps
    assert sum(segment.node_us for segment in outcome.segments) == outcome.node_us[Cause.USEFUL]


# ------------------------------------------------------------------------------------------- worked out by hand


def test_one_node_that_stays() -> None:
    """After 10.28 s, cycles of 100 steps and 0.5 s; the last 85.22 s are 85 steps and a part of one."""
    trace = trace_of("0,add,a", "1000,add,b")
    outcome = Replay(trace, scenario(nodes_max=1)).run()
    start = OPENING_SECONDS + 10
    assert start == pytest.approx(10.28)
    assert node_seconds(outcome) == pytest.approx(
        {"useful": 985, "saving": 4.5, "redone": 1000 - start - 9 * 100.5 - 85, "restarting": start}
    )
    assert (outcome.saves, outcome.restarts, sum(outcome.interruptions.values())) == (9, 0, 0)


def test_a_loss_without_notice_goes_back_to_the_newest_checkpoint() -> None:
    """Of what two nodes did in 139.72 s, 100 steps are saved; the one that is left does the rest again."""
    trace = trace_of("0,add,a", "0,add,b", "150,remove,b", "400,add,c")
    outcome = Replay(trace, scenario(nodes_max=2, save_every_steps=100)).run()
    first = OPENING_SECONDS + 10
    assert outcome.segments[0].steps == 100
    assert outcome.interruptions == {"notice": 0, "loss": 1, "growth": 0}
    assert node_seconds(outcome)["saving"] == 2 * 0.5 + 0.5
    lost = 150 - first - 100.5
    # Seen, told to end, confirmed; 2 s of patience for a replacement, checked ten times a second; opened; started.
    down = (model.LOSS_SEEN_US + 2 * model.MESSAGE_US + gang.EXIT_US) / 1e6 + 2 + OPENING_SECONDS - 0.02 + 10
    restarting = node_seconds(outcome)["restarting"]
    assert restarting == pytest.approx(2 * first + down, abs=0.2)
    # One node: a save at step 200, 2 s per step, of which the last one may be unfinished.
    remaining = 250 - (restarting - 2 * first) - 0.5
    assert node_seconds(outcome)["redone"] == pytest.approx(2 * lost + remaining % 2, abs=0.01)
    check_account(outcome, trace, 2)


def test_with_notice_nothing_is_done_again_but_parts_of_steps() -> None:
    trace = trace_of("0,add,a", "0,add,b", "500,remove,b", "900,add,c")
    outcome = Replay(trace, scenario(notice_seconds=120.0, save_every_steps=0)).run()
    assert outcome.interruptions == {"notice": 1, "loss": 0, "growth": 0}
    assert outcome.node_us[Cause.REDONE] <= 2_000_000  # the step that the trace's end cuts off
    assert outcome.saves >= 1
    assert 0 < node_seconds(outcome)["announced"] <= 120
    check_account(outcome, trace, 2)


def test_below_the_minimum_the_job_waits() -> None:
    trace = trace_of("0,add,a", "0,add,b", "300,remove,b", "500,add,c", "900,remove,c")
    outcome = Replay(trace, scenario(nodes_min=2)).run()
    assert node_seconds(outcome)["waiting"] == 200
    assert outcome.wall_us[Cause.WAITING] == 200_000_000
    check_account(outcome, trace, 2)


def test_nodes_beyond_the_maximum_do_not_count() -> None:
    trace = trace_of("0,add,a", "0,add,b", "0,add,c", "100,remove,c", "300,remove,a")
    outcome = Replay(trace, scenario(nodes_max=1)).run()
    check_account(outcome, trace, 1)
    assert outcome.available_us == 300_000_000


def test_a_node_that_is_announced_when_it_comes() -> None:
    trace = trace_of("0,add,a", "200,add,b", "230,remove,b", "600,add,c")
    for notice in (30.0, 120.0, 1000.0):
        outcome = Replay(trace, scenario(notice_seconds=notice)).run()
        check_account(outcome, trace, 2)
        assert outcome.stopped is None


def test_a_replacement_takes_its_time() -> None:
    trace = trace_of("0,add,a", "600,add,b")
    outcome = Replay(trace, scenario(nodes_max=1, replacement_seconds=60.0)).run()
    assert node_seconds(outcome)["restarting"] == pytest.approx(60 + OPENING_SECONDS + 10)


def test_a_job_that_stops_says_why() -> None:
    """Eleven generations in a row that lose a node before anything is committed: the core gives up."""
    lines = [
        f"{60 * index},{kind},n{index - (kind == 'remove')}" for index in range(1, 16) for kind in ("remove", "add")
    ]
    trace = trace_of("0,add,n0", "0,add,stays", *lines, "2000,add,last")
    outcome = Replay(trace, scenario(nodes_min=2, save_every_steps=0)).run()
    assert outcome.stopped is not None
    assert "generations in a row lost nodes" in outcome.stopped
    check_account(outcome, trace, 2)


def policy(**changes: Any) -> PeriodicPolicy:
    """Ten seconds of training, one of saving; five to restart."""
    values = {"interval_seconds": 10.0, "stall_seconds": 1.0, "restart_seconds": 5.0, "growth_patience": 0.0}
    return PeriodicPolicy(**(values | changes))


def test_periodic_restarts() -> None:
    """From 5 s on, 8 cycles of 11 s on two nodes, 7 s lost; then 5 s, 8 cycles on one node, 3 steps of 2 s and 1 s."""
    trace = trace_of("0,add,a", "0,add,b", "100,remove,b", "200,add,c")
    outcome = PeriodicReplay(trace, scenario(), policy()).run()
    assert node_seconds(outcome) == {
        "useful": 2 * 80 + 86,
        "saving": 2 * 8 + 8,
        "redone": 2 * 7 + 1,
        "restarting": 2 * 5 + 5,
    }
    assert (outcome.restarts, outcome.saves, outcome.interruptions["loss"]) == (1, 16, 1)
    check_account(outcome, trace, 2)


def test_periodic_restarts_let_nodes_in_after_a_save() -> None:
    trace = trace_of("0,add,a", "50,add,b", "100,add,c")
    at_once = PeriodicReplay(trace, scenario(), policy()).run()
    # One node from 5 s on, 5 cycles until 60 s (b waits 10 s); both from 65 s on, 3 cycles and 2 s.
    assert node_seconds(at_once) == {"useful": 50 + 2 * 32, "saving": 5 + 2 * 3, "restarting": 5 + 2 * 5, "spare": 10}
    never = PeriodicReplay(trace, scenario(), policy(growth_patience=float("inf"))).run()
    assert node_seconds(never)["spare"] == 50
    assert never.restarts == 0
    best, outcome = best_periodic(trace, scenario(), policy(growth_patience=1.0))
    assert (best.growth_patience, outcome.goodput) == (0.0, at_once.goodput)


def test_a_periodic_restart_that_is_interrupted_begins_again() -> None:
    trace = trace_of("0,add,a", "0,add,b", "3,remove,b", "20,add,c")
    outcome = PeriodicReplay(trace, scenario(), policy(interval_seconds=100.0)).run()
    assert node_seconds(outcome) == {"useful": 12, "restarting": 2 * 3 + 5}
    check_account(outcome, trace, 2)


# ------------------------------------------------------------------------------------------- at random


@pytest.mark.parametrize("number", range(10))
def test_causes_add_up_whatever_happens(seed: int, number: int) -> None:
    drawn = seed + number
    draw = random.Random(drawn)
    trace = random_trace(drawn, seconds=900)
    chosen = scenario(
        nodes_min=draw.randint(1, 3),
        nodes_max=draw.randint(3, 8),
        step_seconds=draw.choice([0.3, 1.0, 7.0]),
        save_every_steps=draw.choice([0, 10, 30, 100]),
        state_bytes=draw.choice([0, 10**9, 10**11]),
        stall_seconds=draw.choice([0.0, 0.5, 3.0]),
        restart_seconds=draw.choice([0.0, 2.0, 40.0]),
        notice_seconds=draw.choice([0.0, 2.0, 30.0, 120.0]),
        replacement_seconds=draw.choice([0.0, 5.0]),
    )
    told = f"seed {drawn}, {chosen}"
    try:
        ours = Replay(trace, chosen).run()
        check_account(ours, trace, chosen.nodes_max)
        periodic = PeriodicReplay(trace, chosen, policy(growth_patience=draw.choice([0.0, 1.0, 9.0]))).run()
        check_account(periodic, trace, chosen.nodes_max)
    except AssertionError as error:
        raise AssertionError(told) from error
    again = Replay(trace, chosen).run()
    assert again == ours, told


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PROGRESS_EVERY", 1)
    shares: list[float] = []
    Replay(trace_of("0,add,a", "100,add,b"), scenario()).run(shares.append)
    assert shares == sorted(shares)
    assert shares
    assert 0 <= shares[0] <= shares[-1] <= 1


# ------------------------------------------------------------------------------------------- the comparison


def test_the_comparison_has_every_row() -> None:
    trace = trace_of("0,add,a", "0,add,b", "500,remove,b", "900,add,c")
    rows = compare(
        trace,
        scenario(notice_seconds=30.0),
        save_every=None,
        periodic_stall_seconds=2.0,
        periodic_restart_seconds=60.0,
    )
    assert [row.name for row in rows] == [
        "ours, 30 s of notice",
        "ours, no notice",
        "periodic, restart all",
        "bound, every loss announced",
        "bound, no notice",
    ]
    assert rows[3].goodput == pytest.approx(1 - (0.5 + 10) / 900)
    assert rows[2].interval_seconds == pytest.approx((2 * 2 * 900) ** 0.5)
    known = theory(trace, scenario(), 2.0)
    assert (known.young_seconds, known.periodic_young_seconds) == pytest.approx((30.0, 60.0))


def test_the_automatic_interval() -> None:
    trace = trace_of("0,add,a", "0,add,b", "900,remove,b")
    assert save_every_steps(trace, scenario()) == 30
    assert save_every_steps(trace, scenario(notice_seconds=30.0)) == round((2 * 0.5 * 9000) ** 0.5)
    assert save_every_steps(trace, scenario(state_bytes=10**12)) == 500, "not before the last one is uploaded"
    assert save_every_steps(trace_of("0,add,a", "9,add,b"), replace(scenario(), nodes_max=1)) == 3600

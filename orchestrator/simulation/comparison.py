"""The rows that `orchestrator simulate` compares: our policies with and without notice, periodic restarts, the bounds.

What it is not: it prints nothing. Called by `cli.simulate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.simulation.goodput import (
    Outcome,
    daly_interval,
    goodput_bound,
    goodput_bound_without_notice,
    young_interval,
)
from orchestrator.simulation.model import Replay
from orchestrator.simulation.periodic import PeriodicPolicy, best_periodic
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.traces import MICROSECONDS, Trace

UNANNOUNCED_ONE_IN = 10
"""Where losses are announced, `save_interval_seconds` provides for one in so many that is not all the same."""
SAVES_EVERY_SECONDS_WITHOUT_LOSSES = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the comparison. A bound has no outcome; `interval_seconds` is the training between two saves.

    `bound`: what our policies are measured by; None for what is no policy of ours.
    """

    name: str
    goodput: float
    bound: float | None
    outcome: Outcome | None
    interval_seconds: float | None
    remark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """What the formulas say of this trace. Seconds; None where nothing was ever lost."""

    mean_seconds_between_losses: float | None
    young_seconds: float | None
    daly_seconds: float | None
    periodic_young_seconds: float | None
    periodic_daly_seconds: float | None


def theory(trace: Trace, scenario: Scenario, periodic_stall_seconds: float) -> Theory:
    """Young's and Daly's intervals for our stall and for that of the periodic restarts."""
    mean = trace.mean_seconds_between_losses

    def at(interval: Callable[..., float], save_seconds: float) -> float | None:
        return None if mean is None else interval(save_seconds=save_seconds, mean_seconds=mean)

    return Theory(
        mean_seconds_between_losses=mean,
        young_seconds=at(young_interval, scenario.stall_seconds),
        daly_seconds=at(daly_interval, scenario.stall_seconds),
        periodic_young_seconds=at(young_interval, periodic_stall_seconds),
        periodic_daly_seconds=at(daly_interval, periodic_stall_seconds),
    )


def save_every_steps(trace: Trace, scenario: Scenario) -> int:
    """Steps between periodic saves: Young's interval for the losses that are not announced, at the trace's mean size.

    Not more often than a save can be uploaded.
    """
    mean = trace.mean_seconds_between_losses
    nodes = max(1.0, trace.node_us(scenario.nodes_max) / trace.duration_us)
    seconds = SAVES_EVERY_SECONDS_WITHOUT_LOSSES
    if mean is not None:
        rarer = UNANNOUNCED_ONE_IN if scenario.notice_seconds else 1
        seconds = young_interval(save_seconds=scenario.stall_seconds, mean_seconds=mean * rarer)
    upload = scenario.state_bytes / nodes / scenario.bandwidth_bytes_per_second
    step = scenario.step_us(max(1, round(nodes))) / MICROSECONDS
    return max(1, round(max(seconds, upload) / step))


def compare(
    trace: Trace,
    scenario: Scenario,
    *,
    save_every: int | None,
    periodic_stall_seconds: float,
    periodic_restart_seconds: float,
    on_progress: Callable[[str, float], None] = lambda _name, _share: None,
) -> list[Row]:
    """Replay everything. `save_every` None: `save_every_steps`, for each row its own. Of the scenario it is ignored."""
    rows = []
    for notice in dict.fromkeys((scenario.notice_seconds, 0.0)):
        name = f"ours, {notice:g} s of notice" if notice else "ours, no notice"
        rows.append(_ours(name, trace, replace(scenario, notice_seconds=notice), save_every, _told(on_progress, name)))
    rows.append(_periodic(trace, scenario, periodic_stall_seconds, periodic_restart_seconds))
    rows += [_bound(trace, scenario, announced=True)] if scenario.notice_seconds else []
    return [*rows, _bound(trace, scenario, announced=False)]


def _told(on_progress: Callable[[str, float], None], name: str) -> Callable[[float], None]:
    return lambda share: on_progress(name, share)


def _ours(
    name: str, trace: Trace, scenario: Scenario, save_every: int | None, on_progress: Callable[[float], None]
) -> Row:
    every = save_every if save_every is not None else save_every_steps(trace, scenario)
    chosen = replace(scenario, save_every_steps=every)
    outcome = Replay(trace, chosen).run(on_progress)
    remark = f"stopped: {outcome.stopped}" if outcome.stopped else f"saves every {every} steps" if every else "no saves"
    return Row(
        name=name,
        goodput=outcome.goodput,
        bound=_bound_of(trace, scenario, announced=scenario.notice_seconds > 0),
        outcome=outcome,
        interval_seconds=every * scenario.step_seconds if every else None,
        remark=remark,
    )


def _periodic(trace: Trace, scenario: Scenario, stall_seconds: float, restart_seconds: float) -> Row:
    mean = trace.mean_seconds_between_losses
    interval = SAVES_EVERY_SECONDS_WITHOUT_LOSSES
    if mean is not None:
        interval = max(young_interval(save_seconds=stall_seconds, mean_seconds=mean), scenario.step_seconds)
    policy = PeriodicPolicy(
        interval_seconds=interval, stall_seconds=stall_seconds, restart_seconds=restart_seconds, growth_patience=0.0
    )
    best, outcome = best_periodic(trace, scenario, policy)
    return Row(
        name="periodic, restart all",
        goodput=outcome.goodput,
        bound=None,
        outcome=outcome,
        interval_seconds=interval,
        remark=f"saves every {interval:.0f} s (Young); {best.growth}",
    )


def _bound_of(trace: Trace, scenario: Scenario, *, announced: bool) -> float:
    mean, save, restart = trace.mean_seconds_between_losses, scenario.stall_seconds, scenario.restart_seconds
    if announced:
        return goodput_bound(saves_per_interruption=1, save_seconds=save, restart_seconds=restart, mean_seconds=mean)
    return goodput_bound_without_notice(save_seconds=save, restart_seconds=restart, mean_seconds=mean)


def _bound(trace: Trace, scenario: Scenario, *, announced: bool) -> Row:
    return Row(
        name=f"bound, {'every loss announced' if announced else 'no notice'}",
        goodput=_bound_of(trace, scenario, announced=announced),
        bound=None,
        outcome=None,
        interval_seconds=None,
        remark="1 − (S + R)/M" if announced else "1 − (√(2·S·M) + R)/M",
    )

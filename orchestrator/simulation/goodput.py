"""Where the machines' time went, and what theory says of it. Pure arithmetic in whole node-microseconds.

What it is not: it simulates nothing. `model` and `periodic` tell a `Ledger` what the nodes are doing; `cli.simulate`
prints the `Outcome`.

*Goodput* here is useful node-seconds over available node-seconds: a node is available from its appearing in the trace
until it is gone, at most as many at a time as the job may use; a node-second is useful if a gang spent it on a training
step whose result was kept. Every available node-second has exactly one cause, so the shares sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Cause(StrEnum):
    """What a node-second went into."""

    USEFUL = "useful"
    """Training steps that were kept."""
    SAVING = "saving"
    """The gang stood still to agree on a step and to stage it."""
    REDONE = "redone"
    """Training steps, or parts of one, that were lost and had to be done again."""
    RESTARTING = "restarting"
    """Enough nodes, but no gang trains: noticing, clearing, uploading, gathering, opening, starting."""
    WAITING = "waiting"
    """Fewer nodes than the job's minimum (or the job has stopped)."""
    ANNOUNCED = "announced"
    """A node that was announced to go is still there and not used any more."""
    SPARE = "spare"
    """A node is there and not in the gang: it waits to join, or the job has no use for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps that one gang did in a row: `steps` of them from step `first_step` on, each `step_us` on `nodes` nodes."""

    start_us: int
    step_us: int
    nodes: int
    first_step: int
    steps: int

    @property
    def node_us(self) -> int:
        """What they took."""
        return self.steps * self.step_us * self.nodes

    def until(self, step: int) -> Segment:
        """The part that leads to `step` at most."""
        return replace(self, steps=max(0, min(self.steps, step - self.first_step)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in which as many nodes were there, and as many trained."""

    start_us: int
    end_us: int
    available: int
    training: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay: every cause's node-microseconds (they sum to `available_us`), and the wall time's share of each.

    `interruptions` counts the times that training stopped, by why: loss, notice, growth. `stopped` says why the job
    ended before the trace did.
    """

    node_us: Mapping[Cause, int]
    wall_us: Mapping[Cause, int]
    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    interruptions: Mapping[str, int]
    restarts: int
    saves: int
    stopped: str | None = None

    @property
    def available_us(self) -> int:
        """All node-microseconds."""
        return sum(self.node_us.values())

    @property
    def goodput(self) -> float:
        """Useful over available node-seconds; 0 where there was no node."""
        return self.share(Cause.USEFUL)

    @property
    def wall_goodput(self) -> float:
        """Share of the wall time in which kept steps were done, on however many nodes."""
        total = sum(self.wall_us.values())
        return self.wall_us[Cause.USEFUL] / total if total else 0.0

    def share(self, *causes: Cause) -> float:
        """Share of the available node-seconds."""
        return sum(self.node_us[cause] for cause in causes) / self.available_us if self.available_us else 0.0

    @property
    def lost_seconds_per_interruption(self) -> float | None:
        """Wall seconds without progress (restarting and work done again) per interruption."""
        count = sum(self.interruptions.values())
        lost_us = self.wall_us[Cause.RESTARTING] + self.wall_us[Cause.REDONE]
        return lost_us / 1e6 / count if count else None


class Ledger:
    """Takes down what the nodes do, as time goes on. All times are whole microseconds.

    Training is provisional: which steps were kept is known only when the next gang says where it starts.
    """

    def __init__(self) -> None:
        self._now_us = 0
        self._nodes: Mapping[Cause, int] = {}
        self._doing = Cause.WAITING
        self._node_us = dict.fromkeys(Cause, 0)
        self._wall_us = dict.fromkeys(Cause, 0)
        self._segments: list[Segment] = []
        self._spans: list[Span] = []

    def advance(self, now_us: int) -> None:
        """Book the time since the last call under what was said to be going on."""
        passed = now_us - self._now_us
        if passed == 0:
            return
        for cause, nodes in self._nodes.items():
            self._node_us[cause] += nodes * passed
        self._wall_us[self._doing] += passed
        available, training = sum(self._nodes.values()), self._nodes.get(Cause.USEFUL, 0)
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.available, last.training) == (available, training):
            self._spans[-1] = replace(last, end_us=now_us)
        else:
            self._spans.append(Span(start_us=self._now_us, end_us=now_us, available=available, training=training))
        self._now_us = now_us

    def occupy(self, doing: Cause, nodes: Mapping[Cause, int]) -> None:
        """From now on: what the job is doing, and how many nodes each cause has. USEFUL stands for training."""
        self._doing, self._nodes = doing, nodes

    def trained(self, segment: Segment) -> None:
        """Whole steps that a gang has completed, within the time booked as training."""
        if segment.steps:
            self._segments.append(segment)

    def roll_back(self, step: int) -> None:
        """The next gang starts from `step`: what was done beyond it is lost."""
        kept = [segment.until(step) for segment in self._segments]
        self._segments = [segment for segment in kept if segment.steps]

    def close(
        self, *, interruptions: Mapping[str, int], restarts: int, saves: int, stopped: str | None = None
    ) -> Outcome:
        """The final account. What is not in a kept step of the time booked as training was done in vain."""
        node_us, wall_us = dict(self._node_us), dict(self._wall_us)
        kept_node_us = sum(segment.node_us for segment in self._segments)
        kept_wall_us = sum(segment.steps * segment.step_us for segment in self._segments)
        for account, kept in ((node_us, kept_node_us), (wall_us, kept_wall_us)):
            assert 0 <= kept <= account[Cause.USEFUL], "more was kept than was trained"
            account[Cause.REDONE] += account[Cause.USEFUL] - kept
            account[Cause.USEFUL] = kept
        return Outcome(
            node_us=node_us,
            wall_us=wall_us,
            segments=tuple(self._segments),
            spans=tuple(self._spans),
            interruptions=dict(interruptions),
            restarts=restarts,
            saves=saves,
            stopped=stopped,
        )


# ------------------------------------------------------------------------------------------------ what theory says


def young_interval(*, save_seconds: float, mean_seconds: float) -> float:
    """Seconds of training between saves that lose least, to first order: √(2·S·M).

    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. `mean_seconds`: mean time
    between interruptions.
    """
    return math.sqrt(2 * save_seconds * mean_seconds)


def daly_interval(*, save_seconds: float, mean_seconds: float) -> float:
    """The same to higher order: √(2·S·M)·[1 + ⅓·√(S/2M) + ⅑·(S/2M)] − S for S < 2M, else M.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, eq. 37.
    """
    if save_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = save_seconds / (2 * mean_seconds)
    return math.sqrt(2 * save_seconds * mean_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def goodput_bound(
    *, saves_per_interruption: float, save_seconds: float, restart_seconds: float, mean_seconds: float | None
) -> float:
    """What no policy can beat when only losses interrupt: 1 − (p·S + R)/M.

    M is the mean time between interruptions (all nodes that go at one instant are one), S the stall of one save, R the
    restart time, p the saves that each interruption costs. With notice of every loss, p = 1: one save at the last
    moment, nothing to do again, no periodic saves; nodes join for nothing, and an announced node is used to its end.
    """
    if mean_seconds is None:
        return 1.0
    return max(0.0, 1 - (saves_per_interruption * save_seconds + restart_seconds) / mean_seconds)


def goodput_bound_without_notice(*, save_seconds: float, restart_seconds: float, mean_seconds: float | None) -> float:
    """The same where no loss is announced: 1 − (√(2·S·M) + R)/M, from Young's interval T = √(2·S·M).

    Per M seconds M/T saves of S seconds are made and T/2 seconds of work are lost: together √(2·S·M).
    """
    if mean_seconds is None:
        return 1.0
    wasted = young_interval(save_seconds=save_seconds, mean_seconds=mean_seconds)
    return max(0.0, 1 - (wasted + restart_seconds) / mean_seconds)


# ------------------------------------------------------------------------------------------------ for charts


def over_time(outcome: Outcome, bins: int) -> tuple[list[float], list[float], list[float]]:
    """In each of `bins` equal parts of the time: mean nodes available, mean nodes training, goodput."""
    end_us = outcome.spans[-1].end_us if outcome.spans else 0
    if not end_us or bins < 1:
        return [], [], []
    width = end_us / bins
    available = _spread([(s.start_us, s.end_us, s.available) for s in outcome.spans], width, bins)
    training = _spread([(s.start_us, s.end_us, s.training) for s in outcome.spans], width, bins)
    kept = [(s.start_us, s.start_us + s.steps * s.step_us, s.nodes) for s in outcome.segments]
    useful = _spread(kept, width, bins)
    return available, training, [part / whole if whole else 0.0 for part, whole in zip(useful, available, strict=True)]


def _spread(stretches: Sequence[tuple[int, int, int]], width: float, bins: int) -> list[float]:
    """The mean height in each bin of stretches (start, end, height) that do not overlap."""
    found = [0.0] * bins
    for start, end, height in stretches:
        for index in range(min(int(start / width), bins - 1), min(int(end / width), bins - 1) + 1):
            overlap = min(end, (index + 1) * width) - max(start, index * width)
            found[index] += max(0.0, overlap) * height / width
    return found

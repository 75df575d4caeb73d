"""One rank's loss, as its script tells it: is it a number, and is it no higher than the last values let expect? Pure.

Judged in the worker, which alone sees every value (`Run.observe`); what is found travels to the supervisor. A value is
compared with the *usual* one, the median of the last `VALUES`, which neither noise nor a few spikes move. Every finite
value counts for what is usual: a loss that jumps and stays is told once, and is usual after half as many values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum

VALUES = 128
"""Finite values that say what is usual: enough that their spread is known to a tenth, few enough to follow a loss that
falls. Within so few a slow rise moves the median along with it."""
VALUES_MIN = 32
"""Fewer are no measure: the first losses after a start fall fast, and nothing but a number that is none is told."""
DEVIATIONS = 10.0
"""A spike is so many times as far above the median as the values usually are (their median absolute deviation): 6.7
standard deviations of Gaussian noise, so once in some ten million values, as the spread is an estimate."""
SHARE = 0.5
"""And it is above the median by this share of it: a loss that hardly varies, or not at all, is not told for trifles."""
WELL_VALUES = 5
"""So many values in a row as usual end a trouble: one good batch after a bad one does not."""


class LossState(IntEnum):
    """How a loss is; the higher, the worse."""

    WELL = 0
    SPIKE = 1
    NOT_FINITE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A trouble that has begun or become worse, or (`WELL`) that is over."""

    state: LossState
    step: int
    """Completed steps when the value was told: of the state that the loss was computed with."""
    value: float
    usual: float | None
    """The median of the values before; None while they are too few."""
    bound: float | None
    """What is higher is a spike; None: nothing is."""
    good_step: int | None
    """The last step at which all was well, before the trouble; None: there was none."""

    @property
    def reason(self) -> str:
        """In words."""
        usual = "" if self.usual is None else f"; {self.usual:.4g} is usual"
        if self.state is LossState.WELL:
            return f"the loss is {self.value:.4g} at step {self.step}{usual}"
        if self.bound is not None and self.state is LossState.SPIKE:
            usual += f", and more than {self.bound:.4g} is a spike"
        return f"the loss is {self.value:.4g} at step {self.step}{usual}"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is remembered of one rank's values in one generation."""

    values: tuple[float, ...] = ()
    """The last finite ones."""
    ordered: tuple[float, ...] = ()
    """The same, by size."""
    state: LossState = LossState.WELL
    good_step: int | None = None
    good_values: int = 0
    """As usual and in a row, while a trouble stands."""


def judge(history: History, *, step: int, value: float) -> tuple[History, Finding | None]:
    """Take in one value; what there is to tell, if anything."""
    seen = _look(history.ordered, value)
    good_values = history.good_values + 1 if history.state and not seen else 0
    over = good_values == WELL_VALUES
    state = LossState.WELL if over else max(history.state, seen)
    finding = None
    if state is not history.state:
        finding = Finding(
            state=state,
            step=step,
            value=value,
            usual=_usual(history.ordered),
            bound=_bound(history.ordered),
            good_step=history.good_step,
        )
    values, ordered = _with(history, value)
    return History(
        values=values,
        ordered=ordered,
        state=state,
        good_step=history.good_step if state else step,
        good_values=0 if over else good_values,
    ), finding


def _look(ordered: tuple[float, ...], value: float) -> LossState:
    """One value against those before. Costs a comparison while it is no more than a share above the median."""
    if not math.isfinite(value):
        return LossState.NOT_FINITE
    usual = _usual(ordered)
    if usual is None or value - usual <= SHARE * abs(usual):
        return LossState.WELL
    bound = _bound(ordered)
    return LossState.SPIKE if bound is not None and value > bound else LossState.WELL


def _usual(ordered: tuple[float, ...]) -> float | None:
    return ordered[len(ordered) // 2] if ordered else None


def _bound(ordered: tuple[float, ...]) -> float | None:
    """What no value exceeds as a rule; None: too few are known, or they are zero and nothing says how much is much."""
    usual = _usual(ordered)
    if usual is None or len(ordered) < VALUES_MIN:
        return None
    deviation = sorted(abs(value - usual) for value in ordered)[len(ordered) // 2]
    if usual == deviation == 0:
        return None
    return usual + max(SHARE * abs(usual), DEVIATIONS * deviation)


def _with(history: History, value: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(values, the same by size) with one more, without the oldest if they are too many."""
    values, ordered = history.values, history.ordered
    if not math.isfinite(value):
        return values, ordered
    if len(values) == VALUES:
        place = bisect_left(ordered, values[0])
        values, ordered = values[1:], ordered[:place] + ordered[place + 1 :]
    place = bisect_left(ordered, value)
    return (*values, value), (*ordered[:place], value, *ordered[place:])

"""Scales and ticks: where a value lies in a drawing, and which values deserve a number on an axis.

What it is not: it writes no markup.
Who uses it: both drawings, the timeline and the losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_DRAWABLE_MAX = 1e12
_TIME_STEPS_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def drawable(value: float) -> bool:
    """Whether a scale may take the value: a number, and not absurdly large."""
    return abs(value) < _DRAWABLE_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps values in [low, high], low < high, to pixels in [start, end]; values outside go to the edge."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a drawable value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def scale_over(values: Sequence[float], *, start: float, end: float, margin: float = 0.0) -> Scale:
    """A scale over drawable values, at least one, widened by `margin` of their range on both sides."""
    low, high = min(values), max(values)
    spread, largest = high - low, max(abs(low), abs(high))
    if spread <= max(1e-4 * largest, 1e-12):
        spread = 0.2 * largest if largest > 1e-12 else 1.0
    middle = (low + high) / 2
    half = spread * (0.5 + margin)
    return Scale(low=middle - half, high=middle + half, start=start, end=end)


def round_step(spread: float, ticks_max: int) -> float:
    """The smallest of 1, 2, 5 × 10^k that divides `spread` into at most `ticks_max` parts."""
    power = 10.0 ** math.floor(math.log10(spread / ticks_max))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if spread / (factor * power) <= ticks_max)


def time_step(spread: float, ticks_max: int) -> float:
    """The same for times, where 15, 30 and 60 are rounder than 20 and 50."""
    if spread / ticks_max < 1:
        return round_step(spread, ticks_max)
    fitting = (float(step) for step in _TIME_STEPS_SECONDS if spread / step <= ticks_max)
    return next(fitting, 86400 * round_step(spread / 86400, ticks_max))


def ticks(scale: Scale, step: float) -> list[float]:
    """The multiples of `step` within the scale; one that misses an end by rounding alone counts as within."""
    nudge = 1e-9 * (scale.high - scale.low) / step
    first, last = math.ceil(scale.low / step - nudge), math.floor(scale.high / step + nudge)
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's number, with as many decimals as the step needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.6g}" if decimals > 6 or abs(value) >= 1e7 else f"{value:,.{decimals}f}"

"""Labels that do not collide: given where each wants to stand, which ones find room and where.

What it is not: it writes no markup, and knows nothing of what a label stands for.
Who uses it: the timeline for its marks, both drawings for the flags of interruptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label that wants to stand beside the line at `x`, from `x - before` to `x + after`; low ranks choose first."""

    x: float
    before: float
    after: float
    rank: int
    text: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a label goes: row 0 is nearest its mark, and from any other row a leader runs back through the rows."""

    label: Label
    row: int
    start: float
    end: float

    def beside(self, distance: float) -> tuple[float, str]:
        """Where text begins that keeps this distance from the label's line, and its text-anchor."""
        left_of_line = self.end - self.label.x < self.label.after - 0.01
        return (self.label.x - distance, "end") if left_of_line else (self.label.x + distance, "start")

    def covers(self, x: float, gap: float = 2) -> bool:
        """Whether a line at `x` would touch the text."""
        return self.start - gap < x < self.end + gap

    def clear_of(self, other: Spot) -> bool:
        """Neither text over text nor a leader through text."""
        if self.row == other.row:
            return self.start - 5 >= other.end or other.start - 5 >= self.end
        upper, lower = (self, other) if self.row < other.row else (other, self)
        return not upper.covers(lower.label.x)


def place_labels(
    labels: Iterable[Label],
    *,
    rows_max: int,
    left: float,
    right: float,
    marks: Sequence[float] = (),
    lines: Sequence[float] = (),
) -> list[Spot]:
    """A spot for every label that has room; the rest go without.

    `marks` stand in row 0 and are kept clear. `lines` run through all rows and are kept clear where that is possible.
    """
    placed: list[Spot] = []
    for label in sorted(labels, key=lambda each: (each.rank, each.x)):
        free = [
            spot
            for spot in _wishes(label, rows_max, left, right)
            if all(spot.clear_of(other) for other in placed)
            and not (spot.row == 0 and any(x != label.x and spot.covers(x, 6) for x in marks))
        ]
        placed += [spot for spot in free if not any(spot.covers(x) for x in lines)][:1] or free[:1]
    return placed


def _wishes(label: Label, rows_max: int, left: float, right: float) -> Iterable[Spot]:
    """Spots in order of preference: to the right of the line, nearest row first, then to its left."""
    x = label.x
    for start, end in ((x - label.before, x + label.after), (x - label.after, x + label.before)):
        if left <= start and end <= right:
            yield from (Spot(label=label, row=row, start=start, end=end) for row in range(rows_max))

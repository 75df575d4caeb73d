"""Interruptions over a drawing: a line through it at each, and a numbered flag above.

What it is not: it does not say where in a drawing an interruption lies.
Who uses it: the timeline, where the flags bear words, and the losses, where they bear numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.cli.report_page.drawing import WIDTH, text_width, vertical
from orchestrator.cli.report_page.labels import Label, Spot, place_labels
from orchestrator.cli.report_page.markup import Markup, escaped, join, shortened, tag
from orchestrator.cli.report_page.model import Interruption

_BADGE_ROW_HEIGHT = 22.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a drawing shows an interruption, and the number that it has in the table."""

    x: float
    number: int
    interruption: Interruption


def flags(cuts: Sequence[Cut], *, words: bool) -> tuple[Markup, float]:
    """Numbered badges, each with a line down to the y where the drawing begins; and that y.

    Causes stand beside the badges if `words` and if there is room for all; else neighbours may share a badge.
    """
    spots: list[Spot] = []
    if words:
        spots = place_labels(map(_cause_label, cuts), rows_max=4, left=0, right=WIDTH)
    if len(spots) < len(cuts):
        spots = place_labels(_number_labels(cuts), rows_max=4, left=0, right=WIDTH)
    top = max((spot.row + 1 for spot in spots), default=0) * _BADGE_ROW_HEIGHT + 8
    return join(*(_flag(spot, top) for spot in spots)), top


def cut_lines(cuts: Iterable[Cut], top: float, bottom: float) -> Markup:
    """A line at each interruption, through the whole drawing."""
    return join(*(tag("path", d=vertical(cut.x, top, bottom), class_="cut") for cut in cuts))


def _cause_label(cut: Cut) -> Label:
    cause, node = cut.interruption.cause, cut.interruption.node
    words = f"{cause}, {node}" if node else cause
    text = f"{cut.number} {shortened(words, 40)}"
    title = f"interruption {cut.number}: {words}"
    return Label(x=cut.x, before=9, after=14 + text_width(text), rank=0, text=text, title=title)


def _number_labels(cuts: Iterable[Cut]) -> list[Label]:
    """Badges without words; interruptions within 20 pixels share one, such as 4–6."""
    groups: list[tuple[float, list[int]]] = []
    for cut in sorted(cuts, key=lambda each: (each.x, each.number)):
        if groups and cut.x - groups[-1][0] < 20:
            groups[-1][1].append(cut.number)
        else:
            groups.append((cut.x, [cut.number]))
    return [_number_label(x, numbers) for x, numbers in groups]


def _number_label(x: float, numbers: Sequence[int]) -> Label:
    text = str(numbers[0]) if len(numbers) == 1 else f"{min(numbers)}–{max(numbers)}"
    half = _badge_width(text) / 2
    title = "interruption " + ", ".join(map(str, numbers))
    return Label(x=x, before=half, after=half, rank=0, text=text, title=title)


def _badge_width(number: str) -> float:
    return 16.0 if len(number) < 3 else 8 + text_width(number)


def _flag(spot: Spot, top: float) -> Markup:
    number, _, words = spot.label.text.partition(" ")
    x, y, width = spot.label.x, top - 14 - spot.row * _BADGE_ROW_HEIGHT, _badge_width(number)
    words_x, anchor = spot.beside(width / 2 + 5)
    return tag(
        "g",
        tag("title", escaped(spot.label.title)),
        tag("path", d=vertical(x, y, top), class_="cut"),
        tag("rect", x=x - width / 2, y=y - 8, width=width, height=16, rx=8, class_="badge"),
        tag("text", escaped(number), x=x, y=y + 4, class_="badge-text"),
        tag("text", escaped(words), x=words_x, y=y + 4, text_anchor=anchor, class_="cause"),
    )

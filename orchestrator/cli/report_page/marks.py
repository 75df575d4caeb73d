"""Marks: the shapes that stand for events in a lane of the timeline, with their labels and their legend.

What it is not: it knows no bars and no lanes, only which lane a mark belongs to.
Who uses it: the timeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.cli.report_page.drawing import WIDTH, text_width, vertical
from orchestrator.cli.report_page.labels import Label, Spot, place_labels
from orchestrator.cli.report_page.markup import Markup, coordinate, escaped, seconds_text, tag
from orchestrator.cli.report_page.model import TimelineEvent
from orchestrator.cli.report_page.scales import Scale, drawable

ROW_HEIGHT = 16.0

JOB_LANE = None
"""Lane of what concerns the whole job: of events without a node, and of kinds that always do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkStyle:
    """How the timeline shows a kind of event: SVG path around 0,0, word, whether it concerns the whole job, rank."""

    path: str
    word: str
    whole_job: bool
    rank: int
    legend: str


_DIAMOND = "M0 -5.5L5.5 0L0 5.5L-5.5 0Z"
_CROSS = "M-4 -4L4 4M4 -4L-4 4"
MARK_STYLES: Mapping[str, MarkStyle] = {
    "notice received": MarkStyle(path="M0 -5L5 4.5H-5Z", word="notice", whole_job=False, rank=0, legend="notice"),
    "committed": MarkStyle(path=_DIAMOND, word="commit", whole_job=True, rank=2, legend="commit, with its step"),
    "abandoned": MarkStyle(path=_DIAMOND, word="abandoned", whole_job=True, rank=3, legend="abandoned"),
    "node lost": MarkStyle(path=_CROSS, word="lost", whole_job=False, rank=0, legend="node lost"),
    "worker exited": MarkStyle(path=_CROSS, word="", whole_job=False, rank=4, legend="worker exited"),
    "first good step": MarkStyle(
        path="M-4 -5L5.5 0L-4 5Z", word="step", whole_job=True, rank=1, legend="first good step after a start"
    ),
}
"""By kind of event, in the legend's order; events of other kinds stand in the table alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One event at its place; `kind` has a style, and `text` may be empty."""

    x: float
    kind: str
    text: str
    title: str


def marks_by_lane(events: Iterable[TimelineEvent], scale: Scale) -> dict[str | None, list[Mark]]:
    """Marks by node or `JOB_LANE`, from left to right; of one kind in one lane at most one within 3 pixels."""
    lanes: dict[str | None, list[Mark]] = {}
    newest: dict[tuple[str | None, str], float] = {}
    shown = (each for each in events if each.kind in MARK_STYLES and drawable(each.time_seconds))
    for event in sorted(shown, key=lambda each: each.time_seconds):
        style, x = MARK_STYLES[event.kind], scale.at(event.time_seconds)
        lane = JOB_LANE if style.whole_job else event.node
        if x - newest.get((lane, event.kind), -math.inf) < 3:
            continue
        newest[lane, event.kind] = x
        text = style.word if event.step is None or not style.whole_job else f"{style.word} {event.step:,}"
        title = f"{event.kind} at {seconds_text(event.time_seconds)} s: {event.reason}"
        lanes.setdefault(lane, []).append(Mark(x=x, kind=event.kind, text=text, title=title))
    return {lane: _spread(marks) for lane, marks in lanes.items()}


def _spread(marks: Iterable[Mark]) -> list[Mark]:
    """Marks side by side that would lie on each other, as long as none moves more than 14 pixels."""
    moved: list[Mark] = []
    for mark in marks:
        wanted = max(mark.x, moved[-1].x + 12) if moved else mark.x
        moved.append(replace(mark, x=wanted) if wanted - mark.x <= 14 else mark)
    return moved


def draw_marks(marks: Sequence[Mark], y: float, *, left: float, lines: Sequence[float]) -> tuple[list[Markup], int]:
    """The marks at height `y` with the labels that find room right of `left`; and how many rows all that takes."""
    labels = [_label(mark) for mark in marks if mark.text]
    spots = place_labels(labels, rows_max=3, left=left, right=WIDTH, marks=[mark.x for mark in marks], lines=lines)
    rows = max((spot.row + 1 for spot in spots), default=1 if marks else 0)
    leaders = [_leader(spot, y) for spot in spots if spot.row]
    shapes = [
        _shape(mark.kind, tag("title", escaped(mark.title)), place=f"{coordinate(mark.x)} {coordinate(y)}")
        for mark in marks
    ]
    return [*leaders, *shapes, *(_label_text(spot, y) for spot in spots)], rows


def mark_legend(events: Iterable[TimelineEvent]) -> list[tuple[Markup, str]]:
    """What the shapes mean, for those that occur."""
    kinds = {each.kind for each in events}
    return [(_shape(kind, place="8 8"), style.legend) for kind, style in MARK_STYLES.items() if kind in kinds]


def _label(mark: Mark) -> Label:
    rank, after = MARK_STYLES[mark.kind].rank, 9 + text_width(mark.text)
    return Label(x=mark.x, before=-4, after=after, rank=rank, text=mark.text, title=mark.title)


def _shape(kind: str, *children: Markup, place: str) -> Markup:
    style = f"mark {kind.replace(' ', '-')}"
    return tag("path", *children, d=MARK_STYLES[kind].path, transform=f"translate({place})", class_=style)


def _leader(spot: Spot, y: float) -> Markup:
    return tag("path", d=vertical(spot.label.x, y, _text_y(spot, y)), class_="leader")


def _label_text(spot: Spot, y: float) -> Markup:
    x, anchor = spot.beside(9 if spot.row == 0 else 4)
    title = tag("title", escaped(spot.label.title))
    return tag("text", escaped(spot.label.text), title, x=x, y=_text_y(spot, y), text_anchor=anchor, class_="label")


def _text_y(spot: Spot, y: float) -> float:
    return y + spot.row * ROW_HEIGHT + 4

"""The timeline: a lane for the job and one per node, bars for generations, marks for events, flags above.

What it is not: it does not list every event; the table of events does.
Who uses it: the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cli.report_page.drawing import (
    WIDTH,
    figure_section,
    first_that_fits,
    generation_tones,
    horizontal,
    legend,
    text_width,
    vertical,
)
from orchestrator.cli.report_page.flags import Cut, cut_lines, flags
from orchestrator.cli.report_page.marks import JOB_LANE, ROW_HEIGHT, Mark, draw_marks, mark_legend, marks_by_lane
from orchestrator.cli.report_page.markup import (
    NOTHING,
    Markup,
    coordinate,
    counted,
    escaped,
    join,
    quiet_paragraph,
    seconds_text,
    section,
    shortened,
    tag,
)
from orchestrator.cli.report_page.model import GenerationSpan, Report
from orchestrator.cli.report_page.scales import Scale, drawable, scale_over, ticks, time_step

_BAR_HEIGHT = 20.0
_NODE_LANES_MAX = 64
_NAME_CHARACTERS_MAX = 22
_TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def timeline_section(report: Report) -> Markup:
    """The drawing with its legend, or a sentence where nothing has a time that can be drawn."""
    times = _times(report)
    if not times:
        return section("Timeline", quiet_paragraph("Nothing happened that has a time."))
    nodes, nodes_left_out = _nodes_shown(report)
    widths = (text_width(shortened(node, _NAME_CHARACTERS_MAX), 12) for node in nodes)
    gutter = min(max(widths, default=24) + 14, 190)
    scale = scale_over(_from_zero(times), start=gutter, end=WIDTH - 78)
    cuts = _cuts(report, scale)
    flags_drawn, top = flags(cuts, words=True)
    bars, marks = _bars(report, scale), marks_by_lane(report.events, scale)
    y, lanes = top, []
    for name in (JOB_LANE, *nodes):
        lane, height = _lane(name, bars.get(name, []), marks.get(name, []), cuts, gutter)
        lanes.append(tag("g", lane, transform=f"translate(0 {coordinate(y)})"))
        y += height
    left_out = f" {counted(nodes_left_out, 'more node')} not drawn." if nodes_left_out else ""
    return figure_section(
        "Timeline",
        time_axis(scale, top, y, "since the job started"),
        cut_lines(cuts, top, y),
        *lanes,
        flags_drawn,
        height=y + 42,
        name="Timeline, one lane per node; the table of events holds the same facts",
        caption=(_legend(report), escaped(left_out)),
    )


def _times(report: Report) -> list[float]:
    found = [each.time_seconds for each in report.events]
    found += [each.at_seconds for each in report.interruptions]
    for span in report.generations:
        found += [span.start_seconds, span.end_seconds]
    return [time for time in found if drawable(time)]


def _from_zero(times: Sequence[float]) -> list[float]:
    """The same times, and the start of the job unless it lies far before the first of them."""
    return [0.0, *times] if 0 <= min(times) <= max(times) / 2 else list(times)


def _cuts(report: Report, scale: Scale) -> list[Cut]:
    return [
        Cut(x=scale.at(each.at_seconds), number=number, interruption=each)
        for number, each in enumerate(report.interruptions, start=1)
        if drawable(each.at_seconds)
    ]


def _nodes_shown(report: Report) -> tuple[list[str], int]:
    """Nodes as they first appear, and how many go without a lane; those with events of their own go first."""
    named = [each.node for each in report.interruptions] + [each.node for each in report.events]
    marked = [node for node in named if node is not None]
    members = [node for span in report.generations for node in span.nodes]
    nodes = list(dict.fromkeys(members + marked))
    chosen = set(list(dict.fromkeys(marked + members))[:_NODE_LANES_MAX])
    return [node for node in nodes if node in chosen], len(nodes) - len(chosen)


def _lane(
    node: str | None, bars: Sequence[Markup], marks: Sequence[Mark], cuts: Sequence[Cut], left: float
) -> tuple[Markup, float]:
    """One lane drawn from y = 0, and its height. Bars show generations, and marks stand below them."""
    name, bar_height = ("job", 0.0) if node is JOB_LANE else (node, _BAR_HEIGHT)
    marks_y = bar_height + ROW_HEIGHT / 2 + 2
    marks_drawn, rows = draw_marks(marks, marks_y, left=left, lines=[cut.x for cut in cuts])
    height = bar_height + rows * ROW_HEIGHT + (12 if rows else 10)
    name_y = (marks_y if node is JOB_LANE else bar_height / 2) + 4
    words = (escaped(shortened(name, _NAME_CHARACTERS_MAX)), tag("title", escaped(name)))
    label = tag("text", *words, x=left - 10, y=name_y, class_="lane")
    rule = tag("path", d=horizontal(height - 5, 0, WIDTH), class_="rule")
    return join(rule, label, *bars, *marks_drawn), height


def _bars(report: Report, scale: Scale) -> dict[str | None, list[Markup]]:
    """Bars by node, one for each generation that the node took part in."""
    tones = generation_tones(report)
    bars: dict[str | None, list[Markup]] = {}
    for span in report.generations:
        drawn = _bar(span, tones[span.generation], scale)
        for node in dict.fromkeys(span.nodes):
            bars.setdefault(node, []).append(drawn)
    return bars


def _bar(span: GenerationSpan, tone: int, scale: Scale) -> Markup:
    """A generation in a node's lane: hatched until its first step, then plain and labelled."""
    if not (drawable(span.start_seconds) and drawable(span.end_seconds)):
        return NOTHING
    start, end = scale.at(span.start_seconds), scale.at(max(span.start_seconds, span.end_seconds))
    first_step = span.first_step_seconds
    ready = min(max(scale.at(first_step), start), end) if first_step is not None and drawable(first_step) else end
    width = max(end - start - 1, 1.5)
    parts = [
        tag("title", escaped(_bar_title(span))),
        tag("rect", x=start, y=0, width=width, height=_BAR_HEIGHT, rx=2, class_=f"bar tone{tone}"),
    ]
    if ready > start:
        hatched = max(min(ready, start + width) - start, 1)
        parts.append(tag("rect", x=start, y=0, width=hatched, height=_BAR_HEIGHT, rx=2, class_="hatch"))
    return tag("g", *parts, _bar_text(span, ready, end))


def _bar_title(span: GenerationSpan) -> str:
    first_step = span.first_step_seconds
    return (
        f"generation {span.generation}, world size {span.world_size}, "
        f"{seconds_text(span.start_seconds)} to {seconds_text(span.end_seconds)} s, "
        + ("no step" if first_step is None else f"first step at {seconds_text(first_step)} s")
    )


def _bar_text(span: GenerationSpan, start: float, end: float) -> Markup:
    """The longest of three wordings that fits into the plain part of the bar, or nothing."""
    wordings = (
        f"generation {span.generation} · world size {span.world_size}",
        f"gen {span.generation} · world {span.world_size}",
        f"{span.generation} · {span.world_size}",
    )
    words = first_that_fits(wordings, end - start - 10)
    return tag("text", escaped(words), x=start + 6, y=14, class_="bar-text") if words else NOTHING


def time_axis(scale: Scale, top: float, bottom: float, since: str) -> Markup:
    """Grid and numbers of a level axis of seconds, in a unit that suits; `since` says from when on they count."""
    step = time_step(scale.high - scale.low, 10)
    divisor, unit = next((pair for pair in _TIME_UNITS if step >= pair[0]), (1, "seconds"))
    parts = []
    for tick in ticks(scale, step):
        x = scale.at(tick)
        parts.append(tag("path", d=vertical(x, top, bottom), class_="grid"))
        parts.append(tag("text", escaped(f"{tick / divisor:,.6g}"), x=x, y=bottom + 16, class_="tick"))
    name = escaped(f"{unit} {since}")
    return join(*parts, tag("text", name, x=(scale.start + scale.end) / 2, y=bottom + 36, class_="axis-name"))


def _legend(report: Report) -> Markup:
    entries = mark_legend(report.events)
    if report.generations:
        swatch = tag("rect", x=0, y=2, width=16, height=12, rx=2, class_="bar tone0")
        hatch = tag("rect", x=0, y=2, width=16, height=12, rx=2, class_="hatch")
        entries.append((join(swatch, hatch), "starting: before the first step"))
    return legend(entries)

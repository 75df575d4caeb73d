"""The page of `orchestrator simulate --html`: shares per row, nodes over time, the table, what was assumed.

What it is not: it computes nothing but coordinates. Frame, style and axes are `report_page`'s. Used by `cli.simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.cli.report_page.drawing import WIDTH, figure_section, first_that_fits, horizontal, legend
from orchestrator.cli.report_page.markup import Markup, coordinate, escaped, join, quiet_paragraph, section, tag
from orchestrator.cli.report_page.page import document
from orchestrator.cli.report_page.scales import Scale, round_step, scale_over, tick_text, ticks
from orchestrator.cli.report_page.tables import plain_table
from orchestrator.cli.report_page.timeline import time_axis
from orchestrator.cli.simulate import HEADERS, cells, summary
from orchestrator.simulation.goodput import Cause, Outcome, over_time

if TYPE_CHECKING:
    from orchestrator.simulation.comparison import Row, Theory
    from orchestrator.simulation.scenario import Scenario
    from orchestrator.simulation.traces import Trace

_LEFT, _RIGHT = 190.0, WIDTH - 16
_BAR_HEIGHT, _BAR_GAP = 24.0, 10.0
_PLOT_HEIGHT = 150.0
_BINS = 360
_SPANS_DRAWN_MAX = 4_000


def render(trace: Trace, scenario: Scenario, rows: Sequence[Row], known: Theory) -> str:
    """The whole page as text, to be written as UTF-8."""
    replayed = [(row.name, row.outcome) for row in rows if row.outcome is not None]
    title = f"orchestrator simulate {trace.name}"
    headline = f"{rows[0].name}: {rows[0].goodput:.1%} of the machines' time kept"
    head = tag(
        "header",
        tag("p", escaped(title), class_="title"),
        tag("h1", escaped(headline)),
        *(quiet_paragraph(line) for line in summary(trace, scenario, known)),
    )
    remarks = tag("ul", *(tag("li", escaped(f"{row.name}: {row.remark}")) for row in rows))
    body = [[cell if cell is not None else "–" for cell in cells(row)] for row in rows]
    numbers = section("Figures", plain_table(HEADERS, body, text_columns=frozenset({0})), remarks)
    over = [_over_time(name, outcome, scenario) for name, outcome in replayed]
    return document(title, head, _shares(replayed), *over, numbers, _assumptions(scenario))


def _shares(replayed: Sequence[tuple[str, Outcome]]) -> Markup:
    """One bar per row, all of the available node-seconds long."""
    bars = [_bar(index * (_BAR_HEIGHT + _BAR_GAP), name, outcome) for index, (name, outcome) in enumerate(replayed)]
    told = "; ".join(f"{name} {outcome.goodput:.1%} useful" for name, outcome in replayed)
    swatches = (
        (tag("rect", x=0, y=2, width=16, height=12, rx=2, class_=f"share {cause}"), str(cause)) for cause in Cause
    )
    return figure_section(
        "Where the nodes' time went",
        *bars,
        height=len(bars) * (_BAR_HEIGHT + _BAR_GAP) + 4,
        name=f"Shares of the available node-seconds: {told}",
        caption=(legend(swatches),),
    )


def _bar(top: float, name: str, outcome: Outcome) -> Markup:
    parts = [tag("text", escaped(name), x=_LEFT - 10, y=top + 16, class_="lane")]
    x = _LEFT
    for cause in Cause:
        share = outcome.share(cause)
        width = share * (_RIGHT - _LEFT)
        label = f"{cause} {share:.2%}"
        parts.append(
            tag(
                "rect",
                tag("title", escaped(label)),
                x=x,
                y=top,
                width=width,
                height=_BAR_HEIGHT,
                class_=f"share {cause}",
            )
        )
        words = first_that_fits((label, f"{share:.1%}"), width - 8)
        if words:
            parts.append(tag("text", escaped(words), x=x + width / 2, y=top + 16, class_="share-text"))
        x += width
    return join(*parts)


def _over_time(name: str, outcome: Outcome, scenario: Scenario) -> Markup:
    """Nodes that are there, and those that train, as areas; below them the goodput as a curve."""
    end_seconds = outcome.spans[-1].end_us / 1e6
    x_scale = scale_over([0.0, end_seconds], start=_LEFT, end=_RIGHT)
    nodes = Scale(low=0.0, high=float(scenario.nodes_max), start=_PLOT_HEIGHT, end=4)
    top = _PLOT_HEIGHT + 18
    share = Scale(low=0.0, high=1.0, start=top + _PLOT_HEIGHT / 2, end=top)
    available, training, goodput = over_time(outcome, _BINS)
    bottom = top + _PLOT_HEIGHT / 2
    return figure_section(
        f"Over time: {name}",
        time_axis(x_scale, 4, bottom, "since the trace began"),
        _level_axis(nodes, "nodes", max(1.0, round_step(float(scenario.nodes_max), 4))),
        _level_axis(share, "goodput", 0.5),
        _area(outcome, available, x_scale, nodes, training=False),
        _area(outcome, training, x_scale, nodes, training=True),
        tag("path", d=_line(goodput, x_scale, share), class_="curve tone0"),
        height=bottom + 42,
        name=f"Nodes that are there and nodes that train, and goodput, over {end_seconds / 3600:.1f} hours",
        caption=(
            legend(
                [
                    (tag("rect", x=0, y=2, width=16, height=12, class_="area there"), "nodes there"),
                    (tag("rect", x=0, y=2, width=16, height=12, class_="area training"), "of these, training"),
                    (tag("path", d="M0 8H16", class_="curve tone0"), "goodput"),
                ]
            ),
        ),
    )


def _level_axis(scale: Scale, name: str, step: float) -> Markup:
    parts = [tag("text", escaped(name), x=_LEFT - 60, y=(scale.start + scale.end) / 2 + 4, class_="lane")]
    for tick in ticks(scale, step):
        y = scale.at(tick)
        parts.append(tag("path", d=horizontal(y, _LEFT, _RIGHT), class_="grid"))
        parts.append(tag("text", escaped(tick_text(tick, step)), x=_LEFT - 10, y=y + 4, class_="lane"))
    return join(*parts)


def _area(outcome: Outcome, means: Sequence[float], x_scale: Scale, y_scale: Scale, *, training: bool) -> Markup:
    """The exact numbers of nodes, or the means per bin where there are too many changes to draw."""
    spans = [(s.start_us / 1e6, s.end_us / 1e6, float(s.training if training else s.available)) for s in outcome.spans]
    if len(spans) > _SPANS_DRAWN_MAX:
        width = spans[-1][1] / len(means)
        spans = [(index * width, (index + 1) * width, mean) for index, mean in enumerate(means)]
    steps = "".join(f"V{coordinate(y_scale.at(height))}H{coordinate(x_scale.at(end))}" for _start, end, height in spans)
    base = coordinate(y_scale.at(0.0))
    path = f"M{coordinate(x_scale.start)} {base}{steps}V{base}Z"
    return tag("path", d=path, class_=f"area {'training' if training else 'there'}")


def _line(values: Sequence[float], x_scale: Scale, y_scale: Scale) -> str:
    width = (x_scale.end - x_scale.start) / max(len(values), 1)
    points = (
        f"{coordinate(x_scale.start + (index + 0.5) * width)} {coordinate(y_scale.at(value))}"
        for index, value in enumerate(values)
    )
    return "M" + "L".join(points)


def _assumptions(scenario: Scenario) -> Markup:
    facts = [
        ("nodes", f"{scenario.nodes_min} to {scenario.nodes_max}"),
        ("step", f"{scenario.step_seconds:g} s on {scenario.nodes_max} nodes, perfectly scaling"),
        ("state", f"{scenario.state_bytes / 1e9:g} GB, {scenario.bandwidth_bytes_per_second / 1e9:g} GB/s per node"),
        ("save stall", f"{scenario.stall_seconds:g} s"),
        ("restart", f"{scenario.restart_seconds:g} s"),
        ("notice", f"{scenario.notice_seconds:g} s" if scenario.notice_seconds else "none"),
        ("replacement", f"{scenario.replacement_seconds:g} s"),
    ]
    return section("Assumed", tag("dl", *(tag("div", tag("dt", escaped(a)), tag("dd", escaped(b))) for a, b in facts)))

"""The losses over steps: a line per generation over the uninterrupted reference, and how far the two differ.

What it is not: it does not judge the difference; a check does, and it is input.
Who uses it: the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from orchestrator.cli.report_page.drawing import (
    WIDTH,
    figure_section,
    first_that_fits,
    generation_tones,
    horizontal,
    legend,
    vertical,
)
from orchestrator.cli.report_page.flags import Cut, cut_lines, flags
from orchestrator.cli.report_page.markup import (
    NOTHING,
    Markup,
    coordinate,
    counted,
    escaped,
    join,
    quiet_paragraph,
    section,
    tag,
)
from orchestrator.cli.report_page.model import LossPoint, Report
from orchestrator.cli.report_page.scales import Scale, drawable, round_step, scale_over, tick_text, ticks

_PLOT_LEFT = 56.0
_PLOT_RIGHT = WIDTH - 16
_PLOT_HEIGHT = 260.0
_RIBBON_HEIGHT = 16.0
_POINTS_PER_LINE_MAX = 2_000

_Place: TypeAlias = tuple[float, float | None]
"""Where a point lies; its y is None if its loss cannot be drawn."""


def loss_section(report: Report) -> Markup:
    """The drawing with its legend and the comparison, or a sentence where no loss can be drawn."""
    generations = _by_generation(report.losses)
    reference = [point for point in report.reference_losses if drawable(point.step)]
    losses = [point for points in generations.values() for point in points]
    shown = [point for point in (*losses, *reference) if drawable(point.loss)]
    if not shown:
        return section("Loss", quiet_paragraph("No losses were recorded."))
    x_scale = scale_over([float(point.step) for point in shown], start=_PLOT_LEFT, end=_PLOT_RIGHT)
    cuts = _cuts(report, generations, x_scale)
    badges, ribbon_top = flags(cuts, words=False)
    top = ribbon_top + _RIBBON_HEIGHT + 6
    bottom = top + _PLOT_HEIGHT
    y_scale = scale_over([point.loss for point in shown], start=bottom, end=top, margin=0.04)
    tones = generation_tones(report)
    curves = (
        _curve(points, x_scale, y_scale, f"tone{tones[generation]}", f"generation {generation}")
        for generation, points in generations.items()
    )
    comparison = _comparison(report)
    return figure_section(
        "Loss",
        _axes(x_scale, y_scale),
        cut_lines(cuts, ribbon_top, bottom),
        _curve(reference, x_scale, y_scale, "reference", "uninterrupted reference"),
        *curves,
        _ribbon(generations, tones, x_scale, ribbon_top),
        badges,
        height=bottom + 42,
        name="Loss over steps. " + comparison,
        caption=(_legend(report, cut=bool(cuts)), escaped(comparison)),
    )


def _by_generation(losses: Iterable[LossPoint]) -> dict[int, list[LossPoint]]:
    """Points whose step can be drawn, in order of generations."""
    found: dict[int, list[LossPoint]] = {}
    for point in losses:
        if drawable(point.step):
            found.setdefault(point.generation, []).append(point)
    return dict(sorted(found.items()))


def _cuts(report: Report, generations: Mapping[int, Sequence[LossPoint]], x_scale: Scale) -> list[Cut]:
    """Interruptions, each at the last step of the generation that ran at that time.

    For a generation without steps it is the newest one before it that did any; without such, there is no cut.
    """
    last_steps = {generation: max(point.step for point in points) for generation, points in generations.items()}
    spans = sorted((each for each in report.generations if each.generation in generations), key=lambda e: e.generation)
    cuts = []
    for number, each in enumerate(report.interruptions, start=1):
        before = [span for span in spans if span.start_seconds <= each.at_seconds and drawable(each.at_seconds)]
        if before:
            x = x_scale.at(last_steps[before[-1].generation])
            cuts.append(Cut(x=x, number=number, interruption=each))
    return cuts


def _comparison(report: Report) -> str:
    """How the losses differ from the reference's at the steps that both have."""
    reference = {point.step: point.loss for point in report.reference_losses}
    shared = [point for point in report.losses if point.step in reference]
    if not shared:
        return ""
    steps = counted(len({point.step for point in shared}), "step")
    different = [point for point in shared if point.loss != reference[point.step]]
    if not different:
        return f"Equal to the uninterrupted reference, to the last bit, at all {steps} compared."
    differences = ((_difference(point.loss, reference[point.step]), point.step) for point in different)
    largest, step = max(differences, key=lambda each: each[0])
    return f"Largest difference from the uninterrupted reference: {largest:.3g} at step {step:,} ({steps} compared)."


def _difference(one: float, other: float) -> float:
    """Absolute difference; infinite if either is not a number, so that it never passes for a small one."""
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


def _axes(x_scale: Scale, y_scale: Scale) -> Markup:
    left, right, bottom, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    parts = []
    x_step = max(1.0, round_step(x_scale.high - x_scale.low, 12))
    y_step = round_step(y_scale.high - y_scale.low, 6)
    for tick in ticks(x_scale, x_step):
        x = x_scale.at(tick)
        parts.append(tag("path", d=vertical(x, bottom, bottom + 4), class_="axis"))
        parts.append(tag("text", escaped(tick_text(tick, x_step)), x=x, y=bottom + 17, class_="tick"))
    for tick in ticks(y_scale, y_step):
        y = y_scale.at(tick)
        parts.append(tag("path", d=horizontal(y, left, right), class_="grid"))
        words = escaped(tick_text(tick, y_step))
        parts.append(tag("text", words, x=left - 8, y=y + 4, text_anchor="end", class_="label"))
    parts.append(tag("path", d=horizontal(bottom, left, right), class_="axis"))
    parts.append(tag("text", escaped("step"), x=(left + right) / 2, y=bottom + 36, class_="axis-name"))
    turned = f"translate(12 {coordinate((top + bottom) / 2)}) rotate(-90)"
    parts.append(tag("text", escaped("loss"), transform=turned, class_="axis-name"))
    return join(*parts)


def _curve(points: Iterable[LossPoint], x_scale: Scale, y_scale: Scale, style: str, title: str) -> Markup:
    """A line through the points in order of steps, broken where a loss cannot be drawn."""
    in_order = sorted(points, key=lambda point: point.step)
    places = [(x_scale.at(p.step), y_scale.at(p.loss) if drawable(p.loss) else None) for p in in_order]
    pieces: list[list[str]] = [[]]
    for x, y in _thinned(places):
        if y is not None:
            pieces[-1].append(f"{coordinate(x)} {coordinate(y)}")
        else:
            pieces.append([])
    path = "".join(f"M{'L'.join(piece)}" + ("h2" if len(piece) == 1 else "") for piece in pieces if piece)
    return tag("path", tag("title", escaped(title)), d=path, class_=f"curve {style}") if path else NOTHING


def _thinned(places: list[_Place]) -> list[_Place]:
    """At most a line's worth of points: of each pixel column the lowest and the highest, in their order."""
    if len(places) <= _POINTS_PER_LINE_MAX:
        return places
    columns: dict[int, list[_Place]] = {}
    for place in places:
        columns.setdefault(round(place[0]), []).append(place)
    kept: list[_Place] = []
    for column in columns.values():
        heights = [(y, index) for index, (_, y) in enumerate(column) if y is not None]
        kept += [column[index] for index in sorted({min(heights)[1], max(heights)[1]})] if heights else column[:1]
    return kept


def _ribbon(
    generations: Mapping[int, Sequence[LossPoint]], tones: Mapping[int, int], x_scale: Scale, top: float
) -> Markup:
    """Above the plot: which generation did which steps, each up to where the next one took over."""
    starts = [min(point.step for point in points) for points in generations.values()]
    newest = max((point.step for points in generations.values() for point in points), default=0)
    parts = []
    for generation, step, following in zip(generations, starts, [*starts, newest][1:], strict=True):
        start, end = x_scale.at(step), x_scale.at(max(step, following))
        width, style = max(end - start - 1, 1.5), f"bar tone{tones[generation]}"
        wordings = (f"generation {generation}", f"gen {generation}", str(generation))
        words = first_that_fits(wordings, end - start - 8)
        parts.append(
            tag(
                "g",
                tag("title", escaped(f"generation {generation}, from step {step:,}")),
                tag("rect", class_=style, x=start, y=top, width=width, height=_RIBBON_HEIGHT, rx=2),
                tag("text", escaped(words), x=start + 5, y=top + 12, class_="bar-text") if words else NOTHING,
            )
        )
    return join(*parts)


def _legend(report: Report, *, cut: bool) -> Markup:
    entries = []
    if report.losses:
        entries.append((tag("path", d="M0 8H16", class_="curve tone0"), "this job, a colour per generation"))
    if report.reference_losses:
        entries.append((tag("path", d="M0 8H16", class_="curve reference"), "uninterrupted reference, behind"))
    if cut:
        entries.append((tag("path", d="M8 0V16", class_="cut"), "interruption"))
    return legend(entries)

"""The report page: what happened to a job, as one HTML file that needs nothing beside itself.

What it is: pure functions from a `Report` to text. `render` gives the page (inline SVG and CSS, no script, no
external resource), `headline` its first sentence, `summary_rows` the table of interruptions for a terminal.
What it is not: it reads no event files, measures nothing and judges nothing; whether a check passed is input.
Who calls it: the verbs that gather events and losses, and write the text to a file.

Text from outside (reasons, node names, causes) may hold anything. Markup has a type of its own: only `_tag` and
`_text` make it, both escape, and the type checker refuses a bare string in its place.

Times are seconds since the job started. Steps count completed optimizer steps. A value that cannot be drawn
(not finite, or absurdly large) appears in the tables and is left out of the drawings.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

Markup = NewType("Markup", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """One thing that happened, with the reason that was recorded for it; `node` is None for the whole job."""

    time_seconds: float
    kind: str
    reason: str
    node: str | None
    generation: int | None
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpan:
    """The life of one generation; without `first_step_seconds` it never completed a step."""

    generation: int
    world_size: int
    nodes: tuple[str, ...]
    start_seconds: float
    first_step_seconds: float | None
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The loss of one step as one generation computed it; a step done twice gives two points."""

    step: int
    loss: float
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """What one notice or failure cost. `steps_lost` were computed and had to be computed again."""

    cause: str
    node: str | None
    at_seconds: float
    notice_to_commit_seconds: float | None
    failure_to_first_step_seconds: float | None
    steps_lost: int
    seconds_lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that had to hold, whether it did, and the evidence in words."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the page shows. `reference_losses` are those of an uninterrupted run; none if there was none."""

    title: str
    subtitle: str
    events: tuple[TimelineEvent, ...]
    generations: tuple[GenerationSpan, ...]
    losses: tuple[LossPoint, ...]
    reference_losses: tuple[LossPoint, ...]
    interruptions: tuple[Interruption, ...]
    checks: tuple[Check, ...]
    facts: tuple[tuple[str, str], ...]


SAMPLES_FACT = "samples lost or repeated"
"""Label of the fact that `headline` quotes; without that fact the headline says nothing about samples."""

SUMMARY_HEADERS = (
    "#",
    "cause",
    "node",
    "at (s)",
    "notice to commit (s)",
    "failure to first step (s)",
    "steps lost",
    "time lost (s)",
)
"""Headers of `summary_rows`, in order."""

SUMMARY_TEXT_COLUMNS = frozenset({1, 2})
"""Columns of `summary_rows` that hold words; the others hold numbers and align right."""


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: even if escaping failed somewhere, the browser would run and load nothing."""


def render(report: Report) -> str:
    """The whole page as text, to be written as UTF-8."""
    head = _join(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        _tag("title", _text(report.title)),
        _tag("style", Markup(_STYLE)),
    )
    sections = (
        _header(report),
        _checks_section(report.checks),
        _timeline_section(report),
        _loss_section(report),
        _interruptions_section(report.interruptions),
        _events_section(report.events),
    )
    page = _tag("html", _tag("head", head), _tag("body", _HATCH, _tag("main", *sections)), lang="en")
    return f"<!doctype html>\n{page}\n"


def headline(report: Report) -> str:
    """The outcome in one plain sentence: steps, interruptions and, if the facts say so, samples."""
    parts = [_count(_steps_reached(report), "step"), _count(len(report.interruptions), "interruption")]
    samples = dict(report.facts).get(SAMPLES_FACT)
    if samples is not None:
        parts.append(f"{samples} {SAMPLES_FACT}")
    return ", ".join(parts)


def summary_rows(interruptions: Sequence[Interruption]) -> list[tuple[str, ...]]:
    """One row of text per interruption, under `SUMMARY_HEADERS`; a dash where nothing was measured."""
    return [
        (
            str(number),
            each.cause,
            each.node or "–",
            _seconds(each.at_seconds),
            _seconds(each.notice_to_commit_seconds),
            _seconds(each.failure_to_first_step_seconds),
            f"{each.steps_lost:,}",
            _seconds(each.seconds_lost),
        )
        for number, each in enumerate(interruptions, start=1)
    ]


# ── Words and markup ──────────────────────────────────────────────────────────────────────────────────────────────

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def _clean(text: str) -> str:
    """Escaped for content and for attributes; what HTML or UTF-8 cannot carry becomes the replacement character."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True)


def _text(text: str) -> Markup:
    return Markup(_clean(text))


def _join(*parts: Markup) -> Markup:
    return Markup("".join(parts))


def _tag(name: str, *children: Markup, **attributes: str | float) -> Markup:
    """One element. `class_` and `stroke_width` become class and stroke-width; numbers must be finite."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_clean(value) if isinstance(value, str) else _coordinate(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(children)}</{name}>")


def _coordinate(value: float) -> str:
    assert math.isfinite(value), "scales only ever give finite coordinates"
    return f"{value:.1f}".removesuffix(".0")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _shortened(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def _text_width(text: str, size: float = 11) -> float:
    """Pixels that the text takes at most, nearly: fonts differ, so this errs on the wide side."""
    return sum(0.6 if character.isascii() else 1.05 for character in text) * size


# ── Scales, ticks and labels that do not collide ──────────────────────────────────────────────────────────────────

_DRAWABLE_MAX = 1e12
_TIME_STEPS_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def _drawable(value: float | None) -> bool:
    return value is not None and abs(value) < _DRAWABLE_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Maps values in [low, high], low < high, to pixels in [start, end]; values outside go to the edge."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def _scale(values: Sequence[float], *, start: float, end: float, margin: float = 0.0) -> _Scale:
    """A scale over drawable values, widened by `margin` of their range on both sides, never empty."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    spread, largest = high - low, max(abs(low), abs(high))
    if spread <= max(1e-4 * largest, 1e-12):
        spread = 0.2 * largest if largest > 1e-12 else 1.0
    middle = (low + high) / 2
    half = spread * (0.5 + margin)
    return _Scale(low=middle - half, high=middle + half, start=start, end=end)


def _round_step(spread: float, ticks_max: int) -> float:
    """The smallest of 1, 2, 5 × 10^k that divides `spread` into at most `ticks_max` parts."""
    power = 10.0 ** math.floor(math.log10(spread / ticks_max))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if spread / (factor * power) <= ticks_max)


def _time_step(spread: float, ticks_max: int) -> float:
    """The same for times, where 15, 30 and 60 are rounder than 20 and 50."""
    if spread / ticks_max < 1:
        return _round_step(spread, ticks_max)
    fitting = (float(step) for step in _TIME_STEPS_SECONDS if spread / step <= ticks_max)
    return next(fitting, 86400 * _round_step(spread / 86400, ticks_max))


def _ticks(scale: _Scale, step: float) -> list[float]:
    nudge = 1e-9 * (scale.high - scale.low) / step
    first, last = math.ceil(scale.low / step - nudge), math.floor(scale.high / step + nudge)
    return [index * step for index in range(first, last + 1)]


def _tick_text(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.6g}" if decimals > 6 or abs(value) >= 1e7 else f"{value:,.{decimals}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Label:
    """A label that wants to stand beside the line at `x`, from `x - before` to `x + after`; low ranks choose first."""

    x: float
    before: float
    after: float
    rank: int
    text: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """Where a label goes: row 0 is nearest its mark, and from any other row a leader runs back through the rows."""

    label: _Label
    row: int
    start: float
    end: float

    @property
    def flipped(self) -> bool:
        """Whether the label stands to the left of its line."""
        return self.end - self.label.x < self.label.after - 0.01

    def covers(self, x: float, gap: float = 2) -> bool:
        return self.start - gap < x < self.end + gap

    def clear_of(self, other: _Spot) -> bool:
        """Neither text over text nor a leader through text."""
        if self.row == other.row:
            return self.start - 5 >= other.end or other.start - 5 >= self.end
        upper, lower = (self, other) if self.row < other.row else (other, self)
        return not upper.covers(lower.label.x)


def _wishes(label: _Label, rows_max: int, left: float, right: float) -> Iterable[_Spot]:
    """Spots in order of preference: to the right of the line, nearest row first, then to its left."""
    x = label.x
    for start, end in ((x - label.before, x + label.after), (x - label.after, x + label.before)):
        if left <= start and end <= right:
            yield from (_Spot(label=label, row=row, start=start, end=end) for row in range(rows_max))


def _place_labels(
    labels: Iterable[_Label],
    *,
    rows_max: int,
    left: float,
    right: float,
    marks: Sequence[float] = (),
    lines: Sequence[float] = (),
) -> list[_Spot]:
    """A spot for every label that has room; the rest go without.

    `marks` stand in row 0 and are kept clear. `lines` run through all rows and are kept clear where that is possible.
    """
    placed: list[_Spot] = []
    for label in sorted(labels, key=lambda each: (each.rank, each.x)):
        free = [
            spot
            for spot in _wishes(label, rows_max, left, right)
            if all(spot.clear_of(other) for other in placed)
            and not (spot.row == 0 and any(x != label.x and spot.covers(x, 6) for x in marks))
        ]
        placed += [spot for spot in free if not any(spot.covers(x) for x in lines)][:1] or free[:1]
    return placed


# ── Header, checks and tables ─────────────────────────────────────────────────────────────────────────────────────


def _header(report: Report) -> Markup:
    facts = [_tag("div", _tag("dt", _text(label)), _tag("dd", _text(value))) for label, value in report.facts]
    passed = all(check.passed for check in report.checks)
    verdict = _tag("b", _text(_verdict(report.checks)), class_="good" if passed else "bad")
    return _tag(
        "header",
        _tag("p", _text(report.title), class_="title"),
        _tag("h1", _text(headline(report))),
        _tag("p", _text(_cost(report.interruptions)), verdict),
        _tag("p", _text(report.subtitle), class_="quiet"),
        _tag("dl", *facts) if facts else Markup(""),
    )


def _steps_reached(report: Report) -> int:
    reached = [point.step for point in report.losses]
    return max(reached or [each.step for each in report.events if each.step and each.kind != "step agreed"], default=0)


def _cost(interruptions: Sequence[Interruption]) -> str:
    if not interruptions:
        return ""
    seconds = _seconds(sum(each.seconds_lost for each in interruptions))
    steps = sum(each.steps_lost for each in interruptions)
    again = f"{_count(steps, 'step')} had to be done again" if steps else "no step had to be done again"
    subject = "The interruption" if len(interruptions) == 1 else "The interruptions"
    return f"{subject} cost {seconds} s; {again}. "


def _verdict(checks: Sequence[Check]) -> str:
    failed = sum(not check.passed for check in checks)
    if failed:
        return f"{failed} of {_count(len(checks), 'check')} failed."
    return f"All {len(checks)} checks passed." if len(checks) > 1 else "The check passed." if checks else ""


def _checks_section(checks: Sequence[Check]) -> Markup:
    if not checks:
        return Markup("")
    items = [
        _tag(
            "li",
            _tag("span", _text("✓ passed" if check.passed else "✗ failed"), class_="mark"),
            _tag("span", _tag("b", _text(check.name)), _text(" " + check.detail)),
            class_="passed" if check.passed else "failed",
        )
        for check in checks
    ]
    return _tag("section", _tag("h2", _text("Checks")), _tag("ul", *items, class_="checks"))


def _table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, words: frozenset[int], total: Sequence[str] = ()
) -> Markup:
    """A table whose columns hold numbers, save those in `words`; `total` is its last row, if there is one."""

    def line(cells: Sequence[str], cell: str) -> Markup:
        kinds = ("word" if column in words else "number" for column in range(len(cells)))
        return _tag("tr", *(_tag(cell, _text(text), class_=kind) for text, kind in zip(cells, kinds, strict=True)))

    head = _tag("thead", line(headers, "th"))
    foot = _tag("tfoot", line(total, "td")) if total else Markup("")
    return _tag("div", _tag("table", head, _tag("tbody", *(line(row, "td") for row in rows)), foot), class_="scroll")


def _interruptions_section(interruptions: Sequence[Interruption]) -> Markup:
    title = _tag("h2", _text("Interruptions"))
    if not interruptions:
        return _tag("section", title, _tag("p", _text("There were none."), class_="quiet"))
    steps = f"{sum(each.steps_lost for each in interruptions):,}"
    seconds = _seconds(sum(each.seconds_lost for each in interruptions))
    total = ("", "all", "", "", "", "", steps, seconds) if len(interruptions) > 1 else ()
    return _tag(
        "section", title, _table(SUMMARY_HEADERS, summary_rows(interruptions), words=SUMMARY_TEXT_COLUMNS, total=total)
    )


def _events_section(events: Sequence[TimelineEvent]) -> Markup:
    title = _tag("h2", _text("Events"))
    if not events:
        return _tag("section", title, _tag("p", _text("None were recorded."), class_="quiet"))
    headers = ("time (s)", "event", "node", "generation", "step", "reason")
    in_order = sorted(events, key=lambda each: math.inf if math.isnan(each.time_seconds) else each.time_seconds)
    rows = (
        (
            f"{each.time_seconds:,.2f}",
            each.kind,
            each.node or "–",
            "–" if each.generation is None else str(each.generation),
            "–" if each.step is None else f"{each.step:,}",
            each.reason,
        )
        for each in in_order
    )
    return _tag("section", title, _table(headers, rows, words=frozenset({1, 2, 5})), class_="events")


# ── Timeline ──────────────────────────────────────────────────────────────────────────────────────────────────────

_WIDTH = 1080.0
_BAR_HEIGHT = 20.0
_ROW_HEIGHT = 16.0
_BADGE_ROW_HEIGHT = 22.0
_NODE_LANES_MAX = 64
_JOB_LANE = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MarkStyle:
    """How the timeline shows a kind of event: SVG path around 0,0, word, whether it concerns the whole job, rank."""

    path: str
    word: str
    whole_job: bool
    rank: int
    legend: str


_DIAMOND = "M0 -5.5L5.5 0L0 5.5L-5.5 0Z"
_CROSS = "M-4 -4L4 4M4 -4L-4 4"
_MARK_STYLES: Mapping[str, _MarkStyle] = {
    "notice received": _MarkStyle(path="M0 -5L5 4.5H-5Z", word="notice", whole_job=False, rank=0, legend="notice"),
    "committed": _MarkStyle(path=_DIAMOND, word="commit", whole_job=True, rank=2, legend="commit, with its step"),
    "abandoned": _MarkStyle(path=_DIAMOND, word="abandoned", whole_job=True, rank=3, legend="abandoned"),
    "node lost": _MarkStyle(path=_CROSS, word="lost", whole_job=False, rank=0, legend="node lost"),
    "worker exited": _MarkStyle(path=_CROSS, word="", whole_job=False, rank=4, legend="worker exited"),
    "first good step": _MarkStyle(
        path="M-4 -5L5.5 0L-4 5Z", word="step", whole_job=True, rank=1, legend="first good step after a start"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    x: float
    style: _MarkStyle
    kind: str
    text: str
    title: str


def _timeline_section(report: Report) -> Markup:
    title = _tag("h2", _text("Timeline"))
    times = _times(report)
    if not times:
        return _tag("section", title, _tag("p", _text("Nothing happened that has a time."), class_="quiet"))
    lanes, lanes_left_out = _lane_names(report)
    gutter = min(max((_text_width(_shortened(name, 22), 12) for name in lanes if name), default=24) + 14, 190)
    scale = _scale(_from_zero(times), start=gutter, end=_WIDTH - 78)
    cuts = [(scale.at(i.at_seconds), n, i) for n, i in enumerate(report.interruptions, 1) if _drawable(i.at_seconds)]
    lines = [x for x, _, _ in cuts]
    flags, top = _flags(cuts, words=True)
    bars, marks = _bars(report, scale), _marks(report.events, scale)
    y, drawn = top, []
    for name in lanes:
        lane, height = _lane(name, bars.get(name, []), _spread(marks.get(name, [])), lines, gutter)
        drawn.append(_tag("g", lane, transform=f"translate(0 {_coordinate(y)})"))
        y += height
    drawn = [_time_axis(scale, top, y), _cut_lines(lines, top, y), *drawn, flags]
    svg = _svg(y + 42, "Timeline, one lane per node; the table of events holds the same facts", *drawn)
    left_out = f" {_count(lanes_left_out, 'more node')} not drawn." if lanes_left_out else ""
    caption = _tag("figcaption", _legend(report), _text(left_out))
    return _tag("section", title, _tag("figure", _tag("div", svg, class_="scroll"), caption))


def _times(report: Report) -> list[float]:
    found: list[float] = [each.time_seconds for each in report.events]
    found += [each.at_seconds for each in report.interruptions]
    for span in report.generations:
        found += [span.start_seconds, span.end_seconds]
    return [time for time in found if _drawable(time)]


def _from_zero(times: Sequence[float]) -> list[float]:
    """The same times, and the start of the job unless it lies far before the first of them."""
    return [0.0, *times] if 0 <= min(times) <= max(times) / 2 else list(times)


def _lane_names(report: Report) -> tuple[list[str | None], int]:
    """The job's lane, then nodes as they first appear; those with events of their own if there are too many."""
    named = [each.node for each in report.interruptions] + [each.node for each in report.events]
    marked = [node for node in named if node is not None]
    members = [node for span in report.generations for node in span.nodes]
    nodes = list(dict.fromkeys(members + marked))
    chosen = set(list(dict.fromkeys(marked + members))[:_NODE_LANES_MAX])
    return [_JOB_LANE, *(node for node in nodes if node in chosen)], len(nodes) - len(chosen)


def _lane(
    node: str | None, bars: Sequence[Markup], marks: Sequence[_Mark], lines: Sequence[float], left: float
) -> tuple[Markup, float]:
    """One lane drawn from y = 0, and its height. Bars show generations, and marks stand below them."""
    bar_height = 0.0 if node is _JOB_LANE else _BAR_HEIGHT
    labels = [_mark_label(mark) for mark in marks if mark.text]
    places = [mark.x for mark in marks]
    spots = _place_labels(labels, rows_max=3, left=left, right=_WIDTH, marks=places, lines=lines)
    rows = max((spot.row + 1 for spot in spots), default=1 if marks else 0)
    base = bar_height + _ROW_HEIGHT / 2 + 2
    height = bar_height + rows * _ROW_HEIGHT + (12 if rows else 10)
    name = "job" if node is _JOB_LANE else node
    title = _tag("title", _text(name))
    label_y = bar_height / 2 + 4 if bar_height else base + 4
    label = _tag("text", _text(_shortened(name, 22)), title, x=left - 10, y=label_y, class_="lane")
    rule = _tag("path", d=f"M0 {_coordinate(height - 5)}H{_coordinate(_WIDTH)}", class_="rule")
    leaders = [_leader(spot, base) for spot in spots if spot.row]
    shapes = [_mark_shape(mark, base) for mark in marks]
    texts = [_spot_text(spot, base) for spot in spots]
    return _join(rule, label, *bars, *leaders, *shapes, *texts), height


def _marks(events: Sequence[TimelineEvent], scale: _Scale) -> dict[str | None, list[_Mark]]:
    """Marks by lane, from left to right; of one kind in one lane at most one within 3 pixels."""
    lanes: dict[str | None, list[_Mark]] = {}
    newest: dict[tuple[str | None, str], float] = {}
    shown = (each for each in events if each.kind in _MARK_STYLES and _drawable(each.time_seconds))
    for event in sorted(shown, key=lambda each: each.time_seconds):
        style, x = _MARK_STYLES[event.kind], scale.at(event.time_seconds)
        lane = _JOB_LANE if style.whole_job or event.node is None else event.node
        if x - newest.get((lane, event.kind), -math.inf) < 3:
            continue
        newest[lane, event.kind] = x
        text = style.word if event.step is None or not style.whole_job else f"{style.word} {event.step:,}"
        title = f"{event.kind} at {_seconds(event.time_seconds)} s: {event.reason}"
        lanes.setdefault(lane, []).append(_Mark(x=x, style=style, kind=event.kind, text=text, title=title))
    return lanes


def _spread(marks: Sequence[_Mark]) -> list[_Mark]:
    """Marks side by side that would lie on each other, as long as none moves more than 14 pixels."""
    moved: list[_Mark] = []
    for mark in marks:
        wanted = max(mark.x, moved[-1].x + 12) if moved else mark.x
        x = wanted if wanted - mark.x <= 14 else mark.x
        moved.append(_Mark(x=x, style=mark.style, kind=mark.kind, text=mark.text, title=mark.title))
    return moved


def _mark_label(mark: _Mark) -> _Label:
    after = 9 + _text_width(mark.text)
    return _Label(x=mark.x, before=-4, after=after, rank=mark.style.rank, text=mark.text, title=mark.title)


def _mark_shape(mark: _Mark, y: float) -> Markup:
    place = f"translate({_coordinate(mark.x)} {_coordinate(y)})"
    kind = mark.kind.replace(" ", "-")
    return _tag("path", _tag("title", _text(mark.title)), d=mark.style.path, transform=place, class_=f"mark {kind}")


def _leader(spot: _Spot, base: float) -> Markup:
    end = base + spot.row * _ROW_HEIGHT + 4
    return _tag("path", d=_vertical(spot.label.x, base, end), class_="leader")


def _spot_text(spot: _Spot, base: float) -> Markup:
    side, anchor = (-1, "end") if spot.flipped else (1, "start")
    x, y = spot.label.x + side * (9 if spot.row == 0 else 4), base + spot.row * _ROW_HEIGHT + 4
    title = _tag("title", _text(spot.label.title))
    return _tag("text", _text(spot.label.text), title, x=x, y=y, text_anchor=anchor, class_="label")


def _bars(report: Report, scale: _Scale) -> dict[str | None, list[Markup]]:
    """Bars by node, one for each generation that the node took part in."""
    tones = _tones(report)
    bars: dict[str | None, list[Markup]] = {}
    for span in report.generations:
        drawn = _bar(span, tones[span.generation], scale)
        for node in dict.fromkeys(span.nodes):
            bars.setdefault(node, []).append(drawn)
    return bars


def _bar(span: GenerationSpan, tone: int, scale: _Scale) -> Markup:
    """A generation in a node's lane: hatched until its first step, then plain and labelled."""
    if not (_drawable(span.start_seconds) and _drawable(span.end_seconds)):
        return Markup("")
    start, end = scale.at(span.start_seconds), scale.at(max(span.start_seconds, span.end_seconds))
    first_step = span.first_step_seconds
    ready = min(max(scale.at(first_step), start), end) if first_step is not None and _drawable(first_step) else end
    title = f"generation {span.generation}, world size {span.world_size}, {_seconds(span.start_seconds)} to "
    title += f"{_seconds(span.end_seconds)} s, " + (
        "no step" if first_step is None else f"first step at {_seconds(first_step)} s"
    )
    width = max(end - start - 1, 1.5)
    parts = [_tag("rect", x=start, y=0, width=width, height=_BAR_HEIGHT, rx=2, class_=f"bar tone{tone}")]
    if ready > start:
        hatched = max(min(ready, start + width) - start, 1)
        parts.append(_tag("rect", x=start, y=0, width=hatched, height=_BAR_HEIGHT, rx=2, class_="hatch"))
    parts.append(_bar_text(span, ready, end))
    return _tag("g", _tag("title", _text(title)), *parts)


def _bar_text(span: GenerationSpan, start: float, end: float) -> Markup:
    """The longest of three wordings that fits into the plain part of the bar, or nothing."""
    wordings = (
        f"generation {span.generation} · world size {span.world_size}",
        f"gen {span.generation} · world {span.world_size}",
        f"{span.generation} · {span.world_size}",
    )
    text = next((each for each in wordings if _text_width(each) + 10 <= end - start), None)
    return _tag("text", _text(text), x=start + 6, y=14, class_="bar-text") if text else Markup("")


def _flags(interruptions: Sequence[tuple[float, int, Interruption]], *, words: bool) -> tuple[Markup, float]:
    """Numbered badges, each with a line down to the y where the drawing begins; and that y.

    Causes stand beside the badges if `words` and if there is room for all; else neighbours may share a badge.
    """
    spots: list[_Spot] = []
    if words:
        spots = _place_labels([_cause_label(*each) for each in interruptions], rows_max=4, left=0, right=_WIDTH)
    if len(spots) < len(interruptions):
        spots = _place_labels(_number_labels(interruptions), rows_max=4, left=0, right=_WIDTH)
    top = max((spot.row + 1 for spot in spots), default=0) * _BADGE_ROW_HEIGHT + 8
    return _join(*(_flag(spot, top) for spot in spots)), top


def _cause_label(x: float, number: int, interruption: Interruption) -> _Label:
    words = interruption.cause + (f", {interruption.node}" if interruption.node else "")
    text = f"{number} {_shortened(words, 40)}"
    title = f"interruption {number}: {words}"
    return _Label(x=x, before=9, after=14 + _text_width(text), rank=0, text=text, title=title)


def _number_labels(interruptions: Sequence[tuple[float, int, Interruption]]) -> list[_Label]:
    """Badges without words; interruptions within 20 pixels share one, such as 4–6."""
    groups: list[tuple[float, list[int]]] = []
    for x, number, _ in sorted(interruptions, key=lambda each: each[:2]):
        if groups and x - groups[-1][0] < 20:
            groups[-1][1].append(number)
        else:
            groups.append((x, [number]))
    labels = []
    for x, numbers in groups:
        text = str(numbers[0]) if len(numbers) == 1 else f"{min(numbers)}–{max(numbers)}"
        half = _badge_width(text) / 2
        title = "interruption " + ", ".join(map(str, numbers))
        labels.append(_Label(x=x, before=half, after=half, rank=0, text=text, title=title))
    return labels


def _badge_width(number: str) -> float:
    return 16.0 if len(number) < 3 else 8 + _text_width(number)


def _flag(spot: _Spot, top: float) -> Markup:
    number, _, words = spot.label.text.partition(" ")
    x, y, width = spot.label.x, top - 14 - spot.row * _BADGE_ROW_HEIGHT, _badge_width(number)
    side, anchor = (-1, "end") if spot.flipped else (1, "start")
    return _tag(
        "g",
        _tag("title", _text(spot.label.title)),
        _tag("path", d=_vertical(x, y, top), class_="cut"),
        _tag("rect", x=x - width / 2, y=y - 8, width=width, height=16, rx=8, class_="badge"),
        _tag("text", _text(number), x=x, y=y + 4, class_="badge-text"),
        _tag("text", _text(words), x=x + side * (width / 2 + 5), y=y + 4, text_anchor=anchor, class_="cause"),
    )


def _cut_lines(xs: Iterable[float], top: float, bottom: float) -> Markup:
    """A line at each interruption, through the whole drawing."""
    return _join(*(_tag("path", d=_vertical(x, top, bottom), class_="cut") for x in xs))


def _time_axis(scale: _Scale, top: float, bottom: float) -> Markup:
    step = _time_step(scale.high - scale.low, 10)
    divisor, unit = next((pair for pair in _TIME_UNITS if step >= pair[0]), (1, "seconds"))
    parts = []
    for tick in _ticks(scale, step):
        x = scale.at(tick)
        parts.append(_tag("path", d=_vertical(x, top, bottom), class_="grid"))
        parts.append(_tag("text", _text(f"{tick / divisor:,.6g}"), x=x, y=bottom + 16, class_="tick"))
    name = _text(f"{unit} since the job started")
    return _join(*parts, _tag("text", name, x=(scale.start + scale.end) / 2, y=bottom + 36, class_="axis-name"))


def _legend(report: Report) -> Markup:
    """What the shapes mean, for those that occur."""
    kinds = {each.kind for each in report.events}
    entries = [
        (_tag("path", d=style.path, transform="translate(8 8)", class_=f"mark {kind.replace(' ', '-')}"), style.legend)
        for kind, style in _MARK_STYLES.items()
        if kind in kinds
    ]
    if report.generations:
        swatch = _tag("rect", x=0, y=2, width=16, height=12, rx=2, class_="bar tone0")
        hatch = _tag("rect", x=0, y=2, width=16, height=12, rx=2, class_="hatch")
        entries.append((_join(swatch, hatch), "starting: before the first step"))
    return _tag("span", *(_legend_entry(shape, words) for shape, words in entries), class_="legend")


def _legend_entry(shape: Markup, words: str) -> Markup:
    picture = _tag("svg", shape, width=16, height=16, viewBox="0 0 16 16", aria_hidden="true")
    return _tag("span", picture, _text(" " + words))


# ── Loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_PLOT_LEFT = 56.0
_PLOT_RIGHT = _WIDTH - 16
_PLOT_HEIGHT = 260.0
_RIBBON_HEIGHT = 16.0
_POINTS_PER_LINE_MAX = 2_000


def _loss_section(report: Report) -> Markup:
    title = _tag("h2", _text("Loss"))
    points = [p for p in (*report.losses, *report.reference_losses) if _drawable(p.loss) and _drawable(p.step)]
    if not points:
        return _tag("section", title, _tag("p", _text("No losses were recorded."), class_="quiet"))
    x_scale = _scale([float(p.step) for p in points], start=_PLOT_LEFT, end=_PLOT_RIGHT)
    cuts = [(x_scale.at(step), number, each) for number, each, step in _steps_cut(report)]
    badges, ribbon_top = _flags(cuts, words=False)
    top = ribbon_top + _RIBBON_HEIGHT + 6
    y_scale = _scale([p.loss for p in points], start=top + _PLOT_HEIGHT, end=top, margin=0.04)
    svg = _svg(
        top + _PLOT_HEIGHT + 42,
        "Loss over steps. " + _comparison(report),
        _loss_axes(x_scale, y_scale),
        _cut_lines((x for x, _, _ in cuts), ribbon_top, top + _PLOT_HEIGHT),
        _curve(report.reference_losses, x_scale, y_scale, "reference", "uninterrupted reference"),
        *_generation_curves(report, x_scale, y_scale),
        _ribbon(report, x_scale, ribbon_top),
        badges,
    )
    caption = _tag("figcaption", _loss_legend(report, cut=bool(cuts)), _text(_comparison(report)))
    return _tag("section", title, _tag("figure", _tag("div", svg, class_="scroll"), caption))


def _steps_cut(report: Report) -> list[tuple[int, Interruption, int]]:
    """Numbered interruptions, each with the last step of the generation that ran at that time.

    For a generation without steps it is the newest one before it that did any; without such, there is no step.
    """
    last: dict[int, int] = {}
    for point in report.losses:
        if _drawable(point.step):
            last[point.generation] = max(point.step, last.get(point.generation, point.step))
    spans = sorted((each for each in report.generations if each.generation in last), key=lambda each: each.generation)
    found = []
    for number, each in enumerate(report.interruptions, start=1):
        before = [span for span in spans if span.start_seconds <= each.at_seconds and _drawable(each.at_seconds)]
        if before:
            found.append((number, each, last[before[-1].generation]))
    return found


def _comparison(report: Report) -> str:
    """How the losses differ from the reference's at the steps that both have."""
    reference = {point.step: point.loss for point in report.reference_losses}
    shared = [point for point in report.losses if point.step in reference]
    if not shared:
        return ""
    steps = _count(len({point.step for point in shared}), "step")
    different = [point for point in shared if point.loss != reference[point.step]]
    if not different:
        return f"Equal to the uninterrupted reference, to the last bit, at all {steps} compared."
    worst = max(different, key=lambda point: _difference(point.loss, reference[point.step]))
    largest = _difference(worst.loss, reference[worst.step])
    return (
        f"Largest difference from the uninterrupted reference: {largest:.3g} at step {worst.step:,} ({steps} compared)."
    )


def _difference(one: float, other: float) -> float:
    """Absolute difference; infinite if either is not a number, so that it never passes for a small one."""
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


def _loss_axes(x_scale: _Scale, y_scale: _Scale) -> Markup:
    left, right, bottom, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    parts = []
    x_step = max(1.0, _round_step(x_scale.high - x_scale.low, 12))
    y_step = _round_step(y_scale.high - y_scale.low, 6)
    for tick in _ticks(x_scale, x_step):
        x = x_scale.at(tick)
        parts.append(_tag("path", d=_vertical(x, bottom, bottom + 4), class_="axis"))
        parts.append(_tag("text", _text(_tick_text(tick, x_step)), x=x, y=bottom + 17, class_="tick"))
    for tick in _ticks(y_scale, y_step):
        y = y_scale.at(tick)
        parts.append(_tag("path", d=f"M{_coordinate(left)} {_coordinate(y)}H{_coordinate(right)}", class_="grid"))
        text = _text(_tick_text(tick, y_step))
        parts.append(_tag("text", text, x=left - 8, y=y + 4, text_anchor="end", class_="label"))
    parts.append(_tag("path", d=f"M{_coordinate(left)} {_coordinate(bottom)}H{_coordinate(right)}", class_="axis"))
    parts.append(_tag("text", _text("step"), x=(left + right) / 2, y=bottom + 36, class_="axis-name"))
    turned = f"translate(12 {_coordinate((top + bottom) / 2)}) rotate(-90)"
    parts.append(_tag("text", _text("loss"), transform=turned, class_="axis-name"))
    return _join(*parts)


def _curve(points: Iterable[LossPoint], x_scale: _Scale, y_scale: _Scale, style: str, title: str) -> Markup:
    """A line through the points in order of steps, broken where a loss cannot be drawn."""
    in_order = sorted((p for p in points if _drawable(p.step)), key=lambda point: point.step)
    places = [(x_scale.at(p.step), y_scale.at(p.loss) if _drawable(p.loss) else None) for p in in_order]
    pieces: list[list[str]] = [[]]
    for x, y in _thinned(places):
        if y is not None:
            pieces[-1].append(f"{_coordinate(x)} {_coordinate(y)}")
        elif pieces[-1]:
            pieces.append([])
    path = "".join(f"M{'L'.join(piece)}" + ("h2" if len(piece) == 1 else "") for piece in pieces if piece)
    return _tag("path", _tag("title", _text(title)), d=path, class_=f"curve {style}") if path else Markup("")


def _thinned(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most a line's worth of points: of each pixel column the lowest and the highest, in their order."""
    if len(points) <= _POINTS_PER_LINE_MAX:
        return points
    columns: dict[int, list[tuple[float, float | None]]] = {}
    for point in points:
        columns.setdefault(round(point[0]), []).append(point)
    kept: list[tuple[float, float | None]] = []
    for column in columns.values():
        heights = [(y, index) for index, (_, y) in enumerate(column) if y is not None]
        kept += [column[index] for index in sorted({min(heights)[1], max(heights)[1]})] if heights else column[:1]
    return kept


def _generation_curves(report: Report, x_scale: _Scale, y_scale: _Scale) -> list[Markup]:
    by_generation: dict[int, list[LossPoint]] = {}
    for point in report.losses:
        by_generation.setdefault(point.generation, []).append(point)
    tones = _tones(report)
    return [
        _curve(points, x_scale, y_scale, f"tone{tones[generation]}", f"generation {generation}")
        for generation, points in sorted(by_generation.items())
    ]


def _tones(report: Report) -> dict[int, int]:
    """A colour's number for each generation, the same in both drawings; neighbours differ."""
    known = {span.generation for span in report.generations} | {point.generation for point in report.losses}
    return {generation: index % _TONES for index, generation in enumerate(sorted(known))}


def _ribbon(report: Report, x_scale: _Scale, top: float) -> Markup:
    """Above the plot: which generation did which steps, each up to where the next one took over."""
    first_steps: dict[int, int] = {}
    for point in report.losses:
        if _drawable(point.step):
            first_steps[point.generation] = min(point.step, first_steps.get(point.generation, point.step))
    if not first_steps:
        return Markup("")
    starts = sorted(first_steps.items())
    ends = [step for _, step in starts[1:]] + [max(point.step for point in report.losses if _drawable(point.step))]
    tones, parts = _tones(report), []
    for (generation, step), following in zip(starts, ends, strict=True):
        start, end = x_scale.at(step), x_scale.at(max(step, following))
        size = {"x": start, "y": top, "width": max(end - start - 1, 1.5), "height": _RIBBON_HEIGHT, "rx": 2.0}
        wordings = (f"generation {generation}", f"gen {generation}", str(generation))
        text = next((_text(each) for each in wordings if _text_width(each) + 8 <= end - start), None)
        words = _tag("text", text, x=start + 5, y=top + 12, class_="bar-text") if text else Markup("")
        title = _tag("title", _text(f"generation {generation}, from step {step:,}"))
        parts.append(_tag("g", title, _tag("rect", class_=f"bar tone{tones[generation]}", **size), words))
    return _join(*parts)


def _loss_legend(report: Report, *, cut: bool) -> Markup:
    entries = []
    if report.losses:
        line = _tag("path", d="M0 8H16", class_="curve tone0")
        entries.append(_legend_entry(line, "this job, a colour per generation"))
    if report.reference_losses:
        line = _tag("path", d="M0 8H16", class_="curve reference")
        entries.append(_legend_entry(line, "uninterrupted reference, behind"))
    if cut:
        entries.append(_legend_entry(_tag("path", d="M8 0V16", class_="cut"), "interruption"))
    return _tag("span", *entries, class_="legend")


# ── Drawing and style ─────────────────────────────────────────────────────────────────────────────────────────────


def _svg(height: float, name: str, *children: Markup) -> Markup:
    box = f"0 0 {_coordinate(_WIDTH)} {_coordinate(height)}"
    return _tag("svg", _tag("title", _text(name)), *children, viewBox=box, role="img", aria_label=name)


def _vertical(x: float, top: float, bottom: float) -> str:
    return f"M{_coordinate(x)} {_coordinate(top)}V{_coordinate(bottom)}"


_TONES = 5
"""How many colours generations take in turn; `_STYLE` defines as many."""

_HATCH = Markup(
    '<svg width="0" height="0" class="definitions" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="hatch-ground"></rect><path d="M1 0V6" class="hatch-line"></path>'
    "</pattern></defs></svg>"
)

_DARK = """
--ground:#16191d; --ink:#dfe3e8; --quiet:#9aa3ad; --line:#2c323a; --good:#6cc08b; --bad:#f08a7c;
--reference:#59616b; --hatch:#7b8590;
--t0:#7fb2e5; --t1:#e0a35e; --t2:#7cc396; --t3:#c69ad6; --t4:#d3c162;
--f0:#24405c; --f1:#54391c; --f2:#22492f; --f3:#47304f; --f4:#474016;
"""

_STYLE = (
    """
:root {
color-scheme:light dark;
--ground:#fff; --ink:#1f2328; --quiet:#5c6670; --line:#e3e6ea; --good:#1c6b3c; --bad:#a8281c;
--reference:#c3c9d0; --hatch:#8b95a0;
--t0:#2464a4; --t1:#a85a08; --t2:#237a45; --t3:#7d4496; --t4:#766a0a;
--f0:#d3e4f5; --f1:#f8e2c6; --f2:#d2ecd9; --f3:#ead9f1; --f4:#efeabf;
}
@media screen and (prefers-color-scheme:dark) { :root {"""
    + _DARK
    + """} }
* { box-sizing:border-box; }
html { background:var(--ground); color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif; -webkit-print-color-adjust:exact; print-color-adjust:exact; }
body { margin:0; }
main { max-width:1128px; margin:0 auto; padding:40px 24px 64px; }
section { margin-top:44px; }
h1 { font-size:1.8rem; line-height:1.25; font-weight:650; margin:2px 0 8px; letter-spacing:-.01em; }
h2 { font-size:1.13rem; font-weight:650; margin:0 0 12px; }
p { margin:0 0 4px; }
.title { font-weight:600; color:var(--quiet); }
.quiet, figcaption, dt { color:var(--quiet); }
header, td, li { overflow-wrap:anywhere; }
dl { display:flex; flex-wrap:wrap; gap:12px 36px; margin:20px 0 0; }
dt { font-size:.87rem; }
dd { margin:0; font-variant-numeric:tabular-nums; }
.checks { list-style:none; margin:0; padding:0; }
.checks li { display:grid; grid-template-columns:100px 1fr; padding:6px 0; border-top:1px solid var(--line); }
.checks .mark { font-weight:600; white-space:nowrap; }
.passed .mark, .good { color:var(--good); }
.failed .mark, .bad { color:var(--bad); }
.failed { box-shadow:-10px 0 0 -6px var(--bad); }
figure { margin:0; }
figcaption { font-size:.87rem; margin-top:6px; }
.scroll { overflow-x:auto; }
.scroll > svg { display:block; width:100%; min-width:720px; height:auto; }
.legend { display:flex; flex-wrap:wrap; gap:2px 22px; margin-bottom:4px; }
.legend span { display:inline-flex; align-items:center; gap:6px; }
table { border-collapse:collapse; width:100%; font-size:.93rem; }
th, td { padding:6px 14px 6px 0; text-align:left; vertical-align:top; border-top:1px solid var(--line); }
th { border-top:0; font-weight:600; font-size:.87rem; color:var(--quiet); vertical-align:bottom; }
.number { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; }
th.number { white-space:normal; }
tr > :last-child { padding-right:0; }
tfoot td { font-weight:600; border-top:1px solid var(--quiet); }
td.word { min-width:96px; }
.events table { font-size:.87rem; }
.events td { padding-top:3px; padding-bottom:3px; }
.definitions { position:absolute; }
svg text { font-size:11px; fill:var(--ink); }
svg .lane { font-size:12px; text-anchor:end; }
.tick, .axis-name { text-anchor:middle; }
svg .tick, svg .axis-name, svg .label { fill:var(--quiet); }
svg .label { paint-order:stroke; stroke:var(--ground); stroke-width:3px; stroke-linejoin:round; }
.grid, .rule, .axis, .leader, .cut, .curve { fill:none; }
.grid, .rule { stroke:var(--line); }
.axis, .leader { stroke:var(--quiet); }
.leader { stroke-opacity:.6; }
.cut { stroke:var(--bad); stroke-dasharray:3 3; }
.badge { fill:var(--bad); }
svg .badge-text { fill:var(--ground); text-anchor:middle; font-weight:700; font-size:10.5px; }
svg .cause { font-weight:600; }
.hatch { fill:url(#hatch); }
.hatch-ground { fill:var(--ground); fill-opacity:.55; }
.hatch-line { stroke:var(--hatch); stroke-width:1.5; }
.bar { stroke-width:1; }
.mark { fill:var(--ink); stroke:var(--ink); stroke-width:1.2; }
.mark.first-good-step { fill:var(--good); stroke:var(--good); }
.mark.abandoned { fill:var(--ground); }
.mark.node-lost, .mark.worker-exited { fill:none; stroke-width:2; }
.mark.node-lost, .mark.notice-received { stroke:var(--bad); }
.mark.notice-received { fill:var(--bad); }
.mark.worker-exited { stroke:var(--quiet); }
.curve { stroke-width:1.6; stroke-linejoin:round; stroke-linecap:round; }
.curve.reference { stroke:var(--reference); stroke-width:4; }
"""
    + "".join(f".bar.tone{n} {{ fill:var(--f{n}); stroke:var(--t{n}); }}\n" for n in range(_TONES))
    + "".join(f".curve.tone{n} {{ stroke:var(--t{n}); }}\n" for n in range(_TONES))
    + """
@media print {
@page { margin:14mm; }
main { max-width:none; padding:0; }
html { font-size:12px; }
figure, li, tr { break-inside:avoid; }
h2 { break-after:avoid; }
.scroll { overflow:visible; }
.scroll > svg { min-width:0; }
}
"""
)

"""The tables: one of interruptions, one of all events.

What it is not: it leaves nothing out; values that cannot be drawn stand here as they are.
Who uses it: the page, and verbs that print the interruptions on a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from orchestrator.cli.report_page.markup import NOTHING, Markup, escaped, quiet_paragraph, seconds_text, section, tag
from orchestrator.cli.report_page.model import Interruption, TimelineEvent

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

_EVENT_HEADERS = ("time (s)", "event", "node", "generation", "step", "reason")
_EVENT_TEXT_COLUMNS = frozenset({1, 2, 5})


def summary_rows(interruptions: Sequence[Interruption]) -> list[tuple[str, ...]]:
    """One row of text per interruption, under `SUMMARY_HEADERS`; a dash where nothing was measured."""
    return [
        (
            str(number),
            each.cause,
            each.node or "–",
            seconds_text(each.at_seconds),
            seconds_text(each.notice_to_commit_seconds),
            seconds_text(each.failure_to_first_step_seconds),
            f"{each.steps_lost:,}",
            seconds_text(each.seconds_lost),
        )
        for number, each in enumerate(interruptions, start=1)
    ]


def interruptions_section(interruptions: Sequence[Interruption]) -> Markup:
    """The summary as a table, with a row of sums if there is more than one interruption."""
    if not interruptions:
        return section("Interruptions", quiet_paragraph("There were none."))
    steps = f"{sum(each.steps_lost for each in interruptions):,}"
    seconds = seconds_text(sum(each.seconds_lost for each in interruptions))
    total = ("", "all", "", "", "", "", steps, seconds) if len(interruptions) > 1 else ()
    table = plain_table(SUMMARY_HEADERS, summary_rows(interruptions), text_columns=SUMMARY_TEXT_COLUMNS, total=total)
    return section("Interruptions", table)


def events_section(events: Sequence[TimelineEvent]) -> Markup:
    """Every event in order of time, with its reason; those without a time come last."""
    if not events:
        return section("Events", quiet_paragraph("None were recorded."))
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
    return section("Events", plain_table(_EVENT_HEADERS, rows, text_columns=_EVENT_TEXT_COLUMNS), class_="events")


def plain_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: frozenset[int], total: Sequence[str] = ()
) -> Markup:
    """A table whose columns hold numbers, save `text_columns`; `total` is its last row, if there is one."""

    def line(cells: Sequence[str], cell: str) -> Markup:
        kinds = ("word" if column in text_columns else "number" for column in range(len(cells)))
        return tag("tr", *(tag(cell, escaped(text), class_=kind) for text, kind in zip(cells, kinds, strict=True)))

    head = tag("thead", line(headers, "th"))
    foot = tag("tfoot", line(total, "td")) if total else NOTHING
    return tag("div", tag("table", head, tag("tbody", *(line(row, "td") for row in rows)), foot), class_="scroll")

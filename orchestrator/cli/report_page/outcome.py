"""The outcome in words: the headline, what the interruptions cost, the verdict, and the list of checks.

What it is not: it judges nothing; whether a check passed is input.
Who uses it: the page; `headline` is there for verbs as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cli.report_page.markup import (
    NOTHING,
    Markup,
    counted,
    escaped,
    quiet_paragraph,
    seconds_text,
    section,
    tag,
)
from orchestrator.cli.report_page.model import SAMPLES_FACT, Check, Interruption, Report


def headline(report: Report) -> str:
    """The outcome in one plain sentence: steps, interruptions and, if the facts say so, samples."""
    parts = [counted(_steps_reached(report), "step"), counted(len(report.interruptions), "interruption")]
    samples = dict(report.facts).get(SAMPLES_FACT)
    if samples is not None:
        parts.append(f"{samples} {SAMPLES_FACT}")
    return ", ".join(parts)


def header(report: Report) -> Markup:
    """Title, headline, cost and verdict, subtitle, facts."""
    facts = [tag("div", tag("dt", escaped(label)), tag("dd", escaped(value))) for label, value in report.facts]
    passed = all(check.passed for check in report.checks)
    verdict = tag("b", escaped(_verdict(report.checks)), class_="good" if passed else "bad")
    return tag(
        "header",
        tag("p", escaped(report.title), class_="title"),
        tag("h1", escaped(headline(report))),
        tag("p", escaped(_cost(report.interruptions)), verdict),
        quiet_paragraph(report.subtitle),
        tag("dl", *facts) if facts else NOTHING,
    )


def checks_section(checks: Sequence[Check]) -> Markup:
    """Each check with its evidence; nothing if there are none."""
    if not checks:
        return NOTHING
    items = [
        tag(
            "li",
            tag("span", escaped("✓ passed" if check.passed else "✗ failed"), class_="mark"),
            tag("span", tag("b", escaped(check.name)), escaped(" " + check.detail)),
            class_="passed" if check.passed else "failed",
        )
        for check in checks
    ]
    return section("Checks", tag("ul", *items, class_="checks"))


def _steps_reached(report: Report) -> int:
    """The last step that has a loss; without losses, the last that an event speaks of as done."""
    reached = [point.step for point in report.losses]
    return max(reached or [each.step for each in report.events if each.step and each.kind != "step agreed"], default=0)


def _cost(interruptions: Sequence[Interruption]) -> str:
    if not interruptions:
        return ""
    seconds = seconds_text(sum(each.seconds_lost for each in interruptions))
    steps = sum(each.steps_lost for each in interruptions)
    again = f"{counted(steps, 'step')} had to be done again" if steps else "no step had to be done again"
    subject = "The interruption" if len(interruptions) == 1 else "The interruptions"
    return f"{subject} cost {seconds} s; {again}. "


def _verdict(checks: Sequence[Check]) -> str:
    failed = sum(not check.passed for check in checks)
    if failed:
        return f"{failed} of {counted(len(checks), 'check')} failed."
    if not checks:
        return ""
    return "The check passed." if len(checks) == 1 else f"All {len(checks)} checks passed."

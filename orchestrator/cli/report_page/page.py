"""The whole page: its sections in order, its style, and the policy that keeps it from loading anything.

What it is: inline SVG and CSS, no script, no external resource.
What it is not: it draws nothing itself.
Who uses it: the verbs, by way of the package; `simulate_page` for the frame of a page of its own.
"""

from __future__ import annotations

from importlib import resources

from orchestrator.cli.report_page.loss import loss_section
from orchestrator.cli.report_page.markup import Markup, escaped, join, tag
from orchestrator.cli.report_page.model import Report
from orchestrator.cli.report_page.outcome import checks_section, header
from orchestrator.cli.report_page.tables import events_section, interruptions_section
from orchestrator.cli.report_page.timeline import timeline_section

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: even if escaping failed somewhere, the browser would run and load nothing."""

_HATCH = Markup(
    '<svg width="0" height="0" class="definitions" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="hatch-ground"></rect><path d="M1 0V6" class="hatch-line"></path>'
    "</pattern></defs></svg>"
)


def render(report: Report) -> str:
    """The whole page as text, to be written as UTF-8."""
    return document(
        report.title,
        header(report),
        checks_section(report.checks),
        timeline_section(report),
        loss_section(report),
        interruptions_section(report.interruptions),
        events_section(report.events),
    )


def document(title: str, *sections: Markup) -> str:
    """A page of these sections, as text to be written as UTF-8."""
    head = join(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", escaped(title)),
        tag("style", Markup("\n" + _style())),
    )
    page = tag("html", tag("head", head), tag("body", _HATCH, tag("main", *sections)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _style() -> str:
    return resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")

"""The report page: what happened to a job, as one HTML file that needs nothing beside itself.

What it is: pure functions from a `Report` to text. `render` gives the page, `headline` its first sentence,
`summary_rows` the table of interruptions for a terminal.
What it is not: it reads no event files, measures nothing and judges nothing; whether a check passed is input.
Who uses it: the verbs that gather events and losses, and write the text to a file.
"""

from orchestrator.cli.report_page.model import (
    SAMPLES_FACT,
    Check,
    GenerationSpan,
    Interruption,
    LossPoint,
    Report,
    TimelineEvent,
)
from orchestrator.cli.report_page.outcome import headline
from orchestrator.cli.report_page.page import render
from orchestrator.cli.report_page.tables import SUMMARY_HEADERS, SUMMARY_TEXT_COLUMNS, summary_rows

__all__ = [
    "SAMPLES_FACT",
    "SUMMARY_HEADERS",
    "SUMMARY_TEXT_COLUMNS",
    "Check",
    "GenerationSpan",
    "Interruption",
    "LossPoint",
    "Report",
    "TimelineEvent",
    "headline",
    "render",
    "summary_rows",
]

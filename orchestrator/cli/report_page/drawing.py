"""What both drawings share: their frame and width, lines, legends, the width of text, a colour per generation.

What it is not: it decides nothing about what is drawn where.
Who uses it: the timeline, its marks, the losses, and the flags over both.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.cli.report_page.markup import Markup, coordinate, escaped, section, tag
from orchestrator.cli.report_page.model import Report

WIDTH = 1080.0

_TONES = 5
"""How many colours generations take in turn; style.css defines as many."""


def figure_section(title: str, *drawn: Markup, height: float, name: str, caption: Iterable[Markup]) -> Markup:
    """A section that holds one drawing, `name` for those who cannot see it, and a caption."""
    box = f"0 0 {coordinate(WIDTH)} {coordinate(height)}"
    picture = tag("svg", tag("title", escaped(name)), *drawn, viewBox=box, role="img", aria_label=name)
    return section(title, tag("figure", tag("div", picture, class_="scroll"), tag("figcaption", *caption)))


def legend(entries: Iterable[tuple[Markup, str]]) -> Markup:
    """What each shape means; shapes are drawn in a square of 16 pixels."""
    return tag("span", *(_legend_entry(shape, words) for shape, words in entries), class_="legend")


def _legend_entry(shape: Markup, words: str) -> Markup:
    picture = tag("svg", shape, width=16, height=16, viewBox="0 0 16 16", aria_hidden="true")
    return tag("span", picture, escaped(" " + words))


def vertical(x: float, top: float, bottom: float) -> str:
    """Path of an upright line."""
    return f"M{coordinate(x)} {coordinate(top)}V{coordinate(bottom)}"


def horizontal(y: float, left: float, right: float) -> str:
    """Path of a level line."""
    return f"M{coordinate(left)} {coordinate(y)}H{coordinate(right)}"


def text_width(text: str, size: float = 11) -> float:
    """Pixels that the text takes at most, nearly: fonts differ, so this errs on the wide side."""
    return sum(0.6 if character.isascii() else 1.05 for character in text) * size


def first_that_fits(wordings: Iterable[str], width: float) -> str:
    """The first wording that takes at most `width` pixels, or no words."""
    return next((each for each in wordings if text_width(each) <= width), "")


def generation_tones(report: Report) -> dict[int, int]:
    """A colour's number for each generation, the same in both drawings; neighbours differ."""
    known = {span.generation for span in report.generations} | {point.generation for point in report.losses}
    return {generation: index % _TONES for index, generation in enumerate(sorted(known))}

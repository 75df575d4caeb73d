"""Words and tags: text from outside becomes markup here, escaped, or not at all.

Text from outside (reasons, node names, causes) may hold anything. Markup has a type of its own: `tag` and `escaped`
make it, both escape, and the type checker refuses a bare string in its place.

What it is not: it knows nothing of reports, and draws nothing.
Who uses it: every module that writes a part of the page.
"""

from __future__ import annotations

import html
import math
import re
from typing import NewType

Markup = NewType("Markup", str)

NOTHING = Markup("")

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def _clean(text: str) -> str:
    """Escaped for content and for attributes; what HTML or UTF-8 cannot carry becomes the replacement character."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True)


def escaped(text: str) -> Markup:
    """The text as content of an element."""
    return Markup(_clean(text))


def join(*parts: Markup) -> Markup:
    """The parts one after the other."""
    return Markup("".join(parts))


def tag(name: str, *children: Markup, **attributes: str | float) -> Markup:
    """One element. `class_` and `stroke_width` become class and stroke-width; numbers must be finite."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_clean(value) if isinstance(value, str) else coordinate(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(children)}</{name}>")


def section(title: str, *body: Markup, **attributes: str) -> Markup:
    """A part of the page under a heading of its own."""
    return tag("section", tag("h2", escaped(title)), *body, **attributes)


def quiet_paragraph(text: str) -> Markup:
    """A line of lesser weight."""
    return tag("p", escaped(text), class_="quiet")


def coordinate(value: float) -> str:
    """A number in a drawing, to a tenth of a pixel."""
    assert math.isfinite(value), "scales only ever give finite coordinates"
    return f"{value:.1f}".removesuffix(".0")


def counted(number: int, noun: str) -> str:
    """The number and its noun, which takes an s unless there is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds_text(seconds: float | None) -> str:
    """Seconds with the decimals that matter; a dash where nothing was measured."""
    if seconds is None:
        return "–"
    decimals = 2 if abs(seconds) < 10 else 1 if abs(seconds) < 1000 else 0
    return f"{seconds:,.{decimals}f}"


def shortened(text: str, characters_max: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"

"""What every source of notices is, and what their parsers share: JSON, times, and seconds that are left.

A source is looked at again and again, and each time says *all* events that stand (`Reading`); `preemption.watching`
makes notices of what has changed. Parsers are pure: bytes and the wall time of receipt in, a `Reading` out. Wall
times of a provider are hints: seconds that are left are taken once, at receipt, and run on the monotonic clock from
then on; a time in the past, or farther away than the source ever announces, is a wrong clock, and is said to be.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError

WORDS_CHARACTERS_MAX = 200
EVENTS_MAX = 100
"""Events in one answer; no machine has so many."""
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII | re.IGNORECASE
)
_HTTP_DATE = re.compile(r"(?:[A-Z][a-z]{2}, )?(\d{1,2}) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) GMT", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An event that stands at a source now."""

    event_id: str
    """The same in every look for as long as the event stands."""
    kind: NoticeKind
    """preempt, maintenance or hint."""
    words: str
    """For people: what happens, and when by the source's clock."""
    remaining_seconds: float | None = None
    """At receipt. None: the source does not say, or cannot be right."""
    version: str = ""
    """Changes when the source has changed the event's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All that stands at a source. With problems it may be less than all: then nothing counts as withdrawn."""

    found: tuple[Found, ...] = ()
    problems: tuple[str, ...] = ()


NOTHING = Reading()


@dataclass(frozen=True, kw_only=True)
class Source:
    """One key of a metadata service, one file: something that is looked at."""

    cloud: str
    """Who speaks: "aws", "file". One alarm for all sources of a cloud."""
    key: str
    """What is read there."""
    look: Callable[[], Awaitable[Reading]]
    """Raises SourceError where nothing could be read."""
    every_seconds: float
    """Between two looks. A source that answers when something changes (long poll) needs no more than a short rest."""
    withdraws: bool
    """An event that is not there any more is withdrawn. Else what was said once stands."""
    acknowledge: Callable[[str], Awaitable[None]] | None = None
    """Tells the source that the machine may go now, for the event of that id. Raises SourceError."""
    acknowledge_seconds: float = 2.0
    """How long that may take."""

    @property
    def name(self) -> str:
        """For people and for ids."""
        return f"{self.cloud} {self.key}"


# ---------------------------------------------------------------------------------------------- reading answers


def json_of(body: bytes) -> Any:
    """The answer's JSON. Raises SourceError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"the answer is no JSON: {shown(body)}") from error


def text_of(body: bytes) -> str:
    """A short answer in plain ASCII. Raises SourceError."""
    try:
        text = body.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise SourceError(f"the answer is no text: {shown(body)}") from error
    if len(text) > WORDS_CHARACTERS_MAX:
        raise SourceError(f"the answer is too long: {shown(body)}")
    return text


def word_of(record: Any, name: str) -> str:
    """A field that must be there and must be a text. Raises SourceError."""
    value = record.get(name) if isinstance(record, Mapping) else None
    if not isinstance(value, str) or not value:
        raise SourceError(f"the field {name!r} is missing or no text")
    return short(value)


def shown(body: bytes) -> str:
    """The beginning of an answer, for an error."""
    return repr(body[:60]) + ("…" if len(body) > 60 else "")


def short(text: str) -> str:
    """Words of a source, not without end and in one line."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= WORDS_CHARACTERS_MAX else line[:WORDS_CHARACTERS_MAX] + "…"


def digest_id(*parts: str) -> str:
    """An id for an event that has none: the same content has the same."""
    whole = "\0".join(parts).encode(errors="backslashreplace")  # JSON may have half of a character
    return hashlib.sha256(whole).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------- its times


def rfc3339_seconds(text: str, *, unmarked_hours: float | None = None) -> float:
    """Seconds since 1970 of "2017-09-18T08:22:00Z".

    A time without a zone's mark is an error unless `unmarked_hours` says which one is meant. Raises SourceError.
    """
    match = _RFC3339.fullmatch(text)
    zone = match[7] if match else None
    if match is None or (zone is None and unmarked_hours is None):
        raise SourceError(f"not a time: {text!r:.80}")
    numbers = [int(part) for part in match.groups()[:6]]
    if zone is None:
        offset = timedelta(hours=unmarked_hours or 0)
    elif zone in "Zz":
        offset = timedelta(0)
    else:
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6])) * (-1 if zone[0] == "-" else 1)
    return _seconds(text, numbers, offset)


def http_date_seconds(text: str) -> float:
    """Seconds since 1970 of "Mon, 19 Sep 2016 18:29:47 GMT"; the day of the week may be missing. Raises SourceError."""
    match = _HTTP_DATE.fullmatch(text)
    if match is None or match[2] not in _MONTHS:
        raise SourceError(f"not a time: {text!r:.80}")
    month = _MONTHS.index(match[2]) + 1
    return _seconds(
        text, [int(match[3]), month, int(match[1]), *(int(match[part]) for part in (4, 5, 6))], timedelta(0)
    )


def _seconds(text: str, numbers: list[int], offset: timedelta) -> float:
    year, month, day, hour, minute, second = numbers
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=timezone(offset)).timestamp()
    except (ValueError, OverflowError) as error:
        raise SourceError(f"not a time: {text!r:.80}") from error


def written(wall_seconds: float) -> str:
    """A wall time for people."""
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_left(
    deadline_wall_seconds: float, now_wall_seconds: float, lead_seconds_max: float
) -> tuple[float | None, str]:
    """Seconds until the deadline, and what is to be said about them.

    None where the time is past: this machine's clock or the source's is wrong, or it is too late. A time that is
    farther away than the source ever announces is cut to that.
    """
    left = deadline_wall_seconds - now_wall_seconds
    if not math.isfinite(left):
        return None, ", a time that cannot be"
    if left < 0:
        return None, f", {-left:.0f} s ago by this machine's clock: taken as no time given"
    if left > lead_seconds_max:
        return lead_seconds_max, f", {left:.0f} s ahead by this machine's clock: taken as {lead_seconds_max:.0f} s"
    return left, ""

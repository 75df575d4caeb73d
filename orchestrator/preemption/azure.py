"""Notices of Azure: scheduled events of the own machine, and their acknowledgement.

The document lists events of all machines of a scale set or placement group; only those that name this machine count,
by the name that the instance's metadata say. An event has no end: it disappears, and is withdrawn by that. To
acknowledge it (`StartRequests`) lets it begin at once, for *all* machines that it names, so it is done only when the
supervisor lets this node go, and never for an event that names another machine, too. Read at
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from http import HTTPStatus

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption.base import (
    EVENTS_MAX,
    Found,
    Reading,
    Source,
    http_date_seconds,
    json_of,
    short,
    text_of,
    time_left,
    word_of,
)
from orchestrator.preemption.metadata import Metadata

ADDRESS = "http://169.254.169.254"
EVERY_SECONDS = 1.0
FIRST_SECONDS = 120.0
"""The first call of a machine switches the service on, and may take that long."""
LEAD_SECONDS = 900.0
HEADERS = {"Metadata": "true"}
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
_KINDS = {
    "Preempt": NoticeKind.PREEMPT,
    "Terminate": NoticeKind.MAINTENANCE,
    "Reboot": NoticeKind.MAINTENANCE,
    "Redeploy": NoticeKind.MAINTENANCE,
    "Freeze": NoticeKind.HINT,  # a pause of seconds; memory is kept
}


def sources(metadata: Metadata, wall: Callable[[], float], every_seconds: float = EVERY_SECONDS) -> list[Source]:
    """What is looked at."""
    events = ScheduledEvents(metadata, wall)
    return [
        Source(
            cloud="azure",
            key="scheduledevents",
            look=events.look,
            every_seconds=every_seconds,
            withdraws=True,
            acknowledge=events.acknowledge,
        )
    ]


class ScheduledEvents:
    """The document of events, and the answers to them."""

    def __init__(self, metadata: Metadata, wall: Callable[[], float]) -> None:
        self._metadata = metadata
        self._wall = wall
        self._name = ""
        self._first_seconds = FIRST_SECONDS
        self._alone: set[str] = set()
        """Events that name this machine and no other."""

    async def look(self) -> Reading:
        """All events that concern this machine. Raises SourceError."""
        name = self._name or await self._own_name()
        answer = await self._metadata.get(EVENTS_PATH, HEADERS, waits_seconds=self._first_seconds)
        if answer.status != HTTPStatus.OK:
            raise self._metadata.refused(EVENTS_PATH, answer)
        self._first_seconds = 0.0
        reading, self._alone = parse_scheduled_events(answer.body, name, self._wall())
        return reading

    async def _own_name(self) -> str:
        answer = await self._metadata.get(NAME_PATH, HEADERS)
        if answer.status != HTTPStatus.OK:
            raise self._metadata.refused(NAME_PATH, answer)
        name = text_of(answer.body)
        if not is_name(name):
            raise SourceError(f"not this machine's name: {name!r:.80}")
        self._name = name
        return name

    async def acknowledge(self, event_id: str) -> None:
        """The event may begin. Raises SourceError, also where it would begin for other machines as well."""
        if event_id not in self._alone:
            raise SourceError("the event names other machines, too, or is over")
        body = json.dumps({"StartRequests": [{"EventId": event_id}]}).encode()
        answer = await self._metadata.request("POST", EVENTS_PATH, headers=HEADERS, body=body)
        if answer.status != HTTPStatus.OK:
            raise self._metadata.refused(EVENTS_PATH, answer)


def is_name(text: str) -> bool:
    """Whether a text can be a machine's name: a login page is none."""
    return re.fullmatch(r"[A-Za-z0-9._-]{1,80}", text) is not None


def parse_scheduled_events(body: bytes, own_name: str, now_wall_seconds: float) -> tuple[Reading, set[str]]:
    """The events that name this machine, and the ids of those that name no other. Raises SourceError."""
    document = json_of(body)
    events = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(events, list) or len(events) > EVENTS_MAX:
        raise SourceError("the document has no list of events, or too many")
    found, problems, alone = [], [], set()
    for event in events:
        try:
            machines = _machines(event)
            if own_name.casefold() not in machines:
                continue
            one = _event(event, now_wall_seconds)
        except SourceError as error:
            problems.append(str(error))
            continue
        found.append(one)
        if len(machines) == 1:
            alone.add(one.event_id)
    return Reading(found=tuple(found), problems=tuple(problems)), alone


def _machines(event: object) -> set[str]:
    names = event.get("Resources") if isinstance(event, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SourceError("an event does not say which machines it concerns")
    return {name.casefold() for name in names}


def _event(event: dict[str, object], now_wall_seconds: float) -> Found:
    event_id, kind, status = (word_of(event, name) for name in ("EventId", "EventType", "EventStatus"))
    if kind not in _KINDS or status not in ("Scheduled", "Started"):
        raise SourceError(f"an event that is not known: {kind!r}, {status!r}")
    when = event.get("NotBefore", "")
    if not isinstance(when, str):
        raise SourceError("the field 'NotBefore' is no text")
    said = event.get("Description")
    words = f"{kind} {status.lower()}" + (f" ({short(said)})" if isinstance(said, str) and said else "")
    if status == "Started" or not when:
        return Found(event_id=event_id, kind=_KINDS[kind], words=words, version="started")
    left, remark = time_left(http_date_seconds(when), now_wall_seconds, LEAD_SECONDS)
    return Found(
        event_id=event_id,
        kind=_KINDS[kind],
        words=f"{words}, not before {when}{remark}",
        remaining_seconds=left,
        version=when,
    )

"""Notices of Google Cloud, from the metadata server: preempted, host maintenance, graceful shutdown.

Each key is read once without waiting (it may be TRUE already), then by long poll from the last answer's ETag on: a
change is heard of at once. With `preemptionNoticeDuration` the value is TRUE up to 120 s before the operating system is
told to stop, so only whoever watches it profits from that. The server does not say how long is left: the job's grace
is taken. Read at https://cloud.google.com/compute/docs/instances/preemptible and …/getting-live-migration-notice.
Nothing is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import quote

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption.base import NOTHING, Found, Reading, Source, shown, text_of
from orchestrator.preemption.metadata import Answer, Metadata

ADDRESS = "http://169.254.169.254"
"""metadata.google.internal, without asking a resolver."""
EVERY_SECONDS = 1.0
"""Rest between two answers; what changes meanwhile is said by the next one at once."""
WAIT_SECONDS = 60.0
WAITS_IN_VAIN_MAX = 2
"""Something on the way that lets no answer wait would let a notice be heard a minute late: then nobody waits."""
FLAVOR = {"Metadata-Flavor": "Google"}
ROOT = "/computeMetadata/v1/instance/"


def sources(
    metadata: Metadata, every_seconds: float = EVERY_SECONDS, wait_seconds: float = WAIT_SECONDS
) -> list[Source]:
    """What is looked at."""

    def source(key: str, parse: Callable[[bytes], Reading], *, withdraws: bool) -> Source:
        poll = LongPoll(metadata, ROOT + key, wait_seconds)

        async def look() -> Reading:
            body = await poll.read()
            return NOTHING if body is None else parse(body)

        return Source(cloud="gcp", key=key, look=look, every_seconds=every_seconds, withdraws=withdraws)

    return [
        source("preempted", parse_preempted, withdraws=False),
        source("maintenance-event", parse_maintenance_event, withdraws=True),
        source("shutdown-details/stop-state", parse_stop_state, withdraws=False),
    ]


class LongPoll:
    """One key, read anew whenever it changes."""

    def __init__(self, metadata: Metadata, path: str, wait_seconds: float) -> None:
        self._metadata = metadata
        self._path = path
        self._wait_seconds = wait_seconds
        self._etag = ""
        self._in_vain = 0
        """Answers in a row that were waited for and did not come."""

    async def read(self) -> bytes | None:
        """The value; None where there is no such key. Waits for a change if it was read before. Raises SourceError."""
        path, waits = self._path, 0.0
        if self._etag and self._in_vain < WAITS_IN_VAIN_MAX:
            waits = self._wait_seconds
            path += f"?wait_for_change=true&timeout_sec={waits:g}&last_etag={quote(self._etag, safe='')}"
        self._etag = ""  # after any trouble it is read without waiting
        self._in_vain += waits > 0
        answer = await self._metadata.get(path, FLAVOR, waits_seconds=waits)
        require_google(answer)
        if waits:
            self._in_vain = 0
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status != HTTPStatus.OK:
            raise self._metadata.refused(self._path, answer)
        self._etag = answer.headers.get("etag", "")
        return answer.body


def require_google(answer: Answer) -> None:
    """Raises SourceError if somebody else has answered: a proxy, a login page."""
    if answer.headers.get("metadata-flavor") != "Google":
        raise SourceError(f"the answer (status {answer.status}) is not from Google's metadata server")


# ----------------------------------------------------------------------------------------------------- parsers


def parse_preempted(body: bytes) -> Reading:
    """`TRUE` or `FALSE`. Raises SourceError."""
    return _read(body, {"FALSE": None, "TRUE": (NoticeKind.PREEMPT, "preempted")})


def parse_maintenance_event(body: bytes) -> Reading:
    """`NONE`, `MIGRATE_ON_HOST_MAINTENANCE` (a pause: a hint), `TERMINATE_ON_HOST_MAINTENANCE`. Raises SourceError."""
    return _read(
        body,
        {
            "NONE": None,
            "MIGRATE_ON_HOST_MAINTENANCE": (NoticeKind.HINT, "it will be moved to another host"),
            "TERMINATE_ON_HOST_MAINTENANCE": (NoticeKind.MAINTENANCE, "it ends for its host's maintenance"),
        },
    )


def parse_stop_state(body: bytes) -> Reading:
    """`UNSPECIFIED` or `PENDING_STOP`: a graceful shutdown, of 1 s to 1 h. Raises SourceError."""
    return _read(body, {"UNSPECIFIED": None, "PENDING_STOP": (NoticeKind.MAINTENANCE, "it is being shut down")})


def _read(body: bytes, meanings: dict[str, tuple[NoticeKind, str] | None]) -> Reading:
    value = text_of(body)
    if value not in meanings:
        raise SourceError(f"a value that is not known: {shown(body)}")
    meaning = meanings[value]
    if meaning is None:
        return NOTHING
    return Reading(found=(Found(event_id=value.lower(), kind=meaning[0], words=meaning[1]),))

"""A file as a notice: that it is there, a time in it, or the JSON of `preemption.pushed`. Removing it withdraws it.

touch /run/leave                                       # leave; the job's grace is taken
date -u -d '+90 seconds' +%FT%TZ > /run/leave          # leave by then
echo '{"kind": "hint"}' > /run/leave                   # save soon, and stay
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption.base import NOTHING, Found, Reading, Source, digest_id, json_of, rfc3339_seconds, time_left
from orchestrator.preemption.detached import detached
from orchestrator.preemption.pushed import LEAD_SECONDS_MAX, parse_own

EVERY_SECONDS = 1.0
FILE_BYTES_MAX = 4096
READ_SECONDS = 2.0
"""A file system that has not answered by then is one that cannot be read."""


def sources(path: Path, wall: Callable[[], float], every_seconds: float = EVERY_SECONDS) -> list[Source]:
    """What is looked at."""

    reading: asyncio.Future[bytes | None] | None = None

    async def look() -> Reading:
        nonlocal reading
        if reading is None:  # else the last look still waits: one thread hangs, not one more with each look
            reading = detached(lambda: _read(path), f"read {path}")
        done, _ = await asyncio.wait({reading}, timeout=READ_SECONDS)
        if not done:
            raise SourceError(f"{path}: it could not be read within {READ_SECONDS:g} s")
        over, reading = reading, None
        body = over.result()
        return NOTHING if body is None else Reading(found=(parse_file(body, wall()),))

    return [Source(cloud="file", key=str(path), look=look, every_seconds=every_seconds, withdraws=True)]


def _read(path: Path) -> bytes | None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe or a terminal may wait for ever
            raise SourceError(f"{path}: it is no plain file")
        with path.open("rb") as stream:
            body = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if len(body) > FILE_BYTES_MAX:
        raise SourceError(f"{path}: longer than {FILE_BYTES_MAX} bytes")
    return body


def parse_file(body: bytes, now_wall_seconds: float) -> Found:
    """A file's content as a notice. Raises SourceError for anything but nothing, a time, or the JSON."""
    text = body.strip()
    version = digest_id(text.hex())
    if not text:
        return Found(event_id="file", kind=NoticeKind.PREEMPT, words="the file is there", version=version)
    if text.startswith(b"{"):
        record = json_of(text)
        found = parse_own(record, now_wall_seconds)
        if found.kind is NoticeKind.CANCEL:
            raise SourceError("kind: removing the file withdraws the notice, a cancel is not written into it")
        return replace(found, event_id="file", version=version)
    time = text.decode("ascii", "replace")
    left, remark = time_left(rfc3339_seconds(time), now_wall_seconds, LEAD_SECONDS_MAX)
    words = f"the file says {time}{remark}"
    return Found(event_id="file", kind=NoticeKind.PREEMPT, words=words, remaining_seconds=left, version=version)

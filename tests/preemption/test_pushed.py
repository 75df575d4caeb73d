"""What is sent or written down: our JSON, strictly, and two clouds' events as they are."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption import watched_file
from orchestrator.preemption.base import rfc3339_seconds
from orchestrator.preemption.pushed import parse_pushed
from orchestrator.preemption.watched_file import parse_file
from orchestrator.testing.metadata import SimulatedOCI, eventbridge_event
from tests.preemption.listening import EVERY_SECONDS, listening, until

NOW = rfc3339_seconds("2026-01-01T00:00:00Z")
IN_A_MINUTE = "2026-01-01T00:01:00Z"


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("sent", "kind", "left"),
    [
        (body(), NoticeKind.PREEMPT, None),
        (body(seconds=90), NoticeKind.PREEMPT, 90.0),
        (body(kind="maintenance", deadline=IN_A_MINUTE, id="a", reason="rack 7"), NoticeKind.MAINTENANCE, 60.0),
        (body(kind="hint"), NoticeKind.HINT, None),
        (body(kind="cancel", id="a"), NoticeKind.CANCEL, None),
    ],
)
def test_our_own_body(sent: bytes, kind: NoticeKind, left: float | None) -> None:
    found = parse_pushed(sent, NOW, None)
    assert found is not None
    assert found.kind is kind
    assert found.remaining_seconds == left
    again = parse_pushed(sent, NOW, None)
    assert again is not None
    assert again.event_id == found.event_id


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"preempt"',
        b"\xff",
        b'{"seconds": NaN}',
        b'{"seconds": 1e999}',
        body(kind="explode"),
        body(kind=7),
        body(kind="cancel"),
        body(seconds=-1),
        body(seconds=True),
        body(seconds="90"),
        body(seconds=90, deadline=IN_A_MINUTE),
        body(deadline="tomorrow"),
        body(second=90),
        body(id=""),
        {"detail-type": "EC2 Spot Instance Interruption Warning"},
        {**eventbridge_event("i-1"), "detail": None},
        {**eventbridge_event("i-1"), "time": "now"},
        {**SimulatedOCI().preemption_event(), "data": []},
        {**SimulatedOCI().preemption_event("i-1"), "eventTime": 7},
    ],
)
def test_garbage_is_a_trouble(sent: bytes | dict[str, Any]) -> None:
    raw = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    with pytest.raises(SourceError):
        parse_pushed(raw, NOW, "i-1")


def test_an_event_of_eventbridge() -> None:
    event = {**eventbridge_event("i-1"), "time": "2025-12-31T23:59:50Z"}
    found = parse_pushed(json.dumps(event).encode(), NOW, "i-1")
    assert found is not None
    assert (found.kind, found.remaining_seconds) == (NoticeKind.PREEMPT, 110)
    hint = parse_pushed(
        json.dumps(eventbridge_event("i-1", "EC2 Instance Rebalance Recommendation")).encode(), NOW, "i-1"
    )
    assert hint is not None
    assert hint.kind is NoticeKind.HINT


def test_an_event_of_oracle() -> None:
    server = SimulatedOCI()
    event = {**server.preemption_event(), "eventTime": "2025-12-31T23:59:50Z"}
    found = parse_pushed(json.dumps(event).encode(), NOW, server.instance_id)
    assert found is not None
    assert (found.kind, found.remaining_seconds) == (NoticeKind.PREEMPT, 110)


@pytest.mark.parametrize("event", [eventbridge_event("i-2"), SimulatedOCI().preemption_event("ocid-2")])
def test_an_event_about_another_machine_is_none(event: dict[str, Any]) -> None:
    assert parse_pushed(json.dumps(event).encode(), NOW, "i-1") is None
    with pytest.raises(SourceError, match="does not know its own id"):
        parse_pushed(json.dumps(event).encode(), NOW, None)


@pytest.mark.parametrize(
    "event",
    [
        {**eventbridge_event("i-1"), "detail-type": "EC2 Instance State-change Notification"},
        {**SimulatedOCI().preemption_event("i-1"), "eventType": "com.oraclecloud.computeapi.launchinstance.end"},
    ],
)
def test_an_event_about_something_else_is_none(event: dict[str, Any]) -> None:
    assert parse_pushed(json.dumps(event).encode(), NOW, "i-1") is None


# ---------------------------------------------------------------------------------------------------- a file


@pytest.mark.parametrize(
    ("content", "kind", "left"),
    [
        (b"", NoticeKind.PREEMPT, None),
        (b" \n", NoticeKind.PREEMPT, None),
        (IN_A_MINUTE.encode() + b"\n", NoticeKind.PREEMPT, 60.0),
        (body(kind="hint"), NoticeKind.HINT, None),
        (body(seconds=50, id="a"), NoticeKind.PREEMPT, 50.0),
    ],
)
def test_a_files_content(content: bytes, kind: NoticeKind, left: float | None) -> None:
    found = parse_file(content, NOW)
    assert (found.event_id, found.kind) == ("file", kind)
    assert found.remaining_seconds == left


@pytest.mark.parametrize(
    "content", [b"soon", b"90", b"\xff", body(kind="cancel", id="a"), b"{", b"2018-08-18 04:09:33"]
)
def test_a_file_that_nobody_understands_is_a_trouble(content: bytes) -> None:
    with pytest.raises(SourceError):
        parse_file(content, NOW)


async def test_a_file_comes_changes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "leave"

    def write(content: bytes) -> None:
        draft = tmp_path / "draft"
        draft.write_bytes(content)
        draft.rename(path)

    async with listening(watched_file.sources(path, lambda: NOW, EVERY_SECONDS)) as listener:
        write(b"")
        await until(lambda: len(listener.heard) == 1)
        write(body(seconds=90))
        await until(lambda: len(listener.heard) == 3)
        write(b"what?")
        await until(lambda: listener.reports)
        assert len(listener.heard) == 3
        path.unlink()
        await until(lambda: len(listener.heard) == 4)
        write(body(kind="hint"))
        await until(lambda: len(listener.heard) == 5)
        await until(lambda: len(listener.reports) == 2)
    assert listener.kinds == [
        NoticeKind.PREEMPT,
        NoticeKind.PREEMPT,
        NoticeKind.CANCEL,
        NoticeKind.CANCEL,
        NoticeKind.HINT,
    ]
    assert [notice.remaining_seconds for notice in listener.heard[:2]] == [30.0, 90.0]


@pytest.mark.parametrize("kind", ["folder", "pipe", "terminal", "loop", "larger than this disk", "no folder"])
async def test_a_file_that_cannot_be_read_is_an_alarm(tmp_path: Path, kind: str) -> None:
    """Whatever somebody has put in its place: a look that waits for ever would be silence."""
    path = tmp_path / "leave"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "terminal":
            path.symlink_to("/dev/ptmx")
        case "loop":
            path.symlink_to(path)
        case "larger than this disk":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case _:
            (tmp_path / "file").touch()
            path = tmp_path / "file" / "leave"
    async with listening(watched_file.sources(path, lambda: NOW, EVERY_SECONDS)) as listener:
        await until(lambda: listener.reports)
    assert str(path) in str(listener.problems[0])
    assert listener.heard == []


async def test_a_file_system_that_hangs_is_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network file system whose server is gone: with one thread that waits, however often it is looked at."""
    hangs, reads = threading.Event(), list[Path]()

    def read(path: Path) -> bytes:
        reads.append(path)
        hangs.wait(30)
        return b""

    monkeypatch.setattr(watched_file, "_read", read)
    monkeypatch.setattr(watched_file, "READ_SECONDS", 0.02)
    async with listening(watched_file.sources(tmp_path / "leave", lambda: NOW, EVERY_SECONDS)) as listener:
        await until(lambda: listener.reports)
        assert "could not be read within 0.02 s" in str(listener.problems[0])
        assert len(reads) == 1
        hangs.set()
        await until(lambda: listener.heard)


def test_half_a_character_is_a_notice_all_the_same() -> None:
    """JSON may say what no text can hold."""
    found = parse_pushed(b'{"reason": "\\ud800"}', NOW, None)
    assert found is not None
    assert (found.kind, found.words) == (NoticeKind.PREEMPT, " ")

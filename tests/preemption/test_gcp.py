"""Google Cloud: parsers, and long polls against a simulated metadata server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption import gcp
from orchestrator.preemption.base import Reading
from orchestrator.preemption.metadata import Answer, Metadata
from orchestrator.testing.metadata import SimulatedGCP
from tests.preemption.listening import EVERY_SECONDS, Listener, listening, until

PARSERS = (gcp.parse_preempted, gcp.parse_maintenance_event, gcp.parse_stop_state)


@pytest.mark.parametrize(
    ("parse", "body", "kind"),
    [
        (gcp.parse_preempted, b"FALSE", None),
        (gcp.parse_preempted, b"TRUE\n", NoticeKind.PREEMPT),
        (gcp.parse_maintenance_event, b"NONE", None),
        (gcp.parse_maintenance_event, b"MIGRATE_ON_HOST_MAINTENANCE", NoticeKind.HINT),
        (gcp.parse_maintenance_event, b"TERMINATE_ON_HOST_MAINTENANCE", NoticeKind.MAINTENANCE),
        (gcp.parse_stop_state, b"UNSPECIFIED", None),
        (gcp.parse_stop_state, b"PENDING_STOP", NoticeKind.MAINTENANCE),
    ],
)
def test_values(parse: Callable[[bytes], Reading], body: bytes, kind: NoticeKind | None) -> None:
    reading = parse(body)
    assert [found.kind for found in reading.found] == ([] if kind is None else [kind])
    assert reading.problems == ()


@pytest.mark.parametrize("body", [b"", b"true", b"TRUE FALSE", b"<html>", b"\xff", b"T" * 9999, b"1"])
@pytest.mark.parametrize("parse", PARSERS)
def test_garbage_is_a_trouble(parse: Callable[[bytes], Reading], body: bytes) -> None:
    with pytest.raises(SourceError):
        parse(body)


@asynccontextmanager
async def watching(server: SimulatedGCP, wait_seconds: float = 5.0) -> AsyncIterator[Listener]:
    metadata = Metadata(server.url, 0.3)
    try:
        async with listening(gcp.sources(metadata, EVERY_SECONDS, wait_seconds)) as listener:
            yield listener
    finally:
        await metadata.close()


@pytest.fixture
async def server() -> AsyncIterator[SimulatedGCP]:
    async with SimulatedGCP() as simulated:
        yield simulated


async def test_a_change_is_heard_of_in_the_long_poll(server: SimulatedGCP) -> None:
    """F12: not at the next look."""
    async with watching(server) as listener:
        await until(lambda: server.waiting == 2)
        asked = server.requests["/computeMetadata/v1/instance/preempted"]
        server.interrupt()
        await until(lambda: listener.heard)
        assert server.requests["/computeMetadata/v1/instance/preempted"] == asked, "no other request was needed"
    (notice,) = listener.heard
    assert (notice.kind, notice.remaining_seconds) == (NoticeKind.PREEMPT, 30.0)


async def test_preempted_before_the_first_look(server: SimulatedGCP) -> None:
    server.interrupt()
    async with watching(server) as listener:
        await until(lambda: listener.heard)
    assert listener.kinds == [NoticeKind.PREEMPT]


async def test_maintenance_is_withdrawn_and_a_move_is_a_hint(server: SimulatedGCP) -> None:
    async with watching(server) as listener:
        server.maintain()
        await until(lambda: len(listener.heard) == 1)
        server.maintain("NONE")
        await until(lambda: len(listener.heard) == 2)
        server.maintain("MIGRATE_ON_HOST_MAINTENANCE")
        await until(lambda: len(listener.heard) == 3)
    assert listener.kinds == [NoticeKind.MAINTENANCE, NoticeKind.CANCEL, NoticeKind.HINT]


async def test_a_poll_that_ends_without_a_change_tells_nothing(server: SimulatedGCP) -> None:
    server.interrupt()
    async with watching(server, wait_seconds=0.05) as listener:
        await until(lambda: server.requests["/computeMetadata/v1/instance/preempted"] >= 5)
    assert len(listener.heard) == 1
    assert listener.reports == []


async def test_somebody_else_answers(server: SimulatedGCP, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that answers TRUE to everything is not Google's server."""
    monkeypatch.setattr(server, "own_headers", dict)
    server.interrupt()
    async with watching(server) as listener:
        await until(lambda: listener.reports)
    assert listener.heard == []
    assert "not from Google" in str(listener.problems[0])


async def test_refused_connections(server: SimulatedGCP) -> None:
    async with watching(server) as listener:
        await until(lambda: server.waiting == 2)
        await server.stop()
        await until(lambda: listener.reports)
        await server.start()
        server.interrupt()
        await until(lambda: listener.heard)
    assert listener.kinds == [NoticeKind.PREEMPT]


class NothingWaits(Metadata):
    """Something on the way that lets no answer wait."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.waited: list[float] = []

    async def get(self, path: str, headers: Mapping[str, str] | None = None, waits_seconds: float = 0.0) -> Answer:
        self.waited.append(waits_seconds)
        if waits_seconds:
            raise SourceError("no answer in time")
        return Answer(status=200, headers={"metadata-flavor": "Google", "etag": "1"}, body=b"FALSE")


async def test_where_no_answer_may_wait_nobody_waits_any_longer() -> None:
    """Else each notice is heard up to a minute late, without an alarm: between two long polls the key can be read."""
    metadata = NothingWaits()
    poll = gcp.LongPoll(metadata, "/key", 60.0)
    for _ in range(10):
        with suppress(SourceError):
            await poll.read()
    assert metadata.waited == [0.0, 60.0, 0.0, 60.0, *[0.0] * 6]

"""AWS: the parsers by tables, and what of simulated instance metadata is not in `table`: tokens, wrong clocks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption import aws
from orchestrator.preemption.base import Reading, rfc3339_seconds
from orchestrator.preemption.metadata import Metadata
from orchestrator.testing.metadata import SimulatedAWS
from orchestrator.testing.metadata_server import Body, rfc3339
from tests.preemption.listening import EVERY_SECONDS, Listener, listening, until

NOW = rfc3339_seconds("2017-09-18T08:20:00Z")
GARBAGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"{}",
    b"3",
    b"<html>please log in</html>",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"action":"terminate"}',
    b'{"action":"explode","time":"2017-09-18T08:22:00Z"}',
    b'{"action":"terminate","time":"2017-09-18T08:22:00"}',
    b'{"action":"terminate","time":"2017-13-18T08:22:00Z"}',
    b'{"action":"terminate","time":"0000-01-01T00:00:00Z"}',
    b'{"action":"terminate","time":1505722920}',
    b'{"action":["terminate"],"time":"2017-09-18T08:22:00Z"}',
]


@pytest.mark.parametrize(
    ("action", "time_text", "left"),
    [
        ("terminate", "2017-09-18T08:22:00Z", 120.0),
        ("stop", "2017-09-18T08:21:00Z", 60.0),
        ("terminate", "2017-09-18T10:21:30+02:00", 90.0),
        ("hibernate", "2017-09-18T08:22:00Z", 0.0),
        ("terminate", "2017-09-18T08:19:00Z", None),
        ("terminate", "2027-09-18T08:19:00Z", 120.0),
    ],
)
def test_instance_action(action: str, time_text: str, left: float | None) -> None:
    body = f'{{"action":"{action}","time":"{time_text}","a-new-field":{{}}}}'.encode()
    (found,) = aws.parse_instance_action(body, NOW).found
    assert (found.kind, found.remaining_seconds) == (NoticeKind.PREEMPT, left)
    assert action in found.words
    assert aws.parse_instance_action(body, NOW + 50).found[0].event_id == found.event_id


@pytest.mark.parametrize("body", GARBAGE)
@pytest.mark.parametrize("parse", [aws.parse_instance_action, aws.parse_rebalance])
def test_garbage_is_a_trouble(parse: Callable[[bytes, float], Reading], body: bytes) -> None:
    with pytest.raises(SourceError):
        parse(body, NOW)


def test_rebalance_is_a_hint() -> None:
    (found,) = aws.parse_rebalance(b'{"noticeTime":"2020-10-26T14:14:14Z"}', NOW).found
    assert (found.kind, found.remaining_seconds) == (NoticeKind.HINT, None)


def scheduled(state: str, event_id: str = "instance-event-1", code: str = "system-reboot") -> str:
    return (
        f'{{"NotBefore":"18 Sep 2017 08:30:00 GMT","Code":"{code}","Description":"scheduled","EventId":"{event_id}",'
        f'"NotAfter":"18 Sep 2017 09:17:23 GMT","State":"{state}"}}'
    )


def test_scheduled_events() -> None:
    body = f"[{scheduled('active')},{scheduled('canceled', 'b')},{scheduled('active', 'c', 'system-maintenance')}]"
    reading = aws.parse_scheduled(body.encode(), NOW)
    assert [(found.event_id, found.kind, found.remaining_seconds) for found in reading.found] == [
        ("instance-event-1", NoticeKind.MAINTENANCE, 600.0),
        ("c", NoticeKind.HINT, 600.0),
    ]
    assert aws.parse_scheduled(b"[]", NOW) == Reading()


def test_one_scheduled_event_that_nobody_understands_hides_no_other() -> None:
    body = f"[{scheduled('active')},{scheduled('mystery')},7,{{}}]"
    reading = aws.parse_scheduled(body.encode(), NOW)
    assert len(reading.found) == 1
    assert len(reading.problems) == 3


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"[" + b"{}," * 200 + b"{}]", b"[}"])
def test_scheduled_garbage(body: bytes) -> None:
    with pytest.raises(SourceError):
        aws.parse_scheduled(body, NOW)


@pytest.mark.parametrize(("state", "notices"), [("InService", 0), ("Warmed:Stopped", 0), ("Terminated", 1)])
def test_lifecycle_state(state: str, notices: int) -> None:
    assert len(aws.parse_lifecycle_state(state.encode(), NOW).found) == notices


@pytest.mark.parametrize("body", [b"", b"<html>", b"Terminated now", b"x" * 1000])
def test_lifecycle_garbage(body: bytes) -> None:
    with pytest.raises(SourceError):
        aws.parse_lifecycle_state(body, NOW)


# ------------------------------------------------------------------------------------------- against a server


@asynccontextmanager
async def watching(server: SimulatedAWS, request_seconds: float = 2.0) -> AsyncIterator[Listener]:
    metadata = Metadata(server.url, request_seconds)
    try:
        async with listening(aws.sources(metadata, time.time, time.monotonic, EVERY_SECONDS)) as listener:
            yield listener
    finally:
        await metadata.close()


@pytest.fixture
async def server() -> AsyncIterator[SimulatedAWS]:
    async with SimulatedAWS() as simulated:
        yield simulated


def looks(server: SimulatedAWS) -> int:
    return server.requests["/latest/meta-data/spot/instance-action"]


async def test_an_interruption_is_told_once(server: SimulatedAWS) -> None:
    async with watching(server) as listener:
        await until(lambda: looks(server) >= 2)
        assert listener.heard == []
        server.interrupt(seconds=100, **{"a-new-field": "x"})
        await until(lambda: listener.heard)
        await until(lambda: looks(server) >= 10)
    (notice,) = listener.heard
    assert notice.kind is NoticeKind.PREEMPT
    assert notice.remaining_seconds is not None
    assert 90 < notice.remaining_seconds <= 100
    assert listener.reports == []
    assert server.requests["/latest/api/token"] == 1


async def test_a_scheduled_event_of_next_week_is_a_hint(server: SimulatedAWS) -> None:
    server.schedule(event_id="one", seconds=7 * 86400)
    async with watching(server) as listener:
        await until(lambda: listener.heard)
        server.schedule(event_id="one", seconds=300)
        await until(lambda: len(listener.heard) == 3)
    assert listener.kinds == [NoticeKind.HINT, NoticeKind.MAINTENANCE, NoticeKind.CANCEL]
    assert listener.heard[2].notice_id == listener.heard[0].notice_id


async def test_a_deadline_of_a_wrong_clock(server: SimulatedAWS) -> None:
    """Farther away than AWS ever announces; one in the past is in the table."""
    server.interrupt(seconds=400 * 86400)
    async with watching(server) as listener:
        await until(lambda: listener.heard)
    (notice,) = listener.heard
    assert notice.remaining_seconds == 120.0
    assert "by this machine's clock" in notice.source


async def test_tokens_are_renewed_in_time(server: SimulatedAWS) -> None:
    """The answer says how long a token lives; 15 s before its end it is renewed: here with every request."""
    server.token_seconds = 15.0
    async with watching(server) as listener:
        await until(lambda: looks(server) >= 3)
    assert listener.reports == []
    assert server.requests["/latest/api/token"] >= 3


async def test_a_token_that_is_refused_is_renewed_once(server: SimulatedAWS) -> None:
    """F8: the token is void before its time."""
    async with watching(server) as listener:
        await until(lambda: looks(server) >= 2)
        server.forget_tokens()
        before = looks(server)
        await until(lambda: looks(server) >= before + 3)
        server.interrupt()
        await until(lambda: listener.heard)
    assert listener.reports == []


async def test_an_answer_that_is_too_long_is_an_alarm(server: SimulatedAWS) -> None:
    server.misbehave(Body(body=b"x" * (1 << 20)))
    async with watching(server) as listener:
        await until(lambda: listener.reports)
    assert listener.heard == []


async def test_a_service_that_is_not_there_yet(server: SimulatedAWS) -> None:
    await server.stop()
    async with watching(server) as listener:
        await until(lambda: listener.reports)
        server.keys["spot/instance-action"] = f'{{"action":"stop","time":"{rfc3339(60)}"}}'
        await server.start()
        await until(lambda: listener.heard)
    assert listener.kinds == [NoticeKind.PREEMPT]


async def test_a_lifecycle_hook_is_completed_once_the_node_may_go(server: SimulatedAWS) -> None:
    """F11: a hook that nobody completes keeps the instance until its time is over. Hooks of launches are left alone."""
    async with watching(server) as listener:
        server.scale_in()
        await until(lambda: listener.heard)
        assert server.completed == []
        assert await listener.watcher.acknowledge() == ()
    assert server.completed == [server.instance_id]


async def test_a_hook_that_cannot_be_completed_is_said(server: SimulatedAWS) -> None:
    """The role may not ask, or the metadata are none: the hook's time runs out, and the job's end does not fail."""
    async with watching(server) as listener:
        server.scale_in()
        await until(lambda: listener.heard)
        server.instance_id = "i-another"
        (problem,) = await listener.watcher.acknowledge()
        assert "was not acknowledged" in problem
        assert "autoscaling:CompleteLifecycleAction" in problem
        server.keys["placement/region"] = "<html>"
        (problem,) = await listener.watcher.acknowledge()
        assert "placement/region: no word" in problem
    assert server.completed == []

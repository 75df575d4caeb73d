"""Alibaba, Tencent, Volcengine and BytePlus: one key, one time, three ways to write it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption import termination_time
from orchestrator.preemption.base import Reading, rfc3339_seconds
from orchestrator.preemption.metadata import Metadata
from orchestrator.testing.metadata import (
    Body,
    Cut,
    Fault,
    MetadataServer,
    SimulatedAlibaba,
    SimulatedTencent,
    SimulatedVolcengine,
    Slow,
    Status,
    Unauthorized,
)
from tests.preemption.listening import EVERY_SECONDS, Listener, listening, until

NOW = rfc3339_seconds("2018-08-18T04:04:33Z")
ALIBABA = termination_time.parse_alibaba
TENCENT = termination_time.parse_tencent
VOLCENGINE = termination_time.parse_volcengine
SERVERS = (SimulatedAlibaba, SimulatedTencent, SimulatedVolcengine)


@pytest.mark.parametrize(
    ("parse", "body", "left"),
    [
        (ALIBABA, b"2018-08-18T04:09:33Z", 300.0),
        (TENCENT, b"2018-08-18 12:05:33", 60.0),  # UTC+8: taken as UTC it would be eight hours away
        (TENCENT, b"2018-08-18 04:05:33", None),  # eight hours ago
        (VOLCENGINE, b"2018-08-18T04:06:33Z\n", 120.0),
        (VOLCENGINE, b"2018-08-18 04:06:33", 120.0),
        (ALIBABA, b"2019-08-18T04:09:33Z", 300.0),
    ],
)
def test_times(parse: Callable[[bytes, float], Reading], body: bytes, left: float | None) -> None:
    (found,) = parse(body, NOW).found
    assert (found.kind, found.remaining_seconds) == (NoticeKind.PREEMPT, left)


@pytest.mark.parametrize("parse", [ALIBABA, TENCENT, VOLCENGINE])
def test_an_empty_answer_means_that_nothing_is_announced(parse: Callable[[bytes, float], Reading]) -> None:
    assert parse(b"", NOW) == Reading()


@pytest.mark.parametrize("body", [b"soon", b"<html>", b"\xff", b"2018-08-18", b"2018-13-18T04:04:33Z", b"1534565073"])
@pytest.mark.parametrize("parse", [ALIBABA, TENCENT, VOLCENGINE])
def test_garbage_is_a_trouble(parse: Callable[[bytes, float], Reading], body: bytes) -> None:
    with pytest.raises(SourceError):
        parse(body, NOW)


def test_an_unmarked_time_of_alibaba_is_a_trouble() -> None:
    with pytest.raises(SourceError):
        ALIBABA(b"2018-08-18 04:09:33", NOW)


# ------------------------------------------------------------------------------------------- against a server


@asynccontextmanager
async def watching(server: MetadataServer) -> AsyncIterator[Listener]:
    metadata = Metadata(server.url, 0.3)
    if isinstance(server, SimulatedAlibaba):
        sources = termination_time.alibaba(metadata, time.time, time.monotonic, EVERY_SECONDS)
    elif isinstance(server, SimulatedVolcengine):
        sources = termination_time.volcengine(metadata, time.time, EVERY_SECONDS)
    else:
        sources = termination_time.tencent(metadata, time.time, EVERY_SECONDS)
    try:
        async with listening(sources) as listener:
            yield listener
    finally:
        await metadata.close()


@pytest.mark.parametrize("kind", SERVERS)
async def test_an_interruption_is_told_once(kind: type[SimulatedAlibaba | SimulatedTencent]) -> None:
    async with kind() as server, watching(server) as listener:
        await until(lambda: server.requests.total() >= 3)
        assert listener.heard == []
        server.interrupt(seconds=110)
        await until(lambda: listener.heard)
        asked = server.requests.total()
        await until(lambda: server.requests.total() >= asked + 4)
    (notice,) = listener.heard
    assert notice.kind is NoticeKind.PREEMPT
    assert 100 < (notice.remaining_seconds or 0) <= 110


FAULTS: list[Fault] = [
    Unauthorized(),
    Status(status=500),
    Body(body=b"<html>"),
    Cut(),
    Slow(seconds=0.6),
]


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault!r:.40}")
async def test_a_source_that_cannot_be_read_is_an_alarm_once_and_recovers(
    kind: type[SimulatedAlibaba | SimulatedTencent], fault: Fault
) -> None:
    async with kind() as server, watching(server) as listener:
        await until(lambda: server.requests.total() >= 3)
        server.misbehave(fault)
        await until(lambda: listener.reports)
        assert listener.heard == []
        server.behave()
        server.interrupt()
        await until(lambda: listener.heard)
        await until(lambda: len(listener.reports) == 2)
    assert listener.kinds == [NoticeKind.PREEMPT]

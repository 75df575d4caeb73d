"""Azure: which events are this machine's, withdrawal by disappearance, and whom an acknowledgement would hit."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption import azure
from orchestrator.preemption.base import http_date_seconds
from orchestrator.preemption.metadata import Metadata
from orchestrator.testing.metadata import SimulatedAzure
from orchestrator.testing.metadata_server import Body, Slow, Status
from tests.preemption.listening import EVERY_SECONDS, Listener, listening, until

NOT_BEFORE = "Mon, 19 Sep 2016 18:29:47 GMT"
NOW = http_date_seconds(NOT_BEFORE) - 30
EVENTS_PATH = "/metadata/scheduledevents"


def document(**changes: Any) -> bytes:
    event = {
        "EventId": "e",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_0"],
        "EventStatus": "Scheduled",
        "NotBefore": NOT_BEFORE,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [{**event, **changes}]}).encode()


@pytest.mark.parametrize(
    ("changes", "kind", "left"),
    [
        ({}, NoticeKind.PREEMPT, 30.0),
        ({"Resources": ["VM_0"]}, NoticeKind.PREEMPT, 30.0),
        ({"EventStatus": "Started", "NotBefore": ""}, NoticeKind.PREEMPT, None),
        ({"NotBefore": ""}, NoticeKind.PREEMPT, None),
        ({"NotBefore": "Mon, 19 Sep 2016 18:29:00 GMT"}, NoticeKind.PREEMPT, None),
        ({"EventType": "Terminate"}, NoticeKind.MAINTENANCE, 30.0),
        ({"EventType": "Reboot"}, NoticeKind.MAINTENANCE, 30.0),
        ({"EventType": "Redeploy"}, NoticeKind.MAINTENANCE, 30.0),
        ({"EventType": "Freeze"}, NoticeKind.HINT, 30.0),
        ({"a new field": [1]}, NoticeKind.PREEMPT, 30.0),
    ],
)
def test_events(changes: dict[str, Any], kind: NoticeKind, left: float | None) -> None:
    reading, alone = azure.parse_scheduled_events(document(**changes), "vm_0", NOW)
    (found,) = reading.found
    assert (found.event_id, found.kind, found.remaining_seconds, alone) == ("e", kind, left, {"e"})


def test_an_event_of_other_machines_is_none() -> None:
    reading, alone = azure.parse_scheduled_events(document(Resources=["vm_1", "vm_00"]), "vm_0", NOW)
    assert (reading.found, reading.problems, alone) == ((), (), set())


def test_an_event_of_several_machines_is_told_and_never_acknowledged() -> None:
    reading, alone = azure.parse_scheduled_events(document(Resources=["vm_1", "vm_0"]), "vm_0", NOW)
    assert (len(reading.found), alone) == (1, set())


@pytest.mark.parametrize(
    "changes",
    [
        {"EventId": ""},
        {"EventId": 7},
        {"EventType": "Explode"},
        {"EventStatus": "Completed"},
        {"NotBefore": "tomorrow"},
        {"NotBefore": 7},
        {"NotBefore": "Mon, 39 Sep 2016 18:29:47 GMT"},
        {"Resources": "vm_0"},
        {"Resources": [0]},
        {"Resources": None},
    ],
)
def test_an_event_that_nobody_understands_is_a_trouble(changes: dict[str, Any]) -> None:
    reading, alone = azure.parse_scheduled_events(document(**changes), "vm_0", NOW)
    assert (reading.found, alone) == ((), set())
    assert len(reading.problems) == 1


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"Events":{}}', b'{"Events":null}', b"<html>", b"\xff"])
def test_garbage_is_a_trouble(body: bytes) -> None:
    with pytest.raises(SourceError):
        azure.parse_scheduled_events(body, "vm_0", NOW)


# ------------------------------------------------------------------------------------------- against a server


@asynccontextmanager
async def watching(server: SimulatedAzure, request_seconds: float = 0.3) -> AsyncIterator[Listener]:
    metadata = Metadata(server.url, request_seconds)
    try:
        async with listening(azure.sources(metadata, time.time, EVERY_SECONDS)) as listener:
            yield listener
    finally:
        await metadata.close()


@pytest.fixture
async def server() -> AsyncIterator[SimulatedAzure]:
    async with SimulatedAzure() as simulated:
        yield simulated


async def test_announced_begun_and_over(server: SimulatedAzure) -> None:
    async with watching(server) as listener:
        server.announce("neighbour", machines=("vmss_1",))
        server.announce("mine", seconds=40)
        server.announce("mine", seconds=40)  # listed twice
        await until(lambda: listener.heard)
        server.begin("mine")
        looks = server.requests[EVENTS_PATH]
        await until(lambda: server.requests[EVENTS_PATH] >= looks + 3)
        server.withdraw("mine")
        await until(lambda: len(listener.heard) == 2)
    assert listener.kinds == [NoticeKind.PREEMPT, NoticeKind.CANCEL]
    assert 30 < (listener.heard[0].remaining_seconds or 0) <= 40
    assert server.acknowledged == []


async def test_an_event_that_is_put_off_is_told_again(server: SimulatedAzure) -> None:
    async with watching(server) as listener:
        server.announce("mine", "Reboot", seconds=60)
        await until(lambda: listener.heard)
        server.withdraw("mine")
        server.announce("mine", "Reboot", seconds=600)
        await until(lambda: len(listener.heard) == 3)
    assert listener.kinds == [NoticeKind.MAINTENANCE, NoticeKind.MAINTENANCE, NoticeKind.CANCEL]
    assert listener.heard[2].notice_id == listener.heard[0].notice_id != listener.heard[1].notice_id


async def test_acknowledged_are_own_events_only(server: SimulatedAzure) -> None:
    async with watching(server) as listener:
        server.announce("both", machines=("vmss_0", "vmss_1"))
        server.announce("neighbour", machines=("vmss_1",))
        server.announce("pause", "Freeze")
        server.announce("mine")
        await until(lambda: len(listener.heard) == 3)
        assert server.acknowledged == []
        problems = await listener.watcher.acknowledge()
    assert server.acknowledged == ["mine"]
    (problem,) = problems
    assert "both" in problem


async def test_an_acknowledgement_that_nobody_takes_is_said(server: SimulatedAzure) -> None:
    async with watching(server) as listener:
        server.announce("mine")
        await until(lambda: listener.heard)
        server.misbehave(Status(status=500))
        (problem,) = await listener.watcher.acknowledge()
    assert "500" in problem


async def test_the_first_answer_may_take_long(server: SimulatedAzure) -> None:
    """The first call switches the service on; afterwards nobody waits that long."""
    server.announce("mine")
    server.misbehave(Slow(seconds=0.5), times=1, path="scheduledevents")
    async with watching(server, request_seconds=0.1) as listener:
        await until(lambda: listener.heard)
        server.misbehave(Slow(seconds=0.5), path="scheduledevents")
        await until(lambda: listener.reports)
    assert listener.kinds == [NoticeKind.PREEMPT]


async def test_a_name_that_cannot_be_read_is_an_alarm(server: SimulatedAzure) -> None:
    server.announce("mine")
    server.misbehave(Body(body=b"<html>please log in</html>"), path="/compute/name")
    async with watching(server) as listener:
        await until(lambda: listener.reports)
        assert listener.heard == []
        server.behave()
        await until(lambda: listener.heard)


async def test_refused_connections(server: SimulatedAzure) -> None:
    await server.stop()
    async with watching(server) as listener:
        await until(lambda: listener.reports)
        await server.start()
        server.announce("mine")
        await until(lambda: listener.heard)
    assert listener.kinds == [NoticeKind.PREEMPT]

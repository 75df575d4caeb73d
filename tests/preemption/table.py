"""Every source in every case: what its simulated service does, and what must be heard of it.

`test_table` plays each cell through the real watcher, by the word that a job would be given (`aws@http://127.0.0.1:…`).
`python -m tests.preemption` prints the table as it stands in docs/notices.md. A cell that makes no sense has a reason.
Not here: what is pushed to an agent (tests/agent/test_notices.py).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.clock import SystemClock
from orchestrator.config import parse_notices
from orchestrator.core.messages import NoticeKind
from orchestrator.preemption import clouds, gcp
from orchestrator.preemption.base import Reading, Source
from orchestrator.preemption.metadata import Metadata
from orchestrator.testing.metadata import SERVICES
from orchestrator.testing.metadata_server import Body, Cut, Fault, Slow, Status, Unauthorized, rfc3339
from tests.preemption.listening import Listener, listening, until

ANNOUNCED_SECONDS = 100.0
GRACE_SECONDS = 30.0
LOOK_SECONDS = 0.01
LOOKS = 2
"""So often a source is looked at before it counts that nothing is told."""
NO_TIME = "it says no time"
ONE_VALUE = "it is one value, without fields"
NEVER = "it is never taken back"
BY_ABSENCE = "it is taken back by disappearing"
OWN = "a machine's own metadata name no other one"
NO_SERVICE = "no service answers for a file"

Act = Callable[[Any], None]


class LeaveFile:
    """A watched file in the place of a simulated service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: str | None = None

    async def __aenter__(self) -> LeaveFile:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def interrupt(self, seconds: float) -> None:
        """The file says a time."""
        self.write(rfc3339(seconds))

    def forget(self) -> None:
        """The file is removed."""
        self.write(None)

    def misbehave(self, fault: Body) -> None:
        """The file holds something else."""
        self._kept = self.path.read_text() if self.path.exists() else None
        self.write(fault.body.decode())

    def behave(self) -> None:
        """The file holds what it held before."""
        self.write(self._kept)

    def write(self, text: str | None) -> None:
        """All of it at once; None removes it."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(text or "")
        draft.rename(self.path)
        if text is None:
            self.path.unlink()


# ------------------------------------------------------------------------------------------------- the sources


def set_key(key: str, value: str) -> Act:
    """Changes what a service with keys answers."""
    return lambda server: server.keys.update({key: value})


def more_in_scheduled(server: Any) -> None:
    server.schedule(event_id="one", seconds=ANNOUNCED_SECONDS)
    (event,) = json.loads(server.keys["events/maintenance/scheduled"])
    server.keys["events/maintenance/scheduled"] = json.dumps([{**event, "a-new-field": [1]}])


def scheduled_twice(server: Any) -> None:
    (event,) = json.loads(server.keys["events/maintenance/scheduled"])
    server.keys["events/maintenance/scheduled"] = json.dumps([event, event])


@dataclass(frozen=True, kw_only=True)
class Row:
    """A source: how its service announces, and takes back."""

    cloud: str
    key: str
    kind: NoticeKind = NoticeKind.PREEMPT
    announce: Callable[[Any, float], None] = lambda server, seconds: server.interrupt(seconds)
    says_time: bool = True
    withdraws: bool = False
    """What disappears is withdrawn."""
    more: Act | str = ONE_VALUE
    """Announces with fields that nobody knows."""
    again: Act = lambda server: None
    """What was announced is listed twice."""
    cancel: Act | str = NEVER
    other: Act | str = OWN
    """Announces it for another machine."""
    empty_is: str = "an alarm"
    more_is: str = "ignored"

    def serve(self, folder: Path) -> Any:
        """Its service, to be entered."""
        return SERVICES[self.cloud]() if self.cloud in SERVICES else LeaveFile(folder / "leave")

    def word(self, server: Any) -> str:
        """What a job's `notices` would say."""
        return f"{self.cloud}@{server.url}" if self.cloud in SERVICES else f"file:{server.path}"


MAINTENANCE, HINT = NoticeKind.MAINTENANCE, NoticeKind.HINT
ROWS: Mapping[str, Row] = {
    "aws spot": Row(
        cloud="aws", key="spot/instance-action", more=lambda aws: aws.interrupt(**{"a-new-field": "terminate"})
    ),
    "aws rebalance": Row(
        cloud="aws",
        key="events/recommendations/rebalance",
        kind=HINT,
        announce=lambda aws, _: aws.recommend_rebalance(),
        says_time=False,
        more=set_key("events/recommendations/rebalance", '{"noticeTime": "2020-10-26T14:14:14Z", "a-new-field": {}}'),
    ),
    "aws scheduled": Row(
        cloud="aws",
        key="events/maintenance/scheduled",
        kind=MAINTENANCE,
        announce=lambda aws, seconds: aws.schedule(event_id="one", seconds=seconds),
        withdraws=True,
        more=more_in_scheduled,
        again=scheduled_twice,
        cancel=lambda aws: aws.schedule(event_id="one", seconds=ANNOUNCED_SECONDS, state="canceled"),
    ),
    "aws Auto Scaling": Row(
        cloud="aws",
        key="autoscaling/target-lifecycle-state",
        kind=MAINTENANCE,
        announce=lambda aws, _: set_key("autoscaling/target-lifecycle-state", "Terminated")(aws),
        says_time=False,
    ),
    "gcp spot": Row(cloud="gcp", key="preempted", says_time=False),
    "gcp host maintenance": Row(
        cloud="gcp",
        key="maintenance-event",
        kind=MAINTENANCE,
        announce=lambda google, _: google.maintain(),
        says_time=False,
        withdraws=True,
        cancel=lambda google: google.maintain("NONE"),
    ),
    "gcp graceful shutdown": Row(
        cloud="gcp",
        key="shutdown-details/stop-state",
        kind=MAINTENANCE,
        announce=lambda google, _: google.shut_down(),
        says_time=False,
    ),
    "azure": Row(
        cloud="azure",
        key="scheduledevents",
        withdraws=True,
        more=lambda azure: azure.announce("preempt", **{"a new field": [1]}),
        again=lambda azure: azure.events.append(azure.events[0]),
        cancel=BY_ABSENCE,
        other=lambda azure: azure.announce("neighbour", machines=("vmss_1",)),
    ),
    "alibaba": Row(cloud="alibaba", key="spot/termination-time", empty_is="none"),
    "tencent": Row(cloud="tencent", key="spot/termination-time", empty_is="none"),
    "volcengine": Row(cloud="volcengine", key="spot_instance_termination_time", empty_is="none"),
    "file:/path": Row(
        cloud="file",
        key="",
        withdraws=True,
        more=lambda file: file.write('{"seconds": 100, "a-new-field": 1}'),
        cancel=BY_ABSENCE,
        other="a file is for the machine that it is on",
        empty_is="a notice",
        more_is="an alarm",
    ),
}


# --------------------------------------------------------------------------------------------------- the cases


class Counted(Listener):
    """Counts looks, too."""

    looks = 0

    def counting(self, source: Source) -> Source:
        """The source, counted."""

        async def look() -> Reading:
            try:
                return await source.look()
            finally:
                self.looks += 1

        return replace(source, look=look)

    async def looked(self, times: int = LOOKS) -> None:
        """So often from now on."""
        enough = self.looks + times
        await until(lambda: self.looks >= enough)


@asynccontextmanager
async def heard_of(row: Row, server: Any, patience_seconds: float) -> AsyncIterator[Counted]:
    """Watch a row's source as an agent does with these `notices`; polls are short, and so is the patience."""
    chosen = parse_notices(row.word(server))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clouds, "Metadata", partial(Metadata, request_seconds=patience_seconds))
        patched.setattr(gcp, "sources", partial(gcp.sources, wait_seconds=0.05))
        services = clouds.Clouds(SystemClock(), chosen.addresses, LOOK_SECONDS)
        sources = [one for name in chosen.names for one in services.sources_of(name) if one.key.endswith(row.key)]
        listener = Counted(blind_after_seconds=0.0)
        try:
            async with listening([listener.counting(source) for source in sources], listener):
                yield listener
        finally:
            await services.close()


async def announced(row: Row, server: Any, listener: Counted, seconds: float = ANNOUNCED_SECONDS) -> None:
    """It is announced, and heard as the first of all."""
    row.announce(server, seconds)
    await until(lambda: listener.heard)
    assert listener.kinds == [row.kind]


async def format_(row: Row, server: Any, listener: Counted) -> None:
    await listener.looked()
    assert listener.heard == []
    await announced(row, server, listener)
    (notice,) = listener.heard
    assert notice.node == "node-1"
    assert notice.source.startswith(f"{row.cloud} ")
    if not row.says_time:
        assert notice.remaining_seconds == (None if row.kind is HINT else GRACE_SECONDS)
    assert listener.reports == []


async def deadline(row: Row, server: Any, listener: Counted) -> None:
    await announced(row, server, listener)
    (notice,) = listener.heard
    assert ANNOUNCED_SECONDS - 20 < (notice.remaining_seconds or 0) <= ANNOUNCED_SECONDS


async def past_deadline(row: Row, server: Any, listener: Counted) -> None:
    await announced(row, server, listener, seconds=-300)
    (notice,) = listener.heard
    assert notice.remaining_seconds == GRACE_SECONDS
    assert "ago by this machine's clock" in notice.source


async def more_fields(row: Row, server: Any, listener: Counted) -> None:
    assert not isinstance(row.more, str)
    row.more(server)
    if row.more_is == "an alarm":
        await until(lambda: listener.reports)
        assert listener.heard == []
        assert "a-new-field" in str(listener.problems[0])
    else:
        await until(lambda: listener.heard)
        assert listener.kinds == [row.kind]
        assert listener.reports == []


async def said_again(row: Row, server: Any, listener: Counted) -> None:
    await announced(row, server, listener)
    row.again(server)
    await listener.looked(2 * LOOKS)
    assert listener.kinds == [row.kind]


async def cancelled(row: Row, server: Any, listener: Counted) -> None:
    assert not isinstance(row.cancel, str)
    await announced(row, server, listener)
    row.cancel(server)
    await withdrawn(row, listener)


async def disappears(row: Row, server: Any, listener: Counted) -> None:
    await announced(row, server, listener)
    server.forget()
    if row.withdraws:
        await withdrawn(row, listener)
    else:
        await listener.looked()
        assert listener.kinds == [row.kind]


async def withdrawn(row: Row, listener: Counted) -> None:
    """The one notice is."""
    await until(lambda: len(listener.heard) == 2)
    assert listener.kinds == [row.kind, NoticeKind.CANCEL]
    assert listener.heard[0].notice_id == listener.heard[1].notice_id


async def another_machine(row: Row, server: Any, listener: Counted) -> None:
    assert not isinstance(row.other, str)
    row.other(server)
    await listener.looked()
    assert (listener.heard, listener.reports) == ([], [])


async def empty(row: Row, server: Any, listener: Counted) -> None:
    fault = Body(body=b"")
    if row.empty_is == "an alarm":
        await blind(row, server, listener, fault)
        return
    await listener.looked()
    server.misbehave(fault)
    if row.empty_is == "a notice":
        await until(lambda: listener.heard)
        assert [notice.remaining_seconds for notice in listener.heard] == [GRACE_SECONDS]
    else:
        await listener.looked()
        assert listener.heard == []
        server.behave()
        await announced(row, server, listener)
    assert listener.reports == []


async def blind(row: Row, server: Any, listener: Counted, fault: Fault) -> None:
    """An alarm until it is over: no notice is made up, none is lost, none is withdrawn."""
    await listener.looked()
    await alarmed(server, listener, fault)
    assert listener.heard == []
    await announced(row, server, listener)
    if row.withdraws:
        await alarmed(server, listener, fault)
    assert listener.kinds == [row.kind]


async def alarmed(server: Any, listener: Counted, fault: Fault) -> None:
    """It meets the fault; that is said once, and so is its end."""
    before = len(listener.reports)
    server.misbehave(fault)
    await until(lambda: len(listener.reports) > before)
    await listener.looked(1)
    server.behave()
    await until(lambda: len(listener.reports) > before + 1)
    problem, over = listener.problems[before:]
    assert problem
    assert over is None


def meets(fault: Fault) -> Play:
    """The case of a fault."""
    return partial(blind, fault=fault)


Play = Callable[[Row, Any, Counted], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A column."""

    play: Play
    without: Callable[[Row], str | None] = lambda row: None
    """Why a row has nothing to play."""
    patience_seconds: float = 2.0


def reason(value: Act | str) -> str | None:
    """What stands in the place of an act."""
    return value if isinstance(value, str) else None


def served(row: Row) -> str | None:
    return None if row.cloud in SERVICES else NO_SERVICE


def timed(row: Row) -> str | None:
    return None if row.says_time else NO_TIME


CASES: Mapping[str, Case] = {
    "format": Case(play=format_),
    "deadline": Case(play=deadline, without=timed),
    "past deadline": Case(play=past_deadline, without=timed),
    "more fields": Case(play=more_fields, without=lambda row: reason(row.more)),
    "said again": Case(play=said_again),
    "cancelled": Case(play=cancelled, without=lambda row: reason(row.cancel)),
    "disappears": Case(play=disappears),
    "another machine": Case(play=another_machine, without=lambda row: reason(row.other)),
    "401": Case(play=meets(Unauthorized()), without=served),
    "500": Case(play=meets(Status(status=500)), without=served),
    "slow": Case(play=meets(Slow(seconds=0.5)), without=served, patience_seconds=0.2),
    "cut off": Case(play=meets(Cut()), without=served),
    "empty": Case(play=empty),
    "login page": Case(play=meets(Body(body=b"<html>please log in</html>"))),
}


def markdown() -> str:
    """The table, and below it why a cell is empty."""
    reasons: list[str] = []
    lines = ["| | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    for name, row in ROWS.items():
        cells = []
        for case in CASES.values():
            why = case.without(row)
            if why is not None and why not in reasons:
                reasons.append(why)
            cells.append("✓" if why is None else f"– {letter(reasons.index(why))}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + "; ".join(f"{letter(at)}: {why}" for at, why in enumerate(reasons)) + ".\n"


def letter(number: int) -> str:
    """a, b, c …"""
    return chr(ord("a") + number)

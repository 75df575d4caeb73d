"""What an agent hears of its machine's end beside signals: chosen sources, and what is pushed to its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.agent.notices import NoticeWatch
from orchestrator.agent.objects import HttpObjectServer
from orchestrator.clock import SystemClock
from orchestrator.core.messages import NoticeKind, NoticeReceived, WatcherReported
from orchestrator.storage.memory import MemoryStore
from orchestrator.testing.metadata import SimulatedAWS, SimulatedOCI, eventbridge_event
from tests.agent.settings import settings_in

JOB_TOKEN, WORKERS_TOKEN = "the-job's-token", "the-workers'-token"


class Ears:
    """A watch with its port, and what it told."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.heard: list[NoticeReceived] = []
        self.reports: list[WatcherReported] = []
        self.settings = settings_in(folder, token=JOB_TOKEN, notice_look_seconds=0.02, **settings)
        self.watch = NoticeWatch(self.settings, SystemClock(), self.heard.append, self.reports.append)
        self.url = ""
        self.session: aiohttp.ClientSession

    async def push(self, body: Any, token: str = JOB_TOKEN) -> int:
        data = body if isinstance(body, bytes) else aiohttp.JsonPayload(body)
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.post(f"{self.url}/notices", data=data, headers=headers) as answer:
            return answer.status

    @property
    def kinds(self) -> list[NoticeKind]:
        return [notice.kind for notice in self.heard]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.heard) < count:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def ears(folder: Path, **settings: Any) -> AsyncIterator[Ears]:
    made = Ears(folder, **settings)
    server = HttpObjectServer()
    tokens = (WORKERS_TOKEN, JOB_TOKEN)
    made.url = await server.start(MemoryStore(), tokens, "127.0.0.1", made.watch.routes())
    task = asyncio.create_task(made.watch.run())
    try:
        async with aiohttp.ClientSession() as made.session:
            yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await server.stop()


async def test_a_pushed_notice_is_told_once_and_withdrawn_by_its_id(tmp_path: Path) -> None:
    async with ears(tmp_path, notices="webhook") as heard:
        body = {"kind": "preempt", "seconds": 90, "id": "rack-7", "reason": "the rack is moved"}
        assert await heard.push(body) == 200
        assert await heard.push(body) == 200
        assert await heard.push({**body, "seconds": 40}) == 200
        await heard.until(3)
        assert await heard.push({"kind": "cancel", "id": "rack-7"}) == 200
        assert await heard.push({"kind": "cancel", "id": "rack-7"}) == 409
        await heard.until(4)
    assert heard.kinds == [NoticeKind.PREEMPT, NoticeKind.PREEMPT, NoticeKind.CANCEL, NoticeKind.CANCEL]
    assert "the rack is moved" in heard.heard[0].source
    assert 39 < (heard.heard[1].remaining_seconds or 0) <= 40
    assert heard.reports == []


async def test_a_notice_without_a_time_leaves_the_grace(tmp_path: Path) -> None:
    async with ears(tmp_path, notices="webhook", grace_seconds=17.0) as heard:
        assert await heard.push({}) == 200
        await heard.until(1)
    assert heard.heard[0].remaining_seconds == 17.0


@pytest.mark.parametrize(
    ("body", "token", "status"),
    [
        ({}, "wrong", 401),
        ({}, WORKERS_TOKEN, 403),
        (b"", JOB_TOKEN, 400),
        (b"{", JOB_TOKEN, 400),
        ({"kind": "explode"}, JOB_TOKEN, 400),
        ({"kind": "cancel"}, JOB_TOKEN, 400),
        (b"x" * (1 << 20), JOB_TOKEN, 413),
        (eventbridge_event("i-1"), JOB_TOKEN, 400),  # nobody here knows which machine this is
        ({**eventbridge_event("i-1"), "detail-type": "Something else"}, JOB_TOKEN, 200),
    ],
)
async def test_what_is_refused(tmp_path: Path, body: Any, token: str, status: int) -> None:
    async with ears(tmp_path, notices="webhook") as heard:
        assert await heard.push(body, token) == status
    assert heard.heard == []


async def test_a_body_that_is_not_encoded_as_it_says(tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {JOB_TOKEN}", "Content-Encoding": "gzip"}
    async with ears(tmp_path, notices="webhook") as heard:
        async with heard.session.post(f"{heard.url}/notices", data=b"{}", headers=headers) as answer:
            assert answer.status == 400
    assert heard.heard == []


async def test_what_stands_has_a_limit(tmp_path: Path) -> None:
    async with ears(tmp_path, notices="webhook") as heard:
        for number in range(100):
            assert await heard.push({"kind": "hint", "id": str(number)}) == 200
        assert await heard.push({"kind": "hint", "id": "one more"}) == 409
        await heard.until(100)


async def test_events_of_clouds_count_for_this_machine_alone(tmp_path: Path) -> None:
    async with SimulatedAWS(instance_id="i-7") as aws, SimulatedOCI() as oci:
        async with ears(tmp_path / "a", notices=f"aws@{aws.url},webhook") as heard:
            assert await heard.push(eventbridge_event("i-8")) == 200
            assert await heard.push(eventbridge_event("i-7")) == 200
            await heard.until(1)
        assert heard.kinds == [NoticeKind.PREEMPT]
        async with ears(tmp_path / "b", notices=f"oci@{oci.url}") as heard:
            assert await heard.push(oci.preemption_event("ocid1.instance.another")) == 200
            assert await heard.push(oci.preemption_event()) == 200
            await heard.until(1)
        assert heard.kinds == [NoticeKind.PREEMPT]


async def test_several_sources_at_once(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    async with SimulatedAWS() as aws:
        async with ears(tmp_path, notices=f"auto@{aws.url},file:{path}") as heard:
            aws.interrupt()
            await heard.until(1)
            path.touch()
            await heard.until(2)
            assert await heard.push({"kind": "hint"}) == 200
            await heard.until(3)
    assert heard.watch.watched == (f"file:{path}", "webhook", "aws")
    assert heard.reports == []


async def test_none_watches_nothing_and_takes_nothing(tmp_path: Path) -> None:
    async with ears(tmp_path, notices="none") as heard:
        assert await heard.push({}) == 404
    assert heard.watch.watched == ()


async def test_a_bug_in_choosing_is_an_alarm_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("orchestrator.preemption.clouds.Clouds.find", broken)
    async with ears(tmp_path, notices="auto") as heard, asyncio.timeout(10):
        while not heard.reports:
            await asyncio.sleep(0.002)
    assert "ZeroDivisionError" in str(heard.reports[0].problem)

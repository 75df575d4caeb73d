"""What an agent says of a supervisor that it cannot reach: once, after a while, and when it is there again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from orchestrator.agent import client as client_module
from orchestrator.agent.client import AWAY_SECONDS, SupervisorClient
from orchestrator.agent.link import FrameSocket
from orchestrator.agent.wire import Channel
from orchestrator.clock import SystemClock


class Clock(SystemClock):
    """Goes on by ten seconds at every look."""

    now_seconds = 0.0

    def monotonic(self) -> float:
        self.now_seconds += 10.0
        return self.now_seconds


class Socket:
    """A supervisor that welcomes once, then hangs up."""

    def __init__(self) -> None:
        self.answers: Iterator[str | None] = iter(['{"received": 0, "life": "a"}', None])

    async def send(self, text: str) -> None:
        return

    async def receive(self) -> str | None:
        return next(self.answers)

    async def close(self) -> None:
        return


async def test_a_supervisor_that_is_away_for_long_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_SECONDS_FIRST", 0.0)
    monkeypatch.setattr(client_module, "RETRY_SECONDS_MAX", 0.0)
    said: list[str] = []
    tries = 0

    async def connect() -> FrameSocket:
        nonlocal tries
        tries += 1
        if tries == 8:
            return Socket()
        if tries == 10:
            raise asyncio.CancelledError
        raise ConnectionError("no route")

    client = SupervisorClient(
        "a",
        Channel(),
        Clock(),
        connect,
        on_supervisor=lambda: None,
        on_frame=lambda frame: None,
        say=said.append,
    )
    with pytest.raises(asyncio.CancelledError):
        await client.run()
    assert [text.partition(" (")[0] for text in said] == [
        f"no supervisor for {AWAY_SECONDS + 10:.0f} s",
        "there is a supervisor again",
    ]

"""Connections to a supervisor: which address an agent trusts, and senders that end when they are told to."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from orchestrator.agent.client import WebSocketConnector
from orchestrator.agent.link import send_frames
from orchestrator.agent.wire import Channel
from orchestrator.core.messages import Tick
from orchestrator.errors import FencedError
from orchestrator.schedulers.leftovers import start_ticks
from tests.agent.settings import settings_in


class Sink:
    """A connection that takes everything."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, text: str) -> None:
        self.sent.append(text)

    async def receive(self) -> str | None:
        return None

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_that_comes_together_with_a_frame_is_not_lost(turns: int) -> None:
    """Otherwise an agent that ends, or that has lost its connection, would wait for its sender for ever."""
    channel = Channel()
    sender = asyncio.create_task(send_frames(channel, Sink()))
    for _ in range(4):
        await asyncio.sleep(0)
    channel.post(Tick())
    for _ in range(turns):
        await asyncio.sleep(0)
    sender.cancel()
    done, _ = await asyncio.wait({sender}, timeout=5)
    assert done == {sender}


# ------------------------------------------------------------------------------------------------ the address


class Address:
    """What the state folder says of the supervisor."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "supervisor.json"

    def write(self, url: str, token: str = "the token", pid: int | None = None, ticks: int | None = None) -> None:
        pid = os.getpid() if pid is None else pid
        ticks = start_ticks(pid) if ticks is None else ticks
        self.path.write_text(json.dumps({"job": "j", "url": url, "token": token, "pid": pid, "start_ticks": ticks}))


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(tmp_path)


class Listener:
    """Somebody's port: it remembers the tokens that it was shown, and answers as it is told."""

    def __init__(self) -> None:
        self.url = ""
        self.tokens: list[str | None] = []
        self.status = 401
        self.before_answer: Callable[[], None] = lambda: None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        self.before_answer()
        if self.status != 200:
            return web.Response(status=self.status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.close()
        return socket


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    found = Listener()
    app = web.Application()
    app.router.add_get("/agent", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


def connector(tmp_path: Path, address: Address, url: str) -> WebSocketConnector:
    settings = settings_in(tmp_path, supervisor_url=url, token="the token", supervisor_file=address.path)
    return WebSocketConnector(settings)


async def test_the_address_of_the_supervisor_that_runs_now_takes_the_place_of_the_first(
    tmp_path: Path, address: Address, listener: Listener
) -> None:
    listener.status = 200
    address.write(listener.url)
    socket = await connector(tmp_path, address, "http://127.0.0.1:1")()
    await socket.close()
    assert listener.tokens == ["Bearer the token"]


@pytest.mark.parametrize("ticks", [1, 12345])
async def test_a_port_that_a_dead_supervisor_had_is_not_called(
    tmp_path: Path, address: Address, listener: Listener, ticks: int
) -> None:
    """Whoever listens there now, perhaps another user, sees no token, gives no orders, and turns nobody away."""
    address.write(listener.url, ticks=ticks)
    with pytest.raises(ConnectionError, match="dead"):
        await connector(tmp_path, address, listener.url)()
    assert listener.tokens == []


async def test_a_supervisor_of_another_run_is_not_called(tmp_path: Path, address: Address, listener: Listener) -> None:
    """It may have a node of its own by this one's name: two would speak for one, and both would be given up."""
    address.write(listener.url, token="another token")
    with pytest.raises(FencedError, match="another run"):
        await connector(tmp_path, address, listener.url)()
    assert listener.tokens == []


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
async def test_without_a_whole_address_nobody_is_called(
    tmp_path: Path, address: Address, listener: Listener, text: str | None
) -> None:
    if text is not None:
        address.path.write_text(text)
    with pytest.raises(ConnectionError):
        await connector(tmp_path, address, listener.url)()
    assert listener.tokens == []


async def test_a_living_supervisor_that_refuses_the_token_is_believed(
    tmp_path: Path, address: Address, listener: Listener
) -> None:
    address.write(listener.url)
    with pytest.raises(FencedError):
        await connector(tmp_path, address, listener.url)()


async def test_a_refusal_by_one_whose_place_was_just_taken_means_nothing(
    tmp_path: Path, address: Address, listener: Listener
) -> None:
    address.write(listener.url)
    listener.before_answer = lambda: address.write(f"{listener.url}/newer")
    with pytest.raises(ConnectionError):
        await connector(tmp_path, address, listener.url)()

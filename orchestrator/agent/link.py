"""One connection between an agent and its supervisor: whole texts in order, until it breaks.

`FrameSocket` is the port; `WebSocketLink` is the real one, used by `agent.client` and `supervisor.server`. What
survives a broken connection is `agent.wire`'s affair. Simulation brings connections of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

import aiohttp
from aiohttp import WSMsgType, web

from orchestrator.agent.wire import Channel

ACKNOWLEDGE_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
GREETING_SECONDS = 10.0  # how long either end waits for the other's first word


class FrameSocket(Protocol):
    """An open connection."""

    async def send(self, text: str) -> None:
        """Send one text. Raises ConnectionError once the connection is broken."""
        ...

    async def receive(self) -> str | None:
        """The next text; None once the connection is closed or broken."""
        ...

    async def close(self) -> None:
        """Close; both ends' `receive` then return None."""
        ...


Connect = Callable[[], Awaitable[FrameSocket]]
"""Opens a connection to the supervisor. Raises OSError while it cannot be reached, FencedError if it is another's."""


class WebSocketLink:
    """A WebSocket of aiohttp, either end; a client's session lives as long as its one connection."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._socket = socket
        self._session = session

    async def send(self, text: str) -> None:
        """See the port."""
        await self._socket.send_str(text)

    async def receive(self) -> str | None:
        """See the port; anything but text ends the connection."""
        frame = await self._socket.receive()
        return frame.data if frame.type is WSMsgType.TEXT else None

    async def close(self) -> None:
        """See the port."""
        await self._socket.close()
        if self._session is not None:
            await self._session.close()


async def send_frames(channel: Channel, socket: FrameSocket) -> None:
    """Send what the channel has, and an acknowledgement at least every second; both ends use it.

    `asyncio.wait_for` would lose a cancellation that comes together with a frame: whoever cancels would wait for ever.
    """
    while True:
        frames: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACKNOWLEDGE_SECONDS):
                frames = await channel.outgoing()
        for text in frames:
            await socket.send(text)
        await socket.send(channel.acknowledgement())

"""The agent's end of the connection to its supervisor: one WebSocket that is made again whenever it breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from orchestrator.agent.settings import AgentSettings
from orchestrator.agent.wire import FRAME_BYTES_MAX, Channel
from orchestrator.clock import Clock

RETRY_SECONDS_FIRST = 0.05
RETRY_SECONDS_MAX = 2.0
ACKNOWLEDGE_SECONDS = 1.0


class SupervisorClient:
    """Keeps the channel connected until `run` is cancelled or the supervisor says that this agent is not wanted."""

    def __init__(
        self, settings: AgentSettings, channel: Channel, clock: Clock, on_frame: Callable[[dict[str, Any]], None]
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._clock = clock
        self._on_frame = on_frame
        self.connected_seconds = clock.monotonic()
        """When the connection was last known to work."""

    async def run(self) -> str:
        """Connect, serve, connect again; returns why the supervisor does not want this agent."""
        retry_seconds = RETRY_SECONDS_FIRST
        headers = {"Authorization": f"Bearer {self._settings.token}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while True:
                try:
                    refusal = await self._serve(session)
                    if refusal is not None:
                        return refusal
                    retry_seconds = RETRY_SECONDS_FIRST
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403, 409):
                        return f"the supervisor answered {error.status}: this agent belongs to another run"
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass  # the supervisor is away: training goes on, and we try again
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)

    async def _serve(self, session: aiohttp.ClientSession) -> str | None:
        url = f"{self._settings.supervisor_url}/agent"
        async with session.ws_connect(url, heartbeat=10, max_msg_size=FRAME_BYTES_MAX) as socket:
            await socket.send_json({"node": self._settings.node, "received": self._channel.received})
            try:
                welcome = json.loads(await socket.receive_str(timeout=10))
                if "refused" in welcome:
                    return str(welcome["refused"])
                received = int(welcome["received"])
            except (TypeError, ValueError, KeyError):  # closed in the middle of the greeting, or not a supervisor
                return None
            self._channel.reconnect(received)
            sender = asyncio.create_task(send_frames(self._channel, socket))
            try:
                async for frame in socket:
                    self.connected_seconds = self._clock.monotonic()
                    if frame.type is not aiohttp.WSMsgType.TEXT:
                        break  # the connection is broken: make it again
                    taken = self._channel.take(frame.data)
                    if taken is not None:
                        self._on_frame(taken)
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        return None


async def send_frames(
    channel: Channel, socket: aiohttp.ClientWebSocketResponse | aiohttp.web.WebSocketResponse
) -> None:
    """Send what the channel has, and an acknowledgement at least every second; both ends use it."""
    while True:
        try:
            frames = await asyncio.wait_for(channel.outgoing(), ACKNOWLEDGE_SECONDS)
        except TimeoutError:
            frames = []
        for text in frames:
            await socket.send_str(text)
        await socket.send_str(channel.acknowledgement())

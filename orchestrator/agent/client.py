"""The agent's end of the connection to its supervisor: made again whenever it breaks, to wherever the supervisor is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from orchestrator.agent.link import (
    GREETING_SECONDS,
    HEARTBEAT_SECONDS,
    Connect,
    FrameSocket,
    WebSocketLink,
    send_frames,
)
from orchestrator.agent.settings import AgentSettings
from orchestrator.agent.wire import FRAME_BYTES_MAX, Channel
from orchestrator.certificates import client_context
from orchestrator.clock import Clock
from orchestrator.errors import FencedError
from orchestrator.schedulers.leftovers import start_ticks

RETRY_SECONDS_FIRST = 0.05
RETRY_SECONDS_MAX = 2.0
CONNECT_SECONDS = 5.0
AWAY_SECONDS = 30.0
"""Without a supervisor for that long is worth a line."""
NOT_WANTED = (401, 403, 409)


class SupervisorClient:
    """Keeps the channel connected until `run` is cancelled or the supervisor says that this agent is not wanted."""

    def __init__(
        self,
        node: str,
        channel: Channel,
        clock: Clock,
        connect: Connect,
        *,
        on_supervisor: Callable[[], None],
        on_frame: Callable[[dict[str, Any]], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`say`: for people, that the supervisor is away for long, and that it is there again."""
        self._node = node
        self._channel = channel
        self._clock = clock
        self._connect = connect
        self._on_supervisor = on_supervisor
        self._on_frame = on_frame
        self._say = say
        self._told_away = False
        self._life = ""
        """Of the supervisor process that the channel's messages belong to."""
        self.connected = False
        self.connected_seconds = clock.monotonic()
        """When the connection was last known to work."""

    async def run(self) -> str:
        """Connect, serve, connect again; returns why the supervisor does not want this agent."""
        retry_seconds = RETRY_SECONDS_FIRST
        while True:
            try:
                refusal = await self._serve(await self._connect())
                if refusal is not None:
                    return refusal
                retry_seconds = RETRY_SECONDS_FIRST
            except FencedError as error:
                return str(error)
            except (OSError, TimeoutError) as error:  # the supervisor is away: training goes on, and we try again
                self._tell_of(error)
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)

    def _tell_of(self, error: Exception) -> None:
        """Once, when it has been away for long: where nobody joins, this line is all that a person sees."""
        away_seconds = self._clock.monotonic() - self.connected_seconds
        if away_seconds > AWAY_SECONDS and not self._told_away:
            self._told_away = True
            self._say(f"no supervisor for {away_seconds:.0f} s ({str(error) or type(error).__name__}); trying on")

    async def _serve(self, socket: FrameSocket) -> str | None:
        try:
            greeting = {"node": self._node, "received": self._channel.received, "life": self._life}
            await socket.send(json.dumps(greeting))
            try:
                async with asyncio.timeout(GREETING_SECONDS):
                    answer = await socket.receive()
                welcome = json.loads(answer or "")
                if "refused" in welcome:
                    return str(welcome["refused"])
                received, life = int(welcome["received"]), str(welcome["life"])
            except (TypeError, ValueError, KeyError):  # closed in the middle of the greeting, or not a supervisor
                return None
            if life != self._life:
                self._life = life
                self._channel.reset()
                self._on_supervisor()
            self._channel.reconnect(received)
            await self._exchange(socket)
        finally:
            await socket.close()
        return None

    async def _exchange(self, socket: FrameSocket) -> None:
        """Until the connection breaks."""
        if self._told_away:
            self._told_away = False
            self._say("there is a supervisor again")
        self.connected, self.connected_seconds = True, self._clock.monotonic()
        sender = asyncio.create_task(send_frames(self._channel, socket))
        try:
            while (text := await socket.receive()) is not None:
                self.connected_seconds = self._clock.monotonic()
                taken = self._channel.take(text)
                if taken is not None:
                    self._on_frame(taken)
        finally:
            self.connected = False
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)


class WebSocketConnector:
    """Opens WebSockets to the supervisor that the settings name, or that took its place in the same run."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        own = settings.identity.certificate if settings.identity else None
        self._trusted = client_context(settings.supervisor_certificate or own)

    async def __call__(self) -> FrameSocket:
        """See `agent.link.Connect`."""
        url = self._address()
        headers = {"Authorization": f"Bearer {self._settings.token}"}
        session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        )
        try:
            async with asyncio.timeout(GREETING_SECONDS):  # a process that stands still takes connections all the same
                socket = await session.ws_connect(
                    f"{url}/agent", heartbeat=HEARTBEAT_SECONDS, max_msg_size=FRAME_BYTES_MAX, ssl=self._trusted or True
                )
            return WebSocketLink(socket, session)
        except aiohttp.ClientError as error:
            await session.close()
            unwanted = isinstance(error, aiohttp.WSServerHandshakeError) and error.status in NOT_WANTED
            if unwanted and self._address() == url:  # it did not die, or change, in the meantime
                raise FencedError(f"the supervisor refused this agent: {error}") from error
            raise ConnectionError(str(error)) from error
        except BaseException:
            await session.close()
            raise

    def _address(self) -> str:
        """URL of the supervisor that runs now.

        Raises ConnectionError if it is dead: whoever got its port afterwards shall neither see the token nor be obeyed.
        Raises FencedError if it has another token: it belongs to another run, and may have a node of this one's name.
        """
        path = self._settings.supervisor_file
        if path is None:
            return self._settings.supervisor_url
        try:
            found = json.loads(path.read_text())
            url, token, pid, ticks = str(found["url"]), str(found["token"]), int(found["pid"]), found["start_ticks"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"no supervisor runs: {error}") from error
        if start_ticks(pid) != ticks:
            raise ConnectionError("the supervisor is dead and no other has taken its place yet")
        if token != self._settings.token:
            raise FencedError("another run of the job has taken this one's place")
        return url

"""The supervisor's end of its agents' connections: one channel per node for as long as the node lives.

No port and no HTTP here (`supervisor.server`), and no decision: events go to `submit`, in order.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable

from orchestrator.agent.link import GREETING_SECONDS, FrameSocket, send_frames
from orchestrator.agent.wire import Channel, decode_event
from orchestrator.core.messages import Action, Event
from orchestrator.errors import ProtocolError

REFUSED = "this supervisor does not know the node, or knows it as lost"


class AgentLinks:
    """Channels by node, and the connections that serve them at the moment."""

    def __init__(self, submit: Callable[[Event], None], lose: Callable[[str, str], None]) -> None:
        self._submit = submit
        self._lose = lose
        self._channels: dict[str, Channel] = {}
        self._connections: dict[str, tuple[FrameSocket, asyncio.Task[None]]] = {}
        self._forgotten: set[str] = set()
        self._life = secrets.token_hex(8)
        """Tells this process from an earlier supervisor of the same job, whose numbers mean nothing here."""

    def send(self, node: str, action: Action) -> None:
        """Queue an action for a node; it is delivered when the node is connected."""
        self._channel(node).post(action)

    def dismiss(self, node: str) -> None:
        """Tell a node's agent to end; one that never reported to this supervisor is not let in any more."""
        if node in self._channels:
            self._channels[node].post_dismissal()
        else:
            self._forgotten.add(node)

    def forget(self, node: str) -> None:
        """The node is lost for certain: it is not listened to any more and not let in again."""
        self._forgotten.add(node)
        self._channels.pop(node, None)

    def _channel(self, node: str) -> Channel:
        return self._channels.setdefault(node, Channel())

    async def serve(self, socket: FrameSocket) -> None:
        """Serve one connection until it breaks."""
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                greeting = await socket.receive()
            hello = json.loads(greeting or "")
            node, received, life = str(hello["node"]), int(hello["received"]), str(hello["life"])
        except (TypeError, ValueError, KeyError, TimeoutError):  # closed in the middle of the greeting, or no agent
            return
        known = life == self._life
        if node in self._forgotten or (known and node not in self._channels):
            await socket.send(json.dumps({"refused": REFUSED}))
            return
        await self._close_earlier(node)
        channel = self._channel(node)
        if not known and channel.received:
            channel = self._channels[node] = Channel()
        await socket.send(json.dumps({"received": channel.received, "life": self._life}))
        try:
            channel.reconnect(received if known else 0)
            await self._exchange(node, channel, socket)
        except ProtocolError as error:
            self._lose(node, f"its agent sent what the protocol does not allow: {error}")

    async def _exchange(self, node: str, channel: Channel, socket: FrameSocket) -> None:
        sender = asyncio.create_task(send_frames(channel, socket))
        self._connections[node] = (socket, sender)
        try:
            while (text := await socket.receive()) is not None and node not in self._forgotten:
                taken = channel.take(text)
                if taken is not None:
                    self._submit(decode_event(taken))
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            if self._connections.get(node, (None,))[0] is socket:
                del self._connections[node]

    async def _close_earlier(self, node: str) -> None:
        """A node that connects again has lost its earlier connection: two senders would share one channel's frames."""
        socket, sender = self._connections.pop(node, (None, None))
        if socket is not None and sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await socket.close()

    async def deliver(self, seconds: float) -> None:
        """Wait, for a limited time, until every connected agent has left (they were dismissed)."""
        until = asyncio.get_running_loop().time() + seconds
        while self._connections and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Close all connections."""
        for socket, _ in list(self._connections.values()):
            await socket.close()

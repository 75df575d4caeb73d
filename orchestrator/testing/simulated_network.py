"""A simulated network between agents and supervisors: delays, broken connections, partitions.

A connection delivers texts in order, as TCP does; what is in flight when it breaks is lost, and either end may notice
long before the other. `agent.wire.Channel` repeats what was lost. Used by `testing.simulated_cluster`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from orchestrator.testing.simulated_time import SimulatedLoop, SimulatedProcess


class SimulatedSocket:
    """One end of a connection: an `agent.link.FrameSocket`."""

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        self._network = network
        self._process = process
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()
        self._last_seconds = 0.0
        self.peer: SimulatedSocket | None = None
        self.broken = False

    async def send(self, text: str) -> None:
        """See the port; what a dead process sends reaches nobody."""
        if self.broken:
            raise ConnectionError("the connection is broken")
        if self._process.alive and self.peer is not None:
            self.peer.deliver(text)

    async def receive(self) -> str | None:
        """See the port."""
        return None if self.broken and self._inbox.empty() else await self._inbox.get()

    async def close(self) -> None:
        """See the port."""
        self.break_now()
        if self.peer is not None:
            self.peer.break_later()

    def deliver(self, text: str) -> None:
        """A text is on its way to this end; the order is kept."""
        loop = self._network.loop
        self._last_seconds = max(self._last_seconds + 1e-6, loop.now + self._network.delay())
        loop.call_at(self._last_seconds, self._arrive, text)

    def _arrive(self, text: str) -> None:
        if not self.broken and self._process.alive:
            self._inbox.put_nowait(text)

    def break_now(self) -> None:
        """This end notices that the connection is broken; what was in flight to it is lost."""
        if not self.broken:
            self.broken = True
            self._inbox.put_nowait(None)

    def break_later(self) -> None:
        """This end will notice some time later."""
        self._network.loop.call_later(self._network.delay(), self.break_now)


class SimulatedNetwork:
    """All connections of the cluster."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random, delay_seconds: float) -> None:
        self.loop = loop
        self._random = draw
        self._delay_seconds = delay_seconds
        self._connections: dict[str, list[SimulatedSocket]] = {}
        self._cut_until_seconds: dict[str, float] = {}

    def delay(self) -> float:
        """A random delay with a long tail."""
        return self._delay_seconds * self._random.choice((0.1, 0.5, 1.0, 1.0, 4.0))

    def connect(
        self,
        node: str,
        client: SimulatedProcess,
        server: SimulatedProcess | None,
        accept: Callable[[SimulatedSocket], None],
    ) -> SimulatedSocket:
        """Open a connection from a node. Raises ConnectionError while the node is cut off or nobody listens."""
        if server is None or not server.alive or self.loop.now < self._cut_until_seconds.get(node, 0.0):
            raise ConnectionError("no route, or nobody listens")
        near, far = SimulatedSocket(self, client), SimulatedSocket(self, server)
        near.peer, far.peer = far, near
        ends = self._connections.setdefault(node, [])
        ends[:] = [end for end in ends if not end.broken]
        ends.extend((near, far))
        client.on_death.append(far.break_later)
        server.on_death.append(near.break_later)
        accept(far)
        return near

    def cut(self, node: str, seconds: float) -> None:
        """No word between this node and any supervisor for a while. Some ends notice at once, others after it.

        With 0 seconds its connections break, and it may connect again at once.
        """
        self._cut_until_seconds[node] = self.loop.now + seconds
        for end in self._connections.pop(node, []):
            end.peer = None
            self.loop.call_later(self._random.choice((0.0, 0.5, 1.0)) * seconds, end.break_now)

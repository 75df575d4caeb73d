"""The simulated network: order is kept, what is in flight can be lost, both ends notice in their own time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import pytest

from orchestrator.testing.simulated_network import SimulatedNetwork, SimulatedSocket
from orchestrator.testing.simulated_time import SimulatedLoop, SimulatedProcess

NODE = "node-1"


class Scene:
    """Two processes and what connects them."""

    def __init__(self, seed: int, delay_seconds: float = 0.1) -> None:
        self.loop = SimulatedLoop()
        self.network = SimulatedNetwork(self.loop, random.Random(seed), delay_seconds)
        self.client, self.server = SimulatedProcess("client"), SimulatedProcess("server")
        self.accepted: list[SimulatedSocket] = []

    def connect(self) -> SimulatedSocket:
        return self.network.connect(NODE, self.client, self.server, self.accepted.append)


@pytest.fixture
def scene(seed: int) -> Iterator[Scene]:
    made = Scene(seed)
    yield made
    made.loop.close()


def test_texts_arrive_later_and_in_order(scene: Scene) -> None:
    async def story() -> None:
        near = scene.connect()
        sent = [str(number) for number in range(50)]
        for text in sent:
            await near.send(text)
        assert [await scene.accepted[0].receive() for _ in sent] == sent
        assert scene.loop.now > 0

    scene.loop.run_until_complete(story())


def test_nobody_listens_in_a_dead_process_and_its_connections_break(scene: Scene) -> None:
    async def story() -> None:
        near = scene.connect()
        scene.server.kill()
        assert await near.receive() is None
        with pytest.raises(ConnectionError):
            await near.send("x")
        with pytest.raises(ConnectionError):
            scene.connect()

    scene.loop.run_until_complete(story())


def test_what_a_dead_process_sends_reaches_nobody(scene: Scene) -> None:
    async def story() -> None:
        near = scene.connect()
        scene.client.kill()
        await near.send("never said")
        assert await scene.accepted[0].receive() is None

    scene.loop.run_until_complete(story())


def test_a_cut_loses_what_is_in_flight_and_lasts(scene: Scene) -> None:
    async def story() -> None:
        near = scene.connect()
        await near.send("arrives")
        await asyncio.sleep(1)
        scene.network.cut(NODE, 5.0)
        with pytest.raises(ConnectionError):
            scene.connect()
        with contextlib.suppress(ConnectionError):  # this end may have noticed, or not yet
            await near.send("into the void")
        assert await scene.accepted[0].receive() == "arrives"
        assert await scene.accepted[0].receive() is None
        await asyncio.sleep(6)
        await scene.connect().send("again")
        assert await scene.accepted[1].receive() == "again"

    scene.loop.run_until_complete(story())


def test_the_same_seed_gives_the_same_times() -> None:
    def times() -> list[float]:
        scene, seen = Scene(7), []

        async def story() -> None:
            near = scene.connect()
            for _ in range(20):
                await near.send("x")
                await scene.accepted[0].receive()
                seen.append(scene.loop.now)

        scene.loop.run_until_complete(story())
        scene.loop.close()
        return seen

    assert times() == times()

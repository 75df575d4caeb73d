"""The simulated store: one truth, operations that take time, and failures before or after they took effect."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from orchestrator.errors import AlreadyExistsError, StoreError
from orchestrator.storage.memory import MemoryStore
from orchestrator.testing.simulated_store import SimulatedStore, Weather
from orchestrator.testing.simulated_time import SimulatedLoop, SimulatedProcess


class Scene:
    """The truth, and how one process sees it."""

    def __init__(self, seed: int) -> None:
        self.loop = SimulatedLoop()
        self.truth = MemoryStore()
        self.weather = Weather(random.Random(seed), 0.1)
        self.process = SimulatedProcess("p")
        self.written: list[tuple[str, bytes, SimulatedProcess]] = []
        self.store = SimulatedStore(self.truth, self.weather, self.process, lambda *what: self.written.append(what))


@pytest.fixture
def scene(seed: int) -> Iterator[Scene]:
    made = Scene(seed)
    yield made
    made.loop.close()


def test_an_operation_takes_time_and_the_write_is_seen_as_it_happens(scene: Scene) -> None:
    async def story() -> None:
        await asyncio.to_thread(scene.store.create, "key", [b"one", b"two"])
        assert scene.loop.now > 0
        assert await asyncio.to_thread(scene.store.read, "key") == b"onetwo"

    scene.loop.run_until_complete(story())
    assert scene.written == [("key", b"onetwo", scene.process)]


def test_everybody_sees_one_truth_and_the_first_creation_counts(scene: Scene) -> None:
    other = SimulatedStore(scene.truth, scene.weather, SimulatedProcess("other"))

    async def story() -> list[object]:
        tries = [asyncio.to_thread(store.create, "key", [name]) for store, name in ((scene.store, b"a"), (other, b"b"))]
        return await asyncio.gather(*tries, return_exceptions=True)

    results = scene.loop.run_until_complete(story())
    assert [type(result) for result in results if result is not None] == [AlreadyExistsError]
    assert scene.truth.read("key") in (b"a", b"b")


def test_an_outage_fails_everything_and_ends(scene: Scene) -> None:
    scene.weather.out = True
    with pytest.raises(StoreError):
        scene.store.read("key")
    with pytest.raises(StoreError):
        scene.store.create("key", [b"x"])
    scene.weather.out = False
    scene.store.create("key", [b"x"])
    assert scene.weather.failures == 2


def test_a_failure_may_come_after_the_write(scene: Scene) -> None:
    """An answer that is lost: the object is there all the same."""
    scene.weather.fail_share = 0.5
    lost = 0
    for number in range(200):
        key = f"key-{number}"
        try:
            scene.store.create(key, [b"x"])
        except StoreError:
            lost += any(entry.key == key for entry in scene.truth.entries(key))
    assert 10 < lost < 100

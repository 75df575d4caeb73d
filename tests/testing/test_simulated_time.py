"""Simulated time: the clock jumps, threads give way, a killed process does nothing more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from orchestrator.testing.simulated_time import (
    SimulatedClock,
    SimulatedLoop,
    SimulatedProcess,
    Stuck,
    current_process,
    die_here,
    pause,
)


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    made = SimulatedLoop()
    yield made
    made.close()


def test_an_hour_passes_at_once(loop: SimulatedLoop) -> None:
    began = time.monotonic()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.now == pytest.approx(3600)
    assert time.monotonic() - began < 5


def test_what_can_never_happen_is_an_error_instead_of_a_hang(loop: SimulatedLoop) -> None:
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        loop.run_until_complete(wait_for_nobody())


def test_blocking_code_runs_beside_coroutines_and_errors_come_back(loop: SimulatedLoop) -> None:
    heard: list[str] = []

    def block(name: str, seconds: float) -> float:
        pause(seconds)
        heard.append(name)
        if seconds > 5:
            raise OSError("too slow")
        return seconds

    async def story() -> None:
        slow = asyncio.create_task(asyncio.to_thread(block, "slow", 6.0))
        assert await asyncio.to_thread(block, "quick", 2.0) == 2.0
        heard.append("between")
        with pytest.raises(OSError, match="too slow"):
            await slow

    loop.run_until_complete(story())
    assert heard == ["quick", "between", "slow"]
    assert loop.now == pytest.approx(6.0)


def test_a_killed_process_does_nothing_more(loop: SimulatedLoop) -> None:
    heard: list[str] = []
    process = SimulatedProcess("p")
    process.on_death.append(lambda: heard.append("dead"))

    def block() -> None:
        pause(5.0)
        heard.append("never: a thread of it")

    async def work() -> None:
        assert current_process() is process
        started = asyncio.create_task(asyncio.to_thread(block))
        await asyncio.sleep(5.0)
        await started
        heard.append("never: a task of it")

    async def story() -> None:
        process.start(work())
        await asyncio.sleep(3.0)
        process.kill()
        process.kill()
        await asyncio.sleep(10.0)

    loop.run_until_complete(story())
    assert heard == ["dead"]
    assert current_process() is None


def test_a_process_can_die_at_a_named_line(loop: SimulatedLoop) -> None:
    heard: list[str] = []

    def block() -> None:
        heard.append("before")
        die_here()
        heard.append("after")

    async def work() -> None:
        await asyncio.to_thread(block)
        heard.append("after the thread")

    async def story() -> None:
        SimulatedProcess("p").start(work())
        await asyncio.sleep(1.0)

    loop.run_until_complete(story())
    assert heard == ["before"]


def test_the_wall_clock_may_jump_and_the_monotonic_one_does_not(loop: SimulatedLoop) -> None:
    clock = SimulatedClock(loop)
    before = clock.wall()
    loop.run_until_complete(asyncio.sleep(10))
    assert clock.wall() - before == pytest.approx(10)
    clock.wall_offset_seconds -= 86400
    assert clock.wall() < before
    assert clock.monotonic() == pytest.approx(10)

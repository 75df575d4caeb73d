"""From a cloud's announcement to the agent's notice, with the pauses that agents really make, on simulated services.

    python -m benchmarks.notice_latency [--rounds 10]

Every cloud is watched at once; each announcement comes at a random moment between two looks. What is not in it: how
long a cloud takes until its metadata say it, and the way from agent to supervisor (a few milliseconds).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from orchestrator.clock import SystemClock
from orchestrator.config import parse_notices
from orchestrator.core.messages import NoticeReceived, WatcherReported
from orchestrator.preemption.clouds import Clouds
from orchestrator.preemption.watching import Watcher
from orchestrator.testing.metadata import SERVICES

PHASE_SECONDS = 3.0
LIMIT_SECONDS = 30.0


async def one(name: str, servers: AsyncExitStack, draw: random.Random) -> float:
    """One announcement; seconds until it is told."""
    announce: Callable[[], None]
    if name == "file":
        path = Path(servers.enter_context(tempfile.TemporaryDirectory())) / "leave"
        announce, chosen = path.touch, parse_notices(f"file:{path}")
    else:
        server = await servers.enter_async_context(SERVICES[name]())
        announce, chosen = server.interrupt, parse_notices(f"{name}@{server.url}")
    told: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def tell(_: NoticeReceived) -> None:
        if not told.done():
            told.set_result(time.monotonic())

    def report(said: WatcherReported) -> None:
        raise AssertionError(said)

    clouds = Clouds(SystemClock(), chosen.addresses)
    servers.push_async_callback(clouds.close)
    watcher = Watcher("node", SystemClock(), grace_seconds=30.0, tell=tell, report=report)
    watching = asyncio.create_task(watcher.watch(clouds.sources_of(chosen.names[0])))
    try:
        await asyncio.sleep(0.5 + draw.random() * PHASE_SECONDS)
        began = time.monotonic()
        announce()
        return await asyncio.wait_for(told, LIMIT_SECONDS) - began
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def measure(rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds of each announcement, by source."""
    draw = random.Random(seed)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        async with AsyncExitStack() as servers:
            names = (*SERVICES, "file")
            seconds = await asyncio.gather(*(one(name, servers, draw) for name in names))
            for name, value in zip(names, seconds, strict=True):
                found.setdefault(name, []).append(value)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"{'source':<12}{'median':>9}{'longest':>9}   of {given.rounds}, seconds")
    for name, seconds in asyncio.run(measure(given.rounds, given.seed)).items():
        print(f"{name:<12}{statistics.median(seconds):>9.3f}{max(seconds):>9.3f}")


if __name__ == "__main__":
    main()

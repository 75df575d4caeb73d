"""Looks at the host now and then, and says what has changed. A look that waits for a file system blocks nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orchestrator.core.messages import Event, HostReported
from orchestrator.health.host import HostReading, judge

LOOK_SECONDS = 10.0


async def watch_host(node: str, read: Callable[[], HostReading], post: Callable[[Event], None]) -> None:
    """Until it is cancelled."""
    troubled: dict[str, str] = {}
    while True:
        found = judge(await asyncio.to_thread(read), troubled)
        for what in sorted(found.keys() | troubled.keys()):
            if (what in found) is not (what in troubled):
                post(HostReported(node=node, what=what, problem=found.get(what)))
        troubled = found
        await asyncio.sleep(LOOK_SECONDS)

"""Looks at the host and its devices now and then, and says what has changed. A look that has to wait blocks nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orchestrator.core.messages import Event, HostReported
from orchestrator.health.gpu import Device, judge_devices
from orchestrator.health.host import HostReading, judge

LOOK_SECONDS = 10.0
DEVICE_LOOK_SECONDS = 60.0
Post = Callable[[Event], None]


async def watch_host(node: str, read: Callable[[], HostReading], post: Post) -> None:
    """Until it is cancelled."""
    troubled: dict[str, str] = {}
    while True:
        found = judge(await asyncio.to_thread(read), troubled)
        _tell(node, found, troubled, post)
        troubled = found
        await asyncio.sleep(LOOK_SECONDS)


async def watch_devices(node: str, read: Callable[[], tuple[Device, ...] | None], post: Post) -> None:
    """Until it is cancelled; ends at once where there are none."""
    first = await asyncio.to_thread(read)
    troubled: dict[str, str] = {}
    while first:
        await asyncio.sleep(DEVICE_LOOK_SECONDS)
        found = judge_devices(await asyncio.to_thread(read), first)
        _tell(node, found, troubled, post)
        troubled = found


def _tell(node: str, found: dict[str, str], troubled: dict[str, str], post: Post) -> None:
    for what in sorted(found.keys() | troubled.keys()):
        if (what in found) is not (what in troubled):
            post(HostReported(node=node, what=what, problem=found.get(what)))

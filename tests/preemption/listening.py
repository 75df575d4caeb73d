"""Watches sources as an agent does, and keeps what it was told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from orchestrator.clock import SystemClock
from orchestrator.core.messages import NoticeKind, NoticeReceived, WatcherReported
from orchestrator.preemption.base import Source
from orchestrator.preemption.watching import Watcher

EVERY_SECONDS = 0.02


class Listener:
    """What one node's watcher has told."""

    def __init__(self, blind_after_seconds: float = 0.05) -> None:
        self.heard: list[NoticeReceived] = []
        self.heard_at: list[float] = []
        self.reports: list[WatcherReported] = []
        self.watcher = Watcher(
            "node-1",
            SystemClock(),
            grace_seconds=30.0,
            tell=self._tell,
            report=self.reports.append,
            blind_after_seconds=blind_after_seconds,
        )

    def _tell(self, notice: NoticeReceived) -> None:
        self.heard.append(notice)
        self.heard_at.append(time.monotonic())

    @property
    def kinds(self) -> list[NoticeKind]:
        """Kinds of all that was told, in order."""
        return [notice.kind for notice in self.heard]

    @property
    def problems(self) -> list[str | None]:
        """Of all reports, in order."""
        return [report.problem for report in self.reports]


@asynccontextmanager
async def listening(sources: Sequence[Source], listener: Listener | None = None) -> AsyncIterator[Listener]:
    """Watch until the block ends; a watcher that has ended by itself is a failure."""
    listener = listener or Listener()
    task = asyncio.create_task(listener.watcher.watch(sources))
    try:
        yield listener
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object], limit_seconds: float = 10) -> None:
    """Wait for something that shall come true."""
    async with asyncio.timeout(limit_seconds):
        while not condition():
            await asyncio.sleep(0.002)

"""Time as a port: the monotonic clock that every decision uses, and wall time for people to read."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds on this host's monotonic clock; comparable between processes of one host only."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for display and records; never used in a decision."""
        ...


class SystemClock:
    """The real clocks."""

    def monotonic(self) -> float:
        """CLOCK_MONOTONIC, shared by all processes of this host."""
        return time.monotonic()

    def wall(self) -> float:
        """CLOCK_REALTIME."""
        return time.time()

"""The port to what gives machines: get nodes, give them back, learn for certain that one is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

OnLost = Callable[[str, str], None]
"""Called with (node, reason) when a node that was not given back is gone for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A node as the scheduler sees it."""

    node: str
    pid: int | None


class Scheduler(Protocol):
    """Where nodes come from. Methods return at once; nodes announce themselves to the supervisor when they are up."""

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        """Begin; agents of nodes that come later connect to the supervisor with the token.

        Returns the nodes that an earlier supervisor of this run left running; they report to this one.
        """
        ...

    def request(self, count: int) -> None:
        """Ask for that many more nodes."""
        ...

    def release(self, node: str) -> None:
        """Give a node back; `on_lost` is not called for it."""
        ...

    def lose(self, node: str, after_seconds: float) -> None:
        """Rehearsal: take the node away without asking, after that time. Raises ConfigError where it cannot."""
        ...

    def nodes(self) -> list[NodeInfo]:
        """The nodes that there are."""
        ...

    async def stop(self) -> None:
        """Give every node back and wait until they are gone."""
        ...

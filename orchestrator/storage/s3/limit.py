"""How many parts are on their way at once: fewer as soon as the server asks for it, slowly more again.

Pure; who waits for a place, and how, is `upload`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

GROW_AFTER = 8
"""Parts that arrived, one after another without a refusal, before one more is tried at once."""


class RequestOutcome(Enum):
    """What became of one request."""

    ARRIVED = "arrived"
    SLOWED = "slowed"
    """The server asked for fewer requests."""
    FAILED = "failed"
    """Anything else, which says nothing about how many are too many."""


@dataclass(slots=True, kw_only=True)
class AdaptiveLimit:
    """Halves when the server asks to slow down, down to 1; grows by one after GROW_AFTER that arrived.

    Of the requests that were under way together only the first refusal counts: they all met the same moment.
    """

    at_once_max: int
    at_once: int = field(init=False)
    """May be under way now."""
    under_way: int = field(init=False, default=0)
    _halvings: int = field(init=False, default=0)
    _arrived: int = field(init=False, default=0)
    """Since the limit changed last."""

    def __post_init__(self) -> None:
        self.at_once = self.at_once_max

    def begin(self) -> int | None:
        """A ticket for one request, to be given back by `end`; None: there is no place now."""
        if self.under_way >= self.at_once:
            return None
        self.under_way += 1
        return self._halvings

    def end(self, ticket: int, outcome: RequestOutcome) -> None:
        """The request with that ticket is over."""
        self.under_way -= 1
        if outcome is RequestOutcome.SLOWED:
            self._arrived = 0
            if ticket == self._halvings:
                self.at_once = max(1, self.at_once // 2)
                self._halvings += 1
        elif outcome is RequestOutcome.ARRIVED:
            self._arrived += 1
            if self._arrived >= GROW_AFTER and self.at_once < self.at_once_max:
                self.at_once += 1
                self._arrived = 0

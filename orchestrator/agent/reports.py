"""What this node is told of its end, its sources of notices and its host: passed on at once, kept while it stands.

The supervisor may be another one each time: whoever is new is told again of all that stands (`standing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from orchestrator.clock import Clock
from orchestrator.core.messages import Event, HostReported, NoticeKind, NoticeReceived, WatcherReported


class Reports:
    """One node's. `post` hands an event to whoever is the supervisor."""

    def __init__(self, clock: Clock, post: Callable[[Event], None]) -> None:
        self._clock = clock
        self._post = post
        self._notices: dict[str, tuple[NoticeReceived, float]] = {}
        """Notices that stand, with the time at which each came."""
        self._blind: dict[str, WatcherReported] = {}
        self._host_troubles: dict[str, HostReported] = {}

    def notice(self, event: NoticeReceived) -> None:
        """Somebody on this node has learnt that it will go, may go, or stays after all."""
        if event.kind is NoticeKind.CANCEL:
            self._notices.pop(event.notice_id, None)
        else:
            self._notices.setdefault(event.notice_id, (event, self._clock.monotonic()))
        self._post(event)

    def watcher(self, report: WatcherReported) -> None:
        """Whether a source of notices can be read."""
        if report.problem is None:
            self._blind.pop(report.source, None)
        else:
            self._blind[report.source] = report
        self._post(report)

    def host(self, report: HostReported) -> None:
        """Something is wrong with the host or a device, or is well again."""
        if report.problem is None:
            self._host_troubles.pop(report.what, None)
        else:
            self._host_troubles[report.what] = report
        self._post(report)

    @property
    def node_goes(self) -> bool:
        """Whether a notice stands that is more than a hint."""
        return any(event.kind is not NoticeKind.HINT for event, _ in self._notices.values())

    def standing(self) -> Iterator[Event]:
        """All that stands, notices with the time that is left now."""
        now = self._clock.monotonic()
        for notice, since in self._notices.values():
            left = notice.remaining_seconds
            yield replace(notice, remaining_seconds=None if left is None else left - (now - since))
        yield from chain[Event](self._blind.values(), self._host_troubles.values())

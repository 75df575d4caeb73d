"""Looks at sources for as long as the agent lives, and tells what has changed: notices, withdrawals, blindness.

One task for each source. A source that cannot be read is looked at more rarely, and recovers by itself; once it has
been unreadable for BLIND_AFTER_SECONDS, that is an alarm. What is told of a reading is decided by `changes`, which is
pure. Not here: which sources there are (`preemption.clouds`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.clock import Clock
from orchestrator.core.messages import NoticeKind, NoticeReceived, WatcherReported
from orchestrator.errors import SourceError
from orchestrator.preemption.base import Found, Reading, Source, short

AHEAD_SECONDS = 900.0
"""Maintenance that is farther away is a hint until then: nobody leaves days before."""
BACKOFF_FACTOR_MAX = 4.0
"""A source that cannot be read is looked at so much more rarely at most: a notice may come in that time."""
BLIND_AFTER_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What was last told of an event."""

    notice_id: str
    kind: NoticeKind
    version: str
    deadline_seconds: float | None
    """As the source says, on the monotonic clock; None where it does not say."""
    tellings: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Teller:
    """In whose name it is told."""

    node: str
    source: str
    withdraws: bool
    grace_seconds: float
    """What a notice without a time leaves."""


NOTHING_TOLD: Mapping[str, Told] = MappingProxyType({})


def changes(
    told: Mapping[str, Told], reading: Reading, teller: Teller, now_seconds: float
) -> tuple[Mapping[str, Told], tuple[NoticeReceived, ...]]:
    """What is told after a reading, and what has to be told for that.

    An event is told once. If its time is changed, or maintenance comes near, it is told again under another id, and the
    earlier telling is withdrawn after that. Where something could not be read, nothing counts as withdrawn.
    """
    after: dict[str, Told] = {}
    notices: list[NoticeReceived] = []
    for event in reading.found:
        if event.event_id in after:
            continue
        before = told.get(event.event_id)
        new = _telling(event, before, teller, now_seconds)
        after[event.event_id] = new
        if before is not None and new.notice_id == before.notice_id:
            continue
        notices.append(_notice(event, new, teller, now_seconds))
        if before is not None:
            notices.append(_withdrawal(before, teller))
    for event_id, before in told.items():
        if event_id in after:
            continue
        if teller.withdraws and not reading.problems:
            notices.append(_withdrawal(before, teller))
        else:
            after[event_id] = before
    return after, tuple(notices)


def _telling(event: Found, before: Told | None, teller: Teller, now_seconds: float) -> Told:
    if before is not None and event.version == before.version:
        deadline = before.deadline_seconds  # what was left was taken at receipt, and runs on this machine's clock
    elif event.remaining_seconds is not None:
        deadline = now_seconds + event.remaining_seconds
    else:
        deadline = None if before is None else before.deadline_seconds
    kind = event.kind
    if kind is NoticeKind.MAINTENANCE and deadline is not None and deadline - now_seconds > AHEAD_SECONDS:
        kind = NoticeKind.HINT
    if before is not None and (kind, deadline) == (before.kind, before.deadline_seconds):
        return Told(
            notice_id=before.notice_id,
            kind=kind,
            version=event.version,
            deadline_seconds=deadline,
            tellings=before.tellings,
        )
    tellings = 1 if before is None else before.tellings + 1
    again = "" if tellings == 1 else f" #{tellings}"
    return Told(
        notice_id=f"{teller.source} {event.event_id}{again}",
        kind=kind,
        version=event.version,
        deadline_seconds=deadline,
        tellings=tellings,
    )


def _notice(event: Found, new: Told, teller: Teller, now_seconds: float) -> NoticeReceived:
    left = None if new.deadline_seconds is None else max(new.deadline_seconds - now_seconds, 0.0)
    if left is None and new.kind is not NoticeKind.HINT:
        left = teller.grace_seconds
    return NoticeReceived(
        node=teller.node,
        source=f"{teller.source}: {event.words}",
        kind=new.kind,
        remaining_seconds=left,
        notice_id=new.notice_id,
    )


def _withdrawal(before: Told, teller: Teller) -> NoticeReceived:
    return NoticeReceived(
        node=teller.node,
        source=teller.source,
        kind=NoticeKind.CANCEL,
        remaining_seconds=None,
        notice_id=before.notice_id,
    )


# -------------------------------------------------------------------------------------------------- the tasks


@dataclass(kw_only=True)
class _Cloud:
    """Whether a cloud's sources can be read: one alarm for all of them."""

    failing: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Key → since when, and why."""
    blind: bool = False


class Watcher:
    """Watches several sources for one node. `tell` and `report` are called in the event loop, and must not fail."""

    def __init__(
        self,
        node: str,
        clock: Clock,
        *,
        grace_seconds: float,
        tell: Callable[[NoticeReceived], None],
        report: Callable[[WatcherReported], None],
        blind_after_seconds: float = BLIND_AFTER_SECONDS,
    ) -> None:
        self._node = node
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._tell = tell
        self._report = report
        self._blind_after_seconds = blind_after_seconds
        self._clouds: dict[str, _Cloud] = {}
        self._told: dict[str, Mapping[str, Told]] = {}
        self._sources: dict[str, Source] = {}

    @property
    def failing(self) -> tuple[str, ...]:
        """Sources that could not be read at their last look."""
        return tuple(f"{name} {key}" for name, cloud in self._clouds.items() for key in cloud.failing)

    async def watch(self, sources: Sequence[Source]) -> None:
        """Look at all of them until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in sources:
                self._sources[source.name] = source
                group.create_task(self._watch(source), name=f"watch {source.name}")

    async def acknowledge(self) -> tuple[str, ...]:
        """Tell the sources that the machine may go now, for every notice that stands; what went wrong with that."""
        problems = []
        for name, source in self._sources.items():
            if source.acknowledge is None:
                continue
            for event_id, told in self._told.get(name, NOTHING_TOLD).items():
                if told.kind is NoticeKind.HINT:
                    continue
                try:
                    async with asyncio.timeout(source.acknowledge_seconds):
                        await source.acknowledge(event_id)
                except (SourceError, TimeoutError) as error:
                    problems.append(f"{name}: {event_id} was not acknowledged: {str(error) or 'no answer in time'}")
        return tuple(problems)

    async def _watch(self, source: Source) -> None:
        failures = 0
        while True:
            reading = await self._look(source)
            now = self._clock.monotonic()
            if reading.found or not reading.problems:
                self._take(source, reading, now)
            if reading.problems:
                failures += 1
                self._failed(source, reading.problems[0], now)
            else:
                failures = 0
                self._sees(source)
            await asyncio.sleep(source.every_seconds * min(max(failures, 1), BACKOFF_FACTOR_MAX))

    async def _look(self, source: Source) -> Reading:
        try:
            return await source.look()
        except SourceError as error:
            return Reading(problems=(str(error),))
        except Exception as error:  # a source with a bug is a blind one, and said to be: it must not end the training
            return Reading(problems=(f"{type(error).__name__}: {error}",))

    def _take(self, source: Source, reading: Reading, now: float) -> None:
        teller = Teller(
            node=self._node, source=source.name, withdraws=source.withdraws, grace_seconds=self._grace_seconds
        )
        self._told[source.name], notices = changes(self._told.get(source.name, NOTHING_TOLD), reading, teller, now)
        for notice in notices:
            self._tell(notice)

    def _failed(self, source: Source, problem: str, now: float) -> None:
        cloud = self._clouds.setdefault(source.cloud, _Cloud())
        since, _ = cloud.failing.get(source.key, (now, ""))
        cloud.failing[source.key] = (since, problem)
        if not cloud.blind and now - since >= self._blind_after_seconds:
            cloud.blind = True
            self._report(
                WatcherReported(node=self._node, source=source.cloud, problem=f"{source.key}: {short(problem)}")
            )

    def _sees(self, source: Source) -> None:
        cloud = self._clouds.setdefault(source.cloud, _Cloud())
        cloud.failing.pop(source.key, None)
        if cloud.blind and not cloud.failing:
            cloud.blind = False
            self._report(WatcherReported(node=self._node, source=source.cloud, problem=None))

"""What Slurm does with the job, as notices: asked for every few seconds, and at once when a signal came.

A job that is to be preempted, or comes to its time limit, is drained while it still runs, with the time that is left as
every node's deadline. Hosts that are drained get a notice of their own. A controller that is away changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.core.messages import Event, NoticeKind, NoticeReceived, Request, Requested
from orchestrator.errors import SchedulerError
from orchestrator.schedulers.slurm.allocation import host_of
from orchestrator.schedulers.slurm.commands import SlurmCommands
from orchestrator.schedulers.slurm.records import HostRecord, JobRecord
from orchestrator.schedulers.slurm.submission import PASSING_STATES

LOOK_SECONDS = 5.0
LEAVING_FLAGS = {
    *("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"),
    *("POWERING_DOWN", "POWER_DOWN", "REBOOT_ISSUED", "REBOOT_REQUESTED"),
}
PREEMPTING_REASONS = ("k8s: cordon:", "k8s: pod terminated: cordon:")
"""CoreWeave's SUNK: the node is taken away at the end of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Why the whole job leaves its hosts, and when it will be gone."""

    reason: str
    remaining_seconds: float | None
    comes_again: bool
    """It is to be requeued once it is saved; else somebody ended it."""


def departure(
    record: JobRecord, *, now_wall_seconds: float, limit_notice_seconds: float, kill_wait_seconds: float
) -> Departure | None:
    """Whether the job has to leave. Pure.

    `limit_notice_seconds`: how long before its time limit it leaves. `kill_wait_seconds`: what is left to a job that
    was ended (cancelled, requeued by hand, its grace over).
    """
    left = None if record.ends_at_seconds is None else max(record.ends_at_seconds - now_wall_seconds, 0.0)
    if record.state not in ("RUNNING", "SUSPENDED", "STOPPED", *PASSING_STATES):
        reason = f"Slurm ends the job: it is {record.state}"
        return Departure(reason=reason, remaining_seconds=kill_wait_seconds, comes_again=False)
    if record.preempted:
        return Departure(reason="Slurm preempts the job", remaining_seconds=left, comes_again=True)
    if left is not None and left < limit_notice_seconds:
        reason = f"the job's time limit is near: in {left:.0f} s, and it leaves {limit_notice_seconds:.0f} s before"
        return Departure(reason=reason, remaining_seconds=left, comes_again=True)
    return None


def host_notice(record: HostRecord) -> NoticeKind | None:
    """What a host's state means for what runs there; None: nothing. Pure.

    One that is DOWN is lost by its step's end, not by a notice; one that does not respond may go.
    """
    if record.reason.startswith(PREEMPTING_REASONS):
        return NoticeKind.PREEMPT
    if record.states & LEAVING_FLAGS:
        return NoticeKind.MAINTENANCE
    return NoticeKind.HINT if "NOT_RESPONDING" in record.states else None


class SlurmWatch:
    """Looks, tells the supervisor, and remembers why the job leaves."""

    def __init__(
        self,
        *,
        job_id: str,
        hosts: str,
        commands: SlurmCommands,
        clock: Clock,
        submit: Callable[[Event], None],
        nodes: Callable[[], list[str]],
        limit_notice_seconds: float,
        kill_wait_seconds: float,
    ) -> None:
        self._job_id = job_id
        self._hosts = hosts
        self._commands = commands
        self._clock = clock
        self._submit = submit
        self._nodes = nodes
        self._limit_notice_seconds = limit_notice_seconds
        self._kill_wait_seconds = kill_wait_seconds
        self._wake = asyncio.Event()
        self._said_of_hosts: dict[str, NoticeKind] = {}
        self.departure: Departure | None = None

    def wake(self) -> None:
        """Look now: a signal came."""
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._look()
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _look(self) -> None:
        """The job first: that it has to leave is not held up by what is wrong with hearing of the hosts."""
        with contextlib.suppress(SchedulerError):
            record = await asyncio.to_thread(self._commands.job, self._job_id)
            if record is not None:
                self._look_at_job(record)
        with contextlib.suppress(SchedulerError):
            self._look_at_hosts(await asyncio.to_thread(self._commands.hosts, self._hosts))

    def _look_at_job(self, record: JobRecord) -> None:
        found = departure(
            record,
            now_wall_seconds=self._clock.wall(),
            limit_notice_seconds=self._limit_notice_seconds,
            kill_wait_seconds=self._kill_wait_seconds,
        )
        if found is not None:
            self.leave(found)

    def leave(self, why: Departure) -> None:
        """Every node goes; the job saves and ends. What was said first stands, but for an end that nobody can stop."""
        if self.departure is not None and (self.departure.comes_again is why.comes_again or why.comes_again):
            return
        self.departure = why
        for node in self._nodes():
            self._notice(node, "job", NoticeKind.PREEMPT, why.remaining_seconds)
        self._submit(Requested(request=Request.DRAIN, by=why.reason))

    def _look_at_hosts(self, hosts: dict[str, HostRecord]) -> None:
        said = {name: kind for name, record in hosts.items() if (kind := host_notice(record)) is not None}
        for node in self._nodes():
            name = host_of(node)
            if name in said:
                self._notice(node, f"host-{said[name]}", said[name], None)
            if (before := self._said_of_hosts.get(name)) not in (None, said.get(name)):
                self._notice(node, f"host-{before}", NoticeKind.CANCEL, None)
        self._said_of_hosts = said

    def _notice(self, node: str, what: str, kind: NoticeKind, remaining_seconds: float | None) -> None:
        self._submit(
            NoticeReceived(
                node=node,
                source="slurm",
                kind=kind,
                remaining_seconds=remaining_seconds,
                notice_id=f"slurm-{what}",
            )
        )

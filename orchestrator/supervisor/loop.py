"""The supervisor: feeds events to `core.job.step` and performs the actions that come back.

One per job. It holds no store. Run by `supervisor.local_job` and by attached mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.clock import Clock
from orchestrator.core import hanging
from orchestrator.core.commit import Save
from orchestrator.core.job import Job, JobSpec, new_job, step
from orchestrator.core.messages import (
    Action,
    Event,
    Finish,
    NodeLost,
    NodesFound,
    Note,
    NoticeKind,
    NoticeReceived,
    ReleaseNode,
    Request,
    Requested,
    RequestNodes,
    Tick,
)
from orchestrator.core.states import LossTrouble, Node
from orchestrator.schedulers.base import Scheduler
from orchestrator.supervisor.links import AgentLinks
from orchestrator.supervisor.server import SupervisorServer
from orchestrator.telemetry import EventLog, EventRecord

TICK_SECONDS = 0.1
DELIVER_SECONDS = 2.0


class Server(Protocol):
    """Where agents and people reach the supervisor. It hands agents' connections to `Supervisor.links`."""

    token: str

    async def start(self) -> str:
        """Listen; returns the URL."""
        ...

    async def stop(self) -> None:
        """Close the port."""
        ...

    def count(self, record: EventRecord) -> None:
        """Count an event for the metrics."""
        ...


class Supervisor:
    """Runs one job to its end."""

    def __init__(
        self,
        spec: JobSpec,
        scheduler: Scheduler,
        clock: Clock,
        log: EventLog,
        token: str,
        *,
        open_server: Callable[[Supervisor, str], Server] = SupervisorServer,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._log = log
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._finish: Finish | None = None
        self.job: Job = new_job(spec, clock.monotonic())
        self.links = AgentLinks(self.submit, self.lose)
        self.server: Server = open_server(self, token)
        self.on_listening: Callable[[str], None] = lambda _: None
        """Called with the server's URL before the first node is asked for."""

    @property
    def scheduler(self) -> Scheduler:
        """Where the nodes come from."""
        return self._scheduler

    @property
    def pending_events(self) -> int:
        """Events that were taken in and are not handled yet."""
        return self._queue.qsize()

    def submit(self, event: Event) -> None:
        """Take in an event from an agent, the API or the scheduler; handled in order."""
        self._queue.put_nowait(event)

    def drain(self, by: str) -> None:
        """Save, then end, resumable."""
        self.submit(Requested(request=Request.DRAIN, by=by))

    def rehearse_notice(self, node: str, seconds: float) -> None:
        """A notice as a cloud would give it; at its deadline the node is really taken away. Raises ConfigError."""
        self._scheduler.lose(node, seconds)
        notice = NoticeReceived(
            node=node,
            source="drill",
            kind=NoticeKind.PREEMPT,
            remaining_seconds=seconds,
            notice_id=f"drill-{self._clock.monotonic()}",
        )
        self.submit(notice)

    async def run(self) -> Finish:
        """Serve until the job is over for this supervisor; nodes are given back before it returns."""
        url = await self.server.start()
        ticking: asyncio.Task[None] | None = None
        try:
            self.submit(NodesFound(nodes=await self._scheduler.start(url, self.server.token, self.lose)))
            self.on_listening(url)  # not sooner: nodes that were left running are known before any of them reports
            ticking = asyncio.create_task(self._tick_for_ever())
            while self._finish is None:
                self._handle(await self._queue.get())
            return self._finish
        finally:
            if ticking is not None:
                ticking.cancel()
                await asyncio.gather(ticking, return_exceptions=True)
            await self.links.deliver(DELIVER_SECONDS)
            await self._scheduler.stop()
            await self.links.close()
            await self.server.stop()

    def lose(self, node: str, reason: str) -> None:
        """A node is gone for certain, or is treated so."""
        self.links.forget(node)  # nothing that it still says may arrive after the word that it is gone
        self.submit(NodeLost(node=node, reason=reason))

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._queue.empty():
                self.submit(Tick())

    def _handle(self, event: Event) -> None:
        self.job, actions = step(self.job, event, self._clock.monotonic())
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case RequestNodes():
                self._scheduler.request(action.count)
            case ReleaseNode():
                self.links.dismiss(action.node)
                self._scheduler.release(action.node)
            case Note():
                self._emit(action)
            case Finish():
                self._finish = action
            case _:
                self.links.send(action.node, action)

    def _emit(self, note: Note) -> None:
        record = EventRecord(
            wall_seconds=self._clock.wall(),
            monotonic_seconds=self._clock.monotonic(),
            job=self.job.spec.name,
            kind=note.kind,
            reason=note.reason,
            node=note.node,
            generation=note.generation,
            step=note.step,
            rank=note.rank,
            facts=dict(note.facts),
        )
        self.server.count(record)
        self._log.emit(record)

    def status(self) -> dict[str, Any]:
        """What is going on, for people and programs."""
        return describe(self.job, self._clock.monotonic(), {node.node: node.pid for node in self._scheduler.nodes()})


def describe(job: Job, now_seconds: float, pids: dict[str, int | None]) -> dict[str, Any]:
    """The job as JSON. Pure."""
    committed = job.newest_committed
    age = None if job.committed_at_seconds is None else now_seconds - job.committed_at_seconds
    progress = job.highest_step / job.until if job.until else None
    saves = sorted(job.saves.values(), key=lambda save: save.id)
    step_seconds = job.ranks.step_seconds.highest or job.measured.step_seconds
    eta = None if job.until is None or step_seconds is None else (job.until - job.highest_step) * step_seconds
    return {
        "job": job.spec.name,
        "phase": str(job.phase),
        "generation": job.gang.generation if job.gang else None,
        "world_size": job.gang.world_size if job.gang else 0,
        "step": job.highest_step,
        "until": job.until,
        "progress": progress,
        "eta_seconds": eta,
        "step_seconds": step_seconds,
        "seconds_without_step": hanging.seconds_without_step(job, now_seconds),
        "hang": hanging.suspicion(job),
        "loss_trouble": None if job.loss_trouble is None else _loss_trouble(job.loss_trouble),
        "rollback": {"to": job.rollback_pending, "refusal": job.rollback_refusal},
        "newest_committed": str(committed) if committed else None,
        "newest_committed_step": committed.step if committed else None,
        "commit_age_seconds": age,
        "failures": job.failures,
        "saves": [_save(save, now_seconds) for save in saves],
        "nodes": [_node(job, node, now_seconds, pids.get(node.name)) for node in job.nodes.values()],
        "ranks": [
            {
                "rank": rank,
                "pid": state.pid,
                "step": state.step,
                "step_seconds": state.step_seconds,
                "save": None if not saves else _progress(saves[-1], rank),
            }
            for rank, state in sorted(job.ranks.items())
        ],
    }


def _save(save: Save, now_seconds: float) -> dict[str, Any]:
    return {
        "checkpoint": str(save.id),
        "state": str(save.state),
        "ranks": save.world_size,
        "staged": len(save.staged),
        "durable": len(save.durable),
        "staged_bytes": save.size_bytes,
        "since_seconds": now_seconds - save.decided_at_seconds,
    }


def _node(job: Job, node: Node, now_seconds: float, pid: int | None) -> dict[str, Any]:
    return {
        "node": node.name,
        "agent_pid": pid,
        "going": node.going,
        "hinted": bool(node.hints),
        "blind": list(node.blind),
        "condemned": list(node.condemned.values()),
        "url": node.objects_url,
        "seconds_left": None if node.deadline_seconds is None else node.deadline_seconds - now_seconds,
        "ranks": list(job.gang.ranks_of(node.name)) if job.gang else [],
    }


def _loss_trouble(trouble: LossTrouble) -> dict[str, Any]:
    """What the first rank told, and how many ranks' losses are not well yet."""
    return {
        "rank": trouble.rank,
        "step": trouble.step,
        "value": trouble.value,
        "usual": trouble.usual,
        "reason": trouble.words,
        "ranks": len(trouble.ranks),
    }


def _progress(save: Save, rank: int) -> str:
    """How far a rank's shard is."""
    if rank in save.durable:
        return "durable"
    if rank in save.given_up:
        return "given up"
    return "staged" if rank in save.staged else "not yet"

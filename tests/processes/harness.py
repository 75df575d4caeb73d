"""Runs a real job on this machine inside a test: real supervisor, agents, gloo workers; a folder as store."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.reader import read_committed, verify
from orchestrator.cli.demo_analysis import tensor_digests
from orchestrator.config import JobConfig
from orchestrator.core.messages import Finish
from orchestrator.schedulers.local import AGENT_COMMAND
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import job_url, open_store
from orchestrator.supervisor.local_job import LocalJob, LocalJobOptions
from orchestrator.supervisor.loop import Supervisor
from orchestrator.telemetry import EventRecord

TRAINING = Path(__file__).with_name("small_training.py")
Scenario = Callable[[Supervisor], Coroutine[Any, Any, None]]


@dataclass
class JobResult:
    """What a job left."""

    finish: Finish
    records: list[EventRecord]
    store: ObjectStore
    logs: Path
    reasons: list[str] = field(default_factory=list)

    def kinds(self, kind: str) -> list[EventRecord]:
        """All records of a kind."""
        return [record for record in self.records if record.kind == kind]

    def output(self) -> str:
        """Everything that the workers printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob("*.log")))


async def run_job(
    folder: Path,
    *,
    scenario: Scenario | None = None,
    command: Sequence[str] = (sys.executable, str(TRAINING)),
    agent_command: Sequence[str] = AGENT_COMMAND,
    take_over: bool = False,
    limit_seconds: float = 100,
    **settings: object,
) -> JobResult:
    """Run a job to its end (or fail after the limit), with a scenario beside it."""
    values: dict[str, object] = {
        "job": "small",
        "nodes": "1:2",
        "workers_per_node": 1,
        "save_every": 10,
        "notices": "none",
    }
    values |= {"store": str(folder / "store"), **settings}
    config = JobConfig(command=tuple(command), **values)  # type: ignore[arg-type]
    url = job_url(config.store, config.job)
    records: list[EventRecord] = []
    start = time.monotonic()

    def show(record: EventRecord) -> None:
        records.append(record)
        sys.stderr.write(record.line(start) + "\n")

    options = LocalJobOptions(
        job_url=url,
        take_over=take_over,
        echo_output=False,
        sinks=(show,),
        agent_command=agent_command,
        notice_look_seconds=0.1,
    )
    job = LocalJob(config, options)
    job.acquire()
    running = asyncio.create_task(job.run())
    while job.supervisor is None:
        await asyncio.sleep(0.005)
    acting = asyncio.create_task(scenario(job.supervisor)) if scenario is not None else None
    try:
        finish = await asyncio.wait_for(running, limit_seconds)
    finally:
        if acting is not None:
            acting.cancel()
            for problem in await asyncio.gather(acting, return_exceptions=True):
                if isinstance(problem, Exception):
                    raise problem
    return JobResult(finish=finish, records=records, store=open_store(url), logs=job.logs)


async def until(condition: Callable[[], bool], limit_seconds: float = 60) -> None:
    """Wait for a condition on the supervisor's state."""
    end = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


def final_digests(store: ObjectStore) -> dict[str, str]:
    """Digests of all tensors of the newest committed checkpoint."""
    newest = survey(store).newest()
    assert newest is not None
    return tensor_digests(store, read_committed(store, newest.id))


def check_store(store: ObjectStore) -> None:
    """What must hold after anything: every committed checkpoint reads back, every base was committed."""
    catalog = survey(store)
    for entry in catalog.entries:
        assert entry.standing is not Standing.DAMAGED, entry
        if entry.standing is Standing.COMMITTED:
            problems = [problem for _, problem in verify(store, read_committed(store, entry.id)) if problem]
            assert not problems

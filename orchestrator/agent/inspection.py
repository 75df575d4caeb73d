"""The answer to a suspicion of a hang: what each worker of this node does, and its stacks in its output.

Two looks, a moment apart: a state counts only if it lasts, and processor time only if it passes in between.
"""

from __future__ import annotations

import asyncio
import contextlib

from orchestrator.agent.gang import LocalGang
from orchestrator.agent.ports import Runtime
from orchestrator.agent.workers import Worker
from orchestrator.core.messages import Look, Looked, RankLook
from orchestrator.health import stacks
from orchestrator.health.progress import ProcessReading

LOOK_SECONDS = 1.0


async def inspect(gang: LocalGang, runtime: Runtime, action: Look, awake_seconds: float) -> Looked | None:
    """Look at all workers; None if the gang is over in the meantime."""
    workers = [worker for worker in gang.workers if not worker.exited]
    before = runtime.read(workers)
    written = [worker for worker in workers if runtime.ask_stacks(worker)]
    await asyncio.sleep(LOOK_SECONDS)
    if gang.closed:
        return None
    after = runtime.read(workers)
    texts = {worker.rank: stacks.read(worker.control.stacks_path) for worker in written}
    for worker in written:
        _keep(worker, texts[worker.rank])
    base_step = 0 if gang.action.base is None else gang.action.base.step
    return Looked(
        node=action.node,
        generation=action.generation,
        step=action.step,
        awake_seconds=awake_seconds,
        ranks=tuple(
            _describe(worker, texts.get(worker.rank, ""), one, other, base_step)
            for worker, one, other in zip(workers, before, after, strict=True)
        ),
    )


def _describe(worker: Worker, text: str, before: ProcessReading, after: ProcessReading, base_step: int) -> RankLook:
    ident = (worker.control.info or {}).get("main_thread")
    place = None if ident is None else stacks.main_thread(text, int(ident))
    step = worker.control.step
    return RankLook(
        rank=worker.rank,
        step=base_step if step is None else step,
        state=after.state if after.state == before.state else "",
        traced=before.traced or after.traced,
        busy_seconds=max(0.0, after.processor_seconds - before.processor_seconds),
        waits=None if place is None else place.waits,
        where="" if place is None else place.words,
    )


def _keep(worker: Worker, text: str) -> None:
    """Into the worker's output, for the person who has to look; the same again is not repeated."""
    if worker.log_path is None or not worker.news("stacks", hash(text) or 1) or not text:
        return
    with contextlib.suppress(OSError), worker.log_path.open("a") as log:  # a full disk must not hinder the answer
        log.write(
            f"orchestrator: no step comes; what rank {worker.rank} does:\n{text}orchestrator: end of the stacks\n"
        )

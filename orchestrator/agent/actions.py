"""The supervisor's store actions, carried out: open a generation, commit, abandon, sweep, record the end.

Used by `agent.node`. Each returns the event to report; errors of the store become events, never a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from orchestrator.agent.settings import AgentSettings
from orchestrator.checkpoint import generations, save
from orchestrator.checkpoint.catalog import survey
from orchestrator.checkpoint.quarantine import second_reading, set_aside
from orchestrator.checkpoint.retention import Keep
from orchestrator.checkpoint.rollback import rollback_target
from orchestrator.checkpoint.sweeping import Sweeper
from orchestrator.clock import Clock
from orchestrator.core.messages import (
    Abandon,
    CheckpointId,
    CheckRollback,
    Commit,
    EndRecorded,
    GenerationOpened,
    GenerationRefused,
    IndexDecided,
    IndexFailed,
    OpenGeneration,
    Outcome,
    ReadAgain,
    RecordEnd,
    Refusal,
    RollbackChecked,
    SecondReading,
    Superseded,
    Sweep,
    Swept,
)
from orchestrator.errors import (
    FencedError,
    FormatError,
    OrchestratorError,
    RollbackError,
    StoreDeniedError,
    StoreError,
    StoreFullError,
)
from orchestrator.storage.base import ObjectStore
from orchestrator.telemetry import reached

LAST_SWEEP_SECONDS = 30.0
"""How long the end record of a job that is done waits for the sweep before it: well below the record's own limit."""


class StoreActions:
    """Performs store actions for one node."""

    def __init__(self, settings: AgentSettings, store: ObjectStore, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._sweeper = Sweeper(store, clock.monotonic)
        self._sweeping = asyncio.Lock()
        self._who = generations.Claimant(
            job=settings.job, owner=settings.owner, claimant=settings.claimant, take_over=settings.take_over
        )

    async def open_generation(self, action: OpenGeneration) -> GenerationOpened | GenerationRefused:
        """Claim, roll forward, write the base; also choose the port at which the workers will meet."""
        node = self._settings.node
        try:
            opened = await asyncio.to_thread(
                generations.open_generation,
                self._store,
                self._who,
                action.own,
                action.avoid,
                self._clock.wall(),
                rollback_to=action.rollback_to,
            )
        except FencedError as error:
            return GenerationRefused(node=node, refusal=Refusal.FENCED, reason=str(error))
        except generations.JobOverError as error:
            refusal = Refusal.DONE if error.outcome is Outcome.DONE else Refusal.CANCELLED
            return GenerationRefused(node=node, refusal=refusal, reason=str(error))
        except FormatError as error:
            return GenerationRefused(node=node, refusal=Refusal.FORMAT, reason=str(error))
        except RollbackError as error:
            return GenerationRefused(
                node=node, refusal=Refusal.ROLLBACK, reason=str(error), rollback_to=action.rollback_to
            )
        except (StoreDeniedError, StoreFullError) as error:
            return GenerationRefused(node=node, refusal=Refusal.DENIED, reason=str(error))
        except OrchestratorError as error:
            return GenerationRefused(node=node, refusal=Refusal.STORE, reason=str(error))
        reached("after-base", generation=opened.generation)
        return GenerationOpened(
            node=node,
            generation=opened.generation,
            base=opened.base,
            meeting_address=self._settings.address,
            meeting_port=free_port(self._settings.address),
            rolled_forward=len(opened.rolled_forward),
            skipped=opened.skipped,
            rollback_to=action.rollback_to,
            after=action.own or 0,
        )

    async def commit(self, action: Commit) -> IndexDecided | IndexFailed:
        """Write the index of a checkpoint whose receipts are there."""
        reached("before-index", step=action.step)
        return await self._decide(action, lambda checkpoint: save.commit(self._store, checkpoint))

    async def commit_alone(self, checkpoint: CheckpointId) -> None:
        """Without a supervisor: write the index if this receipt was the last of all ranks. Else the next one does."""
        with contextlib.suppress(StoreError, FormatError):  # whoever opens the next generation rolls it forward
            await asyncio.to_thread(save.commit_whole, self._store, checkpoint)

    async def abandon(self, action: Abandon) -> IndexDecided | IndexFailed:
        """Write an abandoned index."""
        return await self._decide(action, lambda checkpoint: save.abandon(self._store, checkpoint, action.reason))

    async def _decide(
        self, action: Commit | Abandon, write_index: Callable[[CheckpointId], bool]
    ) -> IndexDecided | IndexFailed:
        node, generation, step = self._settings.node, action.generation, action.step
        try:
            committed = await asyncio.to_thread(write_index, CheckpointId(generation=generation, step=step))
        except (StoreError, FormatError) as error:
            return IndexFailed(node=node, generation=generation, step=step, reason=str(error))
        reached("after-index", step=step)
        return IndexDecided(node=node, generation=generation, step=step, committed=committed)

    async def sweep(self, action: Sweep) -> Swept:
        """Delete what is not kept and what was left behind. One after another: a new supervisor may ask again."""
        node, generation = self._settings.node, action.generation
        keep = Keep(last=action.keep_last, every_steps=action.keep_every_steps)
        try:
            async with self._sweeping:
                done = await asyncio.to_thread(
                    self._sweeper.sweep,
                    generation,
                    keep,
                    action.in_flight,
                    action.grace_seconds,
                    claimed_through=action.claimed_through,
                )
        except OrchestratorError as error:
            return Swept(node=node, generation=generation, problem=str(error))
        return Swept(
            node=node,
            generation=generation,
            retired=done.retired,
            abandoned=done.abandoned,
            committed=done.committed,
            unfinished=done.unfinished,
            freed_bytes=done.freed_bytes,
        )

    async def check_rollback(self, action: CheckRollback) -> RollbackChecked:
        """Whether there is a checkpoint of the step that can be gone back to."""
        problem = None
        try:
            catalog = await asyncio.to_thread(survey, self._store)
            rollback_target(catalog, action.step)
        except OrchestratorError as error:
            problem = str(error)
        return RollbackChecked(node=self._settings.node, step=action.step, problem=problem)

    async def second_reading(self, action: ReadAgain) -> SecondReading:
        """Read a checkpoint that another node could not read. It is set aside only if it is bad here as well."""
        node, generation, checkpoint = self._settings.node, action.generation, action.checkpoint
        try:
            mismatch = await asyncio.to_thread(second_reading, self._store, checkpoint, action.first)
            if mismatch is not None:
                reason = f"{action.first}; {node}: {mismatch}"
                await asyncio.to_thread(set_aside, self._store, checkpoint, generation, reason)
        except OrchestratorError as error:
            return SecondReading(node=node, generation=generation, checkpoint=checkpoint, problem=str(error))
        return SecondReading(node=node, generation=generation, checkpoint=checkpoint, mismatch=mismatch)

    async def superseded(self, generation: int) -> Superseded | None:
        """Whether another run has claimed a higher generation by now. A store that cannot say is asked again later."""
        try:
            reason = await asyncio.to_thread(generations.successor, self._store, self._who, generation)
        except (StoreError, FormatError):
            return None
        return None if reason is None else Superseded(node=self._settings.node, reason=reason)

    async def record_end(self, action: RecordEnd) -> EndRecorded | Superseded:
        """Write the end record. Where the job is done there is some time to let the last sweep end first."""
        if action.outcome is Outcome.DONE:
            with contextlib.suppress(TimeoutError):  # a job that is done must be called so, however much there is to go
                async with asyncio.timeout(LAST_SWEEP_SECONDS), self._sweeping:
                    pass
        try:
            await asyncio.to_thread(
                generations.record_end, self._store, self._who, action.outcome, action.reason, self._clock.wall()
            )
        except FencedError as error:
            return Superseded(node=self._settings.node, reason=str(error))
        except (StoreError, FormatError) as error:
            return EndRecorded(node=self._settings.node, reason=str(error))
        return EndRecorded(node=self._settings.node)


def free_port(address: str) -> int:
    """A TCP port that is free now. Another program may take it first: the workers then fail and start again."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])

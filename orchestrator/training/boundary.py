"""The worker's side of an agreement: what happens at a step boundary. See design notes in docs/protocol.md.

The uneventful path is two shared-memory accesses. Order (must): the echo is written before the step is published.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.slots import ControlBlock, Record, SlotState, WorkerPhase
from orchestrator.core.messages import Mode

LOOK_SECONDS = 0.0005
FINAL_WAIT_SECONDS = 60.0
"""How long the last step waits for its save to be proposed and for the decision, before the script ends without."""

Finish = Callable[[int | None, int], None]
"""Called once, by any thread of the worker: (bytes of the staged shard, nanoseconds that copying took); None for the
bytes: what is in the slot is not the state at the boundary, and must not be used."""
There = Callable[[int], None]
"""Called by any thread of the worker: so many bytes of the shard are there, from its beginning on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to stage, and where."""

    slot: int
    step: int
    absent: tuple[int, ...]
    may_overlap: bool
    """Whether training goes on at once and nobody waits for this shard; else it is complete when `stage` returns."""


class Stager(Protocol):
    """Copies the state into slots. One shard at a time: the one before is complete when `stage` is called."""

    def stage(self, order: Order, finish: Finish, there: There) -> None:
        """Copy the state as it is now; `finish` is called when the last byte is there, perhaps after this returns.

        Before that, `there` is called while it is copied from beginning to end, if it is.
        """
        ...

    def join(self) -> None:
        """Complete what is under way; when this returns, its `finish` has been called."""
        ...


class Passing(StrEnum):
    """What a boundary came to."""

    GO_ON = "go on"
    STAGED = "staged"
    LEAVE = "leave"


class Boundary:
    """Reads the agent's record at each boundary and keeps to it."""

    def __init__(
        self,
        control: ControlBlock,
        launch: Launch,
        stager: Stager,
        alone: Callable[[], bool] = lambda: False,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._control = control
        self._launch = launch
        self._stager = stager
        self._alone = alone
        self._now_ns = now_ns
        self._sleep = sleep
        self._seen = 0
        self._record = Record()
        self._last_ns = 0
        self._mean_ns = 0.0

    def at(self, step: int, *, final: bool) -> Passing:
        """Pass the boundary after `step` completed steps; if this is the agreed step, its staging has begun at least.

        What an earlier boundary began is complete before anything of this one is published.
        """
        now_ns = self._now_ns()
        self._measure(now_ns)
        self._stager.join()
        self._read()
        if final:
            self._await_proposal(step)
        self._echo(step)
        self._control.publish(step, now_ns)
        patience_seconds = FINAL_WAIT_SECONDS if final else self._launch.decision_wait_seconds
        passing = self._keep(step, patience_seconds, final=final) if self._concerns(step) else Passing.GO_ON
        self._last_ns = self._now_ns()
        return passing

    def _measure(self, now_ns: int) -> None:
        """The mean step time, without waiting and staging at boundaries."""
        if self._last_ns:
            took = now_ns - self._last_ns
            self._mean_ns = took if not self._mean_ns else 0.8 * self._mean_ns + 0.2 * took
            self._control.set_step_time(int(self._mean_ns))
        else:
            self._last_ns = now_ns

    def start(self) -> None:
        """Training begins now: the first step's time is measured from here."""
        self._last_ns = self._now_ns()

    def _read(self) -> None:
        selector = self._control.selector
        if selector != self._seen:
            self._record = self._control.read_record()
            self._seen = self._control.record_selector  # after a checksum mismatch: look again next time

    def _concerns(self, step: int) -> bool:
        return step in (self._record.decided_step, self._record.proposed_step)

    def _echo(self, step: int) -> None:
        proposed = self._record.proposed_step
        if proposed is not None and step <= proposed:
            self._control.echo(self._record.ballot)

    def _await_proposal(self, step: int) -> None:
        """The job's last step is always saved: it is published only once its save is proposed."""
        self._control.set_phase(WorkerPhase.WAITING)
        until_ns = self._now_ns() + int(FINAL_WAIT_SECONDS * 1e9)
        while not self._concerns(step) and self._now_ns() < until_ns and not self._alone():
            self._echo(step)
            self._sleep(LOOK_SECONDS)
            self._read()
        self._control.set_phase(WorkerPhase.RUNNING)

    def _keep(self, step: int, patience_seconds: float, *, final: bool) -> Passing:
        """Wait at the proposed step for the decision, a later proposal, or the end of patience; then stage."""
        until_ns = self._now_ns() + int(patience_seconds * 1e9)
        self._control.set_phase(WorkerPhase.WAITING)
        try:
            while self._record.decided_step != step:
                if self._record.proposed_step != step:
                    self._echo(step)
                    return Passing.GO_ON
                if self._now_ns() > until_ns:
                    self._control.report_passed(step)
                    return Passing.GO_ON
                self._sleep(LOOK_SECONDS)
                self._read()
                self._echo(step)
            return self._stage_now(step, final=final)
        finally:
            self._control.set_phase(WorkerPhase.RUNNING)

    def _stage_now(self, step: int, *, final: bool) -> Passing:
        slot = self._free_slot()
        if slot is None:
            self._control.report_passed(step)
            return Passing.GO_ON
        leaves = self._record.mode is Mode.LEAVE
        may_overlap = not (leaves or final or self._control.signal)
        order = Order(slot=slot, step=step, absent=self._record.absent, may_overlap=may_overlap)
        generation = self._launch.generation

        def finish(size_bytes: int | None, copy_ns: int) -> None:
            if size_bytes is None:
                self._control.report_passed(step)
            else:
                self._control.finish_slot(slot, generation, step, size_bytes, copy_ns)

        self._control.set_phase(WorkerPhase.STAGING)
        self._control.start_slot(slot, generation, step)
        self._stager.stage(order, finish, lambda size_bytes: self._control.advance_slot(slot, step, size_bytes))
        return Passing.LEAVE if leaves else Passing.STAGED

    def _free_slot(self) -> int | None:
        """A free slot; waits for a limited time while both are being uploaded."""
        until_ns = self._now_ns() + int(self._launch.slot_wait_seconds * 1e9)
        while True:
            free = [slot.index for slot in self._control.slots() if slot.state is SlotState.FREE]
            if free:
                return free[0]
            if self._now_ns() > until_ns:
                return None
            self._sleep(LOOK_SECONDS)

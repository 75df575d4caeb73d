"""The other end of a worker's control block: time that passes only when the worker waits, and an agent in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.save import ShardPlace, commit, upload_shard
from orchestrator.checkpoint.slots import ControlBlock, LeaveOutcome, Record, SlotState
from orchestrator.core.messages import CheckpointId, Mode
from orchestrator.storage.memory import MemoryStore


class FakeTime:
    """Stands in for the module `time`: sleeping moves the clock on and lets the others act."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps = 0
        self.while_waiting: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        self.while_waiting()


@dataclass(kw_only=True)
class OneAgent:
    """Acts for one rank as `agent.gang` and `agent.node` do; decides as soon as the worker has echoed."""

    place: Launch
    store: MemoryStore
    mode: Mode = Mode.STAY
    until: int | None = None
    commits: bool = True
    committed: list[int] = field(default_factory=list)
    record: Record = field(default_factory=Record)

    def __post_init__(self) -> None:
        self.control = ControlBlock.create(
            self.place.control_path,
            generation=self.place.generation,
            rank=self.place.rank,
            world_size=self.place.world_size,
        )

    def propose(self, step: int) -> None:
        self._publish(ballot=self.record.ballot + 1, proposed_step=step, decided_step=self.record.decided_step)

    def decide(self, step: int, absent: tuple[int, ...] = ()) -> None:
        self.record = Record(ballot=self.record.ballot, decided_step=step, mode=self.mode, absent=absent)
        self.control.write_record(self.record)

    def _publish(self, *, ballot: int, proposed_step: int | None, decided_step: int | None) -> None:
        self.record = Record(ballot=ballot, proposed_step=proposed_step, decided_step=decided_step, mode=self.mode)
        self.control.write_record(self.record)

    def look(self) -> None:
        """What the agent does again and again."""
        proposed, decided = self.record.proposed_step, self.record.decided_step
        if proposed is not None and self.control.echoed == self.record.ballot:
            self.decide(proposed)
        step = self.control.step or 0
        waits_at_the_end = self.until is not None and step == self.until - 1 and decided != self.until
        if waits_at_the_end and proposed is None and self.until is not None:
            self.propose(self.until)
        for slot in self.control.slots():
            if slot.state is SlotState.STAGED and self.commits:
                self._upload(slot.index, slot.step, slot.size_bytes)

    def _upload(self, slot: int, step: int, size_bytes: int) -> None:
        where = ShardPlace(
            job=self.place.job,
            checkpoint=CheckpointId(generation=self.place.generation, step=step),
            rank=self.place.rank,
            world_size=self.place.world_size,
            absent=(),
        )
        upload_shard(self.store, where, memoryview(Path(self.place.slot_paths[slot]).read_bytes())[:size_bytes])
        commit(self.store, where.checkpoint)
        self.committed.append(step)
        self.control.set_outcome(LeaveOutcome.COMMITTED, step)
        self.control.free_slot(slot)

    def close(self) -> None:
        self.control.close()

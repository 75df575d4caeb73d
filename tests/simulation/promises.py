"""What must hold all along in a simulated job, checked at every write to the store, every action, every leave.

- An index is committed only over shards of its own step that put together the uninterrupted training's state.
- A base is not older than what was committed, or could be rolled forward, when its generation was claimed, unless a
  rollback record bounds it; and it is never beyond such a bound.
- A generation belongs to one run, and no node starts it twice.
- A step is decided only while no rank has gone past it; an index is asked for only when every needed receipt is there.
- All ranks that leave a generation leave at one step: the one that was decided for leaving.
- A generation starts on no node while another one that is counted on runs workers of an older generation.
- What the supervisor says is committed is committed on the store.
- A checkpoint is retired only while as many newer ones as are kept are committed; the newest generation's base never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.generations import read_base
from orchestrator.checkpoint.reader import read_committed, read_rank_state, verify
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.checkpoint.save import draft_index, receipts_there
from orchestrator.checkpoint.slots import WorkerPhase
from orchestrator.core.messages import Action, CheckpointId, Commit, Decide, LaunchWorkers, Mode
from orchestrator.errors import FormatError, OrchestratorError
from orchestrator.storage.memory import MemoryStore
from orchestrator.telemetry import EventRecord
from orchestrator.testing.simulated_cluster import SimulatedCluster, SimulatedNode, SimulatedRun
from orchestrator.testing.simulated_time import SimulatedProcess
from orchestrator.testing.simulated_workers import WEIGHTS, weights_at


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(kw_only=True)
class Promises:
    """Watches one cluster; the first thing that is wrong is kept in `problem`."""

    cluster: SimulatedCluster
    on_violation: Callable[[], None]
    problem: str | None = None
    committed: set[CheckpointId] = field(default_factory=set)
    retired: set[CheckpointId] = field(default_factory=set)
    claimed_by: dict[int, str] = field(default_factory=dict)
    _owed: dict[int, CheckpointId | None] = field(default_factory=dict)
    """generation → the newest checkpoint that its base must not be older than"""
    _bounds: list[fmt.GenerationRecord] = field(default_factory=list)
    """The claims that say up to which step earlier generations may be used."""
    _launched: set[tuple[int, str]] = field(default_factory=set)
    _launched_by: dict[int, str] = field(default_factory=dict)
    _absent: dict[CheckpointId, frozenset[int]] = field(default_factory=dict)
    _world_size: dict[int, int] = field(default_factory=dict)
    _leave_steps: set[CheckpointId] = field(default_factory=set)
    _left_at: dict[int, int] = field(default_factory=dict)

    def watch(self) -> None:
        """From now on."""
        self.cluster.on_write = lambda key, content, process: self._checked(self._on_write, key, content, process)
        self.cluster.on_action = lambda run, action: self._checked(self._on_action, run, action)
        self.cluster.on_start = lambda node, generation: self._checked(self._on_start, node, generation)
        self.cluster.on_record = lambda run, record: self._checked(self._on_record, record)
        self.cluster.training.on_leave = lambda generation, step: self._checked(self._on_leave, generation, step)

    def _checked(self, check: Callable[..., None], *what: object) -> None:
        try:
            check(*what)
        except (Violation, OrchestratorError) as error:
            if self.problem is None:
                self.problem = f"at {self.cluster.loop.now:.3f} s: {type(error).__name__}: {error}"
            self.on_violation()

    # -- the store ---------------------------------------------------------------------------------------

    def _on_write(self, key: str, content: bytes, process: SimulatedProcess) -> None:
        number = fmt.parse_generation_key(key)
        if number is not None:
            record = fmt.load(fmt.GenerationRecord, key, content)
            if record.rollback_to is not None:
                self._bounds.append(record)
            self.claimed_by[number] = process.name
            self._owed[number] = max(filter(self.usable, self.committed | self._whole()), default=None)
        elif key.endswith(".base.json"):
            self._check_base(fmt.load(fmt.BaseRecord, key, content))
        elif key.endswith("index.json") and b'"committed"' in content:
            parsed = fmt.parse_checkpoint_key(key)
            assert parsed is not None
            check_state(self.cluster.truth, parsed[0])
            self.committed.add(parsed[0])
        elif key.endswith(fmt.RETIRED):
            parsed = fmt.parse_checkpoint_key(key)
            assert parsed is not None
            self._check_retired(parsed[0])
            self.retired.add(parsed[0])

    def usable(self, checkpoint: CheckpointId) -> bool:
        """Whether no later rollback record forbids it."""
        return not any(
            record.rollback_to is not None
            and checkpoint.generation
            <= (record.generation - 1 if record.rollback_through is None else record.rollback_through)
            and checkpoint.step > record.rollback_to
            for record in self._bounds
        )

    def _whole(self) -> set[CheckpointId]:
        """Undecided checkpoints of which everything is there."""
        store = self.cluster.truth
        keys = {entry.key for entry in store.entries("checkpoints/")}
        folders = {parsed[0] for key in keys if (parsed := fmt.parse_checkpoint_key(key)) is not None}
        undecided = [one for one in folders if fmt.index_key(one) not in keys]
        whole = set()
        for checkpoint in undecided:
            try:
                if isinstance(draft_index(store, checkpoint), list):
                    whole.add(checkpoint)
            except FormatError:
                continue
        return whole

    def _check_base(self, record: fmt.BaseRecord) -> None:
        base, owed = record.id, self._owed[record.generation]
        if base is not None and not self.usable(base):
            raise Violation(f"generation {record.generation} starts from {base}, beyond a rollback")
        if owed is None:
            return
        if owed in self.committed and (base is None or base < owed):
            raise Violation(f"generation {record.generation} starts from {base}, and {owed} was there at its claim")
        if fmt.index_key(owed) not in self.cluster.truth._objects:  # a sweeper may have abandoned it first
            raise Violation(f"generation {record.generation} has its base before {owed} was rolled forward")

    def _check_retired(self, checkpoint: CheckpointId) -> None:
        usable = {one for one in self.committed - self.retired if self.usable(one)}
        newer = len([one for one in usable if one > checkpoint])
        keep_last = self.cluster.spec.keep_last
        if keep_last == 0 or newer < keep_last:
            raise Violation(f"{checkpoint} is retired, with {newer} newer ones, and {keep_last} are to be kept")
        base = read_base(self.cluster.truth, max(self.claimed_by))
        if base is not None and base.id == checkpoint:
            raise Violation(f"{checkpoint} is retired, and generation {base.generation} starts from it")

    # -- the supervisor's actions ------------------------------------------------------------------------

    def _on_action(self, run: SimulatedRun, action: Action) -> None:
        match action:
            case LaunchWorkers():
                owner = self._launched_by.setdefault(action.generation, run.name)
                if owner != run.name:
                    raise Violation(f"generation {action.generation} belongs to {owner}, and {run.name} launches it")
                if (action.generation, action.node) in self._launched:
                    raise Violation(f"generation {action.generation} is launched twice on {action.node}")
                self._launched.add((action.generation, action.node))
                self._world_size[action.generation] = action.world_size
            case Decide():
                decided = CheckpointId(generation=action.generation, step=action.step)
                self._absent[decided] = frozenset(action.absent)
                if action.mode is Mode.LEAVE:
                    self._leave_steps.add(decided)
                self._check_nobody_is_past(run, action)
            case Commit() if run.supervisor is not None and run.supervisor.job.taken_back:
                pass  # of nodes that did not come back a new supervisor knows nothing: the store's receipts decide
            case Commit():
                self._check_receipts(CheckpointId(generation=action.generation, step=action.step))
            case _:
                pass

    def _on_start(self, node: SimulatedNode, generation: int) -> None:
        """Every node that the supervisor still counts on has ended its workers of older generations."""
        supervisor = node.run.supervisor
        assert supervisor is not None
        for other in node.run.nodes.values():
            older = {one for one in other.runtime.generations() if one < generation}
            if other.process.alive and other.name in supervisor.job.nodes and older:
                raise Violation(f"generation {generation} starts on {node.name} while {other.name} runs {older}")

    def _on_record(self, record: EventRecord) -> None:
        if record.kind == "committed":
            checkpoint = CheckpointId(generation=record.generation or 0, step=record.step or 0)
            if checkpoint not in self.committed:
                raise Violation(f"{checkpoint} is said to be committed, and the store says otherwise")

    def _check_nobody_is_past(self, run: SimulatedRun, action: Decide) -> None:
        for node in run.nodes.values():
            gang = node.agent._gang
            if not node.process.alive or gang is None or gang.generation != action.generation:
                continue
            for worker in gang.workers:
                step = worker.control.step
                if not node.runtime.is_alive(worker):
                    continue
                if step is None or step < action.step or worker.control.passed == action.step:
                    continue  # one that has waited in vain says so, and the step is abandoned
                waits = worker.control.phase in (WorkerPhase.WAITING, WorkerPhase.STAGING)
                holds = any(slot.step == action.step for slot in worker.control.slots())
                if not (step == action.step and waits) and not holds:
                    raise Violation(f"step {action.step} is decided, and rank {worker.rank} is past it at {step}")

    def _check_receipts(self, checkpoint: CheckpointId) -> None:
        if fmt.index_key(checkpoint) in self.cluster.truth._objects:
            return  # somebody was faster: the index that stands is believed
        there = {rank for rank, _ in receipts_there(self.cluster.truth, checkpoint)}
        needed = set(range(self._world_size[checkpoint.generation])) - self._absent.get(checkpoint, frozenset())
        if not needed <= there:
            raise Violation(f"{checkpoint} is to be committed without the receipts of ranks {sorted(needed - there)}")

    def _on_leave(self, generation: int, step: int) -> None:
        first = self._left_at.setdefault(generation, step)
        if first != step:
            raise Violation(f"of generation {generation} one rank left at step {first} and another at step {step}")
        if CheckpointId(generation=generation, step=step) not in self._leave_steps:
            raise Violation(f"a rank of generation {generation} left at step {step}, and nobody decided that")


def check_state(store: MemoryStore, checkpoint: CheckpointId) -> None:
    """The checkpoint is whole and holds exactly the uninterrupted training's state of its step. Raises Violation."""
    index = read_committed(store, checkpoint)
    problems = [problem for _, problem in verify(store, index) if problem]
    if problems:
        raise Violation(f"{checkpoint} was committed with {problems}")
    weights = torch.empty(WEIGHTS, dtype=torch.int64)
    read_tensors(store, index, {"weights": weights})
    if not torch.equal(weights, weights_at(checkpoint.step)):
        raise Violation(f"{checkpoint} was committed with values of another step")
    staged = {int(read_rank_state(store, index, shard).rank_values["step"]) for shard in index.shards}
    if staged != {checkpoint.step}:
        raise Violation(f"{checkpoint} was committed by ranks that staged steps {staged}")

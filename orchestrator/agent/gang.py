"""The workers of one generation on this node: launch files, control blocks, and what is read from them.

`agent.node` owns one `LocalGang` at a time. `observe` turns what the control blocks say into events; it reads
memory only and takes microseconds, so it may be called often.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.agent import workers as processes
from orchestrator.agent.inheritance import Inheritance, is_file, remove
from orchestrator.agent.ports import Runtime
from orchestrator.agent.saves import LocalSaves
from orchestrator.agent.settings import AgentSettings
from orchestrator.agent.workers import Worker
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import LAUNCH_VARIABLE, HeldShard, Launch
from orchestrator.checkpoint.slots import ControlBlock, LeaveOutcome, Record, Slot, SlotState, WorkerPhase
from orchestrator.core.messages import (
    CheckpointId,
    Decide,
    Echoed,
    Event,
    GangReturned,
    LaunchWorkers,
    LossReported,
    Mode,
    NoticeKind,
    NoticeReceived,
    Passed,
    Paused,
    Prepare,
    Progress,
    RankAttached,
    RankExited,
    RankPlanned,
    RankProgress,
    Refused,
    SaveAsked,
    Settled,
    Staged,
    Verdict,
)
from orchestrator.errors import StoreError
from orchestrator.health.loss import Finding, LossState

ATTACHED_PHASES = (
    WorkerPhase.RUNNING,
    WorkerPhase.WAITING,
    WorkerPhase.STAGING,
    WorkerPhase.FINISHED,
    WorkerPhase.LEFT,
)


class LocalGang:
    """This node's ranks of one generation."""

    def __init__(
        self,
        settings: AgentSettings,
        runtime: Runtime,
        action: LaunchWorkers,
        objects_url: str,
        objects_token: str,
        *,
        inheritance: Inheritance,
        store_folder: Path | None = None,
    ) -> None:
        self.settings = settings
        self._runtime = runtime
        self.action = action
        self.generation = action.generation
        self.record = Record()
        self.refused_ballot = 0
        self.closed = False
        """A newer generation has taken this one's place: the control blocks are closed."""
        self._pause_until_ns = 0
        self.deadline_seconds: float | None = None
        self.workers = [self._prepare(rank) for rank in self.ranks]
        self.held: dict[Path, HeldShard] = {}
        """Slot file → the shard of the base in it, until this gang trains."""
        moved = inheritance.move(worker.slot_paths for worker in self.workers)
        for worker, shard in zip(self.workers, moved, strict=False):
            if shard is not None:
                worker.control.inherit_slot(1, shard.checkpoint, shard.size_bytes)
                self.held[shard.path] = shard
        for worker in self.workers:
            self._write_launch(worker, objects_url, objects_token, store_folder)

    @property
    def ranks(self) -> range:
        """The ranks that live here."""
        return range(self.action.first_rank, self.action.first_rank + self.action.count)

    def _prepare(self, rank: int) -> Worker:
        action, staging = self.action, self.settings.staging
        name = f"g{action.generation:08d}-r{rank:05d}"
        control_path = staging / f"{name}.control"
        return Worker(
            rank=rank,
            local_rank=rank - action.first_rank,
            control=ControlBlock.create(
                control_path, generation=action.generation, rank=rank, world_size=action.world_size
            ),
            slot_paths=(staging / f"{name}.slot-0", staging / f"{name}.slot-1"),
            launch_path=staging / f"{name}.launch.json",
            log_path=None if self.settings.attach_folder else self.settings.logs / f"{name}.log",
        )

    def _write_launch(self, worker: Worker, objects_url: str, objects_token: str, store_folder: Path | None) -> None:
        action = self.action
        Launch(
            job=self.settings.job,
            generation=action.generation,
            rank=worker.rank,
            world_size=action.world_size,
            local_world_size=action.count,
            base=action.base,
            control_path=worker.control.path,
            slot_paths=worker.slot_paths,
            objects_url=objects_url,
            token=objects_token,
            certificate=self.settings.identity.certificate if self.settings.identity else None,
            attached=self.settings.attach_folder is not None,
            agent_pid=os.getpid(),
            store_folder=store_folder,
            held=tuple(self.held.values()),
            held_elsewhere=any(holder.objects_url != objects_url for holder in action.holders),
        ).write(worker.launch_path)

    def launch(self, environment: Mapping[str, str], on_exit: Callable[[Worker], None]) -> None:
        """Start the user's command once per rank, with the variables that torchrun gives."""
        action = self.action
        for worker in self.workers:
            variables = {
                "RANK": worker.rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": action.world_size,
                "LOCAL_WORLD_SIZE": action.count,
                "GROUP_RANK": action.first_rank // action.count,
                "GROUP_WORLD_SIZE": action.world_size // action.count,
                "ROLE_RANK": worker.rank,
                "ROLE_WORLD_SIZE": action.world_size,
                "MASTER_ADDR": action.meeting_address,
                "MASTER_PORT": action.meeting_port,
                "TORCHELASTIC_RUN_ID": self.settings.job,
                "TORCHELASTIC_RESTART_COUNT": action.generation - 1,
                "ORCHESTRATOR_JOB": self.settings.job,
                "ORCHESTRATOR_GENERATION": action.generation,
                LAUNCH_VARIABLE: worker.launch_path,
            }
            strings = {name: str(value) for name, value in variables.items()}
            defaults = (
                {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} if action.count > 1 else {"PYTHONUNBUFFERED": "1"}
            )
            if action.meeting_address == "127.0.0.1":
                defaults["GLOO_SOCKET_IFNAME"] = "lo"
            self._runtime.launch(worker, self.settings.command, {**defaults, **environment, **strings}, on_exit)

    # -- from the supervisor -----------------------------------------------------------------------------

    def prepare(self, action: Prepare) -> None:
        """A proposal for every control block; lower ballots are refused."""
        self._let_go()
        if action.ballot > self.record.ballot:
            self._publish(replace(self.record, ballot=action.ballot, proposed_step=action.step))

    def _let_go(self) -> None:
        """A step is proposed, so every rank has restored its state: the base need not be held in memory any more."""
        for worker in self.workers:
            if self.held.pop(worker.slot_paths[1], None) is not None:
                worker.control.free_slot(1)

    def decide(self, action: Decide, deadline_seconds: float | None) -> None:
        """A decision; it takes the place of the proposal with that ballot."""
        if action.ballot != self.record.ballot:
            return
        self.deadline_seconds = deadline_seconds
        self._publish(
            replace(self.record, proposed_step=None, decided_step=action.step, mode=action.mode, absent=action.absent)
        )

    def _publish(self, record: Record) -> None:
        self.record = record
        for worker in self.workers:
            worker.control.write_record(record)

    def settled(self, action: Settled) -> None:
        """Tell workers that wait to leave how it ended."""
        outcome = LeaveOutcome.COMMITTED if action.committed else LeaveOutcome.ABANDONED
        for worker in self.workers:
            if action.step >= worker.control.outcome()[1]:  # an older step may be settled later
                worker.control.set_outcome(outcome, action.step)

    def release_workers(self, *, superseded: bool) -> None:
        """Attached workers: nothing more will happen; leave now or go on alone. Superseded: another run goes on."""
        outcome = LeaveOutcome.SUPERSEDED if superseded else LeaveOutcome.RELEASED
        for worker in self.workers:
            worker.control.set_outcome(outcome, worker.control.step or 0)

    def end(self) -> None:
        """SIGKILL all workers."""
        for worker in self.workers:
            self._runtime.end(worker)

    @property
    def alive(self) -> bool:
        """Whether any worker's exit is not confirmed yet."""
        return any(not worker.exited for worker in self.workers)

    @property
    def trains(self) -> bool:
        """Whether any worker lives that does not only wait for the word that it may go."""
        return any(not worker.exited and worker.control.phase is not WorkerPhase.LEFT for worker in self.workers)

    @property
    def in_training(self) -> bool:
        """Whether any worker is between two boundaries with more steps to come. Asked by other threads, too."""
        if self.record.mode is Mode.LEAVE:
            return False
        try:
            return any(not worker.exited and worker.control.phase is WorkerPhase.RUNNING for worker in self.workers)
        except ValueError:  # the blocks are closed: a newer generation has taken this one's place
            return False

    @property
    def waiting_for_echo(self) -> bool:
        """Whether an agreement is open, so that looking often pays."""
        if self.record.proposed_step is not None:
            return True
        decided = self.record.decided_step
        return decided is not None and any((worker.control.step or 0) <= decided for worker in self.workers)

    # -- to the supervisor -------------------------------------------------------------------------------

    def observe(self) -> Iterator[Event]:
        """Events for everything that changed in the control blocks since the last call."""
        progress: list[RankProgress] = []
        echoed: list[int] = []
        for worker in self.workers:
            image = worker.control.image()
            if worker.seen == (image, self.record):
                continue
            worker.seen = (image, self.record)
            yield from self._observe_start(worker)
            yield from self._observe_agreement(worker, echoed)
            # The step is read before the slots: whoever is seen past a step has what it staged there seen as well.
            moved = list(self._observe_progress(worker))
            yield from self._observe_slots(worker)
            yield from self._observe_loss(worker)
            progress.extend(moved)
        node, generation = self.settings.node, self.generation
        if progress:
            yield Progress(node=node, generation=generation, ranks=tuple(progress))
        if echoed:
            yield Echoed(node=node, generation=generation, ballot=self.record.ballot, ranks=tuple(echoed))

    def _observe_start(self, worker: Worker) -> Iterator[Event]:
        control, node = worker.control, self.settings.node
        info = control.info if "attached" not in worker.reported and control.phase in ATTACHED_PHASES else None
        if info is not None and worker.news("attached", 1):
            allowed = info.get("allowed_world_sizes")
            yield RankAttached(
                node=node,
                generation=self.generation,
                rank=worker.rank,
                pid=worker.pid,
                step=int(info["step"]),
                until=info.get("until"),
                allowed_world_sizes=None if allowed is None else tuple(allowed),
            )
        if worker.news("slot_bytes", control.slot_bytes):
            yield RankPlanned(
                node=node,
                generation=self.generation,
                rank=worker.rank,
                slot_bytes=control.slot_bytes,
                unique_bytes=control.unique_bytes,
                twins=control.twins,
            )
        if worker.news("signal", control.signal):
            name = signal.Signals(control.signal).name
            yield NoticeReceived(
                node=node,
                source=f"{name} to rank {worker.rank}",
                kind=NoticeKind.PREEMPT,
                remaining_seconds=self.settings.grace_seconds,
                notice_id=f"signal-{self.generation}-{worker.rank}-{control.signal}",
            )
        if worker.news("saves_asked", control.saves_asked):
            yield SaveAsked(node=node, generation=self.generation, rank=worker.rank)

    def _observe_agreement(self, worker: Worker, echoed: list[int]) -> Iterator[Event]:
        """Read the step before the echo: the worker writes them in the other order."""
        control, record = worker.control, self.record
        step, echo = control.step, control.echoed
        if record.proposed_step is not None and echo == record.ballot and worker.news("echo", echo):
            echoed.append(worker.rank)
        late = step is not None and record.proposed_step is not None and step >= record.proposed_step
        if late and record.ballot not in (echo, self.refused_ballot):
            self.refused_ballot = record.ballot
            yield Refused(
                node=self.settings.node,
                generation=self.generation,
                ballot=record.ballot,
                rank=worker.rank,
                step=step or 0,
            )
        passed = control.passed
        if passed is not None and worker.news("passed", passed + 1):
            yield Passed(node=self.settings.node, generation=self.generation, step=passed, rank=worker.rank)

    def _observe_slots(self, worker: Worker) -> Iterator[Event]:
        for slot in worker.control.slots():
            staged = slot.state is SlotState.STAGED and slot.generation == self.generation
            if staged and worker.news(f"staged-{slot.index}", slot.step + 1):
                yield Staged(
                    node=self.settings.node,
                    generation=self.generation,
                    step=slot.step,
                    rank=worker.rank,
                    size_bytes=slot.size_bytes,
                    seconds=slot.stage_seconds,
                )

    def _observe_loss(self, worker: Worker) -> Iterator[LossReported]:
        """What was found since the last look; of more than a few findings the oldest are lost."""
        control = worker.control
        count = control.loss_findings
        for number in range(worker.reported.get("loss", 0) + 1, count + 1):
            finding = control.loss_finding(number)
            if finding is None and number == count:
                worker.seen = None  # not whole yet: look again
                return
            worker.reported["loss"] = number
            if finding is not None:
                yield self._loss_report(worker.rank, finding)

    def _loss_report(self, rank: int, finding: Finding) -> LossReported:
        return LossReported(
            node=self.settings.node,
            generation=self.generation,
            rank=rank,
            step=finding.step,
            value=finding.value if math.isfinite(finding.value) else str(finding.value),
            usual=finding.usual,
            good_step=finding.good_step,
            problem=None if finding.state is LossState.WELL else finding.reason,
        )

    def _observe_progress(self, worker: Worker) -> Iterator[RankProgress]:
        progress = _progress(worker)
        if progress is None:
            return
        new = worker.news("step", progress.step + 1)
        if worker.news("free", progress.free_slots + 1) or new:
            yield progress

    def observe_pause(self, now_seconds: float) -> Iterator[Paused]:
        """The longest pause that any worker has announced, when that has changed."""
        until_ns = max((worker.control.pause_until_ns for worker in self.workers if not worker.exited), default=0)
        if until_ns == self._pause_until_ns:
            return
        self._pause_until_ns = until_ns
        remaining = max(until_ns / 1e9 - now_seconds, 0.0) if until_ns else None
        yield Paused(node=self.settings.node, generation=self.generation, remaining_seconds=remaining)

    def forget_progress(self) -> None:
        """Report every rank's step again at the next look."""
        for worker in self.workers:
            worker.reported.pop("step", None)
            worker.seen = None

    def forget_reports(self) -> None:
        """Report everything again at the next look."""
        for worker in self.workers:
            kept = {what: value for what, value in worker.reported.items() if what.startswith(("upload-", "followed-"))}
            worker.reported = kept
            worker.seen = None
        self.refused_ballot = 0
        self._pause_until_ns = 0

    def returned(self, saves: LocalSaves) -> GangReturned:
        """What a supervisor that was started again has to know before it takes this gang back."""
        staged: dict[int, tuple[int, ...]] = {}
        for worker in self.workers:
            for slot in worker.control.slots():
                if slot.state is SlotState.STAGED and slot.generation == self.generation:
                    staged[slot.step] = (*staged.get(slot.step, ()), worker.rank)
        action = self.action
        return GangReturned(
            node=self.settings.node,
            generation=self.generation,
            world_size=action.world_size,
            first_rank=action.first_rank,
            count=action.count,
            base=action.base,
            progress=tuple(found for worker in self.workers if (found := _progress(worker)) is not None),
            ballot=self.record.ballot,
            proposed_step=self.record.proposed_step,
            decided=saves.undecided(staged),
            ended=any(worker.ended_by_us for worker in self.workers),
            committed_step=saves.committed_step,
        )

    def worker_of(self, rank: int) -> Worker:
        """The worker of a rank that lives here."""
        return self.workers[rank - self.action.first_rank]

    def follow(self, worker: Worker, index: int, step: int) -> Callable[[], tuple[int, bool]]:
        """A question for later: (how many bytes of the step's shard are in this slot, whether that is all).

        It raises StoreError if the step is not there any more, or will not be completed.
        """
        place = CheckpointId(generation=self.generation, step=step)
        key = fmt.shard_key(place, worker.rank, self.action.world_size)

        def ask() -> tuple[int, bool]:
            try:
                slot, there_bytes = worker.control.slot(index), worker.control.there_bytes(index, step)
                passed = worker.control.passed
            except ValueError:  # the block is closed: a newer generation has taken this one's place
                raise StoreError(key, "its generation is over: no receipt is written") from None
            if (slot.generation, slot.step) == (self.generation, step):
                if slot.state is SlotState.STAGED:
                    return slot.size_bytes, True
                if slot.state is SlotState.WRITING and (passed is None or passed < step):
                    return there_bytes, False
            raise StoreError(key, "its slot was used again, or staging was given up: no receipt is written")

        return ask

    def exit_event(self, worker: Worker) -> RankExited:
        """What is known of a worker that is gone."""
        phase = worker.control.phase
        verdict = {
            WorkerPhase.FINISHED: Verdict.FINISHED,
            WorkerPhase.REFUSED: Verdict.REFUSED,
            WorkerPhase.UNREADABLE: Verdict.UNREADABLE,
        }.get(phase, Verdict.NONE)
        code = worker.exit_code
        if code is None and phase is WorkerPhase.FINISHED:
            code = 0
        return RankExited(
            node=self.settings.node,
            generation=self.generation,
            rank=worker.rank,
            exit_code=code,
            attached=worker.control.info is not None,
            verdict=verdict,
            ended_by_us=worker.ended_by_us,
            evidence=processes.evidence(worker),
            memory_kills=worker.memory_kills if worker.exited else None,
        )

    # -- slots -------------------------------------------------------------------------------------------

    def slots_being_staged(self, step: int) -> Iterator[tuple[Worker, int]]:
        """(worker, slot index) of every slot in which this step is being staged."""
        for worker in self.workers:
            for slot in worker.control.slots():
                if slot.state is SlotState.WRITING and (slot.generation, slot.step) == (self.generation, step):
                    yield worker, slot.index

    def staged_slots(self, step: int) -> Iterator[tuple[Worker, int, int]]:
        """(worker, slot index, shard bytes) of every slot that holds this step."""
        for worker in self.workers:
            for slot in worker.control.slots():
                if slot.state is SlotState.STAGED and (slot.generation, slot.step) == (self.generation, step):
                    yield worker, slot.index, slot.size_bytes

    def free(self, may_free: Callable[[int], bool], reading: Callable[[Path], bool]) -> None:
        """Free the slots that nobody reads: of staged steps that may be freed, and those that were given up.

        A worker reports that it passed a step only once nothing of it writes that step's slot any more.
        """
        for worker in self.workers:
            passed = worker.control.passed
            for slot in worker.control.slots() if worker.control.holds_any else ():
                ours = slot.generation == self.generation
                staged = slot.state is SlotState.STAGED and ours and may_free(slot.step)
                given_up = slot.state is SlotState.WRITING and passed is not None and slot.step <= passed
                if (staged or given_up) and not reading(worker.slot_paths[slot.index]):
                    worker.control.free_slot(slot.index)

    def staged_shard(self, checkpoint: CheckpointId, rank: int) -> tuple[Path, int] | None:
        """Where a shard is in this node's memory (slot file, shard bytes), whether this gang staged or inherited it."""
        if checkpoint.generation == self.generation:
            slots = self.staged_slots(checkpoint.step)
            return next(((one.slot_paths[index], size) for one, index, size in slots if one.rank == rank), None)
        held = list(self.held.values())  # asked from other threads
        found = (shard for shard in held if (shard.checkpoint, shard.rank) == (checkpoint, rank))
        return next(((shard.path, shard.size_bytes) for shard in found), None)

    def holder_url(self, rank: int) -> str | None:
        """The other node that may have the base's shard of a rank in its memory."""
        holders = (one for one in self.action.holders if one.first_rank <= rank < one.first_rank + one.count)
        return next((one.objects_url for one in holders), None)

    def hand_down(self, base: CheckpointId | None, reading: Callable[[Path], bool]) -> Inheritance:
        """This gang is over: remove its files but for the slots, and say what is in those."""
        self.closed = True
        held: list[HeldShard] = []
        spare: list[Path] = []
        for worker in self.workers:
            for slot, path in zip(worker.control.slots(), worker.slot_paths, strict=True):
                shard = self._shard_in(worker, slot, path)
                if not is_file(path):
                    remove(path)
                elif shard is not None and shard.checkpoint == base:
                    held.append(shard)
                elif not reading(path):
                    spare.append(path)
                else:
                    remove(path)
            worker.control.close()
            for path in (worker.control.path, worker.control.stacks_path, worker.launch_path):
                path.unlink(missing_ok=True)
        return Inheritance(held=tuple(held), spare=tuple(spare))

    def _shard_in(self, worker: Worker, slot: Slot, path: Path) -> HeldShard | None:
        if slot.state is not SlotState.STAGED or slot.generation != self.generation:
            return self.held.get(path)
        checkpoint = CheckpointId(generation=slot.generation, step=slot.step)
        return HeldShard(checkpoint=checkpoint, rank=worker.rank, path=path, size_bytes=slot.size_bytes)


def _progress(worker: Worker) -> RankProgress | None:
    """What a worker has published, if anything."""
    control = worker.control
    step = control.step
    if step is None:
        return None
    free = sum(slot.state is SlotState.FREE for slot in control.slots())
    return RankProgress(rank=worker.rank, step=step, step_seconds=control.step_seconds, free_slots=free)

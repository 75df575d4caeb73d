"""A node's ranks as their agent sees them, and the whole agreement between real boundaries and a real gang.

No worker process is started: threads or the tests themselves write the workers' words.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.agent.gang import LocalGang
from orchestrator.agent.inheritance import Inheritance
from orchestrator.agent.workers import ProcessRuntime
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.slots import ControlBlock, LeaveOutcome, Record, SlotState, WorkerPhase
from orchestrator.core.messages import (
    Decide,
    Echoed,
    Event,
    LaunchWorkers,
    LossReported,
    Mode,
    NoticeReceived,
    Passed,
    Prepare,
    Progress,
    RankAttached,
    RankPlanned,
    Refused,
    SaveAsked,
    Settled,
    Staged,
    Verdict,
)
from orchestrator.errors import StoreError
from orchestrator.health.loss import History, judge
from orchestrator.training.boundary import Boundary, Finish, Order, Passing, There
from tests.agent.settings import settings_in

RANKS = 3
GENERATION = 4
STEPS_AGREED = 60


def gang_in(folder: Path, count: int = RANKS, first_rank: int = 0) -> LocalGang:
    folder.mkdir(exist_ok=True)
    action = LaunchWorkers(
        node="node-1",
        generation=GENERATION,
        world_size=count + first_rank,
        first_rank=first_rank,
        count=count,
        base=None,
        meeting_address="127.0.0.1",
        meeting_port=1,
    )
    return LocalGang(
        settings_in(folder, workers=count),
        ProcessRuntime(),
        action,
        "http://127.0.0.1:2",
        "objects token",
        inheritance=Inheritance(),
    )


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[LocalGang]:
    made = gang_in(tmp_path / "staging")
    yield made
    made.hand_down(None, lambda _: True)


def prepare(gang: LocalGang, ballot: int, step: int) -> None:
    gang.prepare(Prepare(node="node-1", generation=GENERATION, ballot=ballot, step=step))


def decide(gang: LocalGang, ballot: int, step: int, mode: Mode = Mode.STAY, absent: tuple[int, ...] = ()) -> None:
    action = Decide(
        node="node-1",
        generation=GENERATION,
        ballot=ballot,
        step=step,
        mode=mode,
        absent=absent,
        remaining_seconds=None,
    )
    gang.decide(action, None)


def settle(gang: LocalGang, step: int, committed: bool) -> None:
    gang.settled(Settled(node="node-1", generation=GENERATION, step=step, committed=committed))


def seen(gang: LocalGang, kind: type[Any]) -> list[Any]:
    """New events of one kind."""
    return [event for event in gang.observe() if isinstance(event, kind)]


# ------------------------------------------------------------------------------------------------------- files


def test_each_rank_gets_a_launch_file_and_a_control_block(tmp_path: Path) -> None:
    gang = gang_in(tmp_path, count=2, first_rank=2)
    for rank, worker in zip((2, 3), gang.workers, strict=True):
        place = Launch.read(worker.launch_path)
        assert (place.rank, place.world_size, place.local_world_size, place.generation) == (rank, 4, 2, GENERATION)
        assert (worker.rank, worker.local_rank) == (rank, rank - 2)
        block = ControlBlock.open(place.control_path)
        assert (block.rank, block.world_size, block.generation) == (rank, 4, GENERATION)
        block.close()
        assert place.slot_paths == worker.slot_paths
        assert worker.launch_path.stat().st_mode & 0o777 == 0o600
    for worker in gang.workers:
        worker.slot_paths[0].write_bytes(b"staged")
    gang.hand_down(None, lambda _: True)
    assert [path.name for path in tmp_path.iterdir()] == []


# ------------------------------------------------------------------------------------------------------ records


def test_a_lower_ballot_is_refused_and_a_repeat_changes_nothing(gang: LocalGang) -> None:
    prepare(gang, 2, 10)
    before = gang.workers[0].control.selector
    prepare(gang, 1, 20)
    prepare(gang, 2, 30)
    assert gang.workers[0].control.selector == before
    assert gang.record == Record(ballot=2, proposed_step=10)


def test_a_decision_takes_the_place_of_its_own_proposal_only(gang: LocalGang) -> None:
    prepare(gang, 1, 10)
    prepare(gang, 2, 20)
    decide(gang, 1, 10)
    assert gang.record == Record(ballot=2, proposed_step=20)
    decide(gang, 2, 20, Mode.LEAVE, (1,))
    for worker in gang.workers:
        assert worker.control.read_record() == Record(ballot=2, decided_step=20, mode=Mode.LEAVE, absent=(1,))


def test_a_decision_stands_beside_the_next_proposal(gang: LocalGang) -> None:
    """Decisions are never withdrawn by what is proposed after them."""
    prepare(gang, 1, 10)
    decide(gang, 1, 10)
    prepare(gang, 2, 30)
    assert gang.workers[0].control.read_record() == Record(ballot=2, proposed_step=30, decided_step=10)


def test_the_outcome_is_told_with_its_step_and_never_goes_back(gang: LocalGang) -> None:
    """An upload of an older step may end after the one at which the workers leave."""
    settle(gang, 40, committed=True)
    settle(gang, 30, committed=False)
    assert [worker.control.outcome() for worker in gang.workers] == [(LeaveOutcome.COMMITTED, 40)] * RANKS
    settle(gang, 50, committed=False)
    assert gang.workers[0].control.outcome() == (LeaveOutcome.ABANDONED, 50)
    gang.release_workers(superseded=False)
    assert gang.workers[0].control.outcome()[0] is LeaveOutcome.RELEASED
    gang.release_workers(superseded=True)
    assert gang.workers[0].control.outcome()[0] is LeaveOutcome.SUPERSEDED


# --------------------------------------------------------------------------------------------------- observing


def test_nothing_is_seen_before_the_workers_say_something(gang: LocalGang) -> None:
    assert list(gang.observe()) == []


def test_an_attached_worker_is_reported_once(gang: LocalGang) -> None:
    control = gang.workers[1].control
    control.set_phase(WorkerPhase.RESTORING)
    control.set_info({"step": 7, "until": 100, "allowed_world_sizes": [1, 2]})
    assert seen(gang, RankAttached) == []  # restoring is not attached
    control.set_phase(WorkerPhase.RUNNING)
    (event,) = seen(gang, RankAttached)
    assert (event.rank, event.step, event.until, event.allowed_world_sizes) == (1, 7, 100, (1, 2))
    assert seen(gang, RankAttached) == []


def test_plans_saves_and_signals_are_reported_once_each(gang: LocalGang) -> None:
    control = gang.workers[0].control
    control.set_unique_bytes(512)
    control.set_twins([[0, 2]])
    control.set_slot_bytes(8192)
    control.ask_save()
    control.note_signal(15)
    events = list(gang.observe())
    planned = [event for event in events if isinstance(event, RankPlanned)]
    assert [(event.slot_bytes, event.unique_bytes, event.twins) for event in planned] == [(8192, 512, ((0, 2),))]
    assert [event.rank for event in events if isinstance(event, SaveAsked)] == [0]
    (notice,) = [event for event in events if isinstance(event, NoticeReceived)]
    assert notice.source == "SIGTERM to rank 0"
    assert list(gang.observe()) == []
    control.ask_save()
    assert len(seen(gang, SaveAsked)) == 1


def test_what_was_found_about_the_loss_is_reported_once_and_to_a_new_supervisor_again(gang: LocalGang) -> None:
    control = gang.workers[1].control
    history = History()
    for step, value in enumerate([2.0, math.nan, math.nan, *[2.25] * 5]):
        history, finding = judge(history, step=step, value=value)
        if finding is not None:
            control.tell_loss(finding)
    trouble, well = told = seen(gang, LossReported)
    assert (trouble.rank, trouble.step, trouble.value, trouble.usual, trouble.good_step) == (1, 1, "nan", 2.0, 0)
    assert trouble.problem == "the loss is nan at step 1; 2 is usual"
    assert (well.rank, well.step, well.value, well.problem) == (1, 7, 2.25, None)
    assert seen(gang, LossReported) == []
    gang.forget_reports()
    assert seen(gang, LossReported) == told


def test_a_finding_that_is_not_whole_yet_is_reported_later(gang: LocalGang, monkeypatch: pytest.MonkeyPatch) -> None:
    control = gang.workers[0].control
    _, finding = judge(History(), step=4, value=math.inf)
    assert finding is not None
    control.tell_loss(finding)
    with monkeypatch.context() as patch:
        patch.setattr(ControlBlock, "loss_finding", lambda self, number: None)
        assert seen(gang, LossReported) == []
    assert [(event.step, event.value) for event in seen(gang, LossReported)] == [(4, "inf")]


def test_progress_comes_for_all_ranks_that_moved_in_one_event(gang: LocalGang) -> None:
    for worker in gang.workers[:2]:
        worker.control.set_step_time(250_000_000)
        worker.control.publish(5, 0)
    (event,) = seen(gang, Progress)
    assert [(one.rank, one.step, one.step_seconds, one.free_slots) for one in event.ranks] == [
        (0, 5, 0.25, 2),
        (1, 5, 0.25, 2),
    ]
    gang.workers[1].control.publish(6, 0)
    (event,) = seen(gang, Progress)
    assert [(one.rank, one.step) for one in event.ranks] == [(1, 6)]
    assert seen(gang, Progress) == []


def test_step_zero_is_progress_and_no_step_is_none(gang: LocalGang) -> None:
    gang.workers[0].control.publish(0, 0)
    (event,) = seen(gang, Progress)
    assert [(one.rank, one.step) for one in event.ranks] == [(0, 0)]


def test_echoes_of_this_ballot_are_reported_once(gang: LocalGang) -> None:
    prepare(gang, 3, 10)
    gang.workers[0].control.echo(2)  # of an older one
    gang.workers[1].control.echo(3)
    gang.workers[2].control.echo(3)
    (event,) = seen(gang, Echoed)
    assert (event.ballot, event.ranks) == (3, (1, 2))
    gang.workers[0].control.echo(3)
    (event,) = seen(gang, Echoed)
    assert event.ranks == (0,)
    assert seen(gang, Echoed) == []


@pytest.mark.parametrize("step", [10, 11, 50])
def test_f1_a_step_without_its_echo_is_refused_once(gang: LocalGang, step: int) -> None:
    """F1, W6: one rank that cannot keep to the step is enough to need another."""
    gang.workers[0].control.publish(step, 0)
    gang.workers[1].control.publish(step, 0)
    prepare(gang, 1, 10)
    (event,) = seen(gang, Refused)
    assert (event.ballot, event.rank, event.step) == (1, 0, step)
    assert seen(gang, Refused) == []
    prepare(gang, 2, 10)
    (event,) = seen(gang, Refused)
    assert event.ballot == 2


def test_a_step_with_its_echo_is_not_refused(gang: LocalGang) -> None:
    prepare(gang, 1, 10)
    for worker in gang.workers:
        worker.control.echo(1)
        worker.control.publish(10, 0)
    assert seen(gang, Refused) == []


class Racing(ControlBlock):
    """The worker echoes and publishes step 10 while the agent is between two reads."""

    raced = False

    def _race(self) -> None:
        if not self.raced:
            self.raced = True
            self.echo(1)
            self.publish(10, 0)

    @property
    def step(self) -> int | None:
        found = super().step
        self._race()
        return found

    @property
    def echoed(self) -> int:
        found = super().echoed
        self._race()
        return found


def test_a_worker_that_passes_between_two_reads_is_not_refused(gang: LocalGang) -> None:
    """The step is read before the echo, as they are written the other way round."""
    prepare(gang, 1, 10)
    worker = gang.workers[0]
    worker.control.close()
    worker.control = Racing.open(worker.control.path)
    events = list(gang.observe())
    assert [event.ranks for event in events if isinstance(event, Echoed)] == [(0,)]
    assert [event for event in events if isinstance(event, Refused)] == []


def test_passed_steps_are_reported_once(gang: LocalGang) -> None:
    gang.workers[2].control.report_passed(0)
    (event,) = seen(gang, Passed)
    assert (event.rank, event.step) == (2, 0)
    assert seen(gang, Passed) == []


def test_staged_slots_are_reported_once_and_freed_by_the_rules(gang: LocalGang) -> None:
    control = gang.workers[0].control
    control.start_slot(0, GENERATION, 10)
    assert not seen(gang, Staged)
    control.finish_slot(0, GENERATION, 10, 4096, 1_000_000)
    (event,) = seen(gang, Staged)
    assert (event.rank, event.step, event.size_bytes, event.seconds) == (0, 10, 4096, 0.001)
    assert seen(gang, Staged) == []
    assert [(worker.rank, slot, size) for worker, slot, size in gang.staged_slots(10)] == [(0, 0, 4096)]
    assert list(gang.staged_slots(11)) == []
    gang.free(lambda step: False, lambda path: False)
    gang.free(lambda step: True, lambda path: path == gang.workers[0].slot_paths[0])
    assert {slot.state for slot in control.slots()} == {SlotState.STAGED, SlotState.FREE}
    gang.free(lambda step: step == 10, lambda path: False)
    assert [slot.state for slot in control.slots()] == [SlotState.FREE, SlotState.FREE]
    control.start_slot(0, GENERATION, 20)
    control.finish_slot(0, GENERATION, 20, 4096, 0)
    assert [event.step for event in seen(gang, Staged)] == [20]


def test_a_slot_that_is_being_written_is_never_freed_by_looking(gang: LocalGang) -> None:
    gang.workers[0].control.start_slot(0, GENERATION, 10)
    gang.free(lambda step: True, lambda path: False)
    assert gang.workers[0].control.slot(0).state is SlotState.WRITING


def test_a_slot_whose_step_was_passed_is_free_again(gang: LocalGang) -> None:
    """A copy that was no good: its worker has said so, and writes there no more. A later copy is under way."""
    control = gang.workers[0].control
    control.start_slot(0, GENERATION, 10)
    control.report_passed(10)
    control.start_slot(1, GENERATION, 20)
    gang.free(lambda step: False, lambda path: False)
    assert [slot.state for slot in control.slots()] == [SlotState.FREE, SlotState.WRITING]


def test_slots_of_another_generation_are_ignored(gang: LocalGang) -> None:
    """F80, F93: what an older generation staged is not this one's."""
    gang.workers[0].control.finish_slot(0, GENERATION - 1, 10, 4096, 0)
    assert seen(gang, Staged) == []
    assert list(gang.staged_slots(10)) == []


@pytest.mark.parametrize(
    ("phase", "verdict"),
    [
        (WorkerPhase.NOT_ATTACHED, Verdict.NONE),
        (WorkerPhase.RUNNING, Verdict.NONE),
        (WorkerPhase.FINISHED, Verdict.FINISHED),
        (WorkerPhase.REFUSED, Verdict.REFUSED),
        (WorkerPhase.UNREADABLE, Verdict.UNREADABLE),
        (WorkerPhase.LEFT, Verdict.NONE),
    ],
)
def test_an_exit_carries_what_the_worker_said_last(gang: LocalGang, phase: WorkerPhase, verdict: Verdict) -> None:
    worker = gang.workers[0]
    worker.control.set_phase(phase)
    event = gang.exit_event(worker)
    assert event.verdict is verdict
    assert event.attached is False
    assert event.exit_code == (0 if phase is WorkerPhase.FINISHED else None)


def test_looking_often_pays_only_while_something_is_agreed(gang: LocalGang) -> None:
    found = [gang.waiting_for_echo]
    prepare(gang, 1, 10)
    found.append(gang.waiting_for_echo)
    decide(gang, 1, 10)
    found.append(gang.waiting_for_echo)
    for worker in gang.workers:
        worker.control.publish(11, 0)
    found.append(gang.waiting_for_echo)
    assert found == [False, True, True, False]


def test_uploads_give_way_only_to_workers_that_train(gang: LocalGang) -> None:
    found = {}
    for phase in WorkerPhase:
        gang.workers[1].control.set_phase(phase)
        found[phase] = gang.in_training
    assert [phase for phase, in_training in found.items() if in_training] == [WorkerPhase.RUNNING]
    gang.workers[1].control.set_phase(WorkerPhase.RUNNING)
    prepare(gang, 1, 10)
    decide(gang, 1, 10, Mode.LEAVE)
    assert not gang.in_training
    other = gang_in(gang.settings.staging / "other")
    other.hand_down(None, lambda _: True)
    assert not other.in_training


# --------------------------------------------------------------------------------------- the whole agreement


class Noting:
    """A stager that only notes the steps."""

    def __init__(self, staged: list[int]) -> None:
        self.staged = staged

    def stage(self, order: Order, finish: Finish, there: There) -> None:
        self.staged.append(order.step)
        finish(4096, 1000)

    def join(self) -> None:
        """Nothing is ever under way."""


class Trainer(threading.Thread):
    """A rank that trains at its own pace, through the real boundary over its own mapping of the control block."""

    def __init__(self, worker_launch: Path, seed: int) -> None:
        super().__init__(daemon=True)
        place = Launch.read(worker_launch)
        self.control = ControlBlock.open(place.control_path)
        self.staged: list[int] = []
        self.boundary = Boundary(self.control, place, Noting(self.staged))
        self.draw = random.Random(seed)
        self.step = 0
        self.stop = threading.Event()

    def run(self) -> None:
        self.boundary.start()
        while not self.stop.is_set():
            time.sleep(self.draw.choice([0.0, 0.0, 0.0002, 0.001]))
            self.step += 1
            if self.boundary.at(self.step, final=False) is Passing.LEAVE:
                return


class Coordinator:
    """Proposes close by, often too late for some rank; decides when all have echoed and none has refused."""

    def __init__(self, gang: LocalGang, seed: int) -> None:
        self.gang = gang
        self.draw = random.Random(seed)
        self.ballot = 0
        self.highest = 0
        self.proposed: int | None = None
        self.decided: list[int] = []
        self.staged: dict[int, set[int]] = {}
        self.echoes: set[int] = set()
        self.refusals = 0
        self.open = False

    def propose(self) -> None:
        self.ballot += 1
        self.proposed = max(1, self.highest + self.draw.randrange(-1, 5))
        self.echoes = set()
        prepare(self.gang, self.ballot, self.proposed)

    def take(self, event: Event) -> None:
        match event:
            case Progress():
                self.highest = max(self.highest, *(rank.step for rank in event.ranks))
            case Echoed() if event.ballot == self.ballot:
                self.echoes |= set(event.ranks)
            case Refused() if event.ballot == self.ballot and self.proposed is not None:
                self.refusals += 1
                self.highest = max(self.highest, event.step)
                self.propose()
            case Staged():
                self.staged.setdefault(event.step, set()).add(event.rank)
            case Passed():
                raise AssertionError(f"rank {event.rank} passed step {event.step}")

    def turn(self, last: bool) -> bool:
        """One look; True when the last step is decided."""
        for event in self.gang.observe():
            self.take(event)
        for step, ranks in self.staged.items():
            if len(ranks) == RANKS:
                self.gang.free(lambda held, step=step: held == step, lambda path: False)  # type: ignore[misc]
        waiting = bool(self.decided) and len(self.staged.get(self.decided[-1], ())) < RANKS
        if waiting:
            return False
        if self.proposed is None:
            self.propose()
        elif len(self.echoes) == RANKS:
            self.decided.append(self.proposed)
            decide(self.gang, self.ballot, self.proposed, Mode.LEAVE if last else Mode.STAY)
            self.proposed = None
            return last
        return False


def test_f1_all_ranks_stage_exactly_the_decided_steps(gang: LocalGang, seed: int) -> None:
    """F1, F45, W6: free-running ranks, proposals that come too late, refusals; never a torn step, never a lost one."""
    trainers = [Trainer(worker.launch_path, seed + worker.rank) for worker in gang.workers]
    coordinator = Coordinator(gang, seed)
    for trainer in trainers:
        trainer.start()
    try:
        until = time.monotonic() + 20
        while not coordinator.turn(last=len(coordinator.decided) >= STEPS_AGREED):
            assert time.monotonic() < until, f"only {len(coordinator.decided)} steps were agreed"
            time.sleep(0.0002)
        for trainer in trainers:
            trainer.join(10)
            assert not trainer.is_alive()
    finally:
        for trainer in trainers:
            trainer.stop.set()
            trainer.join(15)
            trainer.control.close()
    for trainer in trainers:
        assert trainer.staged == coordinator.decided
    assert len(coordinator.decided) == STEPS_AGREED + 1
    assert coordinator.refusals > 0


def test_an_upload_that_outlives_its_generation_is_told_that_its_slot_is_gone(gang: LocalGang) -> None:
    """The next generation's launch closes the control blocks while an upload of the old one still runs."""
    there = gang.follow(gang.workers[0], 0, 7)
    gang.workers[0].control.close()
    with pytest.raises(StoreError, match="generation is over"):
        there()
    gang.workers[0].control = ControlBlock.open(gang.workers[0].control.path)


def test_a_shard_is_followed_from_its_first_byte_to_its_last(gang: LocalGang) -> None:
    worker = gang.workers[1]
    there = gang.follow(worker, 0, 7)
    worker.control.start_slot(0, GENERATION, 7)
    assert list(gang.slots_being_staged(7)) == [(worker, 0)]
    assert list(gang.slots_being_staged(6)) == []
    assert there() == (0, False)
    worker.control.advance_slot(0, 7, 4096)
    assert there() == (4096, False)
    worker.control.finish_slot(0, GENERATION, 7, 5000, 1)
    assert there() == (5000, True)
    assert list(gang.slots_being_staged(7)) == []


def passed(control: ControlBlock) -> None:
    control.report_passed(7)


def freed(control: ControlBlock) -> None:
    control.free_slot(0)


def used_again(control: ControlBlock) -> None:
    control.free_slot(0)
    control.start_slot(0, GENERATION, 9)
    control.advance_slot(0, 9, 1 << 20)


@pytest.mark.parametrize("end", [passed, freed, used_again])
def test_a_shard_that_will_not_be_completed_is_not_waited_for(
    gang: LocalGang, end: Callable[[ControlBlock], None]
) -> None:
    """The worker gave it up, or is gone; another step's bytes are never taken for this one's."""
    control = gang.workers[0].control
    there = gang.follow(gang.workers[0], 0, 7)
    control.start_slot(0, GENERATION, 7)
    control.advance_slot(0, 7, 4096)
    assert there() == (4096, False)
    end(control)
    with pytest.raises(StoreError, match="no receipt"):
        there()


def test_a_slot_that_was_given_up_is_not_free_while_it_is_read(gang: LocalGang) -> None:
    control = gang.workers[0].control
    control.start_slot(0, GENERATION, 7)
    control.report_passed(7)
    gang.free(lambda step: False, lambda path: True)
    assert control.slot(0).state is SlotState.WRITING
    gang.free(lambda step: False, lambda path: False)
    assert control.slot(0).state is SlotState.FREE


def test_a_worker_that_failed_where_its_output_found_no_space_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it printed last is not in the log: without this the sentence would be that it printed nothing."""
    gang = gang_in(tmp_path / "staging", count=1)
    worker = gang.workers[0]
    assert worker.log_path is not None
    worker.log_path.parent.mkdir(parents=True, exist_ok=True)
    worker.log_path.write_text("step 3")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    worker.exit_code = 0
    assert gang.exit_event(worker).evidence == "step 3"
    worker.exit_code = 1
    said = f"no space is left in {worker.log_path.parent}, where its output goes"
    assert gang.exit_event(worker).evidence.splitlines() == ["step 3", said]

"""A worker's step boundary: what is written before what, when it waits, when it stages, and when it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.checkpoint import slots
from orchestrator.checkpoint.slots import ControlBlock, Record, SlotState, WorkerPhase
from orchestrator.core.messages import Mode
from orchestrator.training.boundary import FINAL_WAIT_SECONDS, Boundary, Finish, Order, Passing, There
from tests.training.agents import FakeTime
from tests.training.states import launch

DECISION_WAIT, SLOT_WAIT = 10.0, 60.0


class Recorded(ControlBlock):
    """The worker's mapping, which remembers what was written in which order."""

    log: list[str]

    def echo(self, ballot: int) -> None:
        super().echo(ballot)
        self.log.append(f"echo {ballot}")

    def publish(self, step: int, now_ns: int) -> None:
        super().publish(step, now_ns)
        self.log.append(f"publish {step}")

    def report_passed(self, step: int) -> None:
        super().report_passed(step)
        self.log.append(f"passed {step}")

    def start_slot(self, index: int, generation: int, step: int) -> None:
        super().start_slot(index, generation, step)
        self.log.append(f"writing {index}")

    def finish_slot(self, index: int, generation: int, step: int, size_bytes: int, stage_ns: int) -> None:
        super().finish_slot(index, generation, step, size_bytes, stage_ns)
        self.log.append(f"staged {index}")


class Scene:
    """A worker at its boundary and the agent's mapping of the same block."""

    def __init__(self, folder: Path, time: FakeTime) -> None:
        self.time = time
        self.place = launch(
            folder, rank=1, world_size=4, decision_wait_seconds=DECISION_WAIT, slot_wait_seconds=SLOT_WAIT
        )
        self.agent = ControlBlock.create(self.place.control_path, generation=1, rank=1, world_size=4)
        worker = Recorded.open(self.place.control_path)
        assert isinstance(worker, Recorded)
        worker.log = []
        self.worker = worker
        self.staged: list[tuple[int, int, tuple[int, ...]]] = []
        self.orders: list[Order] = []
        self.stage_seconds = 0.0
        self.overlaps = False
        self.size_bytes: int | None = 4096
        self.under_way: list[Callable[[], None]] = []
        self.boundary = Boundary(self.worker, self.place, self, now_ns=time.monotonic_ns, sleep=time.sleep)
        self.boundary.start()

    def stage(self, order: Order, finish: Finish, there: There) -> None:
        assert not self.under_way
        there(1000 + order.step)
        self.orders.append(order)
        self.staged.append((order.slot, order.step, order.absent))
        assert self.agent.phase is WorkerPhase.STAGING
        self.time.now += self.stage_seconds
        self.under_way.append(lambda: finish(self.size_bytes, int(self.stage_seconds * 1e9)))
        if not (self.overlaps and order.may_overlap):
            self.join()

    def join(self) -> None:
        while self.under_way:
            self.under_way.pop()()

    def at(self, step: int, *, final: bool = False) -> Passing:
        self.worker.log.clear()
        return self.boundary.at(step, final=final)

    def when_waiting(self, *acts: Callable[[], None]) -> None:
        """Acts of the agent, one each time the worker sleeps."""
        remaining = list(acts)
        self.time.while_waiting = lambda: remaining.pop(0)() if remaining else None

    def close(self) -> None:
        self.agent.close()
        self.worker.close()


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def scene(tmp_path: Path, time: FakeTime) -> Iterator[Scene]:
    made = Scene(tmp_path, time)
    yield made
    made.close()


def nothing() -> None:
    """The agent does nothing this time."""


# ------------------------------------------------------------------------------------------- uneventful, echoing


def test_without_a_proposal_a_boundary_only_publishes(scene: Scene) -> None:
    for step in range(1, 5):
        assert scene.at(step) is Passing.GO_ON
        assert scene.worker.log == [f"publish {step}"]
    assert scene.time.sleeps == 0
    assert scene.agent.step == 4


@pytest.mark.parametrize("step", [3, 9])
def test_the_echo_is_written_before_the_step(scene: Scene, step: int) -> None:
    """F1: an agent that sees the step also sees the echo; else it would refuse what the worker keeps to."""
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.at(step)
    assert scene.worker.log == ["echo 1", f"publish {step}"]


def test_at_the_proposed_step_too(scene: Scene) -> None:
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.at(10)
    assert scene.worker.log[:2] == ["echo 1", "publish 10"]


@pytest.mark.parametrize("step", [11, 12, 100])
def test_a_proposal_that_comes_too_late_is_not_echoed(scene: Scene, step: int) -> None:
    """F1, W6: no rank promises what it has passed; the agent sees the step without the echo, and refuses."""
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    assert scene.at(step) is Passing.GO_ON
    assert scene.worker.log == [f"publish {step}"]
    assert scene.agent.echoed == 0
    assert scene.time.sleeps == 0


def test_a_proposal_published_between_reading_and_publishing_is_not_echoed(scene: Scene) -> None:
    """The race that the order of the two stores decides: step 10 is there, the echo is not, so the agent refuses."""
    read = scene.boundary._read

    def read_then_agent_writes() -> None:
        read()
        scene.agent.write_record(Record(ballot=1, proposed_step=10))

    scene.boundary._read = read_then_agent_writes  # type: ignore[method-assign]
    assert scene.at(10) is Passing.GO_ON
    assert (scene.agent.step, scene.agent.echoed) == (10, 0)


# ----------------------------------------------------------------------------------------- at the proposed step


@pytest.mark.parametrize(("mode", "passing"), [(Mode.STAY, Passing.STAGED), (Mode.LEAVE, Passing.LEAVE)])
def test_the_decision_is_awaited_and_kept(scene: Scene, mode: Mode, passing: Passing) -> None:
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    decision = Record(ballot=1, decided_step=10, mode=mode, absent=(0, 3))
    scene.when_waiting(nothing, lambda: scene.agent.write_record(decision))
    assert scene.at(10) is passing
    assert scene.worker.log == ["echo 1", "publish 10", "echo 1", "writing 0", "staged 0"]
    assert scene.staged == [(0, 10, (0, 3))]
    slot = scene.agent.slot(0)
    assert (slot.state, slot.generation, slot.step, slot.size_bytes) == (SlotState.STAGED, 1, 10, 4096)
    assert scene.agent.phase is WorkerPhase.RUNNING


def test_a_decision_that_is_there_already_is_kept_at_once(scene: Scene) -> None:
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.at(8)
    scene.agent.write_record(Record(ballot=1, decided_step=10))
    assert scene.at(9) is Passing.GO_ON
    assert scene.at(10) is Passing.STAGED
    assert scene.time.sleeps == 0
    assert scene.at(11) is Passing.GO_ON
    assert scene.staged == [(0, 10, ())]


def test_without_a_decision_the_worker_goes_on_and_says_so(scene: Scene) -> None:
    """F100: every wait has a limit. The step is reported as passed, so nobody takes it for staged."""
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    began = scene.time.now
    assert scene.at(10) is Passing.GO_ON
    assert DECISION_WAIT < scene.time.now - began < DECISION_WAIT + 0.1
    assert scene.worker.log[-1] == "passed 10"
    assert scene.agent.passed == 10
    assert scene.staged == []
    assert scene.agent.phase is WorkerPhase.RUNNING


def test_a_decision_that_comes_after_that_is_not_kept(scene: Scene) -> None:
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.at(10)
    scene.agent.write_record(Record(ballot=1, decided_step=10))
    assert scene.at(11) is Passing.GO_ON
    assert scene.staged == []


def test_a_higher_ballot_ends_the_wait(scene: Scene) -> None:
    """Another rank refused: this one echoes the new ballot before it goes on, and stages at the new step."""
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.when_waiting(lambda: scene.agent.write_record(Record(ballot=2, proposed_step=15)))
    assert scene.at(10) is Passing.GO_ON
    assert scene.worker.log[:2] == ["echo 1", "publish 10"]
    assert scene.agent.echoed == 2
    assert scene.agent.passed is None
    scene.agent.write_record(Record(ballot=2, decided_step=15))
    assert scene.at(15) is Passing.STAGED


def test_a_nearer_step_that_it_has_passed_is_not_echoed(scene: Scene) -> None:
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.when_waiting(lambda: scene.agent.write_record(Record(ballot=2, proposed_step=8)))
    assert scene.at(10) is Passing.GO_ON
    assert scene.agent.echoed == 1


def test_the_same_step_under_a_higher_ballot_is_waited_for(scene: Scene) -> None:
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.when_waiting(
        lambda: scene.agent.write_record(Record(ballot=2, proposed_step=10)),
        lambda: scene.agent.write_record(Record(ballot=2, decided_step=10)),
    )
    assert scene.at(10) is Passing.STAGED
    assert scene.agent.echoed == 2


def test_a_decision_and_the_next_proposal_in_one_record(scene: Scene) -> None:
    """The next step may be proposed before this one is reached; the decision stands beside it."""
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.at(9)
    scene.agent.write_record(Record(ballot=2, proposed_step=20, decided_step=10))
    assert scene.at(10) is Passing.STAGED
    assert scene.agent.echoed == 2
    scene.agent.write_record(Record(ballot=2, decided_step=20, mode=Mode.LEAVE))
    assert scene.at(20) is Passing.LEAVE
    assert [step for _, step, _ in scene.staged] == [10, 20]


def test_a_record_that_is_not_whole_yet_is_looked_at_again(scene: Scene) -> None:
    """A decision must not be missed because its checksum did not fit the first time, or the step would be torn."""
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.at(8)
    scene.agent.write_record(Record(ballot=1, decided_step=10))
    start = slots._CELLS_AT_BYTE + (scene.agent.selector & 1) * scene.agent._cell_bytes
    whole = scene.agent._memory[start + 8]
    scene.agent._memory[start + 8] = whole ^ 1
    scene.at(9)
    scene.agent._memory[start + 8] = whole
    assert scene.at(10) is Passing.STAGED


# ------------------------------------------------------------------------------------------------------- slots


def stage_once(scene: Scene, step: int) -> Passing:
    scene.agent.write_record(Record(ballot=step, decided_step=step))
    return scene.at(step)


def test_slots_take_turns_as_they_become_free(scene: Scene) -> None:
    assert stage_once(scene, 10) is Passing.STAGED
    assert stage_once(scene, 20) is Passing.STAGED
    scene.agent.free_slot(0)
    assert stage_once(scene, 30) is Passing.STAGED
    assert [slot for slot, _, _ in scene.staged] == [0, 1, 0]
    assert [(slot.state, slot.step) for slot in scene.agent.slots()] == [(SlotState.STAGED, 30), (SlotState.STAGED, 20)]


def test_a_busy_slot_is_waited_for(scene: Scene) -> None:
    stage_once(scene, 10)
    stage_once(scene, 20)
    scene.when_waiting(nothing, lambda: scene.agent.free_slot(1))
    assert stage_once(scene, 30) is Passing.STAGED
    assert scene.staged[-1] == (1, 30, ())


def test_a_slot_that_stays_busy_means_that_the_step_is_passed(scene: Scene) -> None:
    """F27, F75: an upload that stalls costs one save and a limited wait, never the training."""
    stage_once(scene, 10)
    stage_once(scene, 20)
    began = scene.time.now
    assert stage_once(scene, 30) is Passing.GO_ON
    assert SLOT_WAIT < scene.time.now - began < SLOT_WAIT + 0.1
    assert scene.agent.passed == 30
    assert [step for _, step, _ in scene.staged] == [10, 20]
    assert scene.agent.phase is WorkerPhase.RUNNING


def overlapping(scene: Scene) -> Scene:
    scene.overlaps = True
    return scene


def test_a_copy_beside_the_training_is_complete_before_the_next_step_is_published(scene: Scene) -> None:
    """Whoever sees a step published sees what was staged before it: nobody takes a late copy for a missed step."""
    assert stage_once(overlapping(scene), 10) is Passing.STAGED
    assert scene.worker.log == ["publish 10", "writing 0"]
    assert scene.agent.slot(0).state is SlotState.WRITING
    assert scene.agent.phase is WorkerPhase.RUNNING
    scene.at(11)
    assert scene.worker.log == ["staged 0", "publish 11"]
    assert scene.agent.slot(0).step == 10


@pytest.mark.parametrize("how", ["leaves", "final", "a signal"])
def test_where_somebody_waits_for_the_shard_nothing_overlaps(scene: Scene, how: str) -> None:
    if how == "a signal":
        scene.worker.note_signal(15)
    mode = Mode.LEAVE if how == "leaves" else Mode.STAY
    scene.agent.write_record(Record(ballot=1, decided_step=10, mode=mode))
    overlapping(scene).at(10, final=how == "final")
    assert scene.agent.slot(0).state is SlotState.STAGED
    assert [order.may_overlap for order in scene.orders] == [False]


def test_what_is_saved_without_some_ranks_overlaps_as_any_save_does(scene: Scene) -> None:
    """A condemned node trains on for as long as the others do: nobody stands still at each of their saves."""
    scene.agent.write_record(Record(ballot=1, decided_step=10, mode=Mode.STAY, absent=(0,)))
    overlapping(scene).at(10)
    assert scene.agent.slot(0).state is SlotState.WRITING
    assert [order.may_overlap for order in scene.orders] == [True]


def test_a_third_save_waits_while_one_slot_is_read_and_the_other_was_being_written(scene: Scene) -> None:
    """The copy under way is completed first, so that a slot is never written twice and no step is given up for it."""
    stage_once(overlapping(scene), 10)
    stage_once(scene, 20)
    assert [slot.state for slot in scene.agent.slots()] == [SlotState.STAGED, SlotState.WRITING]
    states: list[list[SlotState]] = []

    def look() -> None:
        states.append([slot.state for slot in scene.agent.slots()])
        if len(states) == 3:
            scene.agent.free_slot(0)

    scene.time.while_waiting = look
    assert stage_once(scene, 30) is Passing.STAGED
    assert states == [[SlotState.STAGED, SlotState.STAGED]] * 3
    assert scene.worker.log == ["staged 1", "publish 30", "writing 0"]


def test_a_third_save_that_finds_no_slot_is_passed_and_the_one_before_is_complete(scene: Scene) -> None:
    stage_once(overlapping(scene), 10)
    stage_once(scene, 20)
    assert stage_once(scene, 30) is Passing.GO_ON
    assert scene.agent.passed == 30
    assert [slot.step for slot in scene.agent.slots()] == [10, 20]
    assert {slot.state for slot in scene.agent.slots()} == {SlotState.STAGED}


def test_a_copy_that_is_no_good_is_reported_as_a_pass(scene: Scene) -> None:
    """Its slot stays `writing`: nobody may take it for a shard; the agent frees it on the worker's word."""
    overlapping(scene).size_bytes = None
    stage_once(scene, 10)
    assert scene.agent.passed is None
    scene.at(11)
    assert scene.worker.log == ["passed 10", "publish 11"]
    assert scene.agent.slot(0).state is SlotState.WRITING
    scene.size_bytes = 4096
    stage_once(scene, 20)
    scene.at(21)
    assert (scene.agent.slot(1).state, scene.agent.slot(1).step) == (SlotState.STAGED, 20)


def test_how_much_of_a_shard_is_there_is_said_while_it_is_staged(scene: Scene) -> None:
    scene.overlaps = True
    scene.agent.write_record(Record(ballot=1, decided_step=7))
    scene.at(7)
    assert scene.agent.there_bytes(0, 7) == 1007
    assert scene.agent.there_bytes(0, 6) == scene.agent.there_bytes(1, 7) == 0


def test_a_failure_while_staging_leaves_the_slot_unfinished(scene: Scene) -> None:
    """Nobody may take it for a shard; the agent frees it when the worker's exit is confirmed."""

    def fails(order: Order, finish: Finish, there: There) -> None:
        raise MemoryError

    scene.stage = fails  # type: ignore[method-assign]
    scene.agent.write_record(Record(ballot=1, decided_step=10))
    with pytest.raises(MemoryError):
        scene.at(10)
    assert scene.agent.slot(0).state is SlotState.WRITING
    assert scene.worker.log[-1] == "writing 0"


# ----------------------------------------------------------------------------------------------- the last step


def test_the_last_step_is_published_only_once_its_save_is_proposed(scene: Scene) -> None:
    """F54: a job's last state is always saved; a script that ended first could not stage it."""

    def propose() -> None:
        assert scene.agent.step == 99  # not yet at 100
        assert scene.agent.phase is WorkerPhase.WAITING
        scene.agent.write_record(Record(ballot=1, proposed_step=100))

    scene.at(99)
    scene.when_waiting(nothing, propose, lambda: scene.agent.write_record(Record(ballot=1, decided_step=100)))
    assert scene.at(100, final=True) is Passing.STAGED
    assert scene.worker.log[:2] == ["echo 1", "publish 100"]


def test_other_proposals_are_echoed_while_it_waits(scene: Scene) -> None:
    scene.at(99)
    scene.when_waiting(
        lambda: scene.agent.write_record(Record(ballot=1, proposed_step=120)),
        nothing,
        lambda: scene.agent.write_record(Record(ballot=2, proposed_step=100)),
        lambda: scene.agent.write_record(Record(ballot=2, decided_step=100)),
    )
    assert scene.at(100, final=True) is Passing.STAGED
    assert "echo 1" in scene.worker.log[: scene.worker.log.index("publish 100")]


def test_the_last_step_does_not_wait_for_ever(scene: Scene) -> None:
    began = scene.time.now
    assert scene.at(100, final=True) is Passing.GO_ON
    assert FINAL_WAIT_SECONDS <= scene.time.now - began < FINAL_WAIT_SECONDS + 0.1
    assert scene.agent.step == 100
    assert scene.agent.phase is WorkerPhase.RUNNING


def test_a_last_step_that_is_decided_already_waits_for_nothing(scene: Scene) -> None:
    scene.agent.write_record(Record(ballot=1, decided_step=100))
    assert scene.at(100, final=True) is Passing.STAGED
    assert scene.time.sleeps == 0


# ------------------------------------------------------------------------------------------------------ timing


def test_the_step_time_is_of_steps_alone(scene: Scene) -> None:
    """Waiting and staging are not training: else each save would put off the next one's arming."""
    for step in range(1, 10):
        scene.time.now += 0.25
        scene.at(step)
    scene.stage_seconds = 7.0
    scene.agent.write_record(Record(ballot=1, proposed_step=10))
    scene.when_waiting(*[nothing] * 500, lambda: scene.agent.write_record(Record(ballot=1, decided_step=10)))
    scene.time.now += 0.25
    assert scene.at(10) is Passing.STAGED
    assert scene.agent.slot(0).stage_seconds == pytest.approx(7.0)
    scene.time.now += 0.25
    scene.at(11)
    assert scene.agent.step_seconds == pytest.approx(0.25)


def test_the_beat_is_when_the_boundary_was_reached(scene: Scene) -> None:
    """F97: progress is seen outside the collectives."""
    scene.time.now = 2000.0
    scene.at(1)
    assert scene.agent.beat_ns == 2_000_000_000_000

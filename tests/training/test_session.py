"""The training script's side, without processes: attach, the loop, saves, leaving, and what a resumed run trains on.

The agent is played by `tests.training.agents.OneAgent`; time passes only when the worker waits.
"""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import LAUNCH_VARIABLE, Launch
from orchestrator.checkpoint.reader import read_committed, read_receipt
from orchestrator.checkpoint.slots import LeaveOutcome, SlotState, WorkerPhase
from orchestrator.core.messages import CheckpointId, Mode
from orchestrator.errors import (
    ConfigError,
    FencedError,
    FormatError,
    GateError,
    PeerError,
    PeerLostError,
    Preempted,
    RefusedError,
    StateError,
    SupervisorError,
)
from orchestrator.health.loss import Finding, LossState
from orchestrator.storage.memory import MemoryStore
from orchestrator.training import boundary, rng, saved_state, session
from orchestrator.training.boundary import Boundary
from orchestrator.training.sampler import ResumableSampler
from orchestrator.training.session import Run, attach
from tests.checkpoint.stores import change_byte
from tests.contracts.test_object_store import TOKEN, served
from tests.training.agents import FakeTime, OneAgent
from tests.training.states import launch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Leave generators, signal handlers and the number of threads as they were."""
    state, handlers, threads = rng.capture(), [signal.getsignal(number) for number in SIGNALS], torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)
    rng.restore(state)


def use_time(patch: pytest.MonkeyPatch, time: FakeTime) -> None:
    """Boundaries made from now on live in that time."""
    defaults = Boundary.__init__.__kwdefaults__
    assert defaults is not None
    patch.setitem(defaults, "now_ns", time.monotonic_ns)
    patch.setitem(defaults, "sleep", time.sleep)


def told_by(agent: OneAgent) -> dict[str, Any]:
    """What the worker published of itself, but for the number of its main thread."""
    info = dict(agent.control.info or {})
    info.pop("main_thread")
    return info


class LocalStore(MemoryStore):
    """What the agent would serve."""

    def close(self) -> None:
        """As a peer store's."""


class Stage:
    """A job of one rank: a store that stays, one agent per generation, and the worker's time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.store = LocalStore()
        self.time = FakeTime()
        self.agents: list[OneAgent] = []
        self._patch = monkeypatch
        monkeypatch.setattr(session, "PeerStore", lambda url, token, *, tls: self.store)
        monkeypatch.setattr(session, "time", self.time)
        use_time(monkeypatch, self.time)
        monkeypatch.setattr(boundary, "FINAL_WAIT_SECONDS", 2.0)  # turns of the loops, in truth
        monkeypatch.setattr(session, "LEAVE_SECONDS_MAX", 60.0)

    def agent(self, base: CheckpointId | None = None, **options: Any) -> OneAgent:
        """The next generation's agent; `attach` will find its launch file."""
        of_launch = {key: options.pop(key) for key in list(options) if key in Launch.model_fields}
        place = launch(self.folder, generation=len(self.agents) + 1, base=base, agent_pid=os.getpid(), **of_launch)
        agent = OneAgent(place=place, store=self.store, **options)
        self.agents.append(agent)
        self.time.while_waiting = agent.look
        self._patch.setattr(session, "_attached_pid", 0)  # the next generation's worker is a process of its own
        path = self.folder / "launch.json"
        place.write(path)
        self._patch.setenv(LAUNCH_VARIABLE, str(path))
        return agent

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.close()


class Script:
    """A training script: dropout, batch norm, Adam, a schedule, a loader over the sampler's stream."""

    def __init__(self, seed: int = 7, length: int = 400, loader_generator: bool = False) -> None:
        torch.manual_seed(seed)
        inputs, targets = torch.randn(length, 6), torch.randn(length, 1)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.data = TensorDataset(inputs, targets)
        self.sampler = ResumableSampler(length, global_batch=8, micro_batch=4, seed=3, rank=0, world_size=1)
        self._generator = torch.Generator() if loader_generator else None
        self.loader: Iterator[Any] = iter(())

    def attach(self, **options: Any) -> Run:
        return attach(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.sampler, **options
        )

    def start_loader(self) -> None:
        """Between attach and the loop, as scripts do; without a generator of its own it draws from the global one."""
        batches = DataLoader(self.data, batch_sampler=self.sampler.stream(), generator=self._generator)
        self.loader = iter(batches)

    def train_one(self) -> float:
        total = 0.0
        for _ in range(self.sampler.micro_batches_per_step):
            inputs, targets = next(self.loader)
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return total

    def run(self, run: Run, until: int, after: Callable[[int], None] = lambda step: None) -> dict[int, float]:
        """Train to the end; each step's loss. `after` is called within the loop, after a step's training."""
        self.start_loader()
        losses = {}
        for step in run.steps(until=until):
            losses[step] = self.train_one()
            after(step)
        return losses


class Killed(Exception):
    """The process is gone."""


def killed_at(at: int) -> Callable[[int], None]:
    def check(step: int) -> None:
        if step == at:
            raise Killed

    return check


def phase(agent: OneAgent) -> WorkerPhase:
    """What the worker says that it is doing."""
    return agent.control.phase


def weights(script: Script) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in script.model.state_dict().values()]


# ------------------------------------------------------------------------------------------------- a fresh job


def test_a_fresh_job_trains_to_its_end_and_saves_there(stage: Stage) -> None:
    agent = stage.agent(until=5)
    script = Script()
    run = script.attach()
    assert (run.step, run.resumed, run.rank, run.world_size, run.generation) == (0, False, 0, 1, 1)
    assert phase(agent) is WorkerPhase.RESTORING
    losses = script.run(run, 5)
    assert list(losses) == [0, 1, 2, 3, 4]
    assert phase(agent) is WorkerPhase.FINISHED
    agent.look()
    assert agent.committed == [5]
    index = read_committed(stage.store, CheckpointId(generation=1, step=5))
    assert read_receipt(stage.store, index, index.shards[0]).gate.step == 5
    assert "optimizer.state.0.weight.exp_avg" in index.tensors


def test_the_agent_learns_what_it_must(stage: Stage) -> None:
    agent = stage.agent(until=3)
    script = Script()
    run = script.attach()
    steps = run.steps(until=3)
    before = agent.control.info
    next(steps)
    assert before is None  # nothing is told before the loop begins
    assert told_by(agent) == {"step": 0, "until": 3, "allowed_world_sizes": [1, 2, 4, 8]}
    assert phase(agent) is WorkerPhase.RUNNING
    unplanned = agent.control.slot_bytes
    script.start_loader()
    script.train_one()
    next(steps)
    assert unplanned == 0 < agent.control.slot_bytes  # planned after the first step, when Adam has its state
    assert agent.control.step == 1


def test_without_a_last_proposal_the_job_ends_all_the_same(stage: Stage) -> None:
    """F100: the supervisor is away; the script waits a limited time at its end."""
    agent = stage.agent()
    script = Script()
    began = stage.time.now
    assert len(script.run(script.attach(), 3)) == 3
    assert boundary.FINAL_WAIT_SECONDS <= stage.time.now - began < boundary.FINAL_WAIT_SECONDS + 1
    assert agent.committed == []


def test_saves_that_the_script_asks_for_are_counted(stage: Stage) -> None:
    agent = stage.agent(until=4)
    script = Script()
    run = script.attach()
    script.run(run, 4, after=lambda step: run.save())
    assert agent.control.saves_asked == 4


# ---------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("loader_generator", [False, True])
@pytest.mark.parametrize("killed", [7, 9, 10, 13])
def test_f39_a_killed_job_goes_on_to_the_bit(stage: Stage, killed: int, loader_generator: bool) -> None:
    """F37, F39, F40, F52: losses, weights and rates of every later step are those of the job that was never killed.

    The loader is made between attach and the loop, which draws from the global generator.
    """
    agent = stage.agent(until=16)
    whole = Script(loader_generator=loader_generator)
    expected = whole.run(whole.attach(), 16, after=lambda step: agent.propose(6) if step == 3 else None)
    agent.look()
    assert agent.committed == [6, 16]

    stage.agent(until=16, mode=Mode.STAY)
    agent = stage.agents[-1]
    script = Script(loader_generator=loader_generator)

    def until_killed(step: int) -> None:
        if step == 3:
            agent.propose(6)
        agent.look()
        killed_at(killed)(step)

    with pytest.raises(Killed):
        script.run(script.attach(), 16, after=until_killed)
    assert agent.committed == [6]

    base = CheckpointId(generation=2, step=6)
    stage.agent(base=base, until=16)
    again = Script(seed=99, loader_generator=loader_generator)
    run = again.attach()
    assert (run.step, run.resumed, run.generation) == (6, True, 3)
    again.data = whole.data
    found = again.run(run, 16)
    assert found == {step: loss for step, loss in expected.items() if step >= 6}
    assert weights(again) == weights(whole)
    assert again.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert again.sampler.samples_seen == whole.sampler.samples_seen == 16 * 8


def committed_at(stage: Stage, step: int, until: int = 20, **options: Any) -> CheckpointId:
    """A committed checkpoint of a script's first generation."""
    agent = stage.agent(until=until)
    script = Script(**options)

    def after(at: int) -> None:
        if at == step - 2:
            agent.propose(step)
        agent.look()
        killed_at(step)(at)

    with pytest.raises(Killed):
        script.run(script.attach(), until, after=after)
    assert agent.committed == [step]
    return CheckpointId(generation=agent.place.generation, step=step)


def test_a_resumed_job_plans_its_slots_in_attach(stage: Stage) -> None:
    base = committed_at(stage, 5)
    agent = stage.agent(base=base)
    Script().attach()
    assert agent.control.slot_bytes > agent.control.unique_bytes > 0


def test_a_job_that_is_at_its_end_has_no_step_left(stage: Stage) -> None:
    base = committed_at(stage, 5)
    agent = stage.agent(base=base)
    script = Script()
    assert script.run(script.attach(), 5) == {}
    assert phase(agent) is WorkerPhase.FINISHED


def test_a_last_step_below_the_checkpoint_is_refused(stage: Stage) -> None:
    """A mistyped number must not end the job as done."""
    agent = stage.agent(base=committed_at(stage, 5))
    run = Script().attach()
    with pytest.raises(StateError, match="the checkpoint is of step 5, beyond the last step 3"):
        next(run.steps(until=3))
    assert phase(agent) is WorkerPhase.REFUSED


def test_restoring_over_the_agents_port(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker holds no credentials: all that it reads comes from its agent, by HTTP."""
    base = committed_at(stage, 5)
    monkeypatch.undo()
    monkeypatch.setattr(session, "time", stage.time)
    use_time(monkeypatch, stage.time)
    with served(stage.store) as url:
        place = launch(stage.folder, generation=9, base=base, objects_url=url, token=TOKEN)
        agent = OneAgent(place=place, store=stage.store)
        stage.agents.append(agent)
        script = Script(seed=1)
        run = Run(
            place,
            {
                "model": script.model,
                "optimizer": script.optimizer,
                "scheduler": script.scheduler,
                "data": script.sampler,
            },
            (),
        )
    assert run.step == 5
    assert script.sampler.samples_seen == 40


# --------------------------------------------------------------------------------------------------- refusals


def refused(agent: OneAgent, error: type[Exception], expected: WorkerPhase, **options: Any) -> Any:
    """The error of an attach that must fail, and the phase that tells the agent what to make of it."""
    script = options.pop("script", None) or Script()
    with pytest.raises(error) as caught:
        script.attach(**options)
    assert phase(agent) is expected
    return caught.value


def test_f46_other_data_is_refused_for_good(stage: Stage) -> None:
    """F46: restarting would not help, and the agent knows it."""
    agent = stage.agent(base=committed_at(stage, 5))
    error = refused(agent, GateError, WorkerPhase.REFUSED, script=Script(length=401))
    assert error.parts == ("data.length",)


class Counting:
    """Some object of the script's; does what it is told when its state is loaded."""

    def __init__(self, value: Any, on_load: Callable[[], None] = lambda: None) -> None:
        self.value = value
        self.on_load = on_load

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.on_load()


def test_f51_a_changed_rate_is_refused_unless_it_is_accepted(stage: Stage) -> None:
    agent = stage.agent(until=20)
    script = Script()
    run = script.attach(thing=Counting(1))

    def after(step: int) -> None:
        if step == 1:
            agent.propose(4)
        agent.look()
        killed_at(4)(step)

    with pytest.raises(Killed):
        script.run(run, 20, after=after)
    base = CheckpointId(generation=1, step=4)

    def attach_with_other_rate(**options: Any) -> Run:
        again = Script()
        return again.attach(thing=Counting(0, lambda: again.optimizer.param_groups[0].update(lr=0.5)), **options)

    agent = stage.agent(base=base)
    with pytest.raises(GateError) as caught:
        attach_with_other_rate()
    assert caught.value.parts == ("lr",)
    assert phase(agent) is WorkerPhase.REFUSED
    stage.agent(base=base)
    assert attach_with_other_rate(accept=("lr",)).step == 4


def test_a_gate_part_that_does_not_exist_is_refused(stage: Stage) -> None:
    refused(stage.agent(), GateError, WorkerPhase.REFUSED, accept=("everything",))


def test_an_object_without_state_is_refused_in_attach(stage: Stage) -> None:
    error = refused(stage.agent(), StateError, WorkerPhase.REFUSED, thing=object())
    assert error.path == "thing"


def test_state_that_cannot_be_saved_is_refused_after_the_first_step(stage: Stage) -> None:
    """Before any checkpoint is needed, and by its path."""
    agent = stage.agent(until=5)
    script = Script()
    run = script.attach(thing=Counting({"fn": print}))
    with pytest.raises(StateError) as caught:
        script.run(run, 5)
    assert caught.value.path == "thing.value.fn"
    assert phase(agent) is WorkerPhase.REFUSED
    assert agent.control.step is None


def test_memory_that_is_short_is_refused_on_resuming_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = stage.agent(base=committed_at(stage, 5))
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    error = refused(agent, RefusedError, WorkerPhase.REFUSED)
    assert "a staging slot needs" in str(error)


def test_a_damaged_checkpoint_is_unreadable_not_refused(stage: Stage) -> None:
    """F20: the job falls back to the one before; nobody has to look."""
    base = committed_at(stage, 5)
    key = fmt.shard_key(base, 0, 1)
    change_byte(stage.store, key, stage.store.size(key) - 1)
    refused(stage.agent(base=base), FormatError, WorkerPhase.UNREADABLE)


def test_a_missing_shard_is_unreadable_too(stage: Stage) -> None:
    base = committed_at(stage, 5)
    stage.store.delete(fmt.shard_key(base, 0, 1))
    refused(stage.agent(base=base), Exception, WorkerPhase.UNREADABLE)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("error", [PeerError("rank 1 could not restore: DigestError: x", 1), PeerLostError("gone")])
def test_a_rank_whose_peer_failed_leaves_the_verdict_to_that_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: PeerError, *, attached: bool
) -> None:
    """It ends after the other one, so that a checkpoint counts as unreadable if a rank could not read it, only then."""
    agent = stage.agent(base=committed_at(stage, 5), attached=attached)
    began = stage.time.now

    def restore(state: saved_state.SavedState, *stores: Any) -> int:
        raise error

    monkeypatch.setattr(saved_state.SavedState, "restore", restore)
    assert refused(agent, PeerError, WorkerPhase.RESTORING) is error
    assert stage.time.now - began == (0 if attached else session.REFORM_WAIT_SECONDS)


def test_a_world_size_that_does_not_share_the_batch_is_told_and_refused(stage: Stage) -> None:
    """F65: the global batch never drifts; the supervisor learns which sizes would do."""
    agent = stage.agent(world_size=3)
    script = Script()
    sampler = ResumableSampler(400, global_batch=8, micro_batch=4, seed=3, rank=0, world_size=3)
    with pytest.raises(ConfigError, match="cannot share"):
        attach(model=script.model, data=sampler)
    assert told_by(agent) == {"step": 0, "until": None, "allowed_world_sizes": [1, 2, 4, 8]}
    assert stage.time.sleeps > 0  # it waits to be formed anew


# ------------------------------------------------------------------------------------------------------ misuse


def test_after_step_serves_loops_that_are_not_ours(stage: Stage) -> None:
    agent = stage.agent()
    script = Script()
    run = script.attach()
    script.start_loader()
    for step in range(run.step, 4):
        script.train_one()
        if step == 1:
            agent.propose(4)
        agent.look()
        run.after_step(step + 1)
    run._state.stager.join()  # as at the end of the script
    agent.look()
    assert agent.committed == [4]
    assert run.step == 4
    assert script.sampler.samples_seen == 32


@pytest.mark.parametrize("step", [0, 2, 5, -1])
def test_a_step_that_does_not_follow_is_an_error(stage: Stage, step: int) -> None:
    stage.agent()
    run = Script().attach()
    with pytest.raises(ConfigError, match=rf"after_step\({step}\) follows step 0: begin the loop at run.step"):
        run.after_step(step)


def test_a_step_reported_twice_is_an_error(stage: Stage) -> None:
    stage.agent()
    run = Script().attach()
    run.after_step(1)
    with pytest.raises(ConfigError, match="follows step 1"):
        run.after_step(1)


def test_a_process_attaches_once(stage: Stage) -> None:
    """Two readers of one control block would both stage."""
    stage.agent()
    script = Script()
    script.attach()
    with pytest.raises(ConfigError, match="called before in this process"):
        script.attach()


@pytest.mark.parametrize("until", [True, 3.0, "3", None])
def test_the_number_of_steps_is_a_whole_number(stage: Stage, until: Any) -> None:
    stage.agent()
    with pytest.raises(ConfigError, match="whole number"):
        next(Script().attach().steps(until=until))


def test_the_sampler_is_given_as_data(stage: Stage) -> None:
    """Under any other name it would be saved, and never moved on."""
    stage.agent()
    script = Script()
    with pytest.raises(ConfigError, match="as data="):
        attach(model=script.model, sampler=script.sampler)


def test_the_loop_is_entered_once(stage: Stage) -> None:
    stage.agent()
    run = Script().attach()
    next(run.steps(until=3))
    with pytest.raises(ConfigError, match="once"):
        next(run.steps(until=3))


def test_the_two_ways_are_not_mixed(stage: Stage) -> None:
    stage.agent()
    run = Script().attach()
    run.after_step(1)
    with pytest.raises(ConfigError, match="cannot be mixed"):
        next(run.steps(until=3))


# ------------------------------------------------------------------------------------- staging beside the training


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread copies anything: what is not joined stays undone."""

    class Never(threading.Thread):
        def start(self) -> None:
            """It never gets to run."""

    monkeypatch.setattr(threading, "Thread", Never)


def staging_at(stage: Stage, at: int, **options: Any) -> tuple[OneAgent, Run, Script, Iterator[int]]:
    """A job whose step is being staged, in the loop's next turn; nothing of that turn is trained yet."""
    agent = stage.agent(**options)
    script = Script()
    run = script.attach()
    agent.propose(at)
    script.start_loader()
    steps = run.steps(until=10)
    for step in steps:
        if step == at:
            break
        script.train_one()
    assert agent.control.slot(0).state is SlotState.WRITING
    return agent, run, script, steps


@pytest.mark.usefixtures("unhurried")
def test_a_save_is_complete_when_the_optimizer_steps(stage: Stage) -> None:
    agent, _, script, _ = staging_at(stage, 3)
    script.train_one()
    assert agent.control.slot(0).state is SlotState.STAGED


@pytest.mark.usefixtures("unhurried")
def test_a_save_is_complete_when_the_script_asks_for_one(stage: Stage) -> None:
    """From then on the script may write its weights by hand, until the next boundary."""
    agent, run, _, _ = staging_at(stage, 3)
    run.save()
    assert agent.control.slot(0).state is SlotState.STAGED


@pytest.mark.usefixtures("unhurried")
def test_a_save_is_complete_when_the_script_leaves_the_loop(stage: Stage) -> None:
    agent, _, _, steps = staging_at(stage, 3)
    steps.close()  # type: ignore[attr-defined]
    assert agent.control.slot(0).state is SlotState.STAGED


@pytest.mark.usefixtures("unhurried")
def test_a_save_is_complete_before_the_worker_leaves_without_another(stage: Stage) -> None:
    """Attached, alone and signalled: the process ends here."""
    agent, run, _, steps = staging_at(stage, 3, attached=True)
    agent.control.set_outcome(LeaveOutcome.RELEASED, 0)
    run._control.note_signal(signal.SIGTERM)
    with pytest.raises(Preempted):
        next(steps)  # the turn trained nothing, so no optimizer has stepped
    assert agent.control.slot(0).state is SlotState.STAGED


# ---------------------------------------------------------------------------------------------- leaving, signals


def leaving(stage: Stage, at: int = 3, **options: Any) -> tuple[OneAgent, Run, Script]:
    """A job that will be told to leave at a step."""
    agent = stage.agent(mode=Mode.LEAVE, **options)
    script = Script()
    run = script.attach()
    agent.propose(at)
    return agent, run, script


def test_attached_a_leaving_worker_ends_once_its_step_is_committed(stage: Stage) -> None:
    """F1, F2, F77: nothing is saved in a handler, and status 75 says that the job can be resumed."""
    agent, run, script = leaving(stage, attached=True)
    with pytest.raises(Preempted) as caught:
        script.run(run, 10)
    assert caught.value.code == 75
    assert str(caught.value) == "left at step 3: its checkpoint is committed"
    assert agent.committed == [3]
    assert phase(agent) is WorkerPhase.LEFT
    assert isinstance(caught.value, SystemExit)
    assert not isinstance(caught.value, Exception)


def test_attached_an_earlier_steps_commit_is_not_taken_for_this_ones(stage: Stage) -> None:
    """The outcome of a periodic save stands in the control block when the worker leaves: it must wait for its own."""
    agent, run, script = leaving(stage, attached=True, commits=False)
    agent.control.set_outcome(LeaveOutcome.COMMITTED, 2)
    waited = []

    def look() -> None:
        agent.look()
        if phase(agent) is WorkerPhase.LEFT:
            waited.append(agent.control.outcome())
            if len(waited) == 5:
                agent.control.set_outcome(LeaveOutcome.ABANDONED, 3)

    stage.time.while_waiting = look
    with pytest.raises(Preempted, match="its checkpoint is not committed"):
        script.run(run, 10)
    assert waited == [(LeaveOutcome.COMMITTED, 2)] * 5


def test_attached_a_worker_that_is_released_leaves(stage: Stage) -> None:
    agent, run, script = leaving(stage, attached=True, commits=False)

    def look() -> None:
        agent.look()
        if phase(agent) is WorkerPhase.LEFT:
            agent.control.set_outcome(LeaveOutcome.RELEASED, 3)

    stage.time.while_waiting = look
    with pytest.raises(Preempted, match="left to the agent"):
        script.run(run, 10)


def test_attached_a_worker_does_not_wait_for_an_agent_that_is_gone(stage: Stage) -> None:
    """F100."""
    agent, run, script = leaving(stage, attached=True, commits=False)
    run._launch = run._launch.model_copy(update={"agent_pid": 1 << 30})
    agent.control.set_outcome(LeaveOutcome.COMMITTED, 2)  # an earlier step's: it says nothing of this one
    with pytest.raises(Preempted, match="left to the agent"):
        script.run(run, 10)
    assert stage.time.now < 1100
    assert agent.committed == []


def test_attached_the_loop_ends_when_its_last_step_is_committed(stage: Stage) -> None:
    """The script's exit status must not say "done" while the upload may still fail."""
    agent = stage.agent(attached=True, until=4)
    script = Script()
    script.run(script.attach(), 4)
    assert agent.committed == [4]
    assert phase(agent) is WorkerPhase.FINISHED


def test_attached_a_last_step_that_is_abandoned_is_an_error(stage: Stage) -> None:
    agent = stage.agent(attached=True, until=4, commits=False)
    agent.control.set_outcome(LeaveOutcome.COMMITTED, 3)

    def look() -> None:
        agent.look()
        if agent.control.slot(0).step == 4:
            agent.control.set_outcome(LeaveOutcome.ABANDONED, 4)

    stage.time.while_waiting = look
    script = Script()
    with pytest.raises(SupervisorError, match="the last step 4 was not saved"):
        script.run(script.attach(), 4)


def test_attached_a_commit_counts_although_the_agent_ended_right_after_it(stage: Stage) -> None:
    agent = stage.agent(attached=True, until=4)
    script = Script()
    run = script.attach()

    def look() -> None:
        agent.look()
        if agent.committed:
            run._launch = run._launch.model_copy(update={"agent_pid": 1 << 30})

    stage.time.while_waiting = look
    assert len(script.run(run, 4)) == 4


def test_under_a_supervisor_the_worker_waits_to_be_ended(stage: Stage) -> None:
    """Its agent kills it once all is staged; it neither trains on nor returns to the script."""
    agent, run, script = leaving(stage)
    began = stage.time.now
    with pytest.raises(Preempted, match="nobody ended this process"):
        script.run(run, 10)
    assert stage.time.now - began >= session.LEAVE_SECONDS_MAX
    assert agent.committed == [3]
    assert script.sampler.samples_seen == 24


@pytest.mark.parametrize("number", SIGNALS)
def test_f2_a_signal_is_noted_and_training_goes_on(stage: Stage, number: int) -> None:
    """F2, F4, F77, F82: the handler only records; every notice signal counts; the step is not left half done."""
    agent = stage.agent(until=4)
    script = Script()
    losses = script.run(script.attach(), 4, after=lambda step: os.kill(os.getpid(), number) if step == 1 else None)
    assert len(losses) == 4
    assert agent.control.signal == number


def test_the_scripts_own_handler_is_called_too(stage: Stage) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    agent = stage.agent()
    Script().attach()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    assert agent.control.signal == signal.SIGUSR1


def test_attached_and_alone_a_signal_is_left_on_at_the_next_step(stage: Stage) -> None:
    agent = stage.agent(attached=True)
    script = Script()
    run = script.attach()
    agent.control.set_outcome(LeaveOutcome.RELEASED, 0)
    with pytest.raises(Preempted, match="without a new checkpoint"):
        script.run(run, 10, after=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None)
    assert run.step == 3


@pytest.mark.parametrize(("at", "until"), [(3, 10), (4, 4)])
def test_attached_a_script_whose_job_is_another_runs_stops(stage: Stage, at: int, until: int) -> None:
    """Nothing that it trains would be saved: neither in the middle nor at the end does it look as if it were."""
    agent = stage.agent(attached=True, until=until, commits=False)
    script = Script()
    run = script.attach()

    def taken_over(step: int) -> None:
        if step == at - 1:
            agent.control.set_outcome(LeaveOutcome.SUPERSEDED, step)

    with pytest.raises(FencedError, match="another run has taken over the job"):
        script.run(run, until, after=taken_over)
    assert run.step == at


def test_attached_and_alone_training_goes_on_without_a_signal(stage: Stage) -> None:
    """Losing the supervisor costs checkpoints, not the training."""
    agent = stage.agent(attached=True)
    script = Script()
    run = script.attach()
    agent.control.set_outcome(LeaveOutcome.RELEASED, 0)
    with pytest.raises(SupervisorError, match="the last step 10 was not saved"):
        script.run(run, 10)
    assert run.step == 10, "trained to the end, and the exit status says that it is not saved"


# ------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize(
    ("world_size", "rank", "find_unused", "warned"),
    [(2, 0, False, False), (3, 0, False, True), (3, 1, False, False), (3, 0, True, False)],
)
def test_ddp_above_two_ranks_is_told_how_to_be_exact(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    world_size: int,
    rank: int,
    find_unused: bool,
    warned: bool,
) -> None:
    """DDP rebuilds its buckets after the first backward pass, so above two ranks sums are added in another order."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=find_unused)
        session._warn_about_buckets(model, launch(tmp_path, rank=rank, world_size=world_size))
        session._warn_about_buckets(model.module, launch(tmp_path, rank=rank, world_size=world_size))
    finally:
        torch.distributed.destroy_process_group()
    assert capsys.readouterr().err.count("find_unused_parameters=True") == int(warned)


# -------------------------------------------------------------------------------------------------------- launch


def test_a_launch_file_comes_back_and_is_the_owners_alone(tmp_path: Path) -> None:
    place = launch(tmp_path, rank=2, world_size=4, base=CheckpointId(generation=3, step=0), attached=True)
    path = tmp_path / "launch.json"
    place.write(path)
    assert Launch.read(path) == place
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["launch.json"]


# ------------------------------------------------------------------------------------------------- pauses


def test_a_pause_is_told_while_it_lasts(stage: Stage) -> None:
    agent = stage.agent()
    run = attach(model=nn.Linear(2, 1))
    now_ns = stage.time.monotonic_ns()
    with run.pause(seconds=10.0):
        assert agent.control.pause_until_ns == now_ns + 10 * 10**9
        with run.pause(seconds=5.0):
            assert agent.control.pause_until_ns == now_ns + 10 * 10**9, "the outer one ends later"
    assert agent.control.pause_until_ns == 0


def test_a_pause_ends_when_it_fails(stage: Stage) -> None:
    agent = stage.agent()
    run = attach(model=nn.Linear(2, 1))
    with pytest.raises(ValueError, match="evaluation"), run.pause():
        raise ValueError("evaluation")
    assert agent.control.pause_until_ns == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e10, float("nan")])
def test_a_pause_needs_a_length(seconds: float, stage: Stage) -> None:
    stage.agent()
    run = attach(model=nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="seconds"), run.pause(seconds):
        pass


def test_whoever_leaves_the_loop_takes_no_step_any_more(stage: Stage) -> None:
    agent = stage.agent()
    run = attach(model=nn.Linear(2, 1))
    for _ in run.steps(until=3):
        break
    assert agent.control.pause_until_ns > stage.time.monotonic_ns()


# ------------------------------------------------------------------------------------------------- the loss


def told_losses(agent: OneAgent) -> list[Finding]:
    """What the worker has found about its loss."""
    found = [agent.control.loss_finding(number + 1) for number in range(agent.control.loss_findings)]
    return [finding for finding in found if finding is not None]


def test_a_loss_that_is_no_number_is_told_with_its_step(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """As a tensor that requires a gradient, as a script has it."""
    agent = stage.agent(until=8)
    script = Script()
    run = script.attach()

    def after(step: int) -> None:
        run.observe(loss=torch.tensor([math.nan if step >= 5 else 2.0], requires_grad=True))

    script.run(run, 8, after=after)
    (finding,) = told_losses(agent)
    assert (finding.state, finding.step, finding.good_step) == (LossState.NOT_FINITE, 5, 4)
    assert capsys.readouterr().err == "", "under a supervisor the events say it"


def test_attached_the_person_at_the_script_is_told(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.agent(attached=True)
    Script().attach().observe(loss=math.inf)
    assert "orchestrator: the loss is inf at step 0\n" in capsys.readouterr().err


def test_telling_the_loss_changes_nothing(stage: Stage) -> None:
    """Losses, weights and every generator are to the bit those of a script that says nothing."""
    stage.agent(until=12)
    silent = Script()
    expected = silent.run(silent.attach(), 12)
    drawn = torch.rand(3).tolist()
    stage.agent(until=12)
    script = Script()
    run = script.attach()
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    assert script.run(run, 12, after=lambda step: run.observe(loss=math.nan if step % 3 else step)) == expected
    assert weights(script) == weights(silent)
    assert torch.rand(3).tolist() == drawn
    assert random.getstate() == python
    assert str(np.random.get_state(legacy=False)) == str(numpy)


@pytest.mark.parametrize("loss", [2, 2.5, True, np.float32(2.5), torch.tensor(2.5), torch.tensor([[3]])], ids=repr)
def test_a_loss_is_any_number(stage: Stage, loss: Any) -> None:
    stage.agent()
    Script().attach().observe(loss=loss)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (None, "None"),
        ("2.5", "'2.5'"),
        (b"2.5", "b'2.5'"),
        ([2.5], r"\[2.5\]"),
        (2j, "2j"),
        (10**400, "10000"),
        (torch.tensor([1.0, 2.0]), r"a tensor of shape \(2,\) and type torch.float32"),
        (torch.tensor([]), r"a tensor of shape \(0,\)"),
        (torch.tensor(2j), r"a tensor of shape \(\) and type torch.complex64"),
    ],
    ids=repr,
)
def test_what_is_no_loss_is_one_clear_error(stage: Stage, loss: Any, what: str) -> None:
    agent = stage.agent()
    run = Script().attach()
    with pytest.raises(
        ConfigError, match=rf"run\.observe\(loss=…\) takes a number or a tensor of one element, not {what}"
    ):
        run.observe(loss=loss)
    assert told_losses(agent) == []

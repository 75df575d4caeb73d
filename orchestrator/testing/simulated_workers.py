"""Simulated training processes: the real boundary, layout, staging and restore code around a training of a few numbers.

A worker keeps to `training.session`'s order: restore the base, publish, step, boundary, leave. Its state is a chain in
which every number depends on all steps before it, so that a checkpoint of the wrong step, or one put together from two
steps, is found out by its values. `SimulatedRuntime` is the agent's port to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from greenlet import GreenletExit, getcurrent

from orchestrator.agent.workers import Worker
from orchestrator.checkpoint.launch import LAUNCH_VARIABLE, Launch
from orchestrator.checkpoint.layout import Scope, ShardPlan, TensorSpec, plan_shard
from orchestrator.checkpoint.near import NearStore
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.checkpoint.slots import ControlBlock, LeaveOutcome, WorkerPhase
from orchestrator.checkpoint.staging import Metadata, SlotFile
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import FormatError, NotFoundError, StoreError
from orchestrator.health.progress import ProcessReading
from orchestrator.storage.base import ObjectStore
from orchestrator.telemetry import reached
from orchestrator.testing.simulated_time import SimulatedLoop, SimulatedProcess, SimulatedThread, current_process
from orchestrator.training.boundary import Boundary, Finish, Order, Passing, There

WEIGHTS = 24  # elements of the state that all ranks hold alike: not divided by most world sizes
SPEC = TensorSpec(name="weights", dtype="I64", width=8, shape=(WEIGHTS,), scope=Scope.SHARED)
LOOK_SECONDS = (0.005, 0.03)  # how long a waiting worker sleeps between two looks
SHARE_BLOCKING = 0.3  # of the saves that might overlap with training
SHARE_DAMAGED = 0.03  # of those, what turns out not to be the boundary's state
OnExit = Callable[[Worker], None]


def next_weights(weights: torch.Tensor, step: int) -> torch.Tensor:
    """The state after one more step; depends on everything before."""
    return (weights * 6364136223846793005 + step + torch.arange(WEIGHTS)) ^ (weights >> 17)


@lru_cache(maxsize=1)
def _chain() -> list[torch.Tensor]:
    return [torch.arange(WEIGHTS)]


def weights_at(step: int) -> torch.Tensor:
    """The state of an uninterrupted training after `step` steps."""
    chain = _chain()
    while len(chain) <= step:
        chain.append(next_weights(chain[-1], len(chain)))
    return chain[step]


@lru_cache(maxsize=1024)
def _plan(rank: int, world_size: int, absent: tuple[int, ...]) -> ShardPlan:
    return plan_shard([SPEC], rank=rank, world_size=world_size, absent=absent, metadata_bytes=400)


@dataclass(kw_only=True)
class Group:
    """The ranks of one generation, which add their gradients: a step ends when all have come to it."""

    world_size: int
    arrived: dict[int, int] = field(default_factory=dict)
    waiting: list[SimulatedThread] = field(default_factory=list)

    def meet(self, step: int, thread: SimulatedThread) -> None:
        """Wait for all others at this step; for ever, if one of them is gone."""
        self.arrived[step] = self.arrived.get(step, 0) + 1
        if self.arrived[step] < self.world_size:
            self.waiting.append(thread)
            thread.wait()
            return
        for other in self.waiting:
            thread.loop.call_soon(other.resume)
        self.waiting.clear()


@dataclass(kw_only=True)
class Training:
    """What all workers of a job have in common."""

    until: int
    step_seconds: float
    start_seconds: float
    synchronous: bool
    decision_wait_seconds: float
    on_leave: Callable[[int, int], None] = lambda generation, step: None
    """Told (generation, step) when a rank leaves for a decision."""
    groups: dict[int, Group] = field(default_factory=dict)
    object_stores: dict[str, ObjectStore] = field(default_factory=dict)
    """Agents' object servers by URL."""


class SimulatedRuntime:
    """Starts and ends the workers of one agent."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random, training: Training, agent: SimulatedProcess) -> None:
        self._loop = loop
        self._random = draw
        self._training = training
        self._agent = agent
        self._processes: dict[int, SimulatedProcess] = {}
        self._generations: dict[int, int] = {}
        self._pids = 0
        self.on_start: Callable[[int], None] = lambda generation: None
        """Told of every launch, with its generation."""
        agent.on_death.append(self._kill_all)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()

    def launch(self, worker: Worker, command: Sequence[str], environment: Mapping[str, str], on_exit: OnExit) -> None:
        """See the port."""
        self._pids += 1
        worker.pid = self._pids
        process = SimulatedProcess(f"{self._agent.name}/rank-{worker.rank}")
        self._processes[worker.pid] = process
        self._generations[worker.pid] = generation = int(environment["ORCHESTRATOR_GENERATION"])
        self.on_start(generation)
        program = _Program(self._random, self._training, process, str(environment[LAUNCH_VARIABLE]))
        process.on_death.append(lambda: self._report(worker, -9, on_exit))
        start = self._random.uniform(0.2, 1.0) * self._training.start_seconds
        self._loop.call_later(start, self._start, process, program, worker, on_exit)

    def _start(self, process: SimulatedProcess, program: _Program, worker: Worker, on_exit: OnExit) -> None:
        def work() -> None:
            code = program.run()
            if process.alive:
                process.on_death.clear()
                process.alive = False
                self._report(worker, code, on_exit)

        if process.alive:
            self._loop.start_thread(process, work)

    def _report(self, worker: Worker, code: int, on_exit: OnExit) -> None:
        """The kernel tells the agent, if that still lives."""

        def tell() -> None:
            if self._agent.alive and not worker.exited:
                worker.exited, worker.exit_code = True, code
                on_exit(worker)

        self._loop.call_later(self._random.uniform(0.001, 0.05), tell)

    def adopt(self, worker: Worker, pid: int, on_exit: OnExit) -> None:
        """See the port: nobody else starts processes in a simulated cluster, so there is no such process."""
        worker.exited = True
        on_exit(worker)

    def end(self, worker: Worker) -> None:
        """See the port."""
        process = self._processes.get(worker.pid)
        if self._agent.alive and process is not None and not worker.exited:
            worker.ended_by_us = True
            self._loop.call_later(self._random.uniform(0.0, 0.05), process.kill)

    def read(self, workers: Sequence[Worker]) -> list[ProcessReading]:
        """See the port: whoever waits for others looks the same as whoever works."""
        return [ProcessReading(state="S", traced=False, processor_seconds=0.0) for _ in workers]

    def ask_stacks(self, worker: Worker) -> bool:
        """See the port: there are none."""
        return False

    def alive(self) -> list[SimulatedProcess]:
        """Workers that run."""
        return [process for process in self._processes.values() if process.alive]

    def is_alive(self, worker: Worker) -> bool:
        """Whether it runs, whatever its agent believes."""
        process = self._processes.get(worker.pid)
        return process is not None and process.alive

    def generations(self) -> set[int]:
        """Of the workers that run."""
        return {self._generations[pid] for pid, process in self._processes.items() if process.alive}


class _Program:
    """The training script of one rank."""

    def __init__(self, draw: random.Random, training: Training, process: SimulatedProcess, launch: str) -> None:
        self._random = draw
        self._training = training
        self._process = process
        self._launch_path = launch

    def run(self) -> int:
        """From attach to the end; the exit status."""
        given = Launch.read(Path(self._launch_path))
        launch = given.model_copy(update={"decision_wait_seconds": self._training.decision_wait_seconds})
        control = ControlBlock.open(launch.control_path)
        try:
            return self._train(launch, control)
        except (FormatError, NotFoundError):
            control.set_phase(WorkerPhase.UNREADABLE)
            return 1
        except StoreError:
            return 1
        except GreenletExit:
            raise
        finally:
            control.close()

    def _train(self, launch: Launch, control: ControlBlock) -> int:
        control.set_phase(WorkerPhase.RESTORING)
        step, weights = self._restore(launch)
        stager = SimulatedStager(self._random, self._process, launch)
        stager.weights = weights
        thread = current_thread()
        boundary = Boundary(
            control,
            launch,
            stager,
            now_ns=lambda: int(thread.loop.now * 1e9),
            sleep=lambda _: thread.pause(self._random.uniform(*LOOK_SECONDS)),
        )
        plan = _plan(launch.rank, launch.world_size, ())
        control.set_unique_bytes(plan.header_bytes)
        control.set_slot_bytes(plan.size_bytes)
        control.set_info({"step": step, "until": self._training.until, "allowed_world_sizes": None})
        control.set_phase(WorkerPhase.RUNNING)
        boundary.start()
        group = self._training.groups.setdefault(launch.generation, Group(world_size=launch.world_size))
        pace = self._random.uniform(0.8, 1.3) * self._training.step_seconds
        while step < self._training.until:
            thread.pause(pace * self._random.uniform(0.8, 1.2))
            if self._training.synchronous:
                group.meet(step, thread)
            step += 1
            stager.weights = next_weights(stager.weights, step)
            if boundary.at(step, final=step == self._training.until) is Passing.LEAVE:
                control.set_phase(WorkerPhase.LEFT)
                self._training.on_leave(launch.generation, step)
                while control.outcome()[0] is not LeaveOutcome.RELEASED:
                    thread.wait()  # the agent ends this process
        control.set_phase(WorkerPhase.FINISHED)
        return 0

    def _restore(self, launch: Launch) -> tuple[int, torch.Tensor]:
        if launch.base is None:
            return 0, weights_at(0)
        store = self._training.object_stores[launch.objects_url]
        try:
            near = NearStore(store, store, launch.held, held_elsewhere=launch.held_elsewhere)
            return self._read(near, launch.base)
        except (FormatError, StoreError):
            return self._read(store, launch.base)

    def _read(self, store: ObjectStore, base: CheckpointId) -> tuple[int, torch.Tensor]:
        index = read_committed(store, base)
        weights = torch.empty(WEIGHTS, dtype=torch.int64)
        read_tensors(store, index, {"weights": weights})
        return index.step, weights


class SimulatedStager:
    """Stages the weights as the real one does: at once, or in a thread of the same process while training goes on."""

    def __init__(self, draw: random.Random, process: SimulatedProcess, launch: Launch) -> None:
        self._random = draw
        self._process = process
        self._launch = launch
        self._slots = [SlotFile(path) for path in launch.slot_paths]
        self._under_way = False
        self._waiting: SimulatedThread | None = None
        self.weights = weights_at(0)

    def stage(self, order: Order, finish: Finish, there: There) -> None:
        """See the port."""
        reached("before-stage", rank=self._launch.rank, step=order.step)
        weights = self.weights
        if not order.may_overlap or self._random.random() < SHARE_BLOCKING:
            self._copy(order, weights, finish, there)
            return

        def work() -> None:
            current_thread().pause(self._random.uniform(0.0, 0.2))
            reached("while-staging", rank=self._launch.rank, step=order.step)
            self._copy(order, weights, finish, lambda _: None)
            self._under_way = False
            if self._waiting is not None:
                self._waiting.loop.call_soon(self._waiting.resume)

        self._under_way = True
        current_thread().loop.start_thread(self._process, work)

    def join(self) -> None:
        """See the port."""
        if self._under_way:
            self._waiting = current_thread()
            self._waiting.wait()
            self._waiting = None
            assert not self._under_way

    def _copy(self, order: Order, weights: torch.Tensor, finish: Finish, there: There) -> None:
        plan = _plan(self._launch.rank, self._launch.world_size, order.absent)
        values: dict[str, object] = {"objects": {}}
        gate = {"step": order.step, "lr": "", "data": None, "rng": ""}
        own = {"rank": self._launch.rank, "step": order.step}
        metadata = Metadata(values=values, rank_values=own, gate=gate)
        took_seconds = self._random.uniform(0.0, 0.05)

        def slowly(size_bytes: int) -> None:
            there(size_bytes)
            current_thread().pause(took_seconds / 2)

        self._slots[order.slot].stage(plan, {"weights": weights}, metadata, slowly)
        reached("after-stage", rank=self._launch.rank, step=order.step)
        damaged = order.may_overlap and self._random.random() < SHARE_DAMAGED
        finish(None if damaged else plan.size_bytes, int(took_seconds * 1e9))


def current_thread() -> SimulatedThread:
    """The simulated thread that runs at the moment."""
    thread = getcurrent()
    assert isinstance(thread, SimulatedThread)
    assert current_process() is thread.process
    return thread

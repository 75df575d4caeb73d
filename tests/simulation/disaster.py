"""One seed, one disaster: a whole simulated job with random faults.

`run_seed(seed)` tells what went wrong, if anything: a promise that was broken (`tests.simulation.promises`), or a job
that does not get to its end, with its last step committed, once the faults have stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint import generations, save
from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.generations import Claimant
from orchestrator.core.messages import CheckpointId, NoticeKind, Request, Requested
from orchestrator.core.states import JobSpec
from orchestrator.errors import OrchestratorError
from orchestrator.telemetry import set_point_hook
from orchestrator.testing.faults import POINTS
from orchestrator.testing.simulated_cluster import Limits, SimulatedCluster, SimulatedNode, SimulatedRun
from orchestrator.testing.simulated_store import SimulatedStore
from orchestrator.testing.simulated_time import SimulatedLoop, SimulatedProcess, current_process, die_here, pause
from orchestrator.testing.simulated_workers import Training
from tests.simulation.promises import Promises, Violation

FAULTS_UNTIL_SECONDS = 12.0
LIMIT_SECONDS = 300.0
SWEEP_SECONDS = 1.0
ROLLBACK_UNTIL_SECONDS = 60.0


@dataclass(kw_only=True)
class Outcome:
    """How a seed ended."""

    problem: str | None
    seconds: float
    seen: Counter[str]


def run_seed(seed: int) -> Outcome:
    """Run one seed to its end; never raises for what the job did wrong."""
    disaster = Disaster(seed)
    try:
        disaster.loop.run_until_complete(disaster.run())
        problem = disaster.promises.problem
    except AssertionError as error:
        problem = disaster.promises.problem or f"{type(error).__name__}: {error}"
    finally:
        disaster.close()
    text = None if problem is None else f"seed {seed}: {problem}"
    return Outcome(problem=text, seconds=disaster.loop.now, seen=disaster.seen)


class Disaster:
    """One job, one seed."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        self.loop = SimulatedLoop()
        self.loop.set_exception_handler(self._on_loop_problem)
        self.seen: Counter[str] = Counter()
        self.cluster = SimulatedCluster(
            loop=self.loop,
            draw=draw,
            spec=replace(draw_spec(draw), **draw_keeping(random.Random(f"keeping {seed}"))),
            training=draw_training(draw),
            limits=draw_limits(draw),
        )
        self.promises = Promises(cluster=self.cluster, on_violation=self.cluster.finished.set)
        self.promises.watch()
        self.armed: set[str] = set()
        set_point_hook(self._on_point)

    def close(self) -> None:
        """Unwind what is left, quietly: its last words concern nobody."""
        set_point_hook(None)
        for run in self.cluster.runs:
            self.seen.update(f"event: {record.kind}" for record in run.records)
        self.cluster.close()

    def _on_loop_problem(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self.promises.problem = self.promises.problem or f"{context.get('message')}: {error!r}"
            self.cluster.finished.set()

    # -- the story ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the job is done; Violation if it does not get there in time."""
        self.cluster.start_run("run-1", "owner")
        for _ in range(self.random.randint(0, 8)):
            self.loop.call_later(self.random.uniform(0.3, FAULTS_UNTIL_SECONDS), self._fault)
        if self.random.random() < 0.25:
            self.loop.call_later(3.0, self._rollback)
        self.loop.call_later(FAULTS_UNTIL_SECONDS, self._calm)
        while not all(run.finish is not None for run in self.cluster.runs):
            self.cluster.finished.clear()
            try:
                await asyncio.wait_for(self.cluster.finished.wait(), LIMIT_SECONDS - self.loop.now)
            except TimeoutError:
                phases = [str(run.supervisor.job.phase) for run in self.cluster.runs if run.supervisor is not None]
                raise Violation(f"not done after {self.loop.now:.0f} s: {phases}") from None
            if self.promises.problem is not None:
                return
        self._check_end()

    def _calm(self) -> None:
        """From now on nothing more goes wrong."""
        self.armed.clear()
        self.cluster.weather.fail_share, self.cluster.weather.out = 0.0, False

    def _check_end(self) -> None:
        finishes = [run.finish for run in self.cluster.runs if run.finish is not None]
        catalog = survey(self.cluster.truth)
        for entry in catalog.entries:
            lost = entry.id in self.promises.committed and self.promises.usable(entry.id)
            retired = entry.standing is Standing.RETIRED and entry.id in self.promises.retired
            if lost and not retired and entry.standing is not Standing.COMMITTED:
                raise Violation(f"{entry.id} was committed and is {entry.standing} now: {entry.problem}")
        newest = catalog.newest()
        self.seen["committed"] += len(self.promises.committed)
        if newest is None or newest.id.step != self.cluster.training.until or all(end.exit_code for end in finishes):
            ends = [(end.exit_code, end.reason) for end in finishes]
            raise Violation(f"the job ended with {newest and newest.id} as the newest checkpoint: {ends}")

    # -- faults ------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        kinds: tuple[tuple[int, Callable[[], None]], ...] = (
            (2, self._lose_a_node),
            (3, self._notices),
            (1, self._worker_dies),
            (2, self._supervisor_dies),
            (1, self._network),
            (2, self._store),
            (3, self._named_point),
            (1, self._clocks),
            (1, self._request),
            (1, self._stall),
            (1, self._twin),
            (3, self._sweep),
            (1, self._device_fails),
        )
        weights = [weight for weight, _ in kinds]
        kind = self.random.choices([kind for _, kind in kinds], weights)[0]
        self.seen[kind.__name__.strip("_")] += 1
        kind()

    def _node(self) -> SimulatedNode | None:
        nodes = self.cluster.nodes()
        return self.random.choice(nodes) if nodes else None

    def _run(self) -> SimulatedRun:
        return self.random.choice(self.cluster.runs)

    def _lose_a_node(self) -> None:
        node = self._node()
        if node is not None:
            self.cluster.lose(node.name)

    def _notices(self) -> None:
        """One node or a burst; true, false or withdrawn; with a deadline, one that is past, or without."""
        nodes = self.cluster.nodes()
        self.random.shuffle(nodes)
        for node in nodes[: self.random.choice((1, 1, 1, 2, 3))]:
            seconds = self.random.choice((0.0, 0.3, 1.0, 2.0, 4.0, 6.0, 15.0))
            told = None if self.random.random() < 0.2 else seconds
            kind = self.random.choice((NoticeKind.PREEMPT, NoticeKind.PREEMPT, NoticeKind.MAINTENANCE, NoticeKind.HINT))
            notice_id = f"n{self.random.randrange(1 << 30)}"
            self.cluster.notice(node, kind, told, notice_id)
            what = self.random.random()
            if what < 0.6:
                self.cluster.lose(node.name, seconds)
            elif what < 0.8:
                self.loop.call_later(seconds / 2, self.cluster.notice, node, NoticeKind.CANCEL, None, notice_id)

    def _worker_dies(self) -> None:
        node = self._node()
        living = node.runtime.alive() if node is not None else []
        if living:
            self.random.choice(living).kill()

    def _supervisor_dies(self) -> None:
        """Alone, or with the host that its nodes are on."""
        seconds, alone = self.random.choice((0.2, 1.0, 4.0, 12.0)), self.random.random() < 0.7
        self._run().kill(seconds, with_nodes=not alone)

    def _network(self) -> None:
        node = self._node()
        if node is not None:
            self.cluster.network.cut(node.name, self.random.choice((0.0, 0.0, 0.5, 3.0, 8.0)))

    def _store(self) -> None:
        """A part of the operations fails, or all, or everything is slow; for a while."""
        weather, usual = self.cluster.weather, self.cluster.weather.latency_seconds
        kind = self.random.choice(("some", "all", "slow"))
        if kind == "some":
            weather.fail_share = self.random.choice((0.05, 0.3))
        elif kind == "all":
            weather.out = True
        else:
            weather.latency_seconds = 0.5

        def better() -> None:
            weather.fail_share, weather.out, weather.latency_seconds = 0.0, False, usual

        self.loop.call_later(self.random.choice((0.5, 3.0, 8.0)), better)

    def _named_point(self) -> None:
        """The next process that comes to a named point dies there."""
        self.armed.add(self.random.choice(POINTS))

    def _on_point(self, point: str, where: object) -> None:
        process = current_process()
        if point not in self.armed or process is None:
            return
        self.armed.remove(point)
        self.seen[f"killed {point}"] += 1
        node = next((node for node in self.cluster.nodes() if node.process is process), None)
        if node is not None:
            self.cluster.lose(node.name)
        die_here()

    def _clocks(self) -> None:
        self.cluster.clock.wall_offset_seconds += self.random.choice((-86400.0, -1.0, 3600.0))

    def _request(self) -> None:
        run = self._run()
        if run.supervisor is not None and run.process is not None and run.process.alive:
            nodes = self.random.randint(1, self.cluster.spec.nodes_max)
            run.supervisor.submit(Requested(request=Request.RESIZE, by="simulation", nodes=nodes))

    def _stall(self) -> None:
        """A supervisor stands still for a while (suspended, swapped out)."""
        self._run().stalled_until_seconds = self.loop.now + self.random.choice((0.5, 5.0))

    def _twin(self) -> None:
        """The same command is given a second time, somewhere else: by the same owner or by another."""
        if len(self.cluster.runs) == 1:
            self.cluster.start_run("run-2", self.random.choice(("owner", "somebody else")))

    def _sweep(self) -> None:
        """A sweeper with no patience at all: every undecided checkpoint is decided as abandoned, then deleted."""
        process = SimulatedProcess("sweeper")
        store = SimulatedStore(self.cluster.truth, self.cluster.weather, process, self.cluster.on_write)
        self.loop.start_thread(process, lambda: quietly(lambda: sweep(store)))

    def _device_fails(self) -> None:
        """For good, or as it seems for a while; its node is to go, or only told of."""
        node = self._node()
        if node is not None:
            self.cluster.host_trouble(node, "device", "it has failed", condemns=self.random.random() < 0.8)
            if self.random.random() < 0.3:
                self.loop.call_later(2.0, self.cluster.host_trouble, node, "device", None)

    def _rollback(self) -> None:
        """A person goes back to an older step, as soon as there is one: of the running job, or of a stopped one."""
        run = self.cluster.runs[0]
        usable = sorted(filter(self.promises.usable, self.promises.committed - self.promises.retired))
        if run.finish is not None or len(self.cluster.runs) > 1 or self.loop.now > ROLLBACK_UNTIL_SECONDS:
            return
        if len(usable) < 2 or run.process is None or not run.process.alive:
            self.loop.call_later(0.3, self._rollback)
            return
        step = self.random.choice(usable[:-1]).step
        if self.random.random() < 0.5 and run.supervisor is not None:
            self.seen["rollback asked"] += 1
            run.supervisor.submit(Requested(request=Request.ROLLBACK, by="a person", step=step))
            return
        self.seen["rollback"] += 1
        run.kill(None, with_nodes=True)
        process = SimulatedProcess("rollback")
        store = SimulatedStore(self.cluster.truth, self.cluster.weather, process, self.cluster.on_write)
        self.loop.call_later(0.5, self.loop.start_thread, process, lambda: quietly(roll_back, store, step))
        self.loop.call_later(10.0, self._start_after, process, run)

    def _start_after(self, process: SimulatedProcess, run: SimulatedRun) -> None:
        """The person waits for the rollback's end, then gives the command again."""
        if process.alive and process.threads:
            self.loop.call_later(0.5, self._start_after, process, run)
        else:
            run.start()


def sweep(store: SimulatedStore) -> None:
    """As a sweeper must: decide first, and only if that wins, delete."""
    swept = [checkpoint for checkpoint in undecided(store) if not save.abandon(store, checkpoint, "swept")]
    pause(SWEEP_SECONDS)
    for checkpoint in swept:
        remove(store, checkpoint)


def quietly(work: Callable[..., None], *what: object) -> None:
    """A failing store, or somebody faster, ends what a person or a sweeper does, and nothing else."""
    with contextlib.suppress(OrchestratorError):
        work(*what)


def undecided(store: SimulatedStore) -> list[CheckpointId]:
    """Checkpoints without an index."""
    keys = [entry.key for entry in store.entries("checkpoints/")]
    found = {parsed[0] for key in keys if (parsed := fmt.parse_checkpoint_key(key)) is not None}
    return sorted(checkpoint for checkpoint in found if fmt.index_key(checkpoint) not in keys)


def remove(store: SimulatedStore, checkpoint: CheckpointId) -> None:
    """Delete shards and receipts; the index stays."""
    for entry in list(store.entries(fmt.folder_key(checkpoint) + "/")):
        if not entry.key.endswith("index.json"):
            store.delete(entry.key)


def roll_back(store: SimulatedStore, step: int) -> None:
    """As the verb does where no supervisor runs."""
    who = Claimant(job="simulated", owner="owner", claimant="rollback", take_over=False)
    generations.roll_back(store, who, step, "a person", 0.0)


def draw_spec(draw: random.Random) -> JobSpec:
    """A small job with short limits."""
    return JobSpec(
        name="simulated",
        nodes_min=1,
        nodes_max=draw.randint(1, 3),
        workers_per_node=draw.randint(1, 2),
        save_every_steps=draw.choice((4, 7, 1000)),
        failures_max=1000,
        fruitless_max=1000,
        gather_seconds=3.0,
        reform_seconds=1.0,
        open_seconds=15.0,
        exit_seconds=3.0,
        leave_seconds=5.0,
        upload_seconds=20.0,
        return_seconds=6.0,
        store_retry_seconds=1.0,
    )


def draw_keeping(draw: random.Random) -> dict[str, Any]:
    """How many checkpoints are kept, and how often, and how patiently, the store is swept."""
    return {
        "keep_last": draw.choice((0, 0, 1, 2)),
        "keep_every_steps": draw.choice((0, 8)),
        "sweep_seconds": draw.choice((1.0, 5.0, 600.0)),
        "sweep_grace_seconds": draw.choice((0.5, 5.0, 3600.0)),
    }


def draw_training(draw: random.Random) -> Training:
    """A short training."""
    return Training(
        until=draw.randint(12, 30),
        step_seconds=draw.choice((0.05, 0.15, 0.4)),
        start_seconds=draw.choice((0.2, 1.0)),
        synchronous=draw.random() < 0.7,
        decision_wait_seconds=draw.choice((0.5, 2.0, 10.0)),
    )


def draw_limits(draw: random.Random) -> Limits:
    """A fast or a slow network and store."""
    return Limits(delay_seconds=draw.choice((0.002, 0.02, 0.1)), store_latency_seconds=draw.choice((0.001, 0.01, 0.1)))

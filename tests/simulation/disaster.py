"""One seed, one disaster: a whole simulated job with random faults, and what must hold all along.

`run_seed(seed)` gives None, or what went wrong. Checked at every write to the store: an index is committed only over
shards of its own step that put together the uninterrupted training's state, nothing that was committed is written
again, a base is not older than what was committed when its generation was claimed. Checked at every launch: no
generation is shared, none starts beside workers of an older one of its run. Checked at the end: once the faults have
stopped, the job reaches its last step and that step is committed.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.reader import read_committed, verify
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.core.messages import CheckpointId, NoticeKind, Request, Requested
from orchestrator.core.states import JobSpec
from orchestrator.errors import OrchestratorError
from orchestrator.telemetry import set_point_hook
from orchestrator.testing.faults import POINTS
from orchestrator.testing.simulated_cluster import Limits, SimulatedCluster, SimulatedNode
from orchestrator.testing.simulated_time import SimulatedLoop, SimulatedProcess, current_process, die_here
from orchestrator.testing.simulated_workers import WEIGHTS, Training, weights_at

FAULTS_UNTIL_SECONDS = 12.0
LIMIT_SECONDS = 300.0


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(kw_only=True)
class Outcome:
    """How a seed ended."""

    problem: str | None
    seconds: float
    seen: Counter[str] = field(default_factory=Counter)


def run_seed(seed: int) -> Outcome:
    """Run one seed to its end; never raises for what the job did wrong."""
    disaster = Disaster(seed)
    loop = disaster.loop
    try:
        loop.run_until_complete(disaster.run())
        problem = disaster.problem
    except (Violation, AssertionError) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        disaster.close()
    return Outcome(problem=problem and f"seed {seed}: {problem}", seconds=loop.now, seen=disaster.seen)


class Disaster:
    """One job, one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = draw = random.Random(seed)
        self.loop = SimulatedLoop()
        self.problem: str | None = None
        self.seen: Counter[str] = Counter()
        self.loop.set_exception_handler(self._on_loop_problem)
        spec = JobSpec(
            name="simulated",
            nodes_min=1,
            nodes_max=draw.randint(1, 3),
            workers_per_node=draw.randint(1, 2),
            save_every_steps=draw.choice((4, 7, 1000)),
            failures_max=1000,
            fruitless_max=1000,
            gather_seconds=3.0,
            reform_seconds=1.0,
            open_seconds=5.0,
            exit_seconds=3.0,
            leave_seconds=5.0,
            upload_seconds=20.0,
            return_seconds=6.0,
            store_retry_seconds=1.0,
        )
        delay = draw.choice((0.002, 0.02, 0.1))
        synchronous = draw.random() < 0.7
        training = Training(
            until=draw.randint(12, 30),
            step_seconds=draw.choice((0.05, 0.15, 0.4)),
            start_seconds=draw.choice((0.2, 1.0)),
            synchronous=synchronous,
            decision_wait_seconds=draw.choice((0.5, 2.0, 10.0)),
        )
        limits = Limits(delay_seconds=delay, store_latency_seconds=draw.choice((0.001, 0.01, 0.1)))
        self.cluster = SimulatedCluster(loop=self.loop, draw=draw, spec=spec, training=training, limits=limits)
        self.cluster.on_write = self._on_write
        self.cluster.on_start = self._on_start
        self.started_by: dict[int, str] = {}
        self.committed: set[CheckpointId] = set()
        self.newest_at_claim: dict[int, CheckpointId | None] = {}
        self.claimed_by: dict[int, str] = {}
        self.armed: dict[str, int] = {}
        set_point_hook(self._on_point)

    def close(self) -> None:
        """Unwind what is left, quietly: its last words concern nobody."""
        set_point_hook(None)
        for run in self.cluster.runs:
            self.seen.update(f"event: {record.kind}" for record in run.records)
            for node in run.nodes.values():
                node.process.kill()
            if run.process is not None:
                run.process.kill()
        tasks = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        for task in tasks:
            task.cancel()
        for _ in range(50):
            if not self.loop._ready and not any(not task.done() for task in tasks):
                break
            self.loop.call_later(0.2, lambda: None)
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.cluster.close()
        self.loop.close()

    def _on_loop_problem(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if self.problem is None and isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self.problem = f"{context.get('message')}: {type(error).__name__}: {error}"

    # -- the story ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the job is done; Violation if it does not get there in time."""
        first = self.cluster.start_run("run-1", "owner")
        for _ in range(self.random.randint(0, 6)):
            self.loop.call_later(self.random.uniform(0.3, FAULTS_UNTIL_SECONDS), self._fault)
        self.loop.call_later(FAULTS_UNTIL_SECONDS, self._calm)
        while not self._over():
            self.cluster.finished.clear()
            try:
                await asyncio.wait_for(self.cluster.finished.wait(), LIMIT_SECONDS - self.loop.now)
            except TimeoutError:
                phase = first.supervisor.job.phase if first.supervisor else None
                raise Violation(f"not done after {self.loop.now:.0f} s, {phase}") from None
            if self.problem is not None:
                return
        self._check_end()

    def _over(self) -> bool:
        return all(run.finish is not None for run in self.cluster.runs)

    def _calm(self) -> None:
        """From now on nothing more goes wrong."""
        self.armed.clear()
        self.cluster.weather.fail_share, self.cluster.weather.out = 0.0, False

    def _fault(self) -> None:
        kinds: list[Callable[[], None]] = [
            self._lose_a_node,
            self._lose_a_node,
            self._notices,
            self._notices,
            self._worker_dies,
            self._supervisor_dies,
            self._supervisor_dies,
            self._network,
            self._store,
            self._named_point,
            self._clocks,
            self._request,
            self._stall,
            self._twin,
        ]
        kind = self.random.choice(kinds)
        self.seen[kind.__name__.strip("_")] += 1
        kind()

    def _node(self) -> SimulatedNode | None:
        nodes = self.cluster.nodes()
        return self.random.choice(nodes) if nodes else None

    def _lose_a_node(self) -> None:
        node = self._node()
        if node is not None:
            self.cluster.lose(node.name)

    def _notices(self) -> None:
        """One node or a burst; true, false or withdrawn; with a deadline or without."""
        nodes = self.cluster.nodes()
        self.random.shuffle(nodes)
        for node in nodes[: self.random.choice((1, 1, 1, 2, 3))]:
            seconds = self.random.choice((0.0, 0.3, 2.0, 6.0, 15.0))
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
        """Once any has attached: before that a dying worker is the script's own mistake, and ends the job."""
        node = self._node()
        living = node.runtime.alive() if node is not None else []
        supervisor = node.run.supervisor if node is not None else None
        if living and supervisor is not None and supervisor.job.ever_attached:
            self.random.choice(living).kill()

    def _supervisor_dies(self) -> None:
        run = self.random.choice(self.cluster.runs)
        run.kill(self.random.choice((0.2, 1.0, 4.0, 12.0)), with_nodes=self.random.random() < 0.2)

    def _network(self) -> None:
        node = self._node()
        if node is not None:
            self.cluster.network.cut(node.name, self.random.choice((0.0, 0.0, 0.5, 3.0, 8.0)))

    def _store(self) -> None:
        """A part of the operations fails, or all, or everything is slow; for a while."""
        weather, usual = self.cluster.weather, self.cluster.weather.latency_seconds
        if not self.claimed_by:
            return  # a store that fails at the very first claim is the user's mistake, and ends the job
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
        self.armed[self.random.choice(POINTS)] = 1

    def _on_point(self, point: str, where: object) -> None:
        if self.armed.pop(point, 0) and current_process() is not None:
            self.seen[f"killed {point}"] += 1
            process = current_process()
            assert process is not None
            node = next((node for node in self.cluster.nodes() if node.process is process), None)
            if node is not None:
                self.cluster.lose(node.name)
            die_here()

    def _clocks(self) -> None:
        self.cluster.clock.wall_offset_seconds += self.random.choice((-86400.0, -1.0, 3600.0))

    def _request(self) -> None:
        run = self.random.choice(self.cluster.runs)
        if run.supervisor is not None and run.process is not None and run.process.alive:
            nodes = self.random.randint(1, self.cluster.spec.nodes_max)
            run.supervisor.submit(Requested(request=Request.RESIZE, by="simulation", nodes=nodes))

    def _stall(self) -> None:
        """A supervisor stands still for a while (suspended, swapped out)."""
        self.random.choice(self.cluster.runs).stalled_until_seconds = self.loop.now + self.random.choice((0.5, 5.0))

    def _twin(self) -> None:
        """The same command is given a second time, somewhere else: by the same owner or by another."""
        if len(self.cluster.runs) == 1:
            self.cluster.start_run("run-2", self.random.choice(("owner", "somebody else")))

    # -- what must hold ----------------------------------------------------------------------------------

    def _on_write(self, key: str, content: bytes, process: SimulatedProcess) -> None:
        try:
            self._check_write(key, content, process)
        except (Violation, OrchestratorError) as error:
            self.problem = self.problem or f"at {self.loop.now:.3f} s: {type(error).__name__}: {error}"
            self.cluster.finished.set()

    def _on_start(self, node: SimulatedNode, generation: int) -> None:
        """Workers of one generation alone: every node that the supervisor still counts on has ended the older ones."""
        if self.started_by.setdefault(generation, node.run.name) != node.run.name:
            self.problem = self.problem or f"generation {generation} was started by two runs"
        supervisor = node.run.supervisor
        assert supervisor is not None
        for other in node.run.nodes.values():
            older = {one for one in other.runtime.generations() if one < generation}
            if other.process.alive and other.name in supervisor.job.nodes and older:
                beside = f"generation {generation} starts on {node.name} while {other.name} runs {older}"
                self.problem = self.problem or f"at {self.loop.now:.3f} s: {beside}"

    def _check_write(self, key: str, content: bytes, process: SimulatedProcess) -> None:
        number = fmt.parse_generation_key(key)
        if number is not None:
            self.newest_at_claim[number] = max(self.committed, default=None)
            self.claimed_by[number] = process.name
        elif key.endswith(".base.json"):
            record = fmt.load(fmt.BaseRecord, key, content)
            newest = self.newest_at_claim[record.generation]
            if newest is not None and (record.id is None or record.id < newest):
                raise Violation(f"{key}: the base is {record.id}, but {newest} was committed before the claim")
        elif key.endswith("index.json") and b'"committed"' in content:
            parsed = fmt.parse_checkpoint_key(key)
            assert parsed is not None
            self._check_committed(parsed[0])
            self.committed.add(parsed[0])

    def _check_committed(self, checkpoint: CheckpointId) -> None:
        store = self.cluster.truth
        index = read_committed(store, checkpoint)
        problems = [problem for _, problem in verify(store, index) if problem]
        if problems:
            raise Violation(f"{checkpoint} was committed with {problems}")
        weights = torch.empty(WEIGHTS, dtype=torch.int64)
        read_tensors(store, index, {"weights": weights})
        if not torch.equal(weights, weights_at(checkpoint.step)):
            raise Violation(f"{checkpoint} was committed with values of another step")
        staged = {int(values["step"]) for values in index.rank_values.values()}
        if staged != {checkpoint.step}:
            raise Violation(f"{checkpoint} was committed with ranks that staged steps {staged}")
        self.seen["committed"] += 1

    def _check_end(self) -> None:
        if self.problem is not None:
            return
        codes = sorted(run.finish.exit_code for run in self.cluster.runs if run.finish is not None)
        catalog = survey(self.cluster.truth)
        for entry in catalog.entries:
            if entry.id in self.committed and entry.standing is not Standing.COMMITTED:
                raise Violation(f"{entry.id} was committed and is {entry.standing} now: {entry.problem}")
        newest = catalog.newest()
        done = newest is not None and newest.id.step == self.cluster.training.until
        if 0 not in codes or not done:
            reasons = [run.finish.reason for run in self.cluster.runs if run.finish is not None]
            raise Violation(f"ended with {codes}, newest {newest and newest.id}: {reasons}")


def main() -> None:
    """`python -m tests.simulation.disaster FIRST COUNT`: run seeds and print what went wrong."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    sys.unraisablehook = lambda _: None
    seen: Counter[str] = Counter()
    import time

    started = time.process_time()
    bad = 0
    for seed in range(first, first + count):
        outcome = run_seed(seed)
        seen += outcome.seen
        if outcome.problem is not None:
            bad += 1
            print(outcome.problem, flush=True)
        if seed % 20 == 0:
            gc.collect()
    seconds = time.process_time() - started
    print(f"{count} seeds in {seconds:.1f} s, {1000 * seconds / count:.0f} ms each; {bad} went wrong")
    print(dict(seen))


if __name__ == "__main__":
    main()

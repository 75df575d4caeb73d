"""A whole job in one thread: real core, supervisor, agents and store code; simulated time, network and processes.

`SimulatedCluster` owns nodes and runs (a run is a supervisor with its scheduler); faults are its methods, so that a
test, or a user's own, can tell a story: lose this node, cut that one off, kill the supervisor, let the store fail.
What must hold all along is not checked here: `on_write`, `on_start`, `on_action` and `on_record` tell. Needs torch and
greenlet (in the extra `dev`).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.node import Agent
from orchestrator.agent.ports import AgentPorts
from orchestrator.agent.settings import AgentSettings
from orchestrator.core.messages import Action, Event, Finish, HostReported, NoticeKind, NoticeReceived
from orchestrator.core.states import JobSpec
from orchestrator.errors import StoreError
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.memory import MemoryStore
from orchestrator.supervisor.loop import Supervisor
from orchestrator.telemetry import EventLog, EventRecord
from orchestrator.testing.simulated_network import SimulatedNetwork, SimulatedSocket
from orchestrator.testing.simulated_store import SimulatedPeer, SimulatedStore, Weather
from orchestrator.testing.simulated_time import SimulatedClock, SimulatedLoop, SimulatedProcess, pause
from orchestrator.testing.simulated_workers import SimulatedRuntime, Training

TURNS_TO_UNWIND_MAX = 50


@dataclass(kw_only=True)
class Limits:
    """How the cluster behaves apart from faults; seconds."""

    delay_seconds: float = 0.01
    store_latency_seconds: float = 0.01
    node_start_seconds: float = 0.5
    look_seconds: float = 0.1
    """Between two looks of an agent at its control blocks; a quarter of it while an agreement is open."""
    lost_after_seconds: float = 0.5
    """Until the scheduler says for certain that a node is gone."""


@dataclass(kw_only=True, eq=False)
class SimulatedNode:
    """One machine with its agent."""

    name: str
    process: SimulatedProcess
    runtime: SimulatedRuntime
    run: SimulatedRun
    staging: Path
    agent: Agent = field(init=False)
    released: bool = False


class _ObjectServer:
    """An agent's object server: a name by which workers find the agent's store."""

    def __init__(self, training: Training, url: str) -> None:
        self._training = training
        self._url = url

    async def start(
        self, store: ObjectStore, tokens: tuple[str, ...], address: str, routes: Sequence[object] = ()
    ) -> str:
        """See the port."""
        self._training.object_stores[self._url] = store
        return self._url

    async def stop(self) -> None:
        """See the port."""
        self._training.object_stores.pop(self._url, None)


class _NoPort:
    """The supervisor's server: agents reach it through the simulated network."""

    def __init__(self, token: str) -> None:
        self.token = token

    async def start(self) -> str:
        """See the port."""
        return "simulated:"

    async def stop(self) -> None:
        """See the port."""

    def count(self, record: EventRecord) -> None:
        """See the port."""


class _Scheduler:
    """Gives and takes nodes for one life of a supervisor."""

    def __init__(self, run: SimulatedRun, process: SimulatedProcess) -> None:
        self._run = run
        self._process = process
        self.on_lost: OnLost = lambda node, reason: None

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        """See the port."""
        self.on_lost = on_lost
        return tuple(self._run.nodes)

    def request(self, count: int) -> None:
        """See the port."""
        if self._process.alive:
            for _ in range(count):
                self._run.order_node()

    def release(self, node: str) -> None:
        """See the port."""
        if self._process.alive:
            self._run.release(node)

    def lose(self, node: str, after_seconds: float) -> None:
        """See the port."""
        self._run.cluster.lose(node, after_seconds)

    def nodes(self) -> list[NodeInfo]:
        """See the port."""
        return [NodeInfo(node=name, pid=1) for name in self._run.nodes]

    async def stop(self) -> None:
        """See the port."""
        if self._process.alive:
            for name in list(self._run.nodes):
                self._run.release(name)


@dataclass(kw_only=True, eq=False)
class SimulatedRun:
    """One `orchestrator run`: supervisors one after another, each started again when it was killed."""

    cluster: SimulatedCluster
    name: str
    owner: str
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    lives: int = 0
    supervisor: Supervisor | None = None
    process: SimulatedProcess | None = None
    scheduler: _Scheduler | None = None
    finish: Finish | None = None
    records: list[EventRecord] = field(default_factory=list)
    stalled_until_seconds: float = 0.0

    def start(self) -> None:
        """Start a supervisor: the same command again."""
        self.lives += 1
        name = f"{self.name}-supervisor-{self.lives}"
        process = SimulatedProcess(name)
        self.process, self.scheduler = process, _Scheduler(self, process)

        def emit(record: EventRecord) -> None:
            if process.alive:
                self.records.append(record)
                self.cluster.on_record(self, record)

        supervisor = Supervisor(
            self.cluster.spec,
            self.scheduler,
            self.cluster.clock,
            EventLog(emit),
            "token",
            open_server=lambda _, token: _NoPort(token),
        )
        self.supervisor = supervisor
        self._let_it_stall(supervisor)
        self._let_others_watch(supervisor)

        async def live() -> None:
            finish = await supervisor.run()
            if process.alive:
                process.alive = False
                self.finish = finish
                self.cluster.finished.set()

        process.start(live())

    def _let_it_stall(self, supervisor: Supervisor) -> None:
        """Events that come in while the process stands still are taken in afterwards, all at once."""
        take_in, held = supervisor.submit, list[Event]()

        def submit(event: Event) -> None:
            if not held and self.cluster.loop.now >= self.stalled_until_seconds:
                take_in(event)
                return
            if not held:
                self.cluster.loop.call_at(self.stalled_until_seconds, go_on)
            held.append(event)

        def go_on() -> None:
            if self.cluster.loop.now < self.stalled_until_seconds:
                self.cluster.loop.call_at(self.stalled_until_seconds, go_on)
                return
            for event in held:
                take_in(event)
            held.clear()

        supervisor.submit = submit  # type: ignore[method-assign]
        supervisor.links._submit = submit

    def _let_others_watch(self, supervisor: Supervisor) -> None:
        send = supervisor.links.send

        def watched(node: str, action: Action) -> None:
            self.cluster.on_action(self, action)
            send(node, action)

        supervisor.links.send = watched  # type: ignore[method-assign]

    def kill(self, back_after_seconds: float | None, *, with_nodes: bool = False) -> None:
        """SIGKILL to the supervisor, with or without its nodes; the same command is given again later (None: never)."""
        if self.process is None or not self.process.alive or self.finish is not None:
            return
        self.process.kill()
        if with_nodes:
            for name in list(self.nodes):
                self.cluster.end_node(self.nodes.pop(name))
        if back_after_seconds is not None:
            self.cluster.loop.call_later(back_after_seconds, self.start)

    def order_node(self) -> None:
        """A node comes up some time later."""
        seconds = self.cluster.limits.node_start_seconds * self.cluster.random.choice((0.2, 1.0, 1.0, 4.0))
        life = self.lives
        self.cluster.loop.call_later(seconds, lambda: self._add_node() if life == self.lives else None)

    def _add_node(self) -> None:
        if self.process is not None and self.process.alive and self.finish is None:
            node = self.cluster.start_node(self)
            self.nodes[node.name] = node

    def release(self, name: str) -> None:
        """The agent was dismissed; one that does not end by itself is ended."""
        node = self.nodes.pop(name, None)
        if node is not None:
            node.released = True
            self.cluster.loop.call_later(5.0, self.cluster.end_node, node)

    def on_lost(self, name: str, reason: str) -> None:
        """The scheduler is certain; a supervisor that is away will not hear of it."""
        if self.process is not None and self.process.alive and self.scheduler is not None:
            self.scheduler.on_lost(name, reason)


class SimulatedCluster:
    """Nodes, network, store and runs of one job."""

    def __init__(
        self, *, loop: SimulatedLoop, draw: random.Random, spec: JobSpec, training: Training, limits: Limits
    ) -> None:
        self.loop = loop
        self.random = draw
        self.spec = spec
        self.training = training
        self.limits = limits
        self.clock = SimulatedClock(loop)
        self.network = SimulatedNetwork(loop, draw, limits.delay_seconds)
        self.weather = Weather(draw, limits.store_latency_seconds)
        self.truth = MemoryStore("job")
        self.runs: list[SimulatedRun] = []
        self.finished = asyncio.Event()
        self.folder = Path(tempfile.mkdtemp(prefix="simulated-", dir="/dev/shm"))
        self.on_write: Callable[[str, bytes, SimulatedProcess], None] = lambda *_: None
        self.on_start: Callable[[SimulatedNode, int], None] = lambda *_: None
        self.on_record: Callable[[SimulatedRun, EventRecord], None] = lambda *_: None
        self.on_action: Callable[[SimulatedRun, Action], None] = lambda *_: None
        self.unfit: dict[str, str] = {}
        """Node → what it finds wrong with its devices before it joins."""
        self._names = 0

    def close(self) -> None:
        """Everything is killed and unwound, quietly; memory is given back and the loop closed."""
        self.on_write = lambda *_: None
        self.on_start = lambda *_: None
        self.on_action = lambda *_: None
        self.on_record = lambda *_: None
        for run in self.runs:
            for node in run.nodes.values():
                node.process.kill()
            if run.process is not None:
                run.process.kill()
        tasks = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        for task in tasks:
            task.cancel()
        for _ in range(TURNS_TO_UNWIND_MAX):
            if not self.loop._ready and all(task.done() for task in tasks):  # type: ignore[attr-defined]
                break
            self.loop.call_later(0.2, lambda: None)
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.loop.close()

    def start_run(self, name: str, owner: str) -> SimulatedRun:
        """Give the command."""
        run = SimulatedRun(cluster=self, name=name, owner=owner)
        self.runs.append(run)
        run.start()
        return run

    # -- nodes -------------------------------------------------------------------------------------------

    def nodes(self) -> list[SimulatedNode]:
        """All nodes that live."""
        return [node for run in self.runs for node in run.nodes.values() if node.process.alive]

    def start_node(self, run: SimulatedRun) -> SimulatedNode:
        """A machine comes up; its agent looks for the run's supervisor."""
        self._names += 1
        name = f"node-{self._names}"
        process = SimulatedProcess(name)
        runtime = SimulatedRuntime(self.loop, self.random, self.training, process)
        node = SimulatedNode(name=name, process=process, runtime=runtime, run=run, staging=self.folder / name)
        runtime.on_start = lambda generation: self.on_start(node, generation)
        settings = AgentSettings(
            job=self.spec.name,
            node=name,
            workers=self.spec.workers_per_node,
            command=("simulated",),
            store="memory:",
            owner=run.owner,
            claimant=run.name,
            supervisor_url="simulated:",
            token="token",
            staging=node.staging,
            logs=self.folder / "logs",
            echo_output=False,
        )
        node.agent = Agent(settings, self._ports(node))

        async def live() -> None:
            await node.agent.run(handle_signals=False)
            self.end_node(node)

        process.start(live())
        return node

    def _ports(self, node: SimulatedNode) -> AgentPorts:
        async def connect() -> SimulatedSocket:
            return self.network.connect(node.name, node.process, node.run.process, lambda end: self._accept(node, end))

        return AgentPorts(
            store=SimulatedStore(self.truth, self.weather, node.process, self._written),
            clock=self.clock,
            connect=connect,
            runtime=node.runtime,
            object_server=_ObjectServer(self.training, f"simulated:{node.name}"),
            open_peer=lambda url, _: self._peer(url),
            sleep=pause,
            reason_not_to_join=(lambda: self.unfit[node.name]) if node.name in self.unfit else None,
            look_seconds_busy=self.limits.look_seconds / 4,
            look_seconds_idle=self.limits.look_seconds,
        )

    def _peer(self, url: str) -> AbstractContextManager[ObjectStore]:
        store = self.training.object_stores.get(url)
        if store is None:
            raise StoreError(url, "no such node (simulated)")
        return nullcontext(SimulatedPeer(store, self.weather))

    def _written(self, key: str, content: bytes, process: SimulatedProcess) -> None:
        self.on_write(key, content, process)

    def _accept(self, node: SimulatedNode, end: SimulatedSocket) -> None:
        run = node.run
        assert run.process is not None
        assert run.supervisor is not None
        run.process.start(run.supervisor.links.serve(end))

    def end_node(self, node: SimulatedNode) -> None:
        """Everything on the machine is gone; nobody is told."""
        self.training.object_stores.pop(f"simulated:{node.name}", None)
        node.process.kill()
        shutil.rmtree(node.staging, ignore_errors=True)

    # -- faults ------------------------------------------------------------------------------------------

    def lose(self, name: str, after_seconds: float = 0.0) -> None:
        """The machine vanishes; the scheduler learns of it some time later."""

        def gone() -> None:
            node = next((run.nodes[name] for run in self.runs if name in run.nodes), None)
            if node is None:
                return
            self.end_node(node)
            seconds = self.limits.lost_after_seconds * self.random.choice((0.1, 1.0, 4.0))
            self.loop.call_later(seconds, report, node)

        def report(node: SimulatedNode) -> None:
            node.run.nodes.pop(name, None)
            node.run.on_lost(name, "it vanished (simulated)")

        self.loop.call_later(after_seconds, gone)

    def notice(self, node: SimulatedNode, kind: NoticeKind, remaining_seconds: float | None, notice_id: str) -> None:
        """What the node's metadata service says, as its agent would pass it on."""
        if node.process.alive:
            node.agent.reports.notice(
                NoticeReceived(
                    node=node.name,
                    source="simulated cloud",
                    kind=kind,
                    remaining_seconds=remaining_seconds,
                    notice_id=notice_id,
                )
            )

    def host_trouble(self, node: SimulatedNode, what: str, problem: str | None, *, condemns: bool = False) -> None:
        """What a node sees of its host or of a device, as its agent would pass it on."""
        if node.process.alive:
            node.agent.reports.host(HostReported(node=node.name, what=what, problem=problem, condemns=condemns))

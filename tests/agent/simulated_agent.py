"""One real agent in simulated time, beside supervisors that a test plays and workers whose words it writes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from orchestrator.agent.node import Agent
from orchestrator.agent.ports import AgentPorts
from orchestrator.agent.workers import Worker
from orchestrator.checkpoint.slots import WorkerPhase
from orchestrator.core.messages import Action, Decide, Event, LaunchWorkers, Mode, Prepare
from orchestrator.errors import StoreError
from orchestrator.health.progress import ProcessReading
from orchestrator.storage.base import ObjectStore, Piece
from orchestrator.storage.memory import MemoryStore
from orchestrator.supervisor.links import AgentLinks
from orchestrator.testing.simulated_network import SimulatedNetwork, SimulatedSocket
from orchestrator.testing.simulated_time import SimulatedClock, SimulatedLoop, SimulatedProcess, pause
from tests.agent.settings import settings_in
from tests.checkpoint.shards import checkpoint_id, place, stage

NODE, GENERATION = "node-1", 4
STATE = {"w": torch.arange(30, dtype=torch.float32)}


class FakeSupervisor:
    """One life of a supervisor: what it hears, and what the test lets it say."""

    def __init__(self, name: str) -> None:
        self.process = SimulatedProcess(name)
        self.heard: list[Event] = []
        self.links = AgentLinks(self.heard.append, lambda node, reason: self.lost.append(reason))
        self.lost: list[str] = []

    def say(self, *actions: Action) -> None:
        for action in actions:
            self.links.send(NODE, action)

    def kinds(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]


class FakeRuntime:
    """Workers without processes: they live until the test, or the agent, ends them."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._on_exit: dict[int, Callable[[Worker], None]] = {}
        self.launched: list[Worker] = []
        self.dies_after_seconds = 0.01
        self.readings: dict[int, list[ProcessReading]] = {}
        """Rank → what is seen of it, one look after another; without any it waits."""

    def launch(
        self, worker: Worker, command: Sequence[str], environment: Mapping[str, str], on_exit: Callable[[Worker], None]
    ) -> None:
        self.launched.append(worker)
        worker.pid = 1000 + len(self.launched)
        self._on_exit[worker.pid] = on_exit

    def adopt(self, worker: Worker, pid: int, on_exit: Callable[[Worker], None]) -> None:
        worker.exited = True  # nobody starts processes here but the agent: there is no such process
        on_exit(worker)

    def end(self, worker: Worker) -> None:
        if not worker.exited:
            worker.ended_by_us = True
            self._loop.call_later(self.dies_after_seconds, self.exit, worker, -9)

    def read(self, workers: Sequence[Worker]) -> list[ProcessReading]:
        """See the port."""
        quiet = ProcessReading(state="S", traced=False, processor_seconds=0.0)
        return [self.readings[one.rank].pop(0) if self.readings.get(one.rank) else quiet for one in workers]

    def ask_stacks(self, worker: Worker) -> bool:
        """See the port."""
        return False

    def exit(self, worker: Worker, code: int) -> None:
        if not worker.exited:
            worker.exited, worker.exit_code = True, code
            self._on_exit[worker.pid](worker)


class NoObjectServer:
    """Nobody reads this agent's store."""

    async def start(
        self, store: ObjectStore, tokens: tuple[str, ...], address: str, routes: Sequence[object] = ()
    ) -> str:
        return "simulated:"

    async def stop(self) -> None:
        return


class FailingStore(MemoryStore):
    """Fails the next `failures` creations, and remembers when it was asked."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop
        self.failures = 0
        self.tried_seconds: list[float] = []

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        self.tried_seconds.append(self._loop.now)
        if self.failures:
            self.failures -= 1
            raise StoreError(key, "503 (a test)")
        super().create(key, pieces)


class Scene:
    """The agent, its supervisors one after another, and a clock that jumps."""

    def __init__(self, folder: Path, *, ranks: int = 1, world_size: int = 1, **settings: Any) -> None:
        self.loop = SimulatedLoop()
        self.folder = folder
        self.ranks, self.world_size = ranks, world_size
        self.store = FailingStore(self.loop)
        self.runtime = FakeRuntime(self.loop)
        self.network = SimulatedNetwork(self.loop, random.Random(1), 0.001)
        self.supervisor = FakeSupervisor("supervisor-1")
        self.process = SimulatedProcess("agent")
        self.reason: str | None = None
        (folder / "made").mkdir(parents=True)
        ports = AgentPorts(
            store=self.store,
            clock=SimulatedClock(self.loop),
            connect=self._connect,
            runtime=self.runtime,
            object_server=NoObjectServer(),
            open_peer=lambda url, token: nullcontext(self.store),
            sleep=pause,
            look_seconds_idle=0.1,
        )
        given = settings_in(folder / "staging", workers=ranks, echo_output=False).model_copy(update=settings)
        self.agent = Agent(given, ports)

    async def _connect(self) -> SimulatedSocket:
        supervisor = self.supervisor

        def accept(end: SimulatedSocket) -> None:
            supervisor.process.start(supervisor.links.serve(end))

        return self.network.connect(NODE, self.process, supervisor.process, accept)

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        """Run the agent and the story beside it."""

        async def all_of_it() -> None:
            living = self.process.start(self._live())
            try:
                await story()
            finally:
                living.cancel()
                await asyncio.gather(living, return_exceptions=True)
                self.supervisor.process.kill()
                await asyncio.sleep(1)

        try:
            self.loop.run_until_complete(all_of_it())
        finally:
            self.loop.close()

    async def _live(self) -> None:
        self.reason = await self.agent.run(handle_signals=False)

    def kill_supervisor(self) -> None:
        self.supervisor.process.kill()

    def next_supervisor(self) -> FakeSupervisor:
        self.supervisor = FakeSupervisor("the next supervisor")
        return self.supervisor

    # -- what a job does, in short -------------------------------------------------------------------------

    def launch(self, generation: int = GENERATION) -> None:
        self.supervisor.say(
            LaunchWorkers(
                node=NODE,
                generation=generation,
                world_size=self.world_size,
                first_rank=0,
                count=self.ranks,
                base=None,
                meeting_address="127.0.0.1",
                meeting_port=1,
            )
        )

    def attach(self) -> None:
        for worker in self.runtime.launched:
            worker.control.set_info({"step": 0, "until": 100, "allowed_world_sizes": None})
            worker.control.set_phase(WorkerPhase.RUNNING)

    def agree(self, step: int, ballot: int = 1, mode: Mode = Mode.STAY, absent: tuple[int, ...] = ()) -> None:
        self.supervisor.say(
            Prepare(node=NODE, generation=GENERATION, ballot=ballot, step=step),
            Decide(
                node=NODE,
                generation=GENERATION,
                ballot=ballot,
                step=step,
                mode=mode,
                absent=absent,
                remaining_seconds=None,
            ),
        )

    def stage(self, rank: int, step: int, absent: tuple[int, ...] = ()) -> None:
        """As the worker does: shard into a free slot, then publish."""
        worker = self.runtime.launched[rank]
        where = place(rank, self.world_size, absent, checkpoint_id(GENERATION, step))
        data = stage(self.folder / "made", STATE, where)
        worker.slot_paths[0].write_bytes(data)
        worker.control.start_slot(0, GENERATION, step)
        worker.control.finish_slot(0, GENERATION, step, len(data), 1_000_000)
        worker.control.publish(step, 0)

    def receipts(self) -> list[str]:
        keys = (entry.key for entry in self.store.entries("checkpoints/"))
        return sorted(key for key in keys if "shard-" in key and key.endswith(".json"))

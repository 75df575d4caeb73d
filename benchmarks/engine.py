"""All that the benchmarks call of the checkpoint engine, in one place: when the engine changes, this follows.

Nothing is done in another way than a job does it: a rank's state is captured, planned and staged by
`training.saved_state`, uploaded by `agent.uploads`, committed by `checkpoint.save`, read by `checkpoint.restore`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from orchestrator.agent import uploads
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import HeldShard, Launch
from orchestrator.checkpoint.layout import plan_shard
from orchestrator.checkpoint.near import NearStore
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.checkpoint.save import ShardPlace, commit
from orchestrator.checkpoint.slots import SLOTS, ControlBlock
from orchestrator.checkpoint.staging import Metadata, SlotFile
from orchestrator.clock import SystemClock
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from orchestrator.storage.peers import PeerStore
from orchestrator.training.boundary import Order
from orchestrator.training.parts import Captured, ModelPart
from orchestrator.training.saved_state import SavedState
from orchestrator.training.session import Run

GENERATION = 1
JOB = "benchmark"
TOKEN = "of-a-benchmark"
ROOT = Path(__file__).parents[1]


def model_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters are these tensors, without a copy."""
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return model


def launch(staging: Path, rank: int = 0, world_size: int = 1) -> Launch:
    """A worker's place in a job that is not there."""
    return Launch(
        job=JOB,
        generation=GENERATION,
        rank=rank,
        world_size=world_size,
        local_world_size=1,
        base=None,
        control_path=staging / f"{rank}.control",
        slot_paths=(staging / f"{rank}.slot-0", staging / f"{rank}.slot-1"),
        objects_url="http://127.0.0.1:1",
        token=TOKEN,
        attached=False,
        agent_pid=os.getpid(),
    )


# -------------------------------------------------------------------------------------------------- saving


class Rank:
    """One rank that saves: its own side (`stage`) and its agent's (`upload`)."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], staging: Path, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self._place = launch(staging, rank, world_size)
        self._state = SavedState(self._place, [ModelPart("model", model_of(tensors))], None, [], ())
        self._control = ControlBlock.create(
            self._place.control_path, generation=GENERATION, rank=rank, world_size=world_size
        )
        self.slot_bytes = self._state.stager.plan()
        self.slots_bytes = SLOTS * self.slot_bytes
        """Reserved in memory for as long as the job runs."""

    def stage(self, step: int) -> int:
        """What a worker does at the boundary of an agreed step; bytes of the shard."""
        sizes: list[int] = []
        order = Order(slot=step % SLOTS, step=step, absent=(), may_overlap=False)
        self._state.stager.stage(order, lambda size_bytes, copy_ns: sizes.append(size_bytes or 0), lambda there: None)
        return sizes[0]

    def upload(self, store: ObjectStore, step: int, size_bytes: int) -> None:
        """What the agent does with a staged shard, at normal priority: nothing else shall run beside it here."""
        place = ShardPlace(
            job=self._place.job,
            checkpoint=checkpoint_of(step),
            rank=self._place.rank,
            world_size=self._place.world_size,
            absent=(),
        )
        asyncio.run(_upload(store, place, self.slot(step), size_bytes))

    def slot(self, step: int) -> Path:
        """Where the shard of a step is staged."""
        return self._place.slot_paths[step % SLOTS]

    def save(self, store: ObjectStore, step: int) -> None:
        """A blocking save of a job of this rank alone: staged, durable, committed; one after the other."""
        self.upload(store, step, self.stage(step))
        commit(store, checkpoint_of(step))

    def near(self, store: ObjectStore, step: int) -> NearStore:
        """The store as a worker of the next generation sees it, while this rank's slot holds the shard of the step."""
        path = self.slot(step)
        size_bytes = read_committed(store, checkpoint_of(step)).by_rank[self._place.rank].size_bytes
        held = HeldShard(checkpoint=checkpoint_of(step), rank=self._place.rank, path=path, size_bytes=size_bytes)
        return NearStore(store, store, [held], held_elsewhere=False)

    def save_leaving(self, agent: Agent, step: int) -> None:
        """Stage, as when all leave: the agent follows. Returns when shard and receipt are durable."""
        index = step % SLOTS
        self._control.start_slot(index, GENERATION, step)
        agent.ask(
            job=self._place.job,
            control=str(self._place.control_path),
            slot=str(self.slot(step)),
            index=index,
            step=step,
        )
        self._state.stager.stage(
            Order(slot=index, step=step, absent=(), may_overlap=False),
            lambda size_bytes, copy_ns: self._control.finish_slot(index, GENERATION, step, size_bytes or 0, copy_ns),
            lambda there_bytes: self._control.advance_slot(index, step, there_bytes),
        )
        agent.answer()


class Agent:
    """A rank's connection to the process that uploads."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rw")

    def ask(self, **request: object) -> None:
        """Send a request; `answer` waits for it to be done."""
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()

    def answer(self) -> object:
        """What came of the last request."""
        line = self._file.readline()
        if not line:
            raise SystemExit("the process that uploads has failed, and has said why")
        return json.loads(line)

    def commit(self, step: int) -> None:
        """Write the index: all shards are there."""
        self.ask(commit=step, generation=GENERATION)
        if self.answer() is not True:
            raise SystemExit(f"the checkpoint of step {step} was not committed")

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()


@contextmanager
def agent_process(folder: Path, path: Path) -> Iterator[None]:
    """A process that uploads to a folder and commits there, as an agent does; `Agent(path)` talks to it."""
    command = [sys.executable, "-m", "benchmarks.upload_server", str(path), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdout.readline()
            yield
        finally:
            server.stdin.close()  # it ends with its input
            server.wait(timeout=30)


async def _upload(store: ObjectStore, place: ShardPlace, path: Path, size_bytes: int) -> None:
    uploads.UPLOAD_NICE = 0
    pool = uploads.Uploads(store, SystemClock(), 1)
    try:
        await pool.start(place, path, lambda: (size_bytes, True))
    finally:
        pool.close()


def commit_step(store: ObjectStore, step: int) -> None:
    """The index, once all shards are there."""
    if not commit(store, checkpoint_of(step)):
        raise SystemExit(f"the checkpoint of step {step} was not committed")


def checkpoint_of(step: int) -> CheckpointId:
    """Of the one generation here."""
    return CheckpointId(generation=GENERATION, step=step)


def shard_key(step: int) -> str:
    """Of a job of one rank."""
    return fmt.shard_key(checkpoint_of(step), 0, 1)


class BareSlot:
    """A slot alone: planned once, staged without capturing the state anew."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        captured = Captured()
        objects = {"model": ModelPart("model", model_of(tensors)).capture(captured)}
        self._tensors = captured.tensors
        self._metadata = Metadata(values={"objects": objects}, rank_values={}, gate={})
        self._plan = plan_shard(
            captured.specs(), rank=0, world_size=1, absent=(), metadata_bytes=self._metadata.size_bytes()
        )
        self._slot = SlotFile(path)
        self._slot.reserve(self._plan.size_bytes)

    def stage(self) -> None:
        """Header and tensors into the slot."""
        self._slot.stage(self._plan, self._tensors, self._metadata)


# ------------------------------------------------------------------------------------------------- loading


def open_folder(folder: Path) -> ObjectStore:
    """A store in a folder."""
    return open_store(str(folder))


def load(store: ObjectStore, checkpoint: CheckpointId, tensors: Mapping[str, torch.Tensor]) -> None:
    """Into existing tensors of the names that `Rank` was given, every byte verified."""
    index = read_committed(store, checkpoint)
    read_tensors(store, index, {f"model.{name}": tensor for name, tensor in tensors.items()})


def needed_bytes(store: ObjectStore, checkpoint: CheckpointId, names: Sequence[str]) -> int:
    """What the tensors of these names take in the shards, rounded to whole digest blocks."""
    index = read_committed(store, checkpoint)
    blocks: set[tuple[int, int]] = set()
    for name in names:
        for chunk in index.chunks(f"model.{name}"):
            touched = range(chunk.first_byte // fmt.BLOCK_BYTES, -(-chunk.last_byte // fmt.BLOCK_BYTES))
            blocks |= {(chunk.rank, block) for block in touched}
    sizes = {rank: record.size_bytes for rank, record in index.by_rank.items()}
    return sum(min(fmt.BLOCK_BYTES, sizes[rank] - block * fmt.BLOCK_BYTES) for rank, block in blocks)


@contextmanager
def through_agent(folder: Path) -> Iterator[ObjectStore]:
    """The same folder as a worker sees it: served over HTTP by the agent's object server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.object_server", str(folder), TOKEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            with PeerStore(server.stdout.readline().strip(), TOKEN) as store:
                yield store
        finally:
            server.stdin.close()  # it ends with its input
            server.wait(timeout=30)


# ------------------------------------------------------------------------------------------------ boundary


@contextmanager
def attached(tensors: Mapping[str, torch.Tensor], staging: Path) -> Iterator[Run]:
    """A worker with its control block, and an agent that wants nothing."""
    place = launch(staging)
    control = ControlBlock.create(place.control_path, generation=GENERATION, rank=0, world_size=1)
    try:
        yield Run(place, {"model": model_of(tensors)}, ())
    finally:
        control.close()

"""The training of `inflation.py`, a worker of a real job: `python -m benchmarks.training_to_inflate SETTING`, as JSON.

A step computes for a while on a small matrix and then updates all parameters (SGD, foreach). Phases of at least 12
steps alternate: without a save, and with a save at step 0 and 6, by each side in turn; a phase goes on until its saves
are durable. Everything goes through `run.steps`, the others' phases too. What each phase took is written to
FOLDER/result.json. At the end one more save of ours is loaded and compared with what the state was at its boundary.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import orchestrator
from benchmarks import rivals
from benchmarks.measuring import PAIRS_MIN, QUICK_STATES, STATES, after
from orchestrator.checkpoint.catalog import survey
from orchestrator.checkpoint.digest import crc
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.storage.opening import open_store

SAVE_STEPS = (0, 6)
PHASE_STEPS = 12
WAIT_SECONDS_MAX = 120.0
STEPS_MAX = 1 << 40
LOOK_SECONDS = 0.005


class Side(Protocol):
    """One way to save."""

    def begin(self, tensors: rivals.Tensors, folder: Path) -> None:
        """Begin to save; may return before it is durable."""
        ...

    def ready(self) -> bool:
        """Whether the next save may begin: waits for the one before, or says no until it is durable."""
        ...

    def done(self) -> bool:
        """Whether everything that was begun is durable."""
        ...


class Ours:
    """`run.save()`: staged at a step boundary, uploaded by the agent."""

    def __init__(self, run: orchestrator.Run, store: Path) -> None:
        self._run = run
        self._store = store
        self._expected = 0

    def begin(self, tensors: rivals.Tensors, folder: Path) -> None:
        """Asks for it."""
        self._expected = self.committed() + 1
        self._run.save()

    def ready(self) -> bool:
        """Training goes on until then; two requests before an agreement would be one."""
        return self.done()

    def done(self) -> bool:
        """By the indexes."""
        return self.committed() >= self._expected

    def committed(self) -> int:
        """How many indexes are there."""
        return len(list(self._store.glob("checkpoints/*/index.json")))


class Blocking:
    """`dcp.save`."""

    def begin(self, tensors: rivals.Tensors, folder: Path) -> None:
        """All of it."""
        rivals.dcp_save(tensors, folder)

    def ready(self) -> bool:
        """Always."""
        return True

    def done(self) -> bool:
        """Always."""
        return True


class Async:
    """`dcp.async_save`."""

    def __init__(self) -> None:
        self._future: Any = None

    def begin(self, tensors: rivals.Tensors, folder: Path) -> None:
        """Returns when the state is copied."""
        self._future = rivals.dcp_async_save(tensors, folder)

    def ready(self) -> bool:
        """Waits for the future."""
        if self._future is not None:
            self._future.result()
        return True

    def done(self) -> bool:
        """Of the future."""
        return self._future is None or bool(self._future.done())


@dataclass(kw_only=True)
class Training:
    """The training and its clock."""

    tensors: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    turns: Iterator[int]
    matrix: torch.Tensor
    compute_seconds: float
    lock: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self) -> None:
        """One step, and its boundary."""
        for _ in range(self.products):
            torch.mm(self.matrix, self.matrix)
        with self.lock():
            self.optimizer.step()
        next(self.turns)

    def calibrate(self) -> None:
        """So many products take so long. Fixed then, so that whoever disturbs them is seen."""
        begin = time.perf_counter()
        for _ in range(50):
            torch.mm(self.matrix, self.matrix)
        self.products = max(round(50 * self.compute_seconds / (time.perf_counter() - begin)), 1)

    products: int = 1

    def base(self) -> float:
        """Seconds of a step without a save."""
        begin = time.perf_counter()
        for _ in range(PHASE_STEPS):
            self.step()
        return (time.perf_counter() - begin) / PHASE_STEPS

    def with_saves(self, side: Side, folder: Path) -> tuple[float, int]:
        """(seconds, steps) until two saves are durable."""
        begin, steps, due = time.perf_counter(), 0, list(SAVE_STEPS)
        while steps < PHASE_STEPS or due or not side.done():
            if due and steps >= due[0] and side.ready():
                side.begin(self.tensors, folder / str(due.pop(0)))
            self.step()
            steps += 1
        return time.perf_counter() - begin, steps


def main() -> None:
    """Train until all pairs are measured."""
    setting = json.loads(sys.argv[1])
    folder = Path(setting["folder"])
    torch.set_num_threads(setting["threads"])
    state = (QUICK_STATES if setting["quick"] else STATES)[setting["state"]]
    model = torch.nn.Module()
    for name, tensor in state.make().items():
        model.register_parameter(name, torch.nn.Parameter(tensor))
    gradient = torch.full((state.tensor_bytes // 4,), 1e-3)
    for parameter in model.parameters():
        parameter.grad = gradient  # one for all: what is measured are the parameters' bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    run = orchestrator.attach(model=model, optimizer=optimizer)
    training = Training(
        tensors={name: parameter.detach() for name, parameter in model.named_parameters()},
        optimizer=optimizer,
        turns=run.steps(until=STEPS_MAX),
        matrix=torch.ones(256, 256) / 256,
        compute_seconds=setting["compute_seconds"],
    )
    ours = Ours(run, folder / "store" / "job")
    training.calibrate()
    try:
        with rivals.process_group():
            result = measure(training, ours, setting)
        result["equal"] = compare(training, ours, run, folder)
    except Exception:  # else the job would start this again and again
        result = {"error": traceback.format_exc()}
    (folder / "draft").write_text(json.dumps(result))
    (folder / "draft").rename(folder / "result.json")
    time.sleep(WAIT_SECONDS_MAX)  # it is ended from outside


def measure(training: Training, ours: Ours, setting: dict[str, Any]) -> dict[str, Any]:
    """Added milliseconds per save of each side, between two base phases each; base seconds per step."""
    sides: dict[str, Any] = {"orchestrator": ours, "dcp.save": Blocking(), "dcp.async_save": Async()}
    left_out = []
    for name, library in (("torchsnapshot", rivals.TorchSnapshot), ("torch_checkpointing", rivals.TorchCheckpointing)):
        problem = rivals.import_problem(name)
        if problem is None:
            sides[name] = library()
        else:
            left_out.append(problem)
    added: dict[str, list[float]] = {name: [] for name in sides}
    bases: list[float] = []
    over = after(setting["limit_seconds"])
    for pair in range(setting["pairs"] + 1):
        if pair > PAIRS_MIN and over():
            break
        first = pair % len(sides)
        names = [*sides][first:] + [*sides][:first]
        before = training.base()
        for name in names:
            target = Path(setting["folder"]) / "rivals"
            training.lock = getattr(sides[name], "lock", nullcontext)
            seconds, steps = training.with_saves(sides[name], target)
            training.lock = nullcontext
            rivals.remove(target)
            between = training.base()
            if pair:  # the first round warms up
                added[name].append((seconds - steps * (before + between) / 2) / len(SAVE_STEPS))
                bases.append(between)
            before = between
    for side in sides.values():
        getattr(side, "close", lambda: None)()
    return {"added_seconds": added, "base_step_seconds": bases, "left_out": left_out}


def compare(training: Training, ours: Ours, run: orchestrator.Run, folder: Path) -> bool:
    """One more save of ours, loaded: bit-equal to the state at the boundary of its step?"""

    def digests(tensors: rivals.Tensors) -> list[int]:
        return [crc(memoryview(tensor.numpy().data).cast("B")) for tensor in tensors.values()]

    at = {run.step: digests(training.tensors)}
    ours.begin(training.tensors, folder)
    end = time.monotonic() + WAIT_SECONDS_MAX
    while not ours.done() and time.monotonic() < end:
        training.optimizer.step()
        at[run.step + 1] = digests(training.tensors)
        next(training.turns)
        time.sleep(LOOK_SECONDS)
    store = open_store(str(folder / "store" / "job"))
    newest = survey(store).newest()
    if newest is None or newest.id.step not in at:
        return False
    loaded = {name: torch.zeros_like(tensor) for name, tensor in training.tensors.items()}
    index = read_committed(store, newest.id)
    read_tensors(store, index, {f"model.{name}": tensor for name, tensor in loaded.items()})
    return digests(loaded) == at[newest.id.step]


if __name__ == "__main__":
    main()

"""A training that is mostly state, for `notice_to_commit.py`: saved by the orchestrator, or by a SIGTERM handler.

`training_to_interrupt.py orchestrator|dcp TENSORS TENSOR_BYTES STEP_SECONDS FOLDER`, one process per rank with
torchrun's variables. Every rank holds the same tensors. Step s adds 1 to tensor s modulo TENSORS, so that the state
after any number of steps is known. Each rank writes its process id to FOLDER/rank-<rank> after a few steps.

The handler with torch.distributed.checkpoint is what one writes by hand: the signal sets a flag, the ranks reduce the
flag at every step, and all save together as soon as one has it. Its files are flushed to the disk (`sync_files`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

READY_STEPS = 6
STEPS_MAX = 100_000
LAST_ACT_SECONDS = 60.0


def make_tensors(count: int, tensor_bytes: int) -> list[torch.Tensor]:
    """The state before the first step: float32 [tensor_bytes / 4] each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tensor_bytes // 4, generator=generator) for _ in range(count)]


def train_one(step: int, tensors: list[torch.Tensor]) -> None:
    """What a step changes."""
    tensors[step % len(tensors)].add_(1.0)


def steps(begin: int, tensors: list[torch.Tensor], step_seconds: float, folder: Path) -> Iterator[int]:
    """Steps of equal length, which the ranks do together, as a reduction of gradients makes them."""
    gradient = torch.ones(1024)
    for step in range(begin, STEPS_MAX):
        began = time.monotonic()
        dist.all_reduce(gradient)
        gradient.fill_(1.0)
        train_one(step, tensors)
        if step == READY_STEPS:
            (folder / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(max(0.0, step_seconds - (time.monotonic() - began)))
        yield step + 1


def with_orchestrator(tensors: list[torch.Tensor], step_seconds: float, folder: Path) -> None:
    import orchestrator

    model = torch.nn.Module()
    for number, tensor in enumerate(tensors):
        model.register_parameter(f"t{number}", torch.nn.Parameter(tensor, requires_grad=False))
    run = orchestrator.attach(model=model)
    done = steps(run.step, tensors, step_seconds, folder)
    for _ in run.steps(until=STEPS_MAX):
        next(done)


def with_handler(tensors: list[torch.Tensor], step_seconds: float, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    asked = False

    def on_signal(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, on_signal)
    for step in steps(0, tensors, step_seconds, folder):
        flag = torch.tensor([float(asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            state = {f"t{number}": tensor for number, tensor in enumerate(tensors)} | {"step": step}
            writer = dcp.FileSystemWriter(folder / "checkpoint", sync_files=True)
            dcp.save(state, storage_writer=writer)
            time.sleep(LAST_ACT_SECONDS)  # it is measured from outside, and ended from there


def main() -> None:
    kind, count, tensor_bytes, step_seconds, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensors = make_tensors(int(count), int(tensor_bytes))
    train = {"orchestrator": with_orchestrator, "dcp": with_handler}[kind]
    with torch.no_grad():
        train(tensors, float(step_seconds), Path(folder))


if __name__ == "__main__":
    main()

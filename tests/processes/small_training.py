"""A real training in miniature for tests: DDP over gloo if there are several ranks, Adam, dropout, LR schedule.

Options are environment variables, so that the same command line runs everywhere:
STEPS, STEP_SECONDS, FIRST_STEP_SECONDS, LOG (folder), FAULT and FAULT_MARKER (see orchestrator.testing.faults),
LOADER (DataLoader workers), ODD (a scheduler state that cannot be saved), CHILD (seconds that a child process sleeps),
SAVE_AT (a step that asks for a save), NOTICES (what is watched where nobody supervises), HANG (rank, step: there it
sleeps for ever, in generation 1), PAUSE (step, seconds: all announce a pause there), EVALUATE (steps, seconds: so often
rank 0 computes for so long, unannounced), LOSS_NAN_FROM (the losses are told, and from this step on as NaN).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import quick_torch  # noqa: F401  # first of all that imports torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import orchestrator
from orchestrator.testing import faults

STEPS = int(os.environ.get("STEPS", "40"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Odd:
    """An object whose state holds something that cannot be saved."""

    def state_dict(self) -> dict[str, object]:
        return {"0": {"fn": lambda: None}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError(state)


def stand(run: orchestrator.Run, step: int) -> None:
    """What is no training, after this step."""
    rank, at = pair("HANG")
    if run.generation == 1 and (run.rank, step) == (rank, at):
        time.sleep(3600)
    at, seconds = pair("PAUSE")
    if step == at:
        with run.pause(seconds=60):
            time.sleep(seconds)
    every, seconds = pair("EVALUATE")
    if every > 0 and step % every == 0 and run.rank == 0:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass


def pair(name: str) -> tuple[float, float]:
    """Two numbers of an option; without it, some that mean nothing."""
    first, second = os.environ.get(name, "-1 -1").split()
    return float(first), float(second)


def main() -> None:
    torch.set_num_threads(1)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
    )
    model = DistributedDataParallel(net, find_unused_parameters=WORLD_SIZE > 2) if WORLD_SIZE > 1 else net
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    data = TensorDataset(torch.randn(4096, 16), torch.randn(4096, 1))
    sampler = orchestrator.ResumableSampler(len(data), global_batch=16, micro_batch=4, seed=3)
    others: dict[str, Any] = {"odd": Odd()} if "ODD" in os.environ else {}
    if "CHILD" in os.environ:
        subprocess.Popen(["sleep", os.environ["CHILD"]])
    if "FAULT" in os.environ:
        faults.parse(os.environ["FAULT"]).kill(once=Path(os.environ["FAULT_MARKER"]))
    run = orchestrator.attach(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=sampler,
        save_every=10,
        notices=os.environ.get("NOTICES", "none"),
        **others,
    )
    workers = int(os.environ.get("LOADER", "0"))
    loader = iter(DataLoader(data, batch_sampler=sampler.stream(), num_workers=workers, generator=torch.Generator()))
    for step in run.steps(until=STEPS):
        began = time.monotonic()
        for _ in range(sampler.micro_batches_per_step):
            inputs, targets = next(loader)
            if run.step == 0:
                time.sleep(float(os.environ.get("FIRST_STEP_SECONDS", "0")) / sampler.micro_batches_per_step)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if "LOSS_NAN_FROM" in os.environ:
            run.observe(loss=loss * (float("nan") if step >= int(os.environ["LOSS_NAN_FROM"]) else 1.0))
        if step + 1 == int(os.environ.get("SAVE_AT", "0")):
            run.save()
        stand(run, step + 1)
        if "LOG" in os.environ:
            line = {"step": step + 1, "generation": run.generation, "lr": scheduler.get_last_lr(), "pid": os.getpid()}
            folder = Path(os.environ["LOG"])
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{run.rank}.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - began)))
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main()

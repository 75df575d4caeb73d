"""A training with a large state whose every step is different, and a ledger of it: what a checkpoint must hold.

Every `SAVE_EVERY` steps, at the first step after a start and after the last, each rank enters the digests of its whole
live state (parameters, optimizer, schedule, position, generators) as it computes them itself, without the package.
An entry of a restarted worker is thus the digest of what was really restored. Run by `tests.processes.kill_times`.

Variables: STEPS, SAVE_EVERY, LEDGER (folder), BALLAST_MIB, PACE (a file: while it is there, steps take STEP_SECONDS).
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import quick_torch  # noqa: F401  # first of all that imports torch
import torch
import torch.distributed as dist
from crc32c import crc32c

import orchestrator

STEPS = int(os.environ["STEPS"])
SAVE_EVERY = int(os.environ["SAVE_EVERY"])
BALLAST_MIB = int(os.environ["BALLAST_MIB"])
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.05"))
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DTYPES = {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}


class Net(torch.nn.Module):
    """Two small layers that are trained, and tensors beside them that only make the state large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )
        pieces = [torch.randn(8, 2**17) for _ in range(BALLAST_MIB // 4)]
        self.ballast = torch.nn.ParameterList(torch.nn.Parameter(piece, requires_grad=False) for piece in pieces)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = Net()
    inputs, targets = torch.randn(4096, 64), torch.randn(4096, 1)
    torch.manual_seed(100 + RANK)  # dropout differs from rank to rank: generators are part of the state
    random.seed(5)
    np.random.seed(6)
    optimizer = torch.optim.Adam(net.layers.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    sampler = orchestrator.ResumableSampler(len(inputs), global_batch=16, micro_batch=4, seed=3)
    run = orchestrator.attach(model=net, optimizer=optimizer, scheduler=scheduler, data=sampler)
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    begun = run.step
    pace = Path(os.environ["PACE"])
    for step in run.steps(until=STEPS):
        began = time.monotonic()
        if step == begun or step % SAVE_EVERY == 0:
            enter(run.generation, step, **state)
        for indices in sampler:
            torch.nn.functional.mse_loss(net(inputs[indices]), targets[indices]).backward()
        average_gradients(net)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for number, piece in enumerate(net.ballast):
                piece.add_(random.random() - 0.5 + np.random.random() * number)
        if pace.exists():
            time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - began)))
    enter(run.generation, STEPS, **state)


def average_gradients(net: Net) -> None:
    """What DDP does, without what its import of the compiler costs. A sum of two is the same in either order."""
    gradients = [parameter.grad for parameter in net.layers.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    torch._foreach_copy_(
        gradients, [part.view_as(of) for part, of in zip(split(flat, gradients), gradients, strict=True)]
    )


def split(flat: torch.Tensor, like: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (flat / WORLD_SIZE).split([tensor.numel() for tensor in like])


def enter(generation: int, step: int, *, net: Net, optimizer: Any, scheduler: Any, sampler: Any) -> None:
    """One entry of this rank, whole or not there at all."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"optimizer.state.{names[parameter]}.{entry}": tensor for entry, tensor in state.items()}
    tensors[f"rank.{RANK:05d}.rng.torch"] = torch.get_rng_state()
    version, words, gauss = random.getstate()
    values = {
        "position": sampler.state_dict()["position"],
        "last_epoch": scheduler.state_dict()["last_epoch"],
        "lr": scheduler.state_dict()["_last_lr"],
        "python": digest_json([version, list(words), gauss]),
        "numpy": digest_json(np.random.get_state(legacy=False)),
    }
    entry = {
        "generation": generation,
        "step": step,
        "rank": RANK,
        "tensors": {name: digest(tensor) for name, tensor in tensors.items()},
        "values": values,
    }
    folder = Path(os.environ["LEDGER"])
    draft = folder / f".rank-{RANK}"
    draft.write_text(json.dumps(entry))
    draft.rename(folder / f"generation-{generation:04d}-step-{step:06d}-rank-{RANK}.json")


def digest(tensor: torch.Tensor) -> str:
    """As `tensor_digests` writes it: dtype, shape, crc32c of the bytes."""
    checksum = crc32c(
        memoryview(tensor.detach().contiguous().numpy().data).cast("B") if tensor.dim() else bytes_of(tensor)
    )
    return f"{DTYPES[tensor.dtype]}{list(tensor.shape)}:{checksum:08x}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def digest_json(value: Any) -> str:
    """crc32c of a value as JSON with sorted keys."""
    text = json.dumps(value, sort_keys=True, default=lambda array: array.tolist())
    return f"{crc32c(text.encode()):08x}"


if __name__ == "__main__":
    main()

"""A byte-level GPT, trained on the sources of Python's own standard library: nothing to download.

What it is: one complete training script, small enough to read, in which the lines marked `# orchestrator` are all
that fault tolerance takes. What it is not: a good language model.

It runs as `python train.py`, under `torchrun --nproc-per-node 4 train.py`, and under
`orchestrator run --job gpt --store checkpoints -- python train.py`; the README says more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import orchestrator  # orchestrator
from orchestrator.training.sampler import ResumableSampler  # orchestrator

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BYTES = 256  # the vocabulary
WARM_UP_STEPS = 20
PACKAGES = ("", "asyncio", "collections", "concurrent/futures", "email", "http", "importlib", "json", "logging")


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual: [batch, context, width] to the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.queries_keys_values(self.norm_1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.dropout(self.attended(attention.transpose(1, 2).reshape(batch, context, width)))
        change: Tensor = self.dropout(self.perceptron(self.norm_2(x)))
        return x + change


class GPT(nn.Module):
    """Predicts each next byte: int64 [batch, context + 1] to the mean cross-entropy, a scalar, in nats."""

    def __init__(self, *, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, window: Tensor) -> Tensor:
        known, wanted = window[:, :-1], window[:, 1:]
        x = self.dropout(self.bytes(known) + self.places.weight[: known.shape[1]])
        scores = self.scores(self.norm(self.blocks(x)))
        return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def library_text(mebibytes_max: float) -> NDArray[np.uint8]:
    """The standard library's sources one after the other, in a fixed order, as uint8 [bytes]."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for package in PACKAGES for file in sorted((library / package).glob("*.py"))]
    text, bytes_max = bytearray(), int(mebibytes_max * 2**20)
    for file in files:
        if len(text) < bytes_max and not file.name.startswith("_sysconfigdata"):  # that one differs between machines
            text += file.read_bytes()
    return np.frombuffer(bytes(text[:bytes_max]), dtype=np.uint8)


def windows(text: NDArray[np.uint8], indices: list[int], context: int) -> Tensor:
    """Samples by index, int64 [len(indices), context + 1]: sample i starts at byte i * context."""
    return torch.from_numpy(np.stack([text[i * context : (i + 1) * context + 1] for i in indices]).astype(np.int64))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="stop after so many optimizer steps in all")
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step, all ranks together")
    parser.add_argument("--micro-batch", type=int, default=8, help="most samples per forward pass")
    parser.add_argument("--seed", type=int, default=1, help="of weights, dropout and sample order")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="bytes that a prediction may look back")
    parser.add_argument("--decay-steps", type=int, default=2000, help="length of the learning rate's cosine")
    parser.add_argument("--text-mebibytes", type=float, default=4.0, help="most text to read")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="write one JSON line per step and rank there")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep until a step has taken so long")
    return parser.parse_args()


def start(args: argparse.Namespace) -> torch.device:
    """Join the other ranks, if there are any, and return the device to train on."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        torch.set_num_threads(1)  # ranks that share cores must not fight for them
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device(f"cuda:{local_rank % torch.cuda.device_count()}" if args.device == "cuda" else "cpu")


def build(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """Model (in DDP if there are several ranks), optimizer and learning-rate schedule."""
    torch.manual_seed(args.seed)  # the same weights on every rank …
    gpt = GPT(layers=args.layers, heads=4, width=args.width, context=args.context, dropout=0.1)
    model: nn.Module = gpt.to(device)
    torch.manual_seed(args.seed + 1 + RANK)  # … and other dropout
    if WORLD_SIZE > 1:
        # Above two ranks, DDP rebuilds its buckets after the first backward pass and then adds in another order,
        # unless it looks for unused parameters: a resumed run would differ in the last bit.
        model = DistributedDataParallel(model, find_unused_parameters=WORLD_SIZE > 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = LinearLR(optimizer, start_factor=0.01, total_iters=WARM_UP_STEPS)
    decay = CosineAnnealingLR(optimizer, T_max=args.decay_steps)
    return model, optimizer, SequentialLR(optimizer, [warm_up, decay], milestones=[WARM_UP_STEPS])


def accumulate(model: nn.Module, windows: Tensor, passes_left: int, passes: int) -> Tensor:
    """Add one micro-batch's gradient; ranks exchange gradients only in the step's last pass. Returns its mean loss."""
    with model.no_sync() if isinstance(model, DistributedDataParallel) and passes_left else contextlib.nullcontext():
        loss: Tensor = model(windows)
        torch.autograd.backward(loss / passes)
    return loss.detach()


def mean_over_ranks(value: Tensor) -> float:
    """The mean of every rank's scalar; overwrites `value`."""
    if WORLD_SIZE > 1:
        dist.all_reduce(value)
    return value.item() / WORLD_SIZE


def write_line(file: Path, line: dict[str, object]) -> None:
    """Append one JSON line; opened and closed each time, so that a kill loses none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def main() -> None:
    """Train until --steps, wherever an earlier start got to."""
    args = options()
    device = start(args)
    model, optimizer, scheduler = build(args, device)
    text = library_text(args.text_mebibytes)
    length = (len(text) - 1) // args.context
    sampler = ResumableSampler(length, args.global_batch, args.micro_batch, args.seed)  # orchestrator
    run = orchestrator.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)  # orchestrator

    for step in run.steps(until=args.steps):  # orchestrator
        began = time.monotonic()
        passes = sampler.micro_batches_per_step  # orchestrator
        ids, losses = [], []
        for passes_done, indices in enumerate(sampler, start=1):  # orchestrator
            ids += indices
            batch = windows(text, indices, args.context).to(device)
            losses.append(accumulate(model, batch, passes - passes_done, passes))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        if RANK == 0 and (step + 1) % 10 == 0:
            run.observe(loss=loss)  # orchestrator: says so if it is not finite or spikes
            print(f"step {step + 1}  loss {loss:.3f}  {time.monotonic() - began:.3f} s", flush=True)
        if args.log:
            line = {"step": step + 1, "generation": run.generation, "world_size": run.world_size, "ids": ids}
            line |= {"loss": mean_over_ranks(loss), "time": time.time()}
            write_line(args.log / f"rank-{run.rank}-gen-{run.generation}.jsonl", line)
        time.sleep(max(0.0, args.step_seconds - (time.monotonic() - began)))

    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

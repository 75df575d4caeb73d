"""A model that `fully_shard` spreads over all ranks, trained so that it survives losing them.

    orchestrator run --job sharded --store checkpoints --workers-per-node 2 -- python train.py

Each rank holds a part of every parameter and of the optimizer's state, and saves that part alone: no rank ever has the
whole model. A job that goes on with another number of ranks puts the parts together anew. The lines marked
`# orchestrator` are all that fault tolerance takes. It runs under `torchrun --nproc-per-node 2 train.py`, too.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import orchestrator  # orchestrator

SAMPLES = 4096


def build() -> nn.Module:
    """A small perceptron, sharded."""
    torch.manual_seed(1)  # the same numbers on every rank: fully_shard keeps this rank's part of them
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)  # its parameters are whole only while it computes
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    """Train until --steps, wherever an earlier start got to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="stop after so many optimizer steps in all")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "nccl" on GPUs
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # after fully_shard: of the sharded parameters
    inputs = torch.randn(SAMPLES, 16)
    targets = inputs.square().mean(dim=1, keepdim=True)

    sampler = orchestrator.ResumableSampler(SAMPLES, global_batch=32, micro_batch=16, seed=1)  # orchestrator
    run = orchestrator.attach(model=model, optimizer=optimizer, data=sampler)  # orchestrator

    for step in run.steps(until=args.steps):  # orchestrator
        for indices in sampler:  # orchestrator: this rank's samples of this step
            loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
            torch.autograd.backward(loss / sampler.micro_batches_per_step)  # fully_shard takes the mean over the ranks
        optimizer.step()
        optimizer.zero_grad()
        if run.rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f} on rank 0", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

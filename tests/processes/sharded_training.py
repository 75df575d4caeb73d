"""A real training in miniature under `fully_shard`, whose numbers are whole: exactly the same at any world size.

Options are environment variables: STEPS, STEP_SECONDS.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import orchestrator

STEPS = int(os.environ.get("STEPS", "40"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Model(torch.nn.Module):
    """Two layers side by side: their gradients are whole numbers that do not depend on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 7)
        self.second = torch.nn.Linear(3, 5)
        for number, parameter in enumerate(self.parameters()):
            torch.nn.init.constant_(parameter, float(number))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A sum of everything."""
        total: torch.Tensor = self.first(inputs).sum() + self.second(inputs).sum()
        return total


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Model()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0, foreach=False)
    run = orchestrator.attach(model=model, optimizer=optimizer, save_every=10)
    for _ in run.steps(until=STEPS):
        began = time.monotonic()
        model(torch.tensor([[1.0, 2.0, 3.0]])).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - began)))
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main()

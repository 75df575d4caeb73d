"""Real gloo groups whose ranks save and restore sharded states: `python -m tests.processes.sharded_jobs FOLDER`.

One interpreter imports torch once and forks the ranks of each job: that is most of what such a test takes. A job saves
under one kind of parallelism; another one of another world size or mesh restores that. Each rank compares what it has
with `full_tensor()`, or with what the saving job's first rank wrote down of it. Prints one line for each job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from orchestrator.checkpoint.layout import Scope, Shares, describe, local_box, local_part
from orchestrator.checkpoint.save import commit
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.filesystem import FolderStore
from tests.checkpoint.sharded import cut
from tests.processes.forks import fork
from tests.training import states

STEP = 2


@dataclass(frozen=True)
class Kind:
    """A kind of parallelism: a mesh with the names of its dimensions; none: DDP."""

    mesh: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks."""
        return int(np.prod(self.mesh))


FSDP_4, FSDP_3 = Kind((4,), ("shard",)), Kind((3,), ("shard",))
HSDP = Kind((2, 2), ("replicate", "shard"))
TENSOR_4 = Kind((4,), ("tensor",))
BOTH = Kind((2, 2), ("shard", "tensor"))
COPIES_OF_TENSOR = Kind((2, 2), ("copies", "tensor"))
DDP_2 = Kind((2,))
JOBS: dict[str, tuple[Kind, Kind]] = {
    "fsdp-4-to-3": (FSDP_4, FSDP_3),
    "fsdp-3-to-ddp": (FSDP_3, DDP_2),
    "ddp-to-hsdp": (DDP_2, HSDP),
    "hsdp-to-fsdp-in-tensor": (HSDP, BOTH),
    "fsdp-in-tensor-to-tensor": (BOTH, TENSOR_4),
    "tensor-in-copies-to-fsdp": (COPIES_OF_TENSOR, FSDP_4),
}


class Model(nn.Module):
    """Sizes that no number of ranks divides, tied weights, buffers, a layer that no mesh cuts evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.wide = nn.Linear(4, 37)
        self.narrow = nn.Linear(37, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


def build(kind: Kind, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under this kind of parallelism, and its optimizer after two steps on made-up gradients."""
    torch.manual_seed(seed)
    model: nn.Module = Model()
    mesh = init_device_mesh("cpu", kind.mesh, mesh_dim_names=kind.names) if kind.names else None
    if mesh is not None and "tensor" in kind.names:
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        model = parallelize_module(model, mesh["tensor"], plan)
    if mesh is not None and "shard" in kind.names:
        others = tuple(name for name in kind.names if name != "tensor")
        fully_shard(model, mesh=mesh[others])
    if mesh is None:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps on gradients that depend on the parameters alone, alike under any kind of parallelism."""
    for _ in range(STEP):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 1
        optimizer.step()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that was trained, by name."""
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    yield from plain.state_dict().items()
    for name, parameter in plain.named_parameters():
        for key, value in optimizer.state[parameter].items():
            yield f"{name}/{key}", value


def save(rank: int, kind: Kind, folder: Path) -> None:
    """Train and save as a rank of a job does; the first one writes down the whole tensors."""
    model, optimizer = build(kind, 1)
    train(model, optimizer)
    shares = Shares(rank, kind.world_size)
    whole: dict[str, Any] = {}
    for name, tensor in tensors_of(model, optimizer):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        spec = describe(name, tensor, Scope.SHARED, shares)
        box = local_box(name, tensor)
        assert spec.share is None or spec.share.box == box, name
        assert torch.equal(cut(full.detach(), box), local_part(tensor)), (name, box)
        whole[name.replace("/", "|")] = full.detach().numpy()
    if rank == 0:
        np.savez(folder / "whole.npz", **whole)
    place = states.launch(folder, rank=rank, world_size=kind.world_size, local_world_size=1)
    state = states.state_of(place, model=model, optimizer=optimizer)
    state.stager.plan()
    states.upload(FolderStore(folder / "store"), place, state, STEP)
    dist.barrier()
    if rank == 0:
        assert commit(FolderStore(folder / "store"), CheckpointId(generation=1, step=STEP))


def restore(rank: int, kind: Kind, folder: Path) -> None:
    """Restore into a model of other numbers; everything must be what was saved, in this rank's part of it."""
    model, optimizer = build(kind, 2)
    base = CheckpointId(generation=1, step=STEP)
    place = states.launch(folder, rank=rank, world_size=kind.world_size, local_world_size=1, generation=2, base=base)
    state = states.state_of(place, model=model, optimizer=optimizer)
    assert state.restore(FolderStore(folder / "store")) == STEP
    whole = np.load(folder / "whole.npz")
    seen = set()
    for name, tensor in tensors_of(model, optimizer):
        expected = torch.from_numpy(whole[name.replace("/", "|")])
        assert torch.equal(cut(expected, local_box(name, tensor)), local_part(tensor)), name
        if not name.endswith("/step") and kind.names and "shard" in kind.names and "norm.running" not in name:
            assert isinstance(tensor, DTensor) or tensor.dtype is torch.int64, (name, type(tensor))
        seen.add(name.replace("/", "|"))
    assert seen == set(whole.files)
    train(model, optimizer)  # restored state is state that the optimizer goes on with


def run(job: Callable[[int, Kind, Path], None], kind: Kind, folder: Path) -> str:
    """Fork the ranks, each in a process of its own; what went wrong, or nothing."""
    meeting = folder / f"meeting-{job.__name__}"
    children = [_fork(job, kind, folder, rank, meeting) for rank in range(kind.world_size)]
    failed = [rank for rank, pid in enumerate(children) if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    return f"{job.__name__} failed on ranks {failed}" if failed else ""


def _fork(job: Callable[[int, Kind, Path], None], kind: Kind, folder: Path, rank: int, meeting: Path) -> int:
    def act() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=kind.world_size)
        job(rank, kind, folder)
        dist.destroy_process_group()

    return fork(act)


def main(parent: Path, wanted: Any) -> None:
    """All jobs one after another."""
    warm = nn.Parameter(torch.zeros(1))
    warm.grad = torch.zeros(1)
    torch.optim.AdamW([warm]).step()  # imports torch's compiler, once for all ranks
    for name, (before, after) in JOBS.items():
        if wanted and name not in wanted:
            continue
        folder = parent / name
        folder.mkdir()
        problem = run(save, before, folder) or run(restore, after, folder)
        print(f"{name}: {problem or 'ok'}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

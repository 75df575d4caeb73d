"""DTensors of any rank of any mesh, in one process: torch's fake process group, which never communicates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.boxes import Box, whole
from orchestrator.checkpoint.layout import TORCH_DTYPES, Scope, describe, plan_shard
from orchestrator.checkpoint.meshes import Cut, Mesh, Share, share
from orchestrator.checkpoint.restore import read_parts
from orchestrator.checkpoint.staging import SlotFile
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.base import ObjectStore
from tests.checkpoint.shards import Tensors, checkpoint_id, metadata, place, upload

MeshOf = Callable[[tuple[int, ...]], DeviceMesh]
NAMES = ("a", "b", "c")


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[MeshOf]:
    """Be this rank; gives a function that makes a mesh of all ranks."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield lambda shape: DeviceMesh(
            "cpu", torch.arange(math.prod(shape)).reshape(shape), mesh_dim_names=NAMES[: len(shape)]
        )
    finally:
        torch.distributed.destroy_process_group()


def cuts_of(placements: Sequence[Placement]) -> list[Cut | None]:
    """The placements, in the words of `checkpoint.meshes`."""
    found: list[Cut | None] = []
    for placement in placements:
        if isinstance(placement, Shard | _StridedShard):
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            found.append(Cut(int(placement.dim), int(factor)))
        else:
            assert isinstance(placement, Replicate)
            found.append(None)
    return found


def plain_mesh(shape: tuple[int, ...]) -> Mesh:
    """All ranks in a grid."""
    return Mesh(shape, tuple(range(math.prod(shape))))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor that a box is."""
    return tensor[tuple(slice(offset, offset + length) for offset, length in zip(*box, strict=True))]


def shard(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], rank: int) -> DTensor:
    """The DTensor that this rank would have of a tensor: a copy of its part, strided as the tensor is."""
    ranks = plain_mesh(tuple(mesh.shape))
    box = share(tuple(tensor.shape), ranks, cuts_of(placements), rank).box
    meta = TensorMeta(torch.Size(tensor.shape), tensor.contiguous().stride(), tensor.dtype)
    return DTensor(cut(tensor, box).clone(), DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def random_cuts(draw: random.Random, mesh: Mesh, dimensions: int) -> list[Cut | None]:
    """Cuts of a tensor of so many dimensions, in any order that can be."""
    order = draw.sample(range(len(mesh.shape)), len(mesh.shape))  # the order in which they are made
    dimension = {axis: draw.choice([None, *range(dimensions)]) for axis in order}
    cuts: list[Cut | None] = []
    for axis in range(len(mesh.shape)):
        mine = dimension[axis]
        before = order[: order.index(axis)]
        factor = math.prod(mesh.shape[one] for one in before if one > axis and dimension[one] == mine)
        cuts.append(None if mine is None else Cut(mine, factor))
    return cuts


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies on a mesh."""

    mesh: Mesh
    cuts: list[Cut | None]

    def share(self, shape: Sequence[int], rank: int) -> Share:
        """A rank's share."""
        return share(tuple(shape), self.mesh, self.cuts, rank)


Shardings = Mapping[str, Sharding]


def random_shardings(draw: random.Random, tensors: Tensors, world_size: int) -> dict[str, Sharding]:
    """For most of the tensors, some mesh of all ranks and some cuts."""
    shapes = [(world_size,)] + [(n, world_size // n) for n in range(2, world_size) if world_size % n == 0]
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() and draw.random() < 0.8:
            mesh = plain_mesh(draw.choice(shapes))
            found[name] = Sharding(mesh, random_cuts(draw, mesh, tensor.dim()))
    return found


def save_sharded(
    store: ObjectStore,
    folder: Path,
    tensors: Tensors,
    shardings: Shardings,
    world_size: int,
    *,
    absent: Collection[int] = (),
    without: Collection[int] = (),
    checkpoint: CheckpointId | None = None,
) -> CheckpointId:
    """Shards and receipts of all ranks but `without`, each of which has its part of every tensor."""
    checkpoint = checkpoint or checkpoint_id()
    for rank in range(world_size):
        if rank in without:
            continue
        local, specs = dict(tensors), []
        for name, tensor in tensors.items():
            spec = describe(name, tensor, Scope.SHARED)
            if name in shardings and tensor.numel():
                mine = shardings[name].share(tensor.shape, rank)
                local[name] = cut(tensor, mine.box)
                spec = replace(spec, share=mine)
            specs.append(spec)
        where, meta = place(rank, world_size, absent, checkpoint), metadata()
        plan = plan_shard(
            specs, rank=rank, world_size=world_size, absent=where.absent, metadata_bytes=meta.size_bytes()
        )
        slot = SlotFile(folder / f"slot-{checkpoint}-{rank}")
        slot.stage(plan, local, meta)
        upload(store, where, slot.path.read_bytes()[: plan.size_bytes])
    return checkpoint


def read_sharded(
    store: ObjectStore, index: fmt.Index, shapes: Mapping[str, torch.Size], shardings: Shardings, rank: int
) -> dict[str, tuple[torch.Tensor, Box]]:
    """What a rank holds of each tensor under these shardings, read into new memory."""
    parts = {}
    for name, shape in shapes.items():
        box = shardings[name].share(shape, rank).box if name in shardings else whole(shape)
        dtype = TORCH_DTYPES[index.tensors[name].dtype]
        parts[name] = (torch.empty(box.lengths, dtype=dtype), box)
    read_parts(store, index, [(name, tensor, box) for name, (tensor, box) in parts.items()])
    return parts

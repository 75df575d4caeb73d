"""DTensors of any rank of any mesh, in one process: torch's fake process group, which never communicates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.checkpoint.boxes import Box
from orchestrator.checkpoint.meshes import Cut, Mesh, share

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


__all__ = ["DTensor", "Replicate", "Shard", "_StridedShard", "cut", "plain_mesh", "process_group", "shard"]

"""Builds real shards and checkpoints without a job: planned, staged into slot files, uploaded, committed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import Scope, ShardPlan, describe, plan_shard
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.save import ShardPlace, commit, upload_shard
from orchestrator.checkpoint.staging import Metadata, SlotFile
from orchestrator.core.messages import CheckpointId
from orchestrator.core.ownership import present_ranks
from orchestrator.storage.base import ObjectStore

JOB = "job"
GATE = {"step": 2, "lr": "0badcafe", "data": None, "rng": "deadbeef"}
Tensors = Mapping[str, torch.Tensor]


def checkpoint_id(generation: int = 1, step: int = 2) -> CheckpointId:
    return CheckpointId(generation=generation, step=step)


def place(
    rank: int = 0,
    world_size: int = 1,
    absent: Collection[int] = (),
    checkpoint: CheckpointId | None = None,
) -> ShardPlace:
    return ShardPlace(
        job=JOB,
        checkpoint=checkpoint or checkpoint_id(),
        rank=rank,
        world_size=world_size,
        absent=tuple(sorted(absent)),
    )


def metadata(values: Any = None, rank_values: Any = None, gate: Mapping[str, Any] = GATE) -> Metadata:
    return Metadata(values={"objects": values or {}}, rank_values=rank_values or {}, gate=gate)


def plan_of(
    tensors: Tensors,
    where: ShardPlace,
    scopes: Mapping[str, Scope] | None = None,
    meta: Metadata | None = None,
) -> ShardPlan:
    """The shard plan of one rank; tensors are shared unless `scopes` says otherwise."""
    specs = [describe(name, tensor, (scopes or {}).get(name, Scope.SHARED)) for name, tensor in tensors.items()]
    return plan_shard(
        specs,
        rank=where.rank,
        world_size=where.world_size,
        absent=where.absent,
        metadata_bytes=(meta or metadata()).size_bytes(),
    )


def stage(
    folder: Path,
    tensors: Tensors,
    where: ShardPlace | None = None,
    scopes: Mapping[str, Scope] | None = None,
    meta: Metadata | None = None,
) -> bytes:
    """The shard file of one rank, byte for byte."""
    where, meta = where or place(), meta or metadata()
    plan = plan_of(tensors, where, scopes, meta)
    slot = SlotFile(folder / f"slot-{where.checkpoint}-{where.rank}")
    slot.stage(plan, tensors, meta)
    return slot.path.read_bytes()[: plan.size_bytes]


def upload(store: ObjectStore, where: ShardPlace, data: bytes) -> fmt.Receipt:
    return upload_shard(store, where, memoryview(data))


def upload_all(
    store: ObjectStore,
    folder: Path,
    tensors: Tensors | Callable[[int], Tensors],
    *,
    world_size: int = 1,
    checkpoint: CheckpointId | None = None,
    absent: Collection[int] = (),
    without: Collection[int] = (),
    scopes: Mapping[str, Scope] | None = None,
    values: Any = None,
    rank_values: Callable[[int], Any] | None = None,
) -> CheckpointId:
    """Shards and receipts of all ranks but `without`. Tensors by rank, if they are a function."""
    checkpoint = checkpoint or checkpoint_id()
    for rank in range(world_size):
        if rank in without:
            continue
        where = place(rank, world_size, absent, checkpoint)
        mine = tensors(rank) if callable(tensors) else tensors
        meta = metadata(values, rank_values(rank) if rank_values else None, {**GATE, "step": checkpoint.step})
        upload(store, where, stage(folder, mine, where, scopes, meta))
    return checkpoint


def save(store: ObjectStore, folder: Path, tensors: Tensors | Callable[[int], Tensors], **options: Any) -> fmt.Index:
    """A committed checkpoint; options as for `upload_all`."""
    checkpoint = upload_all(store, folder, tensors, **options)
    assert commit(store, checkpoint)
    return read_committed(store, checkpoint)


def random_absences(draw: random.Random, world_size: int) -> tuple[int, ...]:
    """Some ranks, perhaps none, perhaps all."""
    return tuple(rank for rank in range(world_size) if draw.random() < 0.3)


def required(world_size: int, absent: Collection[int]) -> tuple[int, ...]:
    return present_ranks(world_size, absent)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's elements in row-major order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
)


def random_tensor(draw: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of that dtype, NaNs and all; bools are 0 or 1."""
    width = dtype.itemsize
    count = 1
    for length in shape:
        count *= length
    if dtype is torch.bool:
        return torch.tensor([draw.random() < 0.5 for _ in range(count)], dtype=torch.bool).reshape(shape)
    raw = torch.frombuffer(bytearray(draw.randbytes(count * width) or b"\0" * width), dtype=torch.uint8)
    return raw[: count * width].view(dtype).reshape(shape)


def random_shape(draw: random.Random) -> tuple[int, ...]:
    """0 to 3 dimensions, some of them empty."""
    return tuple(draw.choice([0, 1, 2, 3, 5, 17]) for _ in range(draw.randrange(4)))


def random_tensors(draw: random.Random, count: int) -> dict[str, torch.Tensor]:
    """Tensors of all kinds; about a third of them is not contiguous."""
    tensors = {}
    for number in range(count):
        tensor = random_tensor(draw, draw.choice(ALL_DTYPES), random_shape(draw))
        if tensor.dim() >= 2 and draw.random() < 0.5:
            tensor = tensor.transpose(0, -1)
        tensors[f"t.{number}"] = tensor
    return tensors

"""Saved on any mesh, read on any other: every bit, in exactly the parts that each rank holds, without processes."""

from __future__ import annotations

import random
from pathlib import Path

import crc32c
import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import Scope, ShardPlan, TensorSpec, holder_sets, plan_shard
from orchestrator.checkpoint.meshes import Cut
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.save import commit
from orchestrator.cli.demo_analysis import tensor_digests
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.sharded import (
    Sharding,
    Shardings,
    cut,
    plain_mesh,
    random_shardings,
    read_sharded,
    save_sharded,
)
from tests.checkpoint.shards import (
    ALL_DTYPES,
    Tensors,
    bits,
    checkpoint_id,
    random_absences,
    random_tensor,
    random_tensors,
)
from tests.checkpoint.stores import CountingStore

WORLDS = (1, 2, 3, 4, 6)


def assert_read(store: MemoryStore, index: fmt.Index, tensors: Tensors, shardings: Shardings, world_size: int) -> None:
    """Each rank of a world reads what it holds, to the bit."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for rank in range(world_size):
        for name, (found, box) in read_sharded(store, index, shapes, shardings, rank).items():
            assert bits(found) == bits(cut(tensors[name], box)), (name, rank)


def test_from_any_mesh_to_any_other(tmp_path: Path, seed: int) -> None:
    """F56–F61: any dtype and shape, any world sizes, tensors sharded and plain, some ranks announced absent."""
    draw = random.Random(seed)
    for turn in range(40):
        store, world_size = MemoryStore(), draw.choice(WORLDS)
        tensors = random_tensors(draw, draw.randrange(1, 12))
        shardings = random_shardings(draw, tensors, world_size)
        absent = random_absences(draw, world_size)
        where = checkpoint_id(1, turn)
        save_sharded(store, tmp_path, tensors, shardings, world_size, absent=absent, checkpoint=where)
        assert commit(store, where)
        index = read_committed(store, where)
        assert {name: tuple(one.shape) for name, one in tensors.items()} == {
            name: record.shape for name, record in index.tensors.items()
        }
        assert_read(store, index, tensors, shardings, world_size)
        other = draw.choice(WORLDS)
        assert_read(store, index, tensors, random_shardings(draw, tensors, other), other)
        assert_read(store, index, tensors, {}, 1)
        assert {name: text.rpartition(":")[2] for name, text in tensor_digests(store, index).items()} == {
            name: f"{crc32c.crc32c(bits(tensor)):08x}" for name, tensor in tensors.items()
        }


def sharding(shape: tuple[int, ...], *cuts: int | None) -> Sharding:
    """A mesh, and the dimension of the tensor that each of its dimensions cuts."""
    return Sharding(plain_mesh(shape), [None if one is None else Cut(one) for one in cuts])


FSDP_4 = sharding((4,), 0)
CASES = {
    "FSDP on 4 to DDP on 2": (FSDP_4, 4, None, 2),
    "DDP on 2 to FSDP on 4": (None, 2, FSDP_4, 4),
    "FSDP on 4 to 3": (FSDP_4, 4, sharding((3,), 0), 3),
    "FSDP on 3 to 4": (sharding((3,), 0), 3, FSDP_4, 4),
    "2 x 2 to 4 x 1": (sharding((2, 2), 0, 1), 4, sharding((4, 1), 0, 1), 4),
    "tensor parallel to FSDP": (sharding((4,), 1), 4, FSDP_4, 4),
    "HSDP to FSDP": (sharding((2, 2), None, 0), 4, FSDP_4, 4),
    "FSDP within tensor parallel, to one": (
        Sharding(plain_mesh((2, 2)), [Cut(0, 2), Cut(0)]),
        4,
        None,
        1,
    ),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
def test_from_one_kind_of_parallelism_to_another(tmp_path: Path, case: str, seed: int) -> None:
    before, world_size, after, other = CASES[case]
    draw, store = random.Random(seed), MemoryStore()
    tensors = {
        f"{place}": random_tensor(draw, dtype, shape)
        for place, (dtype, shape) in enumerate(zip(ALL_DTYPES, [(37, 5), (5, 3), (8, 4, 3), (2, 2)] * 4, strict=True))
    }
    checkpoint = save_sharded(store, tmp_path, tensors, dict.fromkeys(tensors, before) if before else {}, world_size)
    assert commit(store, checkpoint)
    index = read_committed(store, checkpoint)
    assert_read(store, index, tensors, dict.fromkeys(tensors, after) if after else {}, other)


def test_only_what_a_rank_holds_is_read(tmp_path: Path) -> None:
    """No rank gathers a whole tensor: of 4 shards of 8 MiB, each of 2 ranks reads the two that are its own."""
    store = MemoryStore()
    tensors = {"w": torch.arange(1 << 22, dtype=torch.int64).reshape(1 << 11, 1 << 11)}
    checkpoint = save_sharded(store, tmp_path, tensors, {"w": FSDP_4}, 4)
    assert commit(store, checkpoint)
    counting = CountingStore(store)
    index = read_committed(counting, checkpoint)
    read_sharded(counting, index, {"w": tensors["w"].shape}, {"w": sharding((2,), 0)}, 1)
    read = {key: 0 for key, _, _ in counting.reads}
    for key, start, stop in counting.reads:
        read[key] += (stop or 0) - start
    shards = {key: size for key, size in read.items() if key.endswith("safetensors")}
    assert set(shards) == {fmt.shard_key(checkpoint, rank, 4) for rank in (2, 3)}
    assert sum(shards.values()) <= (16 << 20) + (2 << 20)


def test_far_apart_columns_are_read_by_themselves(tmp_path: Path) -> None:
    """Rows of 4 MiB, of which a rank holds a quarter: the rest of each row is not read."""
    store = MemoryStore()
    tensors = {"w": torch.arange(3 << 20, dtype=torch.int32).reshape(3, 1 << 20)}
    checkpoint = save_sharded(store, tmp_path, tensors, {}, 1)
    assert commit(store, checkpoint)
    counting = CountingStore(store)
    index = read_committed(counting, checkpoint)
    columns = {"w": sharding((4,), 1)}
    parts = read_sharded(counting, index, {"w": tensors["w"].shape}, columns, 2)
    assert bits(parts["w"][0]) == bits(cut(tensors["w"], parts["w"][1]))
    read = sum((stop or 0) - start for key, start, stop in counting.reads if key.endswith("safetensors"))
    assert read <= 3 * (2 << 20)


# ----------------------------------------------------------------------------------------------- who writes what


def plans(specs_of: list[list[TensorSpec]], absent: tuple[int, ...] = ()) -> list[ShardPlan]:
    """The plan of each rank."""
    world_size = len(specs_of)
    return [
        plan_shard(specs, rank=rank, world_size=world_size, absent=absent, metadata_bytes=0)
        for rank, specs in enumerate(specs_of)
    ]


def specs_of(how: Sharding, world_size: int, count: int = 20) -> list[list[TensorSpec]]:
    """Each rank's specs of some tensors that lie so."""
    shape = (40, 10)
    return [
        [
            TensorSpec(
                name=f"t{number}", dtype="F32", width=4, shape=shape, scope=Scope.SHARED, share=how.share(shape, rank)
            )
            for number in range(count)
        ]
        for rank in range(world_size)
    ]


def data_bytes(plan: ShardPlan) -> int:
    return plan.size_bytes - plan.header_bytes


def test_holders_of_the_same_part_split_it() -> None:
    """HSDP: two replicas of two shards; each rank writes a quarter, though each holds a half."""
    how = specs_of(sharding((2, 2), None, 0), 4)
    assert [data_bytes(one) for one in plans(how)] == [20 * 400 * 4 // 4] * 4
    assert holder_sets(how[1], 1, 4) == ((1, 3),)
    assert holder_sets(how[2], 2, 4) == ((0, 2),)


def test_a_victim_owns_nothing_that_another_holds() -> None:
    how = specs_of(sharding((2, 2), None, 0), 4)
    half = 20 * 400 * 4 // 2
    assert [data_bytes(one) for one in plans(how, (0, 1))] == [0, 0, half, half]
    assert [data_bytes(one) for one in plans(how, (1,))] == [half // 2, 0, half // 2, half]


def test_victims_own_what_only_they_hold() -> None:
    """Both holders of a part go: they save it as if they stayed, and the others are not asked for what they lack."""
    how = specs_of(sharding((2, 2), None, 0), 4)
    quarter = 20 * 400 * 4 // 4
    assert [data_bytes(one) for one in plans(how, (0, 2))] == [quarter] * 4
    fsdp = specs_of(FSDP_4, 4)
    assert [data_bytes(one) for one in plans(fsdp, (1,))] == [quarter] * 4


def test_what_nobody_else_holds_is_counted() -> None:
    fsdp, ddp = specs_of(FSDP_4, 4), specs_of(sharding((4,), None), 4)
    (alone, *_), (alike, *_) = plans(fsdp), plans(ddp)
    assert alone.unique_bytes(0) == alone.size_bytes
    assert alike.unique_bytes(0) == alike.header_bytes
    assert holder_sets(fsdp[0], 0, 4) == ((0,),)
    assert holder_sets(ddp[0], 0, 4) == ()


def test_a_rank_with_an_empty_part_has_none(tmp_path: Path) -> None:
    """3 rows on 4 ranks: the fourth has nothing of it, and is no holder of anything."""
    store = MemoryStore()
    tensors = {"w": torch.arange(6.0).reshape(3, 2)}
    checkpoint = save_sharded(store, tmp_path, tensors, {"w": FSDP_4}, 4)
    assert commit(store, checkpoint)
    index = read_committed(store, checkpoint)
    assert [chunk.rank for chunk in index.chunks("w")] == [0, 1, 2]
    assert index.tensors["w"].series == "0*3:0+2@0"

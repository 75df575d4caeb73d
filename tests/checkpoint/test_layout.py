"""Who writes what, and where: the shard plans of all ranks together hold every element once, every view aligned."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import UninitializedParameter

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import (
    DTYPES,
    TORCH_DTYPES,
    Scope,
    ShardPlan,
    Shares,
    TensorSpec,
    describe,
    plan_shard,
)
from orchestrator.checkpoint.slots import HEADER_ALIGN_BYTES
from orchestrator.core.ownership import present_ranks
from orchestrator.errors import StateError
from tests.checkpoint.sharded import process_group
from tests.checkpoint.shards import ALL_DTYPES, random_absences, random_shape

SCOPES = (Scope.SHARED, Scope.SHARED, Scope.SHARED, Scope.FIRST, Scope.RANK)


def random_specs(draw: random.Random) -> list[TensorSpec]:
    """The specs of some tensors; those of one rank alone have the rank's number in their name, added later."""
    return [
        TensorSpec(
            name=f"t.{number}",
            dtype=DTYPES[dtype],
            width=dtype.itemsize,
            shape=random_shape(draw),
            scope=draw.choice(SCOPES),
        )
        for number in range(draw.randrange(12))
        for dtype in [draw.choice(ALL_DTYPES)]
    ]


def plan(specs: list[TensorSpec], rank: int, world_size: int, absent: tuple[int, ...] = ()) -> ShardPlan:
    return plan_shard(specs, rank=rank, world_size=world_size, absent=absent, metadata_bytes=100)


@pytest.mark.parametrize("world_size", range(1, 6))
def test_all_ranks_together_hold_every_element_once(world_size: int, seed: int) -> None:
    """F59, F113: empty tensors are legal, and each tensor's name and shape are stored by somebody."""
    draw = random.Random(seed + world_size)
    for _ in range(60):
        specs, absent = random_specs(draw), random_absences(draw, world_size)
        plans = [plan(specs, rank, world_size, absent) for rank in range(world_size)]
        first = present_ranks(world_size, absent)[0]
        for spec in specs:
            holders = [
                (rank, chunk) for rank, one in enumerate(plans) for chunk in one.chunks if chunk.spec.name == spec.name
            ]
            if spec.scope is Scope.RANK:
                assert [(rank, chunk.whole) for rank, chunk in holders] == [(rank, True) for rank in range(world_size)]
            elif spec.scope is Scope.FIRST:
                assert [(rank, chunk.whole) for rank, chunk in holders] == [(first, True)]
            else:
                assert not {rank for rank, _ in holders} & (set(absent) if len(absent) < world_size else set())
                ranges = sorted((chunk.start, chunk.stop) for _, chunk in holders)
                assert ranges[0][0] == 0
                assert ranges[-1][1] == spec.elements
                assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


@pytest.mark.parametrize("world_size", range(1, 6))
def test_every_view_is_aligned_and_no_byte_is_wasted(world_size: int, seed: int) -> None:
    draw = random.Random(seed + world_size)
    for _ in range(60):
        specs, absent = random_specs(draw), random_absences(draw, world_size)
        for rank in range(world_size):
            mine = plan(specs, rank, world_size, absent)
            position = 0
            for chunk in mine.chunks:
                assert chunk.first_byte == position  # safetensors allows no holes
                assert chunk.last_byte - chunk.first_byte == (chunk.stop - chunk.start) * chunk.spec.width
                assert (mine.header_bytes + chunk.first_byte) % chunk.spec.width == 0
                position = chunk.last_byte
            assert mine.header_bytes % HEADER_ALIGN_BYTES == 0
            assert mine.size_bytes == mine.header_bytes + position


def test_the_order_of_the_specs_does_not_matter(seed: int) -> None:
    """Ranks find their state in any order; what each owns depends on names and sizes alone."""
    draw = random.Random(seed)
    specs = random_specs(draw) + random_specs(draw)
    specs = list({spec.name: spec for spec in specs}.values())
    shuffled = draw.sample(specs, len(specs))
    for rank in range(3):
        assert plan(specs, rank, 3).chunks == plan(shuffled, rank, 3).chunks


def test_ranks_share_the_bytes_equally() -> None:
    specs = [
        TensorSpec(name=f"t.{number}", dtype="F32", width=4, shape=(1000 + number,), scope=Scope.SHARED)
        for number in range(10)
    ]
    sizes = [plan(specs, rank, 4).size_bytes - plan(specs, rank, 4).header_bytes for rank in range(4)]
    assert max(sizes) - min(sizes) <= 4


def test_the_parts_say_what_the_entries_do_not() -> None:
    specs = [
        TensorSpec(name="a", dtype="F32", width=4, shape=(2, 3), scope=Scope.SHARED),
        TensorSpec(name="b", dtype="I64", width=8, shape=(), scope=Scope.SHARED),
        TensorSpec(name="c", dtype="U8", width=1, shape=(0, 4), scope=Scope.SHARED),
    ]
    alone = plan(specs, 0, 1)
    assert alone.entries() == {
        "b": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
        "c": {"dtype": "U8", "shape": [0, 4], "data_offsets": [32, 32]},
    }
    assert alone.parts() == {}
    first, second = plan(specs, 0, 2), plan(specs, 1, 2)
    assert first.entries()["a"]["shape"] == [2]  # a part of a tensor has no shape but its length
    assert first.parts() == {"a": {"shape": [2, 3], "start": 0}}
    assert second.parts() == {"a": {"shape": [2, 3], "start": 2}}


def test_every_dtype_has_a_width_that_readers_know() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == fmt.DTYPE_BYTES
    assert set(DTYPES) == set(ALL_DTYPES)


# ---------------------------------------------------------------------------------------------------- refusals


class Subclass(torch.Tensor):
    """Any tensor subclass: a plain copy of a quantised one would store dequantised values."""


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.ones(3).as_subclass(Subclass), "Subclass"),
        (lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Subclass)), "Subclass"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (quantised, "quantised"),
        (lambda: torch.ones(3, dtype=torch.complex128), "complex128"),
        (lambda: torch.ones(3, dtype=torch.float32).to(torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
        (UninitializedParameter, "UninitializedParameter"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_a_copy_would_falsify_are_refused_by_name(make: Callable[[], torch.Tensor], word: str) -> None:
    with pytest.raises(StateError, match=word) as caught:
        describe("model.layer.weight", make(), Scope.SHARED)
    assert caught.value.path == "model.layer.weight"


def test_a_sharded_tensor_is_refused_where_each_rank_has_its_own() -> None:
    """F59, F61: a DTensor's local part alone would be taken for all of it."""
    with process_group(0, 1) as mesh_of:
        tensor = DTensor.from_local(torch.ones(4), mesh_of((1,)), [Replicate()], run_check=False)
        for one in (tensor, torch.nn.Parameter(tensor)):
            with pytest.raises(StateError, match="DTensor"):
                describe("rank.00000.data.x", one, Scope.RANK, Shares(0, 1))


@pytest.mark.parametrize("make", [torch.Tensor, torch.nn.Parameter, torch.nn.Buffer])
def test_plain_tensors_parameters_and_buffers_are_described(make: type[torch.Tensor]) -> None:
    spec = describe("x", make(torch.ones(2, 3)), Scope.FIRST)
    assert (spec.dtype, spec.width, spec.shape, spec.elements, spec.scope) == ("F32", 4, (2, 3), 6, Scope.FIRST)

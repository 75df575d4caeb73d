"""From a checkpoint into tensors that are there already, at the same world size or another: every bit, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import TORCH_DTYPES
from orchestrator.checkpoint.restore import empty_like, read_tensors
from orchestrator.errors import DigestError, FormatError, StateError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import (
    ALL_DTYPES,
    Tensors,
    bits,
    checkpoint_id,
    random_absences,
    random_tensor,
    random_tensors,
    save,
)
from tests.checkpoint.stores import CountingStore, change_byte


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def read_new(store: ObjectStore, index: fmt.Index) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, into new memory."""
    targets = {name: empty_like(record) for name, record in index.tensors.items()}
    read_tensors(store, index, targets)
    return targets


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(store: MemoryStore, tmp_path: Path, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    shapes = [(), (0,), (3, 0), (1,), (7,), (4, 5)]
    tensors = {f"{place}": random_tensor(draw, dtype, shape) for place, shape in enumerate(shapes)}
    assert_same(read_new(store, save(store, tmp_path, tensors, world_size=3)), tensors)


def test_any_state_comes_back_from_any_world_size(tmp_path: Path, seed: int) -> None:
    """F56, F59: 4, 3, 2, 1 or 5 ranks, some of them absent: the reader does not care who wrote what."""
    draw = random.Random(seed)
    for turn in range(12):
        store, world_size = MemoryStore(), draw.randrange(1, 6)
        absent = random_absences(draw, world_size)
        tensors = random_tensors(draw, draw.randrange(1, 15))
        without = absent if len(absent) < world_size else ()
        index = save(
            store,
            tmp_path,
            tensors,
            world_size=world_size,
            absent=absent,
            without=without,
            checkpoint=checkpoint_id(1, turn),
        )
        assert_same(read_new(store, index), tensors)


def test_four_to_two_to_three_ranks_is_the_same_state(store: MemoryStore, tmp_path: Path, seed: int) -> None:
    """F56, F57, F61: remapped there and back, no chunk is laid down in another's place."""
    tensors = random_tensors(random.Random(seed), 25) | {
        "fused": torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6),
        "two rows": torch.arange(6, dtype=torch.bfloat16).reshape(6, 1),
    }
    state: Tensors = tensors
    for step, world_size in enumerate((4, 2, 3, 1)):
        index = save(store, tmp_path, state, world_size=world_size, checkpoint=checkpoint_id(step + 1, step))
        assert index.world_size == world_size
        state = read_new(store, index)
        assert_same(state, tensors)


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda base: base,
    lambda base: base.t(),
    lambda base: base[1:3],
    lambda base: base[::2, 1::2],
    lambda base: base[:, 2],
    lambda base: base.view(2, 2, 6, 1).to(memory_format=torch.channels_last),
    torch.nn.Parameter,
    lambda base: torch.view_as_complex(base.view(4, 3, 2)),
    lambda base: torch.view_as_complex(base.view(4, 3, 2)).conj(),
    lambda base: torch.view_as_complex(base.view(4, 3, 2)).conj().imag,
    lambda base: base[0, 0],
    lambda base: base[:0],
    lambda base: base.to(torch.bfloat16)[:, ::3],
    lambda base: base[1:2, 2:3],
    lambda base: torch.as_strided(base, (1,), (5,)),
]


@pytest.mark.parametrize("view", VIEWS)
def test_tensors_are_filled_where_they_are(
    store: MemoryStore, tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Whatever their strides: the memory stays the same, and so does what lies between."""
    saved = view(torch.arange(24, dtype=torch.float32).reshape(4, 6) + 1).detach()
    index = save(store, tmp_path, {"x": saved}, world_size=2)
    base = torch.full((4, 6), -7.0)
    target = view(base)
    place, strides = target.data_ptr(), target.stride()
    read_tensors(store, index, {"x": target})
    assert (target.data_ptr(), target.stride()) == (place, strides)
    assert bits(target) == bits(saved)
    if target.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and not target.is_complex():
        assert int((base != -7.0).sum()) == target.numel()


def test_an_expanded_tensor_is_filled(store: MemoryStore, tmp_path: Path) -> None:
    """A buffer made by `expand` can be saved, so it must be possible to restore it."""
    saved = torch.arange(5.0).expand(3, 5)
    index = save(store, tmp_path, {"x": saved, "y": torch.tensor(4.0).expand(2, 2)})
    targets = {"x": torch.zeros(5).expand(3, 5), "y": torch.zeros(()).expand(2, 2)}
    read_tensors(store, index, targets)
    assert torch.equal(targets["x"], saved)
    assert torch.equal(targets["y"], torch.full((2, 2), 4.0))


def test_parameters_that_train_are_filled_without_a_trace(store: MemoryStore, tmp_path: Path) -> None:
    index = save(store, tmp_path, {"w": torch.ones(4)})
    parameter = torch.nn.Parameter(torch.zeros(4))
    loss = (parameter * 2).sum()
    read_tensors(store, index, {"w": parameter})
    torch.autograd.backward(loss)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert torch.equal(parameter, torch.ones(4))


def test_two_names_of_one_tensor_are_both_filled(store: MemoryStore, tmp_path: Path) -> None:
    """F113: tied weights."""
    weight = torch.arange(6.0)
    index = save(store, tmp_path, {"embedding": weight, "head": weight}, world_size=2)
    target = torch.zeros(6)
    read_tensors(store, index, {"embedding": target, "head": target})
    assert torch.equal(target, weight)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(3, 2), r"the checkpoint has F32 \[2, 3\], the script F32 \[3, 2\]"),
        (torch.zeros(6), r"the script F32 \[6\]"),
        (torch.zeros(0), r"the script F32 \[0\]"),
        (torch.zeros(2, 3, dtype=torch.float64), r"the script F64 \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.complex128), r"the script None \[2, 3\]"),
    ],
)
def test_another_dtype_or_shape_is_named(
    store: MemoryStore, tmp_path: Path, target: torch.Tensor, message: str
) -> None:
    """F116, F117: compared with the model, and never cast or cut to fit."""
    index = save(store, tmp_path, {"model.w": torch.ones(2, 3)})
    with pytest.raises(StateError, match=message) as caught:
        read_tensors(store, index, {"model.w": target})
    assert caught.value.path == "model.w"


def test_a_tensor_that_is_not_in_the_checkpoint_is_named(store: MemoryStore, tmp_path: Path) -> None:
    index = save(store, tmp_path, {"a": torch.ones(2)})
    with pytest.raises(FormatError, match="has no tensor b"):
        read_tensors(store, index, {"b": torch.ones(2)})


def test_only_what_is_asked_for_is_read(store: MemoryStore, tmp_path: Path) -> None:
    """Each needed block once: the shards of three ranks, one tensor of many."""
    tensors = {f"t{number:02d}": torch.arange(300_000, dtype=torch.int32) + number for number in range(20)}
    index = save(store, tmp_path, tensors, world_size=3)
    counting = CountingStore(store)
    target = torch.empty(300_000, dtype=torch.int32)
    read_tensors(counting, index, {"t13": target})
    assert torch.equal(target, tensors["t13"])
    shards = [one for one in counting.reads if one[0].endswith(".safetensors")]
    read = [(key, block) for key, start, stop in shards for block in range(start >> 20, -(-(stop or 0) >> 20))]
    needed = {
        (fmt.shard_key(index.id, chunk.rank, 3), block)
        for chunk in index.chunks("t13")
        for block in range(chunk.first_byte >> 20, (chunk.last_byte - 1 >> 20) + 1)
    }
    assert len(read) == len(set(read))
    assert set(read) == needed
    holders = {fmt.receipt_key(index.id, chunk.rank, 3) for chunk in index.chunks("t13")}
    assert {key for key, _, _ in counting.reads if key.endswith(".json")} == holders
    assert len(holders) < 3


def test_what_does_not_match_its_digest_is_never_left_as_the_result(store: MemoryStore, tmp_path: Path) -> None:
    """F119: a bad copy is an error, not NaN three iterations later."""
    index = save(store, tmp_path, {"x": torch.arange(100.0)}, world_size=2)
    (chunk,) = [chunk for chunk in index.chunks("x") if chunk.rank == 1]
    change_byte(store, fmt.shard_key(index.id, 1, 2), chunk.first_byte)
    with pytest.raises(DigestError, match="shard-00001-of-00002"):
        read_tensors(store, index, {"x": torch.zeros(100)})


def test_new_tensors_are_as_they_were_saved(store: MemoryStore, tmp_path: Path) -> None:
    index = save(store, tmp_path, {"x": torch.ones(2, 0, 3, dtype=torch.bfloat16)})
    new = empty_like(index.tensors["x"])
    assert (new.dtype, tuple(new.shape)) == (torch.bfloat16, (2, 0, 3))
    assert set(TORCH_DTYPES) == set(fmt.DTYPE_BYTES)

"""Sharded models and optimizers of one process, for every rank in turn, and what is refused of them by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from orchestrator.checkpoint.layout import Scope, Shares, describe, local_part
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.save import commit
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import StateError
from orchestrator.storage.memory import MemoryStore
from orchestrator.training.parts import ModelPart
from tests.checkpoint.sharded import process_group, shard
from tests.training import states
from tests.training.states import restore_one, save_one

CHECKPOINT = CheckpointId(generation=1, step=2)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def whole_state() -> dict[str, torch.Tensor]:
    """The numbers of a model: uneven rows, a matrix for columns, a bias, one number, a float8."""
    draw = torch.Generator().manual_seed(7)
    return {
        "rows": torch.randn(7, 3, generator=draw),
        "columns": torch.randn(3, 5, generator=draw).to(torch.bfloat16),
        "few": torch.randn(2, generator=draw),
        "scale": torch.randn((), generator=draw),
        "flags": torch.randint(0, 2, (5,), generator=draw).bool(),
    }


class Model(nn.Module):
    """Parameters, some of them sharded, a buffer, and a second name for one of them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
        self.again = self.rows
        self.register_buffer("seen", torch.zeros(3))


def sharded_state(mesh: DeviceMesh, rank: int) -> dict[str, torch.Tensor]:
    """What a rank of a mesh of two dimensions has."""
    placements = {"rows": (Shard(0), Shard(0)), "columns": (Replicate(), Shard(1)), "few": (Shard(0), Replicate())}
    return {
        name: shard(tensor, mesh, placements[name], rank) if name in placements else tensor.clone()
        for name, tensor in whole_state().items()
    }


def trained(tensors: dict[str, torch.Tensor], value: float) -> dict[str, Any]:
    """A model, and an optimizer whose state is a function of the parameters alone."""
    model = Model(tensors)
    optimizer = optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            moments = {"exp_avg": parameter.detach() * 2, "exp_avg_sq": parameter.detach() * parameter.detach()}
            optimizer.state[parameter] = {"step": torch.tensor(value), **moments}
    return {"model": model, "optimizer": optimizer}


def save_on(store: MemoryStore, folder: Path, shape: tuple[int, int]) -> None:
    """A committed checkpoint of all ranks of a mesh."""
    for rank in range(shape[0] * shape[1]):
        with process_group(rank, shape[0] * shape[1]) as mesh_of:
            place = states.launch(folder, rank=rank, world_size=shape[0] * shape[1])
            state = states.state_of(place, **trained(sharded_state(mesh_of(shape), rank), 3.0))
            state.stager.plan()
            states.upload(store, place, state, CHECKPOINT.step)
    assert commit(store, CHECKPOINT)


def assert_restored(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """What the rank has now is what it would have had."""
    for (name, mine), (_, theirs) in zip(
        given["model"].named_parameters(), expected["model"].named_parameters(), strict=True
    ):
        assert type(mine) is type(theirs), name
        assert torch.equal(local_part(mine), local_part(theirs)), name
        for key, value in expected["optimizer"].state.get(theirs, {}).items():
            found = given["optimizer"].state[mine][key]
            assert type(found) is type(value), (name, key)
            assert torch.equal(local_part(found), local_part(value)), (name, key)
            if isinstance(value, DTensor):
                assert (found.placements, found.device_mesh) == (value.placements, value.device_mesh)


@pytest.mark.parametrize("before", [(2, 2), (3, 1)])
@pytest.mark.parametrize("after", [(1, 2), (2, 2), None])
def test_a_mesh_restores_what_another_saved(
    store: MemoryStore, tmp_path: Path, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    """F57–F61, F113: parameters in place, optimizer state sharded as its parameter is, also where there was none."""
    save_on(store, tmp_path, before)
    names = set(read_committed(store, CHECKPOINT).tensors)
    assert "model.rows" in names
    assert "model.again" not in names
    if after is None:
        plain = Model({name: torch.zeros_like(tensor) for name, tensor in whole_state().items()})
        given: dict[str, Any] = {"model": plain}
        given["optimizer"] = optim.AdamW([one for one in plain.parameters() if one.requires_grad], lr=0.1)
        place = states.launch(tmp_path, generation=2, base=CHECKPOINT)
        states.state_of(place, **given).restore(store)
        assert_restored(given, trained(whole_state(), 3.0))
        return
    for rank in range(after[0] * after[1]):
        with process_group(rank, after[0] * after[1]) as mesh_of:
            mesh = mesh_of(after)
            blank = {name: tensor * 0 for name, tensor in sharded_state(mesh, rank).items() if name != "flags"}
            blank["flags"] = torch.zeros(5, dtype=torch.bool)
            model = Model({name: blank[name] for name in whole_state()})
            fresh = optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
            place = states.launch(tmp_path, rank=rank, world_size=after[0] * after[1], generation=2, base=CHECKPOINT)
            states.state_of(place, model=model, optimizer=fresh).restore(store)
            assert_restored({"model": model, "optimizer": fresh}, trained(sharded_state(mesh, rank), 3.0))
            assert model.again is model.rows


def test_objects_of_the_users_may_hold_sharded_tensors(store: MemoryStore, tmp_path: Path) -> None:
    """An average of the weights that is kept by hand comes back sharded as the object has it."""

    class Average:
        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            self.tensors = tensors

        def state_dict(self) -> Any:
            return self.tensors

        def load_state_dict(self, state: Any) -> None:
            self.tensors = state

    with process_group(0, 1) as mesh_of:
        tensors = sharded_state(mesh_of((1, 1)), 0)
        checkpoint = save_one(store, tmp_path, 2, average=Average(tensors))
        other = Average({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        restore_one(store, tmp_path, checkpoint, average=other)
        for name, tensor in tensors.items():
            assert type(other.tensors[name]) is type(tensor)
            assert torch.equal(local_part(other.tensors[name]), local_part(tensor))


def test_the_plan_says_who_holds_what_and_what_only_this_rank_has(tmp_path: Path) -> None:
    with process_group(1, 4) as mesh_of:
        place = states.launch(tmp_path, rank=1, world_size=4)
        state = states.state_of(place, **trained(sharded_state(mesh_of((2, 2)), 1), 3.0))
        assert state.stager.plan() > state.stager.unique_bytes > 0
        # rows: each rank its own; columns: the second column of ranks; few: the first row of ranks
        assert state.stager.twins == ((0, 1), (1,), (1, 3))
        plain = states.state_of(states.launch(tmp_path, rank=1, world_size=4), **trained(whole_state(), 3.0))
        plain.stager.plan()
        assert plain.stager.twins == ()


# ---------------------------------------------------------------------------------------------------- refusals


def described(tensor: torch.Tensor, world_size: int = 2) -> None:
    describe("model.w", tensor, Scope.SHARED, Shares(0, world_size))


def test_partial_sums_are_refused_by_name() -> None:
    with process_group(0, 2) as mesh_of:
        tensor = DTensor.from_local(torch.ones(4), mesh_of((2,)), [Partial()], run_check=False)
        with pytest.raises(StateError, match=r"placement Partial.*cannot be saved") as caught:
            described(tensor)
        assert caught.value.path == "model.w"


def test_a_part_that_is_not_where_its_placements_say_is_refused() -> None:
    """torch.distributed's own offsets would have been believed here."""
    with process_group(0, 2) as mesh_of:
        tensor = shard(torch.ones(7, 2), mesh_of((2,)), [Shard(0)], 0)
        tensor._local_tensor = torch.ones(3, 2)
        with pytest.raises(StateError, match=r"rank 0 holds \[3, 2\] of \[7, 2\].* would be \[4, 2\]"):
            described(tensor)


def test_a_mesh_of_some_ranks_is_refused() -> None:
    with process_group(0, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        with pytest.raises(StateError, match=r"a mesh of ranks \[0, 1\] of 4"):
            described(shard(torch.ones(4), mesh, [Shard(0)], 0), 4)


def test_a_part_of_a_mesh_is_alike_in_its_copies() -> None:
    with process_group(2, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "tensor"))
        tensor = DTensor.from_local(torch.ones(2), mesh["tensor"], [Shard(0)], run_check=False)
        spec = describe("model.w", tensor, Scope.SHARED, Shares(2, 4))
        assert spec.share is not None
        assert (spec.share.box.offsets, spec.share.holders) == ((0,), (0, 2))


def test_stages_of_a_pipeline_are_refused() -> None:
    """Their ranks do not hold copies of each other's tensors."""
    with process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        with pytest.raises(StateError, match=r"stages of a pipeline \(mesh dimension pp\)"):
            described(DTensor.from_local(torch.ones(2), mesh["dp"], [Shard(0)], run_check=False), 4)


def test_kinds_of_sharded_tensors_that_are_not_known_are_refused() -> None:
    class Quantised(torch.Tensor):
        pass

    with process_group(0, 2) as mesh_of:
        tensor = shard(torch.ones(4), mesh_of((2,)), [Shard(0)], 0)
        tensor._local_tensor = tensor._local_tensor.as_subclass(Quantised)
        with pytest.raises(StateError, match="Quantised cannot be saved"):
            described(tensor)


def test_modules_that_hide_their_parameters_are_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        __module__ = "torch.distributed.fsdp"

    with pytest.raises(StateError, match="use fully_shard") as caught:
        ModelPart("model", nn.Sequential(nn.Linear(1, 1), FullyShardedDataParallel()))
    assert caught.value.path == "model.1"


# --------------------------------------------------------------------------------------------------- tied weights


def three(*ties: tuple[int, int]) -> nn.Module:
    """Three layers; each pair of `ties` has one weight."""
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    for one, other in ties:
        layers[other].weight = layers[one].weight
    return layers


@pytest.mark.parametrize(
    ("saved", "live", "refusal"),
    [
        (
            three((0, 2)),
            three(),
            ("model.2.weight", "the same tensor as model.0.weight in the checkpoint, not in this"),
        ),
        (
            three(),
            three((0, 2)),
            ("model.2.weight", "the same tensor as model.0.weight in this model, not in the check"),
        ),
        (three((0, 1)), three((0, 2)), ("model.1.weight", "the same tensor as model.0.weight in the checkpoint")),
    ],
)
def test_weights_that_are_tied_otherwise_are_refused_by_name(
    store: MemoryStore, tmp_path: Path, saved: nn.Module, live: nn.Module, refusal: tuple[str, str]
) -> None:
    """F113: silently untied, they would train apart."""
    path, words = refusal
    checkpoint = save_one(store, tmp_path, 1, model=saved)
    with pytest.raises(StateError, match=words) as caught:
        restore_one(store, tmp_path, checkpoint, model=copy.deepcopy(live))
    assert caught.value.path == path


@pytest.mark.parametrize("build", [lambda: three((0, 2)), lambda: three((0, 1), (0, 2)), three])
def test_weights_that_are_tied_alike_come_back(
    store: MemoryStore, tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    saved, live = build(), build()
    checkpoint = save_one(store, tmp_path, 1, model=saved)
    restore_one(store, tmp_path, checkpoint, model=live)
    for mine, theirs in zip(live.state_dict().values(), saved.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    stored = {name for name in read_committed(store, checkpoint).tensors if name.startswith("model.")}
    assert len(stored) == len(list(saved.parameters()))

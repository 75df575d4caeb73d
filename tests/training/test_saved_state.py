"""All of a rank's state: what is planned and staged, what each rank gets back, and the gate that compares."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from orchestrator import telemetry
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.reader import read_committed, read_rank_state
from orchestrator.checkpoint.save import commit, shard_metadata
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import DigestError, GateError, NotFoundError, RefusedError, StateError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.memory import MemoryStore
from orchestrator.training import rng
from orchestrator.training.sampler import ResumableSampler
from orchestrator.training.saved_state import SavedState
from tests.checkpoint.stores import change_byte
from tests.training import states
from tests.training.states import launch, restore_one, save, save_one, state_of


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def sampler_of(rank: int = 0, world_size: int = 1, length: int = 1000) -> ResumableSampler:
    return ResumableSampler(length, global_batch=24, micro_batch=2, seed=5, rank=rank, world_size=world_size)


def seed_everything(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), *torch.rand(2).tolist()]


class Holder:
    """Any object with state; does what it is told when that state is loaded."""

    def __init__(self, state: Any, on_load: Any = None) -> None:
        self.state = state
        self._on_load = on_load

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self._on_load is not None:
            self._on_load()


Rank = tuple[Launch, SavedState]


def save_ranks(
    store: ObjectStore, folder: Path, world_size: int, given: Any, *, step: int = 6, without: tuple[int, ...] = ()
) -> CheckpointId:
    """A committed checkpoint of ranks with generators of their own; `given(rank)` is what each gave to attach."""
    for rank in range(world_size):
        place = launch(folder, rank=rank, world_size=world_size)
        state = state_of(place, **given(rank))
        seed_everything(1000 + rank)
        if rank not in without:
            states.upload(store, place, state, step, absent=without)
    checkpoint = CheckpointId(generation=1, step=step)
    assert commit(store, checkpoint)
    return checkpoint


def restored(
    store: ObjectStore, folder: Path, base: CheckpointId, rank: int, world_size: int, **given: Any
) -> SavedState:
    state = state_of(launch(folder, generation=2, rank=rank, world_size=world_size, base=base), **given)
    state.restore(store)
    return state


# ---------------------------------------------------------------------------------------------------- restoring


def test_f79_without_a_base_nothing_is_restored(store: MemoryStore, tmp_path: Path) -> None:
    """F79: "resume if there is anything" with nothing is step 0, and touches nothing."""
    seed_everything(3)
    before = rng.digest(rng.capture())
    state = state_of(launch(tmp_path), model=nn.Linear(2, 2))
    after_building = rng.digest(rng.capture())
    assert state.restore(store) == 0
    state.restore_rng()
    assert not state.restored
    assert rng.digest(rng.capture()) == after_building != before


def test_the_step_and_the_position_of_the_data_come_back(store: MemoryStore, tmp_path: Path) -> None:
    """F40, F54: exact counters; the epoch is part of the position."""
    sampler = sampler_of()
    for _ in range(100):
        sampler.advance()
    expected, epoch = sampler.next_global_batch(), sampler.epoch
    checkpoint = save_one(store, tmp_path, 100, data=sampler)
    fresh = sampler_of()
    state = restore_one(store, tmp_path, checkpoint, data=fresh)
    assert state.restored
    assert fresh.next_global_batch() == expected
    assert fresh.epoch == epoch == 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_f37_every_rank_gets_its_own_generators_back(store: MemoryStore, tmp_path: Path, world_size: int) -> None:
    """F37, F48: not the first rank's for all."""
    checkpoint = save_ranks(store, tmp_path, world_size, lambda rank: {"model": nn.Linear(2, 2)})
    for rank in range(world_size):
        seed_everything(1000 + rank)
        expected = draws()
        seed_everything(7)
        restored(store, tmp_path, checkpoint, rank, world_size, model=nn.Linear(2, 2))
        assert draws() == expected


def test_f39_generators_are_restored_after_everything_else(store: MemoryStore, tmp_path: Path) -> None:
    """F39: whatever restoring draws (a loader that skips, a layer that is made), the numbers go on as they would."""
    seed_everything(11)
    checkpoint = save_one(store, tmp_path, 3, thing=Holder(1))
    seed_everything(11)
    expected = draws()
    restore_one(store, tmp_path, checkpoint, thing=Holder(0, on_load=draws))
    assert draws() == expected


def test_f39_and_once_more_before_the_first_step(store: MemoryStore, tmp_path: Path) -> None:
    seed_everything(11)
    checkpoint = save_one(store, tmp_path, 3, thing=Holder(1))
    seed_everything(11)
    expected = draws()
    state = restore_one(store, tmp_path, checkpoint, thing=Holder(0))
    draws()  # iter(DataLoader) between attach and the loop
    state.restore_rng()
    assert draws() == expected


@pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1), (4, 2), (2, 3), (3, 4)])
def test_f38_after_a_change_of_world_size_generators_follow_the_rule(
    store: MemoryStore, tmp_path: Path, then: int, now: int
) -> None:
    """F38, F58: an explicit rule instead of an error that is swallowed; no two ranks share a sequence."""
    checkpoint = save_ranks(store, tmp_path, then, lambda rank: {"model": nn.Linear(2, 2)})
    found = []
    for rank in range(now):
        restored(store, tmp_path, checkpoint, rank, now, model=nn.Linear(2, 2))
        found.append(draws())
        rng.derive(checkpoint.generation, checkpoint.step, rank, now)
        assert found[-1] == draws()
    assert len({tuple(numbers) for numbers in found}) == now


@pytest.mark.parametrize(("then", "now"), [(1, 4), (4, 1), (4, 3), (2, 4)])
def test_f56_the_sample_stream_goes_on_at_another_world_size(
    store: MemoryStore, tmp_path: Path, then: int, now: int
) -> None:
    """F41, F56, F65: each sample once, in the same global batches."""
    alone = sampler_of()
    for _ in range(6):
        alone.advance()
    samplers = [sampler_of(rank, then) for rank in range(then)]
    for sampler in samplers:
        sampler.load_state_dict(alone.state_dict())
    checkpoint = save_ranks(store, tmp_path, then, lambda rank: {"data": samplers[rank]})
    again = [sampler_of(rank, now) for rank in range(now)]
    for rank, sampler in enumerate(again):
        restored(store, tmp_path, checkpoint, rank, now, data=sampler)
    for _ in range(3):
        batch = [index for sampler in again for micro_batch in sampler for index in micro_batch]
        assert batch == alone.next_global_batch()
        for sampler in (alone, *again):
            sampler.advance()


def test_a_rank_whose_shard_was_not_awaited_gets_derived_generators(store: MemoryStore, tmp_path: Path) -> None:
    """Under a notice the victims' own state may be missing; everybody else's comes back exactly."""
    checkpoint = save_ranks(store, tmp_path, 3, lambda rank: {"model": nn.Linear(2, 2)}, without=(1,))
    for rank in range(3):
        restored(store, tmp_path, checkpoint, rank, 3, model=nn.Linear(2, 2))
        found = draws()
        if rank == 1:
            rng.derive(checkpoint.generation, checkpoint.step, 1, 3)
        else:
            seed_everything(1000 + rank)
        assert found == draws()


def test_f48_data_of_another_kind_is_kept_for_each_rank(store: MemoryStore, tmp_path: Path) -> None:
    """F41, F48: a loader with a state of its own, tensors included, is each rank's own."""

    def given(rank: int) -> dict[str, Any]:
        return {"data": Holder({"at": rank, "seen": torch.arange(rank + 1)})}

    checkpoint = save_ranks(store, tmp_path, 3, given)
    for rank in range(3):
        holder = Holder(None)
        restored(store, tmp_path, checkpoint, rank, 3, data=holder)
        assert holder.state["at"] == rank
        assert torch.equal(holder.state["seen"], torch.arange(rank + 1))


def test_state_that_differed_by_rank_cannot_go_to_another_world_size(store: MemoryStore, tmp_path: Path) -> None:
    """F38, F46: refused by name, instead of one rank's for all."""
    checkpoint = save_ranks(store, tmp_path, 2, lambda rank: {"thing": Holder({"at": rank})})
    with pytest.raises(StateError, match="different on each of 2 ranks; it cannot go to 3") as caught:
        restored(store, tmp_path, checkpoint, 0, 3, thing=Holder(None))
    assert caught.value.path == "thing"


def test_f41_a_loaders_own_position_cannot_go_to_another_world_size(store: MemoryStore, tmp_path: Path) -> None:
    """F41, F46: even if it was alike on all ranks, each of them would go on at the wrong samples."""
    checkpoint = save_ranks(store, tmp_path, 2, lambda _: {"data": Holder({"at": 5})})
    with pytest.raises(StateError, match="cannot go from 2 ranks to 3; that of a ResumableSampler can") as caught:
        restored(store, tmp_path, checkpoint, 0, 3, data=Holder(None))
    assert caught.value.path == "data"


def test_a_damaged_shard_restores_nothing(store: MemoryStore, tmp_path: Path) -> None:
    checkpoint = save_one(store, tmp_path, 3, model=nn.Linear(4, 4))
    key = fmt.shard_key(checkpoint, 0, 1)
    change_byte(store, key, store.size(key) - 1)
    with pytest.raises(DigestError):
        restore_one(store, tmp_path, checkpoint, model=nn.Linear(4, 4))


def test_what_is_not_committed_cannot_be_restored(store: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        restore_one(store, tmp_path, CheckpointId(generation=1, step=3), model=nn.Linear(4, 4))


# --------------------------------------------------------------------------------------------------------- gate


def trained() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "data": sampler_of()}


def changes_rate(optimizer: optim.Optimizer) -> Any:
    """What a schedule does that computes its own idea of the rate when it is loaded (F51)."""

    def change() -> None:
        optimizer.param_groups[0]["lr"] = 0.05

    return change


def test_f51_a_rate_that_is_not_the_saved_one_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    """F51, F52: a schedule that starts anew is found out before the first step."""
    checkpoint = save_one(store, tmp_path, 3, **trained(), thing=Holder(1))
    given = trained()
    with pytest.raises(GateError, match="lr differ") as caught:
        restore_one(store, tmp_path, checkpoint, **given, thing=Holder(0, changes_rate(given["optimizer"])))
    assert caught.value.parts == ("lr",)
    assert isinstance(caught.value, RefusedError)


def test_an_intended_change_is_accepted(store: MemoryStore, tmp_path: Path) -> None:
    checkpoint = save_one(store, tmp_path, 3, **trained(), thing=Holder(1))
    given = trained()
    holder = Holder(0, changes_rate(given["optimizer"]))
    restore_one(store, tmp_path, checkpoint, accept=("lr",), **given, thing=holder)
    assert given["optimizer"].param_groups[0]["lr"] == 0.05


def test_after_a_remap_the_rate_still_counts(store: MemoryStore, tmp_path: Path) -> None:
    checkpoint = save_ranks(
        store, tmp_path, 2, lambda rank: trained() | {"thing": Holder(1), "data": sampler_of(rank, 2)}
    )
    given = trained()
    with pytest.raises(GateError) as caught:
        restored(store, tmp_path, checkpoint, 0, 1, **given, thing=Holder(0, changes_rate(given["optimizer"])))
    assert caught.value.parts == ("lr",)


@pytest.mark.parametrize(
    ("change", "part"),
    [({"length": 999}, "data.length"), ({"global_batch": 12}, "data.global_batch"), ({"seed": 6}, "data.seed")],
)
@pytest.mark.parametrize("accept", [(), ("data",)])
def test_f46_other_data_is_refused(
    store: MemoryStore, tmp_path: Path, change: dict[str, int], part: str, accept: tuple[str, ...]
) -> None:
    """F46: a position in other data would be other samples, silently; that cannot be accepted either."""
    checkpoint = save_one(store, tmp_path, 3, data=sampler_of())
    options = {"length": 1000, "global_batch": 24, "micro_batch": 2, "seed": 5} | change
    other = ResumableSampler(**options, rank=0, world_size=1)
    with pytest.raises(GateError) as caught:
        restore_one(store, tmp_path, checkpoint, accept=accept, data=other)
    assert caught.value.parts == (part,)


def test_a_sampler_that_serves_other_samples_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    class Shuffled(ResumableSampler):
        """Has the same state, and means something else by it."""

        def digest(self) -> str:
            return "00000000"

    checkpoint = save_one(store, tmp_path, 3, data=sampler_of())
    other = Shuffled(1000, 24, 2, 5, rank=0, world_size=1)
    with pytest.raises(GateError) as caught:
        restore_one(store, tmp_path, checkpoint, data=other)
    assert caught.value.parts == ("data",)
    restore_one(store, tmp_path, checkpoint, accept=("data",), data=other)


def test_f37_generators_that_were_not_restored_are_found_out(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F37, F38: it cannot happen silently, whatever the reason."""
    checkpoint = save_one(store, tmp_path, 3, **trained())
    monkeypatch.setattr(rng, "restore", lambda state: None)
    seed_everything(4711)
    with pytest.raises(GateError) as caught:
        restore_one(store, tmp_path, checkpoint, **trained())
    assert caught.value.parts == ("rng",)
    restore_one(store, tmp_path, checkpoint, accept=("rng",), **trained())


@pytest.mark.parametrize("accept", [("learning-rate",), ("lr", "step"), ("data.length",)])
def test_parts_that_the_gate_does_not_have_cannot_be_accepted(tmp_path: Path, accept: tuple[str, ...]) -> None:
    with pytest.raises(GateError, match="the gate's parts are"):
        state_of(launch(tmp_path), accept, model=nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------------------ staging


def test_the_named_points_are_reached(store: MemoryStore, tmp_path: Path) -> None:
    seen: list[tuple[str, Mapping[str, int]]] = []
    telemetry.set_point_hook(lambda point, where: seen.append((point, dict(where))))
    try:
        save_one(store, tmp_path, 3, model=nn.Linear(2, 2))
    finally:
        telemetry.set_point_hook(None)
    assert seen == [("before-stage", {"rank": 0, "step": 3}), ("after-stage", {"rank": 0, "step": 3})]


def adam() -> dict[str, Any]:
    model = nn.Linear(30, 30)
    return {"model": model, "optimizer": optim.Adam(model.parameters(), lr=0.1)}


def adam_step(given: dict[str, Any]) -> None:
    torch.autograd.backward(given["model"](torch.randn(3, 30)).square().mean())
    given["optimizer"].step()


def test_state_that_appears_later_is_planned_anew(store: MemoryStore, tmp_path: Path) -> None:
    """Adam's moments exist only after the first step; parameters may get theirs later still."""
    given = adam()
    place = launch(tmp_path)
    state = state_of(place, **given)
    before = state.stager.plan()
    states.upload(store, place, state, 0)
    adam_step(given)
    states.upload(store, place, state, 1)
    assert commit(store, CheckpointId(generation=1, step=1))
    index = read_committed(store, CheckpointId(generation=1, step=1))
    assert {name.rpartition(".")[2] for name in index.tensors} >= {"exp_avg", "exp_avg_sq", "step", "weight"}
    assert index.shards[0].size_bytes > before


def test_values_that_outgrow_the_header_are_planned_anew(store: MemoryStore, tmp_path: Path) -> None:
    holder = Holder({"losses": [0.5]})
    place = launch(tmp_path)
    state = state_of(place, thing=holder, model=nn.Linear(3, 3))
    small = state.stager.plan()
    holder.state["losses"] = [random.random() for _ in range(5000)]
    checkpoint = save(store, [(place, state)], 2)
    holder.state["losses"] *= 2
    states.upload(store, place, state, 3)
    assert commit(store, CheckpointId(generation=1, step=3))
    other = Holder(None)
    restore_one(store, tmp_path, CheckpointId(generation=1, step=3), thing=other, model=nn.Linear(3, 3))
    assert other.state == holder.state
    assert read_committed(store, checkpoint).shards[0].size_bytes > small


@pytest.mark.parametrize(("world_size", "local"), [(4, 2), (4, 1), (2, 2), (3, 1)])
def test_the_space_for_the_loss_of_one_node_is_reserved_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, local: int
) -> None:
    """Under a notice each survivor writes more; it must not have to ask for memory then."""
    nodes = [tuple(range(first, first + local)) for first in range(0, world_size, local)]
    for rank in range(world_size):
        given = adam()
        adam_step(given)
        state = state_of(launch(tmp_path, rank=rank, world_size=world_size, local_world_size=local), **given)
        reserved = state.stager.plan()
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            for absent in [(), nodes[0], nodes[-1]]:
                if rank not in absent:
                    assert states.stage(state, 0, 5, absent) <= reserved
                    assert states.stage(state, 1, 6, absent) <= reserved


def test_memory_that_is_short_is_said_when_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F106: before the first save, with numbers."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(RefusedError, match="a staging slot needs"):
        state_of(launch(tmp_path), model=nn.Linear(2, 2)).stager.plan()


def test_absent_ranks_own_nothing_shared(store: MemoryStore, tmp_path: Path) -> None:
    """What a victim holds alone is its generators; all else is with the others."""
    checkpoint = save_ranks(store, tmp_path, 3, lambda rank: adam(), without=(2,))
    index = read_committed(store, checkpoint)
    assert {chunk.rank for name in index.tensors for chunk in index.chunks(name)} == {0, 1}
    victim = state_of(launch(tmp_path, rank=2, world_size=3), **adam())
    size_bytes = states.stage(victim, 0, 6, (2,))
    data = (tmp_path / "g1-r2.slot-0").read_bytes()[:size_bytes]
    metadata, _, header = shard_metadata("shard", memoryview(data))
    assert set(header) == {"__metadata__", "rank.00002.rng.torch"}
    assert metadata["parts"] == {}


def test_a_checkpoint_holds_what_the_design_says(store: MemoryStore, tmp_path: Path) -> None:
    given = adam()
    adam_step(given)
    checkpoint = save_one(store, tmp_path, 1, **given, data=sampler_of(), thing=Holder({"x": 1}))
    index = read_committed(store, checkpoint)
    assert set(index.values["objects"]) == {"model", "optimizer", "data", "thing"}
    own = read_rank_state(store, index, index.shards[0])
    assert set(own.rank_values) == {"rng"}
    gate = own.gate
    assert gate.step == 1
    assert gate.data == sampler_of().digest()
    assert gate.rng == rng.digest(rng.capture())

"""The training state of one process, saved and restored as a job does it, without a job: no agent, no supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.layout import Scope
from orchestrator.checkpoint.save import ShardPlace, commit, upload_shard
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.base import ObjectStore
from orchestrator.training.boundary import Order
from orchestrator.training.parts import ModelPart, ObjectPart, Part, make_part, name_parameters
from orchestrator.training.sampler import ResumableSampler
from orchestrator.training.saved_state import SavedState


def launch(
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    local_world_size: int = 1,
    generation: int = 1,
    base: CheckpointId | None = None,
    **others: Any,
) -> Launch:
    """A worker's place; its slots lie in `folder`."""
    name = f"g{generation}-r{rank}"
    return Launch(
        job="job",
        generation=generation,
        rank=rank,
        world_size=world_size,
        local_world_size=local_world_size,
        base=base,
        control_path=folder / f"{name}.control",
        slot_paths=(folder / f"{name}.slot-0", folder / f"{name}.slot-1"),
        objects_url="http://127.0.0.1:1",
        token="token",
        agent_pid=os.getpid(),
        attached=False,
    ).model_copy(update=others)


def parts_of(place: Launch, given: dict[str, Any]) -> list[Part]:
    """The parts as `attach` makes them."""
    models = [ModelPart(name, value) for name, value in given.items() if isinstance(value, torch.nn.Module)]
    return [
        ObjectPart(name, value, Scope.RANK, prefix=f"rank.{place.rank:05d}.")
        if name == "data" and not isinstance(value, ResumableSampler)
        else make_part(name, value, lambda: name_parameters(models))
        for name, value in given.items()
    ]


def state_of(place: Launch, accept: tuple[str, ...] = (), **given: Any) -> SavedState:
    """All of what would be given to `attach`; None is left out."""
    given = {name: value for name, value in given.items() if value is not None}
    data = given.get("data")
    return SavedState(
        place,
        parts_of(place, given),
        data if isinstance(data, ResumableSampler) else None,
        [value for value in given.values() if isinstance(value, torch.optim.Optimizer)],
        accept,
    )


def stage(state: SavedState, slot: int, step: int, absent: tuple[int, ...] = (), *, may_overlap: bool = False) -> int:
    """Stage one shard to its end; its bytes, 0 if it is no good."""
    sizes: list[int] = []
    state.stager.stage(
        Order(slot=slot, step=step, absent=absent, may_overlap=may_overlap),
        lambda size_bytes, copy_ns: sizes.append(size_bytes or 0),
        lambda there_bytes: None,
    )
    state.stager.join()
    (size,) = sizes
    return size


def upload(store: ObjectStore, place: Launch, state: SavedState, step: int, absent: tuple[int, ...] = ()) -> None:
    """Stage and make one rank's shard durable."""
    size_bytes = stage(state, 0, step, absent)
    where = ShardPlace(
        job=place.job,
        checkpoint=CheckpointId(generation=place.generation, step=step),
        rank=place.rank,
        world_size=place.world_size,
        absent=absent,
    )
    upload_shard(store, where, memoryview(Path(place.slot_paths[0]).read_bytes())[:size_bytes])


def save(store: ObjectStore, states: Sequence[tuple[Launch, SavedState]], step: int) -> CheckpointId:
    """A committed checkpoint of all ranks."""
    for place, state in states:
        state.stager.plan()
        upload(store, place, state, step)
    checkpoint = CheckpointId(generation=states[0][0].generation, step=step)
    assert commit(store, checkpoint)
    return checkpoint


def save_one(store: ObjectStore, folder: Path, step: int, **given: Any) -> CheckpointId:
    """A committed checkpoint of a job of one rank."""
    place = launch(folder)
    return save(store, [(place, state_of(place, **given))], step)


def restore_one(
    store: ObjectStore, folder: Path, base: CheckpointId, accept: tuple[str, ...] = (), **given: Any
) -> SavedState:
    """Restore the same into other objects, in another generation."""
    state = state_of(launch(folder, generation=base.generation + 1, base=base), accept, **given)
    assert state.restore(store) == base.step
    return state

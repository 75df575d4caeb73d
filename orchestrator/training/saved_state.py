"""The whole training state of one rank: capture and stage it, restore it, and the resume gate. Used by `session`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crc32c
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.layout import Scope, ShardPlan, Shares, holder_sets, plan_shard
from orchestrator.checkpoint.reader import RankState, read_committed, read_rank_state, read_receipt
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.checkpoint.staging import Metadata, SlotFile
from orchestrator.errors import GateError, ProtocolError, StateError
from orchestrator.storage.base import ObjectStore
from orchestrator.telemetry import reached
from orchestrator.training import rng
from orchestrator.training.parts import Captured, Part
from orchestrator.training.sampler import ResumableSampler

GATE_PARTS = ("lr", "data", "rng")


class SavedState:
    """Stages and restores everything that makes a resumed run the same run."""

    def __init__(
        self,
        launch: Launch,
        parts: list[Part],
        sampler: ResumableSampler | None,
        optimizers: list[torch.optim.Optimizer],
        accept: tuple[str, ...],
    ) -> None:
        unknown = sorted(set(accept) - set(GATE_PARTS))
        if unknown:
            raise GateError(tuple(unknown), f"accept={unknown}: the gate's parts are {list(GATE_PARTS)}")
        self._launch = launch
        self._parts = parts
        self._sampler = sampler
        self._optimizers = optimizers
        self._accept = accept
        self._slots = tuple(SlotFile(Path(path)) for path in launch.slot_paths)
        self._shares = Shares(launch.rank, launch.world_size)
        self._plans: dict[tuple[int, ...], ShardPlan] = {}
        self._specs: object = None
        self._rng: rng.RngState | None = None
        self.restored = False
        self.planned = False
        self.unique_bytes = 0
        """Bytes of the shard that no other rank holds, the header's among them."""
        self.twins: tuple[tuple[int, ...], ...] = ()
        """For each part of the state that this rank has and not all have: the ranks that hold it."""
        self._step = 0

    # -- saving ------------------------------------------------------------------------------------------

    def plan(self) -> int:
        """Plan the layout and reserve both slots, with room for the loss of one node; bytes of one slot.

        Raises StateError naming what cannot be saved, RefusedError if memory is short.
        """
        captured, metadata = self._capture(self._step)
        self.twins = holder_sets(captured.specs(), self._launch.world_size)
        plans = [self._plan_for(captured, metadata, absent) for absent in self._possible_absences()]
        size = max(plan.size_bytes for plan in plans)
        self.unique_bytes = max(plan.unique_bytes(self._launch.rank) for plan in plans)
        for slot in self._slots:
            slot.reserve(size)
        self.planned = True
        return size

    def _possible_absences(self) -> list[tuple[int, ...]]:
        """Nobody, or all ranks of one node, if this rank is not one of them.

        Nodes that take equal shares from this rank need not all be tried: the first and the last one, and of those that
        hold the same part of the state as this rank.
        """
        world, local, own = self._launch.world_size, self._launch.local_world_size, self._launch.rank
        others = [[rank for rank in twins if rank // local != own // local] for twins in (range(world), *self.twins)]
        firsts = {rank // local * local for ranks in others if ranks for rank in (ranks[0], ranks[-1])}
        return [(), *(tuple(range(first, min(first + local, world))) for first in sorted(firsts))]

    def stage(self, slot: int, step: int, absent: tuple[int, ...]) -> int:
        """Copy the state at this boundary into a slot; bytes of the shard."""
        self._step = step
        reached("before-stage", rank=self._launch.rank, step=step)
        captured, metadata = self._capture(step)
        plan = self._plan_for(captured, metadata, absent)
        try:
            self._slots[slot].stage(plan, captured.tensors, metadata)
        except ProtocolError:  # the values outgrew the header's reserved room
            self._plans.clear()
            plan = self._plan_for(captured, metadata, absent)
            self._slots[slot].stage(plan, captured.tensors, metadata)
        reached("after-stage", rank=self._launch.rank, step=step)
        return plan.size_bytes

    def _plan_for(self, captured: Captured, metadata: Metadata, absent: tuple[int, ...]) -> ShardPlan:
        """The layout for this set of absent ranks; planned anew only when the set of tensors has changed."""
        specs = captured.specs()
        if specs != self._specs:
            self._plans.clear()
            self._specs = specs
        if absent not in self._plans:
            self._plans[absent] = plan_shard(
                specs,
                rank=self._launch.rank,
                world_size=self._launch.world_size,
                absent=absent,
                metadata_bytes=metadata.size_bytes(),
            )
        return self._plans[absent]

    def _capture(self, step: int) -> tuple[Captured, Metadata]:
        captured = Captured(shares=self._shares)
        objects = {part.name: part.capture(captured) for part in self._parts}
        state = rng.capture()
        prefix = f"rank.{self._launch.rank:05d}.rng."
        for name, tensor in state.tensors().items():
            captured.add_tensor(prefix + name, tensor, Scope.RANK)
        metadata = Metadata(
            values={"objects": objects},
            rank_values={"rng": state.values()},
            gate=self._gate(step, state).model_dump(),
        )
        return captured, metadata

    def _gate(self, step: int, state: rng.RngState) -> fmt.Gate:
        rates = [[str(group.get("lr")) for group in optimizer.param_groups] for optimizer in self._optimizers]
        return fmt.Gate(
            step=step,
            lr=f"{crc32c.crc32c(json.dumps(rates).encode()):08x}",
            data=None if self._sampler is None else self._sampler.digest(),
            rng=rng.digest(state),
        )

    # -- restoring ---------------------------------------------------------------------------------------

    def restore(self, store: ObjectStore) -> int:
        """Load the generation's base; the step to go on from (0: a fresh start).

        Raises FormatError, DigestError, StateError, GateError, StoreError.
        """
        base = self._launch.base
        if base is None:
            return 0
        index = read_committed(store, base)
        own = read_rank_state(store, index, index.by_rank[self._launch.rank]) if self._same_ranks(index) else None
        trees = {part.name: self._tree(index, own, part.name) for part in self._parts}
        extra = sorted(set(index.values.get("objects", {})) - set(trees))
        if extra:
            raise StateError(extra[0], f"the checkpoint {base} has it, but attach was not given it")
        targets: dict[str, torch.Tensor] = {}
        for part in self._parts:
            targets |= part.targets(trees[part.name], index)
        rng_targets = self._rng_targets(index)
        read_tensors(store, index, targets | rng_targets)
        for part in self._parts:
            part.finish(trees[part.name], targets)
        self._rng = None if own is None else self._saved_rng(own, rng_targets)
        self.restore_rng()
        self.restored = True
        self._step = index.step
        saved = own or read_receipt(store, index, index.shards[0])
        self._check_gate(index, saved.gate, same=own is not None)
        return index.step

    def _tree(self, index: fmt.Index, own: RankState | None, name: str) -> Any:
        remapped = index.world_size != self._launch.world_size
        if name == "data" and self._sampler is None and remapped:
            sizes = f"{index.world_size} ranks to {self._launch.world_size}"
            raise StateError(name, f"its position cannot go from {sizes}; that of a ResumableSampler can")
        objects = index.values.get("objects", {})
        if name in objects:
            return objects[name]
        if name in index.rank_objects and remapped:
            raise StateError(
                name,
                f"it was different on each of {index.world_size} ranks; it cannot go to {self._launch.world_size}",
            )
        if name not in index.rank_objects or own is None or name not in own.objects:
            raise StateError(name, f"the checkpoint {index.id} does not have it")
        return own.objects[name]

    def _same_ranks(self, index: fmt.Index) -> bool:
        """Whether this rank's own state (RNG) was saved for the same world size."""
        return index.world_size == self._launch.world_size and self._launch.rank in index.by_rank

    def _rng_targets(self, index: fmt.Index) -> dict[str, torch.Tensor]:
        if not self._same_ranks(index):
            return {}
        prefix = f"rank.{self._launch.rank:05d}.rng."
        names = [name for name in index.tensors if name.startswith(prefix)]
        return {name: torch.empty(index.tensors[name].shape, dtype=torch.uint8) for name in names}

    def _saved_rng(self, own: RankState, targets: Mapping[str, torch.Tensor]) -> rng.RngState | None:
        if not targets:
            return None
        prefix = f"rank.{self._launch.rank:05d}.rng."
        tensors = {name.removeprefix(prefix): tensor for name, tensor in targets.items()}
        return rng.RngState.from_parts(own.rank_values["rng"], tensors)

    def restore_rng(self) -> None:
        """Set the generators as they were; after a change of world size, by the documented rule. Last of all."""
        base = self._launch.base
        if self._rng is not None:
            rng.restore(self._rng)
        elif base is not None:
            rng.derive(base.generation, base.step, self._launch.rank, self._launch.world_size)

    def _check_gate(self, index: fmt.Index, saved: fmt.Gate, *, same: bool) -> None:
        """Compare what is there now with what the checkpoint says was there; after a remap without the RNG."""
        now = self._gate(index.step, rng.capture())
        compared = ("step", *GATE_PARTS) if same else ("step", "lr", "data")
        differing = [
            part for part in compared if part not in self._accept and getattr(saved, part) != getattr(now, part)
        ]
        if differing:
            raise GateError(
                tuple(differing),
                f"after restoring {index.id}, {', '.join(differing)} differ from what was saved: the script changes "
                "them; if that is intended, say accept=(…)",
            )

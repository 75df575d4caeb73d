"""The whole training state of one rank: what saves it, restoring it, and the resume gate. Used by `session`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import crc32c
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.reader import RankState, collector_resting, read_committed, read_rank_state, read_receipt
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.errors import GateError, StateError
from orchestrator.storage.base import ObjectStore
from orchestrator.training import rng
from orchestrator.training.parts import Part
from orchestrator.training.sampler import ResumableSampler
from orchestrator.training.stager import StateStager

GATE_PARTS = ("lr", "data", "rng")


class SavedState:
    """Everything that makes a resumed run the same run."""

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
        self._rng: rng.RngState | None = None
        self.restored = False
        self.stager = StateStager(launch, parts, self._gate)

    def _gate(self, step: int, state: rng.RngState) -> fmt.Gate:
        rates = [[str(group.get("lr")) for group in optimizer.param_groups] for optimizer in self._optimizers]
        return fmt.Gate(
            step=step,
            lr=f"{crc32c.crc32c(json.dumps(rates).encode()):08x}",
            data=None if self._sampler is None else self._sampler.digest(),
            rng=rng.digest(state),
        )

    # -- restoring ---------------------------------------------------------------------------------------

    @collector_resting()
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

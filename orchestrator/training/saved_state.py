"""The whole training state of one rank: what saves it, restoring it, and the resume gate. Used by `session`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.layout import is_whole_everywhere
from orchestrator.checkpoint.reader import RankState, read_committed, read_rank_state, read_receipt
from orchestrator.checkpoint.records import collector_resting
from orchestrator.checkpoint.restore import Part as TensorPart
from orchestrator.checkpoint.restore import parts_of
from orchestrator.errors import BrokenOffError, GateError, PeerLostError, StateError
from orchestrator.storage.base import ObjectStore
from orchestrator.training import rng
from orchestrator.training.parts import ModelPart, Part
from orchestrator.training.sampler import ResumableSampler
from orchestrator.training.sharing import Gang, read_together, together
from orchestrator.training.stager import StateStager

GATE_PARTS = ("lr", "data", "rng")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What this rank needs of the checkpoint that it restores."""

    index: fmt.Index
    own: RankState | None
    """This rank's own, if as many ranks saved it."""
    gate: fmt.Gate
    trees: Mapping[str, Any]
    """The state of each part of attach's, with names in place of tensors."""
    targets: dict[str, torch.Tensor]
    rng_targets: dict[str, torch.Tensor]
    parts: Sequence[TensorPart]
    """What is to be read into the targets."""


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
        self._own_prefix = f"rank.{launch.rank:05d}."
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
    def restore(self, *stores: ObjectStore) -> int:
        """Load the generation's base from the first store that has it right; the step to go on from (0: a fresh start).

        Where there is a process group of all ranks, all of them call this, and take the same store.
        Raises FormatError, DigestError, StateError, GateError, StoreError; PeerError where another rank failed.
        """
        if self._launch.base is None:
            return 0
        base = self._read_from_first(stores)
        for part in self._parts:
            part.finish(base.trees[part.name], base.targets)
        self._rng = None if base.own is None else self._saved_rng(base.own, base.rng_targets)
        self.restore_rng()
        self.restored = True
        self._check_gate(base.index, base.gate, same=base.own is not None)
        return base.index.step

    def _read_from_first(self, stores: Sequence[ObjectStore]) -> _Base:
        """Whatever goes wrong with one store on any rank, all ranks go on to the next one; the last one's error counts.

        Not when a rank is lost: the others cannot agree without it.
        """
        devices = (
            one.device for part in self._parts if isinstance(part, ModelPart) for one in part.module.parameters()
        )
        gang = Gang.of(self._launch, next(devices, torch.device("cpu")))
        for store in stores[:-1]:
            try:
                return self._read(store, gang)
            except (PeerLostError, BrokenOffError):
                raise
            except Exception:
                continue
        return self._read(stores[-1], gang)

    def _read(self, store: ObjectStore, gang: Gang | None) -> _Base:
        base = together(gang, lambda: self._open(store))
        targets = base.targets | base.rng_targets
        everyones = {
            name
            for name, tensor in targets.items()
            if is_whole_everywhere(tensor) and not name.startswith(self._own_prefix)
        }
        read_together(gang, store, base.index, base.parts, everyones)
        return base

    def _open(self, store: ObjectStore) -> _Base:
        """Everything but the tensors' contents; all that can be refused is."""
        assert self._launch.base is not None
        index = read_committed(store, self._launch.base)
        own = read_rank_state(store, index, index.by_rank[self._launch.rank]) if self._same_ranks(index) else None
        trees = {part.name: self._tree(index, own, part.name) for part in self._parts}
        extra = sorted(set(index.values.get("objects", {})) - set(trees))
        if extra:
            raise StateError(extra[0], f"the checkpoint {index.id} has it, but attach was not given it")
        targets: dict[str, torch.Tensor] = {}
        for part in self._parts:
            targets |= part.targets(trees[part.name], index)
        rng_targets = self._rng_targets(index)
        return _Base(
            index=index,
            own=own,
            gate=(own or read_receipt(store, index, index.shards[0])).gate,
            trees=trees,
            targets=targets,
            rng_targets=rng_targets,
            parts=parts_of(index, targets | rng_targets),
        )

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
        prefix = f"{self._own_prefix}rng."
        names = [name for name in index.tensors if name.startswith(prefix)]
        return {name: torch.empty(index.tensors[name].shape, dtype=torch.uint8) for name in names}

    def _saved_rng(self, own: RankState, targets: Mapping[str, torch.Tensor]) -> rng.RngState | None:
        if not targets:
            return None
        prefix = f"{self._own_prefix}rng."
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

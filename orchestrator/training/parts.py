"""The training state, part by part: what to save of a model, an optimizer, any other object, and how to put it back.

A part gives a JSON tree in which tensors stand by name, and the live tensors beside it. Restoring goes the other
way in two steps: `targets` names the tensors to read into, `finish` is called once they are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import Scope, TensorSpec, describe
from orchestrator.checkpoint.restore import empty_like
from orchestrator.checkpoint.values import decode, encode
from orchestrator.errors import StateError


@dataclass(kw_only=True)
class Captured:
    """The live state at one boundary. Tensors alias the training state: copy them before training goes on."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scopes: dict[str, Scope] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def specs(self) -> list[TensorSpec]:
        """What the layout needs to know; refuses tensors that cannot be saved exactly, by name."""
        return [describe(name, tensor, self.scopes[name]) for name, tensor in self.tensors.items()]

    def add(self, value: Any, path: str, scope: Scope) -> Any:
        """Encode a value; its tensors are taken in under `scope`."""
        found: dict[str, torch.Tensor] = {}
        tree = encode(value, path, _is_tensor, found)
        self.tensors |= found
        self.scopes |= dict.fromkeys(found, scope)
        return tree


class Part(Protocol):
    """One named part of the training state."""

    name: str

    def capture(self, captured: Captured) -> Any:
        """The part's JSON tree; its tensors go into `captured`."""
        ...

    def targets(self, tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
        """Tensors to read into, by name."""
        ...

    def finish(self, tree: Any, filled: Mapping[str, torch.Tensor]) -> None:
        """Put the part back, its tensors having been filled."""
        ...


def make_part(name: str, value: Any, parameter_names: Callable[[torch.Tensor], str | None]) -> Part:
    """The part that fits an object given to attach. Raises StateError if it has no state that we could save."""
    if isinstance(value, torch.nn.Module):
        return ModelPart(name, value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerPart(name, value, parameter_names)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return ObjectPart(name, value)
    raise StateError(name, f"a {type(value).__qualname__} has no state_dict and load_state_dict")


class ModelPart:
    """A module, in DDP or not. Parameters are alike on every rank; buffers are the first rank's, as DDP broadcasts."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module

    def parameter_name(self, tensor: torch.Tensor) -> str | None:
        """The name of one of this model's parameters."""
        return next((name for name, parameter in self.module.named_parameters() if parameter is tensor), None)

    def capture(self, captured: Captured) -> Any:
        """All of `state_dict()`."""
        buffers = {name for name, _ in self.module.named_buffers()}
        return {
            key: captured.add(value, f"{self.name}.{key}", Scope.FIRST if key in buffers else Scope.SHARED)
            for key, value in self.module.state_dict().items()
        }

    def targets(self, tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
        """The live tensors themselves: they are read into in place."""
        live = self.module.state_dict()
        missing, extra = sorted(set(live) - set(tree)), sorted(set(tree) - set(live))
        if missing or extra:
            raise StateError(
                self.name, f"the checkpoint lacks {missing[:5]} and has {extra[:5]} that this model does not have"
            )
        return {f"{self.name}.{key}": value for key, value in live.items() if _is_tensor(value)}

    def finish(self, tree: Any, filled: Mapping[str, torch.Tensor]) -> None:
        """Tensors are in place; modules with extra state of other kinds get it through load_state_dict."""
        values = {key: decode(value, f"{self.name}.{key}", filled.__getitem__) for key, value in tree.items()}
        if any(not _is_tensor(value) for value in values.values()):
            self.module.load_state_dict(values)


class OptimizerPart:
    """A torch optimizer, its state keyed by parameter name. Written back entry by entry, so nothing is cast."""

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, parameter_name: Callable[[torch.Tensor], str | None]
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self._parameter_name = parameter_name

    def _names(self) -> dict[torch.Tensor, str]:
        names: dict[torch.Tensor, str] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                names[parameter] = self._parameter_name(parameter) or f"group-{number}-parameter-{place}"
        return names

    def capture(self, captured: Captured) -> Any:
        """Groups with parameter names in place of parameters, and the state of each parameter that has one."""
        names = self._names()
        groups = [
            group | {"params": [names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        state = {names[parameter]: dict(entry) for parameter, entry in self.optimizer.state.items()}
        return captured.add({"groups": groups, "state": state}, self.name, Scope.SHARED)

    def targets(self, tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
        """New tensors: a fresh optimizer has none yet."""
        return _new_tensors(tree, index)

    def finish(self, tree: Any, filled: Mapping[str, torch.Tensor]) -> None:
        """Set the groups' options and each parameter's state."""
        saved = decode(tree, self.name, filled.__getitem__)
        names = self._names()
        now = [[names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]
        then = [group["params"] for group in saved["groups"]]
        if now != then:
            raise StateError(
                self.name, f"its parameter groups differ from the checkpoint's: {_first_difference(now, then)}"
            )
        self.optimizer.state.clear()
        for group, options in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
            for parameter in group["params"]:
                entry = saved["state"].get(names[parameter])
                if entry is not None:
                    on_host = not (group.get("capturable") or group.get("fused"))
                    self.optimizer.state[parameter] = {
                        key: _placed(value, parameter, on_host) for key, value in entry.items()
                    }


class ObjectPart:
    """Any object with state_dict and load_state_dict (a learning-rate schedule, a sampler, the user's own)."""

    def __init__(self, name: str, value: Any, scope: Scope = Scope.SHARED, prefix: str = "") -> None:
        self.name = name
        self._value = value
        self._scope = scope
        self._path = f"{prefix}{name}"

    def capture(self, captured: Captured) -> Any:
        """All of `state_dict()`."""
        return captured.add(self._value.state_dict(), self._path, self._scope)

    def targets(self, tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
        """New tensors."""
        return _new_tensors(tree, index)

    def finish(self, tree: Any, filled: Mapping[str, torch.Tensor]) -> None:
        """`load_state_dict` of the saved value."""
        self._value.load_state_dict(decode(tree, self._path, filled.__getitem__))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _placed(value: Any, parameter: torch.Tensor, on_host: bool) -> Any:
    """Optimizer state lives where its parameter does, except counters of plain (not capturable) optimizers."""
    if not _is_tensor(value) or (on_host and value.dim() == 0):
        return value
    return value.to(parameter.device)


def tensor_names(tree: Any) -> Iterable[str]:
    """The names of all tensors in a JSON tree."""
    names: list[str] = []

    def collect(name: str) -> None:
        names.append(name)

    decode(tree, "", collect)
    return names


def _new_tensors(tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
    return {name: empty_like(index.tensors[name]) for name in tensor_names(tree)}


def _first_difference(now: list[list[str]], then: list[list[str]]) -> str:
    if len(now) != len(then):
        return f"{len(now)} groups now, {len(then)} then"
    for number, (mine, saved) in enumerate(zip(now, then, strict=True)):
        for place in range(max(len(mine), len(saved))):
            have = mine[place] if place < len(mine) else "nothing"
            had = saved[place] if place < len(saved) else "nothing"
            if have != had:
                return f"group {number} has {have} where it had {had}"
    return "nothing"

"""The training state, part by part: what to save of a model, an optimizer, any other object, and how to put it back.

A part gives a JSON tree in which tensors stand by name, and the live tensors beside it. Restoring goes the other
way in two steps: `targets` names the tensors to read into, `finish` is called once they are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import Scope, TensorSpec, describe
from orchestrator.checkpoint.restore import empty_like
from orchestrator.checkpoint.values import add_tensor, decode, encode
from orchestrator.errors import FormatError, StateError


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
        for name, tensor in found.items():
            self.add_tensor(name, tensor, scope)
        return tree

    def add_tensor(self, name: str, tensor: torch.Tensor, scope: Scope) -> None:
        """Take one tensor in. Raises StateError if another one has its name."""
        add_tensor(self.tensors, name, tensor)
        self.scopes[name] = scope


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


ParameterNames = Callable[[], Mapping[torch.Tensor, str]]
"""The name of every parameter of the models given to attach."""


def make_part(name: str, value: Any, parameter_names: ParameterNames) -> Part:
    """The part that fits an object given to attach. Raises StateError if it has no state that we could save."""
    if isinstance(value, torch.nn.Module):
        return ModelPart(name, value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerPart(name, value, parameter_names)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return ObjectPart(name, value)
    raise StateError(name, f"a {type(value).__qualname__} has no state_dict and load_state_dict")


def name_parameters(models: Sequence[ModelPart]) -> dict[torch.Tensor, str]:
    """Each parameter's name in its model; where there are several models, with the model's own name in front."""
    names: dict[torch.Tensor, str] = {}
    for model in models:
        prefix = f"{model.name}." if len(models) > 1 else ""
        for name, parameter in model.module.named_parameters():
            names.setdefault(parameter, prefix + name)
    return names


class ModelPart:
    """A module, in DDP or not. Parameters are alike on every rank; buffers are the first rank's, as DDP broadcasts."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module

    def capture(self, captured: Captured) -> Any:
        """All of `state_dict()`."""
        buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        return {
            key: captured.add(value, f"{self.name}.{key}", Scope.FIRST if key in buffers else Scope.SHARED)
            for key, value in self.module.state_dict().items()
        }

    def targets(self, tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
        """The live tensors themselves: they are read into in place. New ones for what is not the model's own memory."""
        live = self.module.state_dict()
        missing, extra = sorted(set(live) - set(tree)), sorted(set(tree) - set(live))
        if missing or extra:
            raise StateError(
                self.name, f"the checkpoint lacks {missing[:5]} and has {extra[:5]} that this model does not have"
            )
        in_place = self._in_place(live)
        targets = {f"{self.name}.{key}": live[key] for key in in_place}
        for key in live:
            if key not in in_place:
                targets |= _new_tensors(tree[key], index)
            elif list(tensor_names(tree[key])) != [f"{self.name}.{key}"]:
                raise StateError(f"{self.name}.{key}", "a tensor in this model, something else in the checkpoint")
        return targets

    def _in_place(self, live: Mapping[str, Any]) -> set[str]:
        """The keys of `state_dict()` whose tensors are parameters and buffers themselves, not made for the occasion."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (*self.module.parameters(), *self.module.buffers())}
        return {
            key
            for key, value in live.items()
            if _is_tensor(value) and (value.numel() == 0 or value.untyped_storage().data_ptr() in own)
        }

    def finish(self, tree: Any, filled: Mapping[str, torch.Tensor]) -> None:
        """Tensors are in place; extra state, and whatever else is not, goes through `load_state_dict`."""
        in_place = self._in_place(self.module.state_dict())
        if in_place != set(tree):
            values = {key: decode(value, f"{self.name}.{key}", filled.__getitem__) for key, value in tree.items()}
            self.module.load_state_dict(values)


class OptimizerPart:
    """A torch optimizer, its state keyed by parameter name. Written back entry by entry, so nothing is cast."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, parameter_names: ParameterNames) -> None:
        self.name = name
        self.optimizer = optimizer
        self._parameter_names = parameter_names

    def _names(self) -> dict[torch.Tensor, str]:
        known = self._parameter_names()
        names: dict[torch.Tensor, str] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in known:
                    raise StateError(
                        f"{self.name}.{number}.{place}",
                        f"a parameter of shape {list(parameter.shape)} is of no model that attach was given: "
                        "it would not be saved; give that model under a keyword of its own",
                    )
                names[parameter] = known[parameter]
        return names

    def capture(self, captured: Captured) -> Any:
        """Groups with parameter names in place of parameters, and the state of each parameter that has one."""
        names = self._names()
        for key in self.optimizer.state:
            if key not in names:
                what = "a tensor" if _is_tensor(key) else ascii(key)
                raise StateError(
                    f"{self.name}.state", f"belongs to {what}, which is none of the optimizer's parameters"
                )
        groups = [
            group | {"params": [names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        state = {names[parameter]: dict(entry) for parameter, entry in self.optimizer.state.items()}
        kind = type(self.optimizer).__name__
        return captured.add({"kind": kind, "groups": groups, "state": state}, self.name, Scope.SHARED)

    def targets(self, tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
        """New tensors: a fresh optimizer has none yet."""
        return _new_tensors(tree, index)

    def finish(self, tree: Any, filled: Mapping[str, torch.Tensor]) -> None:
        """Set the groups' options and each parameter's state."""
        saved = decode(tree, self.name, filled.__getitem__)
        if saved["kind"] != type(self.optimizer).__name__:
            raise StateError(
                self.name,
                f"the checkpoint has the state of {saved['kind']}, the script {type(self.optimizer).__name__}",
            )
        names = self._names()
        now = [[names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]
        then = [group["params"] for group in saved["groups"]]
        if now != then:
            raise StateError(
                self.name, f"its parameter groups differ from the checkpoint's: {_first_difference(now, then)}"
            )
        self.optimizer.state.clear()
        for group, options in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update({key: _taken_over(group.get(key), value) for key, value in options.items() if key != "params"})
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
        """`load_state_dict` of the saved value. A learning-rate schedule of another kind would take it silently."""
        saved = decode(tree, self._path, filled.__getitem__)
        if isinstance(self._value, torch.optim.lr_scheduler.LRScheduler):
            live = self._value.state_dict()
            lacking, extra = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
            if lacking and extra:  # one of them alone may be another release of torch
                kind = type(self._value).__name__
                raise StateError(self.name, f"the checkpoint is of another kind than {kind}: {extra}, not {lacking}")
        self._value.load_state_dict(saved)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _placed(value: Any, parameter: torch.Tensor, on_host: bool) -> Any:
    """Optimizer state lives where its parameter does, except counters of plain (not capturable) optimizers.

    State of the parameter's shape gets the parameter's memory layout, too, as the optimizer made it.
    """
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, parameter, on_host) for item in value)
    if not _is_tensor(value) or (on_host and value.dim() == 0):
        return value
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device)


def _taken_over(now: Any, saved: Any) -> Any:
    """A group's option as it was saved; a tensor (a learning rate, say) stays the one that others may hold, too."""
    if not (_is_tensor(now) and _is_tensor(saved)):
        return saved
    with torch.no_grad():
        return now.copy_(saved) if now.shape == saved.shape and now.dtype == saved.dtype else saved.to(now.device)


def tensor_names(tree: Any) -> Iterable[str]:
    """The names of all tensors in a JSON tree."""
    names: list[str] = []

    def collect(name: str) -> None:
        names.append(name)

    decode(tree, "", collect)
    return names


def _new_tensors(tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
    for name in tensor_names(tree):
        if name not in index.tensors:
            raise FormatError(fmt.index_key(index.id), f"has no tensor {name}")
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

"""The training state, part by part: what to save of a model, an optimizer, any other object, and how to put it back.

A part gives a JSON tree in which tensors stand by name, and the live tensors beside it. Restoring goes the other
way in two steps: `targets` names the tensors to read into, `finish` is called once they are filled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.modules.batchnorm import _NormBase  # batch and instance norm, whose statistics may be running
from torch.nn.parallel import DistributedDataParallel

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import (
    TORCH_DTYPES,
    Scope,
    Shares,
    TensorSpec,
    as_sharded,
    describe,
    local_part,
    sharding_is_there,
)
from orchestrator.checkpoint.restore import empty_like
from orchestrator.checkpoint.values import add_tensor, decode, encode, tensor_tree
from orchestrator.errors import FormatError, StateError


@dataclass(kw_only=True)
class Captured:
    """The live state at one boundary. Tensors alias the training state: copy them before training goes on."""

    shares: Shares | None = None
    """What this rank holds of sharded tensors; None: there can be none."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What this rank holds of each tensor."""
    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors themselves: of a sharded one, the DTensor."""
    scopes: dict[str, Scope] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def specs(self) -> list[TensorSpec]:
        """What the layout needs to know; refuses tensors that cannot be saved exactly, by name."""
        return [describe(name, tensor, self.scopes[name], self.shares) for name, tensor in self.sources.items()]

    def add(self, value: Any, path: str, scope: Scope) -> Any:
        """Encode a value; its tensors are taken in under `scope`."""
        found: dict[str, torch.Tensor] = {}
        tree = encode(value, path, _is_tensor, found)
        for name, tensor in found.items():
            self.add_tensor(name, tensor, scope)
        return tree

    def add_tensor(self, name: str, tensor: torch.Tensor, scope: Scope) -> None:
        """Take one tensor in. Raises StateError if another one has its name."""
        add_tensor(self.sources, name, tensor)
        self.tensors[name] = local_part(tensor)
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
        model.settle()
        for name, parameter in model.module.named_parameters():
            names.setdefault(parameter, prefix + name)
    return names


class ModelPart:
    """A module: plain, in DDP, in `fully_shard`, parallelised into DTensors.

    Plain parameters are alike on every rank; plain buffers are the first rank's, as DDP broadcasts. Running statistics
    differ from rank to rank between two broadcasts, so that only rank 0 has the right ones. What stands under several
    names (tied weights) is stored once, under the first.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        for path, part in self.module.named_modules():
            if type(part).__name__ == "FullyShardedDataParallel" and type(part).__module__.startswith("torch."):
                where = f"{name}.{path}" if path else name
                raise StateError(where, "FullyShardedDataParallel hides its parameters; use fully_shard instead")

    def settle(self) -> None:
        """`fully_shard` lends out whole parameters between forward and backward: have it take them back."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where nobody imported it, nobody can have used it
        for part in self.module.modules() if fsdp is not None else ():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()

    def capture(self, captured: Captured) -> Any:
        """All of `state_dict()`."""
        self.settle()
        scopes = dict.fromkeys((name for name, _ in self.module.named_buffers(remove_duplicate=False)), Scope.FIRST)
        scopes |= dict.fromkeys(self._statistics(), Scope.STATISTICS)
        tree: dict[str, Any] = {}
        names: dict[Any, str] = {}
        for key, value in self.module.state_dict().items():
            name = f"{self.name}.{key}"
            first = names.setdefault(_memory(value) or name, name)
            if first == name:
                tree[key] = captured.add(value, name, scopes.get(key, Scope.SHARED))
            else:
                tree[key] = tensor_tree(first)
        return tree

    def _statistics(self) -> Iterator[str]:
        """Keys of running statistics that each rank keeps of its own batches."""
        for path, part in self.module.named_modules(remove_duplicate=False):
            if isinstance(part, _NormBase) and not isinstance(part, torch.nn.SyncBatchNorm):
                yield from (f"{path}.{name}" if path else name for name, _ in part.named_buffers(recurse=False))

    def targets(self, tree: Any, index: fmt.Index) -> dict[str, torch.Tensor]:
        """The live tensors themselves: they are read into in place. New ones for what is not the model's own memory."""
        self.settle()
        live = self.module.state_dict()
        missing, extra = sorted(set(live) - set(tree)), sorted(set(tree) - set(live))
        if missing or extra:
            raise StateError(
                self.name, f"the checkpoint lacks {missing[:5]} and has {extra[:5]} that this model does not have"
            )
        in_place = self._in_place(live)
        targets: dict[str, torch.Tensor] = {}
        for key in live:
            if key not in in_place:
                targets |= _new_tensors(tree[key], index, {f"{self.name}.{key}": live[key]})
        return targets | self._live_targets({key: live[key] for key in live if key in in_place}, tree)

    def _live_targets(self, live: Mapping[str, torch.Tensor], tree: Any) -> dict[str, torch.Tensor]:
        """The model's tensors under the names that they were saved by; tied ones must be tied as they were."""
        targets: dict[str, torch.Tensor] = {}
        saved_by: dict[Any, str] = {}
        memory_of: dict[str, Any] = {}
        for key, tensor in live.items():
            name = f"{self.name}.{key}"
            if tree[key] != tensor_tree(saved := next(iter(tensor_names(tree[key])), "")):
                raise StateError(name, "a tensor in this model, something else in the checkpoint")
            memory = _memory(tensor) or name
            if saved_by.setdefault(memory, saved) != saved:
                raise StateError(name, f"the same tensor as {saved_by[memory]} in this model, not in the checkpoint")
            if memory_of.setdefault(saved, memory) != memory:
                raise StateError(name, f"the same tensor as {saved} in the checkpoint, not in this model: tie them")
            targets[saved] = tensor
        return targets

    def _in_place(self, live: Mapping[str, Any]) -> set[str]:
        """The keys of `state_dict()` whose tensors are parameters and buffers themselves, not made for the occasion."""
        own = {_storage(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        return {
            key
            for key, value in live.items()
            if _is_tensor(value) and (local_part(value).numel() == 0 or _storage(value) in own)
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
        """New tensors: a fresh optimizer has none yet. Those of a sharded parameter's shape are sharded as it is."""
        parameters = {name: parameter for parameter, name in self._names().items()}
        saved = decode(tree, self.name, _Named)
        alike: dict[str, torch.Tensor] = {}
        for name, entry in saved["state"].items():
            parameter = parameters.get(name)
            if parameter is not None:
                for key, value in entry.items():
                    if key != "step":
                        alike |= dict.fromkeys(_names_in(value), parameter)
        return _new_tensors(tree, index, alike)

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
        """New tensors, sharded as those are that the object has now."""
        live: dict[str, torch.Tensor] = {}
        if sharding_is_there() and next(iter(tensor_names(tree)), None) is not None:
            encode(self._value.state_dict(), self._path, _is_tensor, live)
        return _new_tensors(tree, index, live)

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
    if _is_tensor(value) and as_sharded(value) is not None:
        return value  # made as the parameter is
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, parameter, on_host) for item in value)
    if not _is_tensor(value) or (on_host and value.dim() == 0):
        return value
    if value.shape == parameter.shape and as_sharded(parameter) is None:
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


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for a tensor where only its name is known."""

    name: str


def _names_in(value: Any) -> Iterator[str]:
    """The names of the tensors in a decoded value."""
    if isinstance(value, _Named):
        yield value.name
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _names_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _names_in(item)


def _new_tensors(tree: Any, index: fmt.Index, alike: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """A new tensor for each that the tree names; sharded as what `alike` has for it, if that has the same shape."""
    found: dict[str, torch.Tensor] = {}
    for name in tensor_names(tree):
        record = index.tensors.get(name)
        if record is None:
            raise FormatError(fmt.index_key(index.id), f"has no tensor {name}")
        like: Any = (alike or {}).get(name)
        if _is_tensor(like) and as_sharded(like) is not None and tuple(like.shape) == record.shape:
            found[name] = torch.empty_like(like, dtype=TORCH_DTYPES[record.dtype], requires_grad=False)
        else:
            found[name] = empty_like(record)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


def _memory(value: Any) -> tuple[Any, ...] | None:
    """Alike for two tensors only if they are one: the same elements of the same memory. None if that cannot be told."""
    if not _is_tensor(value):
        return None
    local = local_part(value)
    plain = type(local) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and local.layout is torch.strided
    if not plain or local.device.type == "meta" or value.numel() == 0:
        return None
    placed = as_sharded(value)
    sharding = None if placed is None else (placed.device_mesh, placed.placements)
    view = (local.storage_offset(), tuple(local.shape), local.stride(), local.dtype, local.is_conj(), local.is_neg())
    return (_storage(local), *view, tuple(value.shape), sharding)


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

"""The parts' state, taken at one boundary after another: cheap while only the contents of the tensors change.

A part that is as plain as most are (a module without hooks of its own, an optimizer whose state is tensors) is walked
through, and if nothing but contents has changed since its state was last taken in full, the tree of names of that time
stands. Anything else is taken in full each time. Also says who owns the tensors. Used by `training.saved_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from orchestrator.checkpoint.layout import Scope
from orchestrator.checkpoint.staging import Fixed
from orchestrator.training.overlap import Owners
from orchestrator.training.parts import Captured, ModelPart, ObjectPart, OptimizerPart, Part

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Captures:
    """Takes the state of all parts, again and again."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._known: dict[str, _Known] = {}
        self._others: list[object] = []
        self.version = 0
        """Rises when tensors have come, gone or changed their kind: whoever planned has to plan anew."""
        self.later: frozenset[str] = frozenset()
        """Tensors that nobody but a torch optimizer's step writes, as far as that can be told."""
        self.owners = Owners()

    def take(self) -> tuple[Captured, dict[str, Any]]:
        """The live state and the tree of each part. Raises StateError naming what cannot be saved."""
        walks = {part.name: _walk(part) for part in self._parts}
        if self._known and all(known.still(walks[name]) for name, known in self._known.items()):
            taken = self._take_known(walks)
            if taken is not None:
                return taken
        return self._take_all(walks)

    def _take_known(self, walks: dict[str, _Walk | None]) -> tuple[Captured, dict[str, Any]] | None:
        """By what is known of plain parts; None if the other parts' tensors have changed."""
        captured, expected = Captured(), 0
        trees: dict[str, Any] = {}
        others: list[object] = []
        for part in self._parts:
            known, walk = self._known.get(part.name), walks[part.name]
            before = len(captured.tensors)
            if known is None or walk is None:
                trees[part.name] = part.capture(captured)
                others.append(_kinds(captured, before))
                expected += len(captured.tensors) - before
            else:
                captured.tensors.update(zip(known.names, walk.tensors, strict=True))
                captured.scopes.update(known.scopes)
                expected += len(known.names)
                within = len(captured.tensors)
                trees[part.name] = known.tree(part, captured)
                expected += len(captured.tensors) - within
        return (captured, trees) if others == self._others and len(captured.tensors) == expected else None

    def _take_all(self, walks: dict[str, _Walk | None]) -> tuple[Captured, dict[str, Any]]:
        captured = Captured()
        trees: dict[str, Any] = {}
        known: dict[str, _Known] = {}
        others: list[object] = []
        for part in self._parts:
            before = len(captured.tensors)
            trees[part.name] = part.capture(captured)
            walk = walks[part.name]
            names = list(captured.tensors)[before:]
            learnt = None if walk is None else _learn(part, walk, names, captured, trees[part.name])
            if learnt is None:
                others.append(_kinds(captured, before))
            else:
                known[part.name] = learnt
        self._known, self._others = known, others
        self.version += 1
        self.later, self.owners = _ownership(self._parts, captured)
        return captured, trees


@dataclass(frozen=True, slots=True)
class _Walk:
    """What was found on a way through a part: everything but contents, and the live tensors."""

    signature: list[object]
    tensors: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Known:
    """What a full capture gave that stands as long as a walk finds the same."""

    signature: list[object]
    names: list[str]
    scopes: dict[str, Scope]
    fixed: Fixed
    """A model's tree, or an optimizer's tree of states."""
    group_names: list[list[str]] | None
    """An optimizer's parameters by group."""

    def still(self, walk: _Walk | None) -> bool:
        """Whether nothing but contents has changed."""
        return walk is not None and walk.signature == self.signature

    def tree(self, part: Part, captured: Captured) -> Any:
        """The part's tree; what an optimizer's groups say is always taken anew."""
        if self.group_names is None or not isinstance(part, OptimizerPart):
            return self.fixed
        return _optimizer_tree(part, self.group_names, self.fixed, captured)


def _walk(part: Part) -> _Walk | None:
    """The way through a part, None if it is not as plain as it must be."""
    if isinstance(part, ModelPart):
        return _walk_module(part.module)
    return _walk_optimizer(part.optimizer) if isinstance(part, OptimizerPart) else None


def _walk_module(module: torch.nn.Module) -> _Walk | None:
    """In the order of `state_dict()`, without making one."""
    signature: list[object] = []
    tensors: list[torch.Tensor] = []
    stack = [module]
    while stack:
        here = stack.pop()
        if not _plain_class(type(here)) or here._state_dict_hooks or here._state_dict_pre_hooks:
            return None
        hidden = here._non_persistent_buffers_set
        for mapping in (here._parameters, here._buffers):
            for key, tensor in mapping.items():
                if tensor is None or key in hidden:
                    continue
                if type(tensor) not in _PLAIN_TENSORS:
                    return None
                tensors.append(tensor)
                signature += (key, tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad)
        children = [(key, child) for key, child in here._modules.items() if child is not None]
        signature += (len(here._parameters), *(key for key, _ in children))
        stack.extend(child for _, child in reversed(children))
    return _Walk(signature, tensors)


@lru_cache(maxsize=1024)
def _plain_class(kind: type) -> bool:
    """Whether its `state_dict` is torch's own."""
    names = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in names)


def _walk_optimizer(optimizer: torch.optim.Optimizer) -> _Walk | None:
    signature: list[object] = []
    tensors: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        signature += (len(group), *map(id, group["params"]))
    for parameter, entry in optimizer.state.items():
        signature.append(id(parameter))
        for key, value in entry.items():
            signature.append(key)
            if value is None:
                continue
            if type(value) not in _PLAIN_TENSORS:
                return None
            tensors.append(value)
            signature += (value.dtype, value.shape, value.device)
    return _Walk(signature, tensors)


def _learn(part: Part, walk: _Walk, names: list[str], captured: Captured, tree: Any) -> _Known | None:
    """What to keep of a full capture, if walking finds the very tensors that it found, in the same order."""
    if isinstance(part, OptimizerPart):
        return _learn_optimizer(part, walk, captured, tree)
    if len(names) != len(walk.tensors):
        return None
    for name, tensor in zip(names, walk.tensors, strict=True):
        found = captured.tensors[name]
        if (found.data_ptr(), found.shape, found.stride()) != (tensor.data_ptr(), tensor.shape, tensor.stride()):
            return None
    return _Known(walk.signature, names, {name: captured.scopes[name] for name in names}, Fixed(tree), None)


def _learn_optimizer(part: OptimizerPart, walk: _Walk, captured: Captured, tree: Any) -> _Known | None:
    match tree:
        case {"$": "dict", "items": [["kind", _], ["groups", list(groups)], ["state", states]]}:
            pass
        case _:
            return None
    group_names = [[str(name) for name in _option(group, "params")] for group in groups]
    by_id = {
        id(parameter): name
        for group, of_group in zip(part.optimizer.param_groups, group_names, strict=True)
        for parameter, name in zip(group["params"], of_group, strict=True)
    }
    names = [
        f"{part.name}.state.{by_id[id(parameter)]}.{key}"
        for parameter, entry in part.optimizer.state.items()
        for key, value in entry.items()
        if value is not None
    ]
    if any(captured.tensors.get(name) is not tensor for name, tensor in zip(names, walk.tensors, strict=True)):
        return None
    if _optimizer_tree(part, group_names, states, Captured()) != tree:
        return None
    scopes = {name: captured.scopes[name] for name in names}
    return _Known(walk.signature, names, scopes, Fixed(states), group_names)


def _option(group: Any, name: str) -> Any:
    """One entry of an encoded dict, whichever of its two forms it has."""
    return dict(group["items"])[name] if "$" in group else group[name]


def _optimizer_tree(part: OptimizerPart, group_names: list[list[str]], states: Any, captured: Captured) -> Any:
    """As `OptimizerPart.capture` makes it, around a tree of states that is there already."""
    groups = [group | {"params": names} for group, names in zip(part.optimizer.param_groups, group_names, strict=True)]
    tree = captured.add(groups, f"{part.name}.groups", Scope.SHARED)
    kind = type(part.optimizer).__name__
    return {"$": "dict", "items": [["kind", kind], ["groups", tree], ["state", states]]}


def _kinds(captured: Captured, first: int) -> object:
    """All but contents of the tensors that were captured from that place on."""
    found = list(captured.tensors.items())[first:]
    return [(name, tensor.dtype, tensor.shape, tensor.device, captured.scopes[name]) for name, tensor in found]


# ------------------------------------------------------------------------------------------------- who owns what


def _ownership(parts: Sequence[Part], captured: Captured) -> tuple[frozenset[str], Owners]:
    """(tensors that only torch optimizers' steps write, who else writes)."""
    optimizers = [part for part in parts if isinstance(part, OptimizerPart)]
    trained = {
        parameter for part in optimizers for group in part.optimizer.param_groups for parameter in group["params"]
    }
    later = {name for part in optimizers for name in captured.tensors if name.startswith(f"{part.name}.state.")}
    untrained: list[str] = []
    for part in parts:
        for name, parameter in _parameters(part):
            found = captured.tensors.get(name)
            if parameter.requires_grad and parameter not in trained:
                untrained.append(name)
            if found is not None and found.data_ptr() == parameter.data_ptr():
                later.add(name)
    devices = {str(captured.tensors[name].device) for name in later if captured.tensors[name].device.type != "cpu"}
    owners = Owners(
        untrained=tuple(untrained),
        holders=tuple(_holders(parts)),
        unhooked=tuple(part.name for part in optimizers if not getattr(type(part.optimizer).step, "hooked", False)),
        devices=tuple(sorted(devices)),
    )
    return frozenset(later), owners


def _parameters(part: Part) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A model's parameters, under every name that each has."""
    if isinstance(part, ModelPart):
        for name, parameter in part.module.named_parameters(remove_duplicate=False):
            yield f"{part.name}.{name}", parameter


def _holders(parts: Sequence[Part]) -> Iterator[str]:
    """Objects of the user's that hold more floating-point numbers than one: averages of weights, say."""
    for part in parts:
        if isinstance(part, ObjectPart):
            own = Captured()
            part.capture(own)
            if any(tensor.is_floating_point() and tensor.numel() > 1 for tensor in own.tensors.values()):
                yield part.name

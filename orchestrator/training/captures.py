"""The parts' state, taken at one boundary after another: cheap while only the contents of the tensors change.

A part that is as plain as most are (a module without hooks of its own, an optimizer whose state is tensors) is walked
through, and if nothing but contents has changed since its state was last taken in full, the tree of names of that time
stands. Anything else is taken in full each time. Also says who owns the tensors. Used by `training.stager`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from orchestrator.checkpoint.layout import Scope, Shares, as_sharded, is_sharded_type, local_part
from orchestrator.checkpoint.staging import Fixed
from orchestrator.training.overlap import Owners
from orchestrator.training.parts import Captured, ModelPart, ObjectPart, OptimizerPart, Part, tensor_names

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN_KINDS = frozenset({*_PLAIN_TENSORS, type(None)})


class Captures:
    """Takes the state of all parts, again and again."""

    def __init__(self, parts: Sequence[Part], shares: Shares) -> None:
        self._parts = parts
        self._shares = shares
        self._known: dict[str, _Known] = {}
        self._others: list[object] = []
        self._all_kinds: object = None
        self.version = 0
        """Rises when tensors have come, gone or changed their kind or owner: whoever planned has to plan anew."""
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
        return self._take_all()

    def _take_known(self, walks: dict[str, _Walk | None]) -> tuple[Captured, dict[str, Any]] | None:
        """By what is known of plain parts; None if the other parts' tensors have changed."""
        captured, expected = Captured(shares=self._shares), 0
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
                captured.sources.update(zip(known.names, walk.tensors, strict=True))
                captured.tensors.update(zip(known.names, walk.locals, strict=True))
                captured.scopes.update(known.scopes)
                expected += len(known.scopes)
                within = len(captured.tensors)
                trees[part.name] = known.tree(part, captured)
                expected += len(captured.tensors) - within
        return (captured, trees) if others == self._others and len(captured.tensors) == expected else None

    def _take_all(self) -> tuple[Captured, dict[str, Any]]:
        captured = Captured(shares=self._shares)
        trees: dict[str, Any] = {}
        known: dict[str, _Known] = {}
        others: list[object] = []
        for part in self._parts:
            before = len(captured.tensors)
            trees[part.name] = part.capture(captured)
            walk = _walk(part)  # anew: `fully_shard` may have put its parameters back in place
            learnt = None if walk is None else _learn(part, walk, captured, trees[part.name])
            if learnt is None:
                others.append(_kinds(captured, before))
            else:
                known[part.name] = learnt
        self._known, self._others = known, others
        self.later, self.owners = _ownership(self._parts, captured)
        kinds = (_kinds(captured, 0), self.later, self.owners)
        if kinds != self._all_kinds:
            self._all_kinds = kinds
            self.version += 1
        return captured, trees


@dataclass(frozen=True, slots=True)
class _Walk:
    """What was found on a way through a part: the names and their order, and the live tensors."""

    structure: list[object]
    tensors: list[torch.Tensor]
    locals: list[torch.Tensor]
    """What this rank holds of each."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What a full capture gave, which stands as long as a walk finds the same tensors under the same names.

    The tensors are known by identity: weakly, so that none is kept alive. Only `p.data = x` gives a tensor another
    shape or type; that is done to parameters (`model.half()`), and gives them other memory, too.
    """

    structure: list[object]
    tensors: list[weakref.ref[torch.Tensor]]
    memory: list[tuple[int, bool] | None]
    """Where each of a model's tensors lies, and whether it is trained."""
    names: list[str]
    scopes: dict[str, Scope]
    fixed: Fixed
    """A model's tree, or an optimizer's tree of states."""
    group_names: list[Fixed] | None
    """An optimizer's parameters by group."""

    def still(self, walk: _Walk | None) -> bool:
        """Whether nothing but contents has changed."""
        if walk is None or len(walk.tensors) != len(self.tensors) or walk.structure != self.structure:
            return False
        pairs = zip(self.tensors, walk.tensors, strict=True)
        if self.group_names is not None:
            return all([known() is tensor for known, tensor in pairs])
        # One look at each tensor: with thousands of them, fetching them into the cache is what takes the time.
        found = [
            (local.data_ptr(), tensor.requires_grad) if known() is tensor else None
            for (known, tensor), local in zip(pairs, walk.locals, strict=True)
        ]
        return found == self.memory

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
    structure: list[object] = []
    tensors: list[torch.Tensor | None] = []
    stack = [module]
    while stack:
        here = stack.pop()
        kind: type = type(here)
        if (
            not _plain_class(kind)
            or here._state_dict_hooks
            or not all(map(_reshards, here._state_dict_pre_hooks.values()))
        ):
            return None
        tensors += here._parameters.values()
        buffers, children = here._buffers, here._modules
        if buffers:
            hidden = here._non_persistent_buffers_set
            tensors += [tensor for key, tensor in buffers.items() if key not in hidden]
            structure.append(frozenset(hidden))
        structure += (tuple(here._parameters), tuple(buffers), tuple(children))
        stack += [child for child in reversed(children.values()) if child is not None]
    return _walked(structure, tensors)


def _reshards(hook: object) -> bool:
    """Whether this hook of `state_dict` is that of `fully_shard`, which only puts sharded parameters back in place.

    While they are not in their places, walking finds others than those that are known.
    """
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.")


def _walked(structure: list[object], tensors: list[Any]) -> _Walk:
    kinds = set(map(type, tensors))
    if type(None) in kinds:
        structure.append([tensor is None for tensor in tensors])
        tensors = [tensor for tensor in tensors if tensor is not None]
    sharded = not kinds <= _PLAIN_KINDS
    return _Walk(structure, tensors, list(map(local_part, tensors)) if sharded else tensors)


@lru_cache(maxsize=1024)
def _plain_class(kind: type) -> bool:
    """Whether its `state_dict` is torch's own."""
    names = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in names)


def _walk_optimizer(optimizer: torch.optim.Optimizer) -> _Walk | None:
    structure: list[object] = [list(map(id, group["params"])) for group in optimizer.param_groups]
    values: list[object] = []
    structure.append(list(map(id, optimizer.state)))
    for entry in optimizer.state.values():
        structure.append(tuple(entry))
        values += entry.values()
    if any(kind not in _PLAIN_KINDS and not is_sharded_type(kind) for kind in set(map(type, values))):
        return None
    return _walked(structure, values)


def _learn(part: Part, walk: _Walk, captured: Captured, tree: Any) -> _Known | None:
    """What to keep of a full capture, if walking finds the very tensors that it found, in the same order."""
    if not all(type(tensor) in _PLAIN_TENSORS or is_sharded_type(type(tensor)) for tensor in walk.tensors):
        return None
    group_names = None
    if isinstance(part, OptimizerPart):
        found = _learn_groups(part, tree)
        if found is None:
            return None
        group_names, names, tree = found
    else:  # tied weights stand under their first name
        names = [name for value in tree.values() for name in tensor_names(value)]
    if len(names) != len(walk.tensors) or not set(names) <= set(captured.tensors):
        return None
    for name, tensor, local in zip(names, walk.tensors, walk.locals, strict=True):
        taken = captured.tensors[name]
        if (taken.data_ptr(), taken.shape, taken.stride()) != (local.data_ptr(), local.shape, local.stride()):
            return None
        if _placing(captured.sources[name]) != _placing(tensor):
            return None
    return _Known(
        walk.structure,
        [weakref.ref(tensor) for tensor in walk.tensors],
        [(local.data_ptr(), tensor.requires_grad) for tensor, local in zip(walk.tensors, walk.locals, strict=True)],
        names,
        {name: captured.scopes[name] for name in names},
        Fixed(tree),
        group_names,
    )


def _learn_groups(part: OptimizerPart, tree: Any) -> tuple[list[Fixed], list[str], Any] | None:
    """(names of parameters by group, names of the state's tensors, tree of states) of an optimizer's tree."""
    match tree:
        case {"$": "dict", "items": [["kind", _], ["groups", list(groups)], ["state", states]]}:
            pass
        case _:
            return None
    group_names: list[list[str]] = [dict(group["items"] if "$" in group else group)["params"] for group in groups]
    if _optimizer_tree(part, group_names, states, Captured()) != tree:
        return None
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
    return [Fixed(names_of_group) for names_of_group in group_names], names, states


def _optimizer_tree(part: OptimizerPart, group_names: Sequence[object], states: object, captured: Captured) -> Any:
    """As `OptimizerPart.capture` makes it, with names of parameters and a tree of states that are there already."""
    groups = [group | {"params": None} for group in part.optimizer.param_groups]
    trees = captured.add(groups, f"{part.name}.groups", Scope.SHARED)
    for tree, names in zip(trees, group_names, strict=True):
        if "$" in tree:
            tree["items"] = [[key, names if key == "params" else value] for key, value in tree["items"]]
        else:
            tree["params"] = names
    kind = type(part.optimizer).__name__
    return {"$": "dict", "items": [["kind", kind], ["groups", trees], ["state", states]]}


def _kinds(captured: Captured, first: int) -> object:
    """All but contents of the tensors that were captured from that place on."""
    found = list(captured.sources.items())[first:]
    return [
        (name, tensor.dtype, tensor.shape, tensor.device, captured.scopes[name], _placing(tensor))
        for name, tensor in found
    ]


def _placing(tensor: torch.Tensor) -> object:
    """How a sharded tensor is sharded."""
    sharded = as_sharded(tensor)
    return None if sharded is None else (sharded.device_mesh, sharded.placements, sharded.shape)


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
            if found is not None and found.data_ptr() == local_part(parameter).data_ptr():
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

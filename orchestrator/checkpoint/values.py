"""Training state ↔ JSON: plain values keep their exact type, tensors are taken out by name, the rest is refused.

JSON has no tuples, no non-string keys, no NaN and no tensors; these are written as objects with one "$" key.
Anything else is a `StateError` that names the path, for instance `optimizer.state.0.fn`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.errors import FormatError, StateError

TAG = "$"


def encode(value: Any, path: str, is_tensor: Callable[[Any], bool], tensors: dict[str, Any]) -> Any:
    """A JSON tree of `value`. Every tensor goes into `tensors` under its path."""
    if value is None or isinstance(value, bool | str):
        return value
    if is_tensor(value):
        tensors[path] = value
        return {TAG: "tensor", "name": path}
    if isinstance(value, int) and type(value) is int:
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if type(value) in (list, tuple):
        items = [encode(item, f"{path}.{index}", is_tensor, tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {TAG: "tuple", "items": items}
    if type(value) in (dict, OrderedDict, Counter) or isinstance(value, OrderedDict):
        return _encode_mapping(value, path, is_tensor, tensors)
    raise StateError(
        path,
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved: state may hold tensors, numbers, "
        "strings, None, lists, tuples and dicts",
    )


def _encode_mapping(
    value: Mapping[Any, Any], path: str, is_tensor: Callable[[Any], bool], tensors: dict[str, Any]
) -> Any:
    kind = "counter" if isinstance(value, Counter) else "dict"
    plain = kind == "dict" and all(type(key) is str for key in value) and TAG not in value
    if plain:
        return {key: encode(item, f"{path}.{key}", is_tensor, tensors) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        if key is not None and type(key) not in (str, int, float, bool):
            raise StateError(path, f"a key of type {type(key).__qualname__} cannot be saved")
        pairs.append([key, encode(item, f"{path}.{key}", is_tensor, tensors)])
    return {TAG: kind, "items": pairs}


def decode(tree: Any, path: str, tensor: Callable[[str], Any]) -> Any:
    """The value of a JSON tree; `tensor(name)` gives the tensors back. Raises FormatError for an unknown tag."""
    if isinstance(tree, list):
        return [decode(item, f"{path}.{index}", tensor) for index, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    tag = tree.get(TAG)
    if tag is None:
        return {key: decode(item, f"{path}.{key}", tensor) for key, item in tree.items()}
    if tag == "tensor":
        return tensor(tree["name"])
    if tag == "float":
        return float(tree["value"])
    if tag == "tuple":
        return tuple(decode(item, f"{path}.{index}", tensor) for index, item in enumerate(tree["items"]))
    if tag in ("dict", "counter"):
        pairs = {key: decode(item, f"{path}.{key}", tensor) for key, item in tree["items"]}
        return Counter(pairs) if tag == "counter" else pairs
    raise FormatError(path, f"holds a value of the unknown kind {tag!r}")

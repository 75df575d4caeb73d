"""Training state ↔ JSON: plain values keep their exact type, tensors are taken out by name, the rest is refused.

JSON has no tuples, no non-string keys, no NaN and no tensors; these are written as objects with one "$" key. So are
dicts whose keys are not in alphabetical order, because the records on the store are written with sorted keys.
An OrderedDict comes back as a dict of the same order. Anything else is a `StateError` that names the path, for
instance `optimizer.state.0.fn`; so is what JSON could hold but its readers could not take (see the limits below).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.errors import FormatError, StateError

TAG = "$"
DEPTH_MAX = 60
"""Containers within containers; one takes up to three levels of JSON, and its readers stop at 200."""
INT_BITS_MAX = 8192
"""Python reads no longer numbers than 4300 digits from text."""


def encode(value: Any, path: str, is_tensor: Callable[[Any], bool], tensors: dict[str, Any], depth: int = 0) -> Any:
    """A JSON tree of `value`. Every tensor goes into `tensors` under its path. Raises StateError naming the path."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        _check_text(value, path)
        return value
    if is_tensor(value):
        add_tensor(tensors, path, value)
        return tensor_tree(path)
    if type(value) is int:
        _check_int(value, path)
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if depth >= DEPTH_MAX:
        raise StateError(path, f"lies {depth} containers deep, or within itself: at most {DEPTH_MAX} can be saved")
    if type(value) in (list, tuple):
        items = [encode(item, f"{path}.{index}", is_tensor, tensors, depth + 1) for index, item in enumerate(value)]
        return items if type(value) is list else {TAG: "tuple", "items": items}
    if type(value) in (dict, Counter) or isinstance(value, OrderedDict):
        return _encode_mapping(value, path, is_tensor, tensors, depth + 1)
    raise StateError(
        path,
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved: state may hold tensors, numbers, "
        "strings, None, lists, tuples and dicts",
    )


def tensor_tree(name: str) -> dict[str, str]:
    """What stands for a tensor in the tree."""
    return {TAG: "tensor", "name": name}


def add_tensor(tensors: dict[str, Any], name: str, tensor: Any) -> None:
    """Take a tensor in under its name. Raises StateError if another one has it: it would be lost."""
    _check_text(name, name)
    if tensors.setdefault(name, tensor) is not tensor:
        raise StateError(name, "two tensors of the state would have this name; rename a key (1 and '1' are alike here)")


def _encode_mapping(
    value: Mapping[Any, Any], path: str, is_tensor: Callable[[Any], bool], tensors: dict[str, Any], depth: int
) -> Any:
    for key in value:
        _check_key(key, path)
    kind = "counter" if isinstance(value, Counter) else "dict"
    keys = list(value)
    plain = kind == "dict" and TAG not in value and all(type(key) is str for key in keys) and keys == sorted(keys)
    if plain:
        return {key: encode(item, f"{path}.{key}", is_tensor, tensors, depth) for key, item in value.items()}
    pairs = [[key, encode(item, f"{path}.{key}", is_tensor, tensors, depth)] for key, item in value.items()]
    return {TAG: kind, "items": pairs}


def _check_key(key: Any, path: str) -> None:
    if key is not None and type(key) not in (str, int, float, bool):
        raise StateError(path, f"a key of type {type(key).__qualname__} cannot be saved")
    if type(key) is str:
        _check_text(key, path)
    if type(key) is int:
        _check_int(key, path)
    if type(key) is float and not math.isfinite(key):
        raise StateError(path, f"the key {key} cannot be saved")


def _check_text(text: str, path: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise StateError(
                ascii(path)[1:-1], f"a string that is not valid Unicode cannot be saved: {error.reason}"
            ) from error


def _check_int(value: int, path: str) -> None:
    if value.bit_length() > INT_BITS_MAX:
        raise StateError(path, f"an integer of {value.bit_length()} bits cannot be saved; at most {INT_BITS_MAX} can")


def decode(tree: Any, path: str, tensor: Callable[[str], Any]) -> Any:
    """The value of a JSON tree; `tensor(name)` gives the tensors back, or raises KeyError if there is none.

    Raises FormatError for what `encode` never writes.
    """
    if isinstance(tree, list):
        return [decode(item, f"{path}.{index}", tensor) for index, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decode(item, f"{path}.{key}", tensor) for key, item in tree.items()}
    match tree:
        case {"$": "tensor", "name": str(name), **rest} if not rest:
            try:
                return tensor(name)
            except KeyError as error:
                raise FormatError(path, f"names the tensor {name!r}, which is not there") from error
        case {"$": "float", "value": "nan" | "inf" | "-inf" as text, **rest} if not rest:
            return float(text)
        case {"$": "tuple", "items": list(items), **rest} if not rest:
            return tuple(decode(item, f"{path}.{index}", tensor) for index, item in enumerate(items))
        case {"$": "dict" | "counter" as kind, "items": list(items), **rest} if not rest:
            pairs = dict(_decode_pair(pair, path, tensor) for pair in items)
            return Counter(pairs) if kind == "counter" else pairs
    raise FormatError(path, f"holds a value of the unknown kind {tree[TAG]!r:.100}")


def _decode_pair(pair: Any, path: str, tensor: Callable[[str], Any]) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], list | dict):
        raise FormatError(path, "holds a dict whose items are no pairs")
    return pair[0], decode(pair[1], f"{path}.{pair[0]}", tensor)


def tensor_places(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, name) of each tensor in a JSON tree: they differ where one stands in two places (tied weights).

    What `encode` never writes holds none.
    """
    match tree:
        case list(items) | {"$": "tuple", "items": list(items)}:
            for index, item in enumerate(items):
                yield from tensor_places(item, f"{path}.{index}")
        case {"$": "tensor", "name": str(name)}:
            yield path, name
        case {"$": "dict" | "counter", "items": list(items)}:
            for item in items:
                if isinstance(item, list) and len(item) == 2:
                    yield from tensor_places(item[1], f"{path}.{item[0]}")
        case dict() if TAG not in tree:
            for key, item in tree.items():
                yield from tensor_places(item, f"{path}.{key}")

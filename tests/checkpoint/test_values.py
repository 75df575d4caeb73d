"""Training state as JSON: every supported value comes back exactly, everything else is refused by its path.

Values go all the way that they go in a checkpoint: encoded, written into a receipt, read back, merged into an index,
written and read once more.
"""

from __future__ import annotations

import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.values import DEPTH_MAX, INT_BITS_MAX, decode, encode, tensor_places
from orchestrator.errors import FormatError, StateError
from tests.checkpoint.receipts import index_of, read, receipt


class Tensor:
    """Stands in for a tensor: the module knows tensors only by the predicate it is given."""


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    WORD = "word"


class Point(NamedTuple):
    x: int


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def through_the_store(tree: Any) -> Any:
    """What receipt and index make of a JSON tree."""
    written = receipt(0, 1, rows=[], objects={"part": json.loads(json.dumps(tree, allow_nan=False))})
    index = read(index_of([fmt.load_receipt("receipt", fmt.dump(written), fmt.Receipt)]))
    return index.values["objects"]["part"]


def round_trip(value: Any) -> Any:
    tensors: dict[str, Any] = {}
    tree = encode(value, "part", is_tensor, tensors)
    return decode(through_the_store(tree), "part", tensors.__getitem__)


def assert_same(left: Any, right: Any) -> None:
    """Equal in type, order and every bit."""
    assert type(left) is type(right), (left, right)
    if isinstance(left, float):
        assert struct.pack("<d", left) == struct.pack("<d", right), (left, right)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert len(left) == len(right)
        for (key, one), (other_key, other) in zip(left.items(), right.items(), strict=True):
            assert_same(key, other_key)
            assert_same(one, other)
    else:
        assert left == right


SUPPORTED: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**64),
    2 ** (INT_BITS_MAX - 1),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    "",
    'text with "quotes", a \\ and \n, é, 😀, \u2028 and \x00',
    [],
    (),
    {},
    [[], (), {}, [[()]]],
    (1, (2, (3, [4, (5,)]))),
    {"b": 1, "a": 2, "c": {"z": (), "y": []}},
    {1: "int", "1": "text", 2.5: "float", False: "bool", None: "none"},
    {-0.0: "zero", True: "one"},
    {"$": "a user's key"},
    {"$": "tensor", "name": "no tensor"},
    {"a": {"$": {"$": [{"$": 1}]}}},
    {0: {}, 1: {"x": {}}},
    Counter({30: 1, 80: 2, 10: 1}),
    Counter(),
    Counter("mississippi"),
    {"milestones": Counter({3: 1}), "gamma": 0.1},
]


@pytest.mark.parametrize("value", SUPPORTED, ids=lambda value: f"{type(value).__name__}-{value!r:.30}")
def test_comes_back_exactly(value: Any) -> None:
    assert_same(round_trip(value), value)


def test_w10_empty_lambdas_of_a_schedule_survive() -> None:
    """W10: a checkpoint format that flattens its state lost `lr_lambdas: [{}, {}]`."""
    state = {"base_lrs": [0.1, 0.2], "last_epoch": 3, "lr_lambdas": [{}, {}], "nested": {"empty": {}, "none": None}}
    assert_same(round_trip(state), state)


def test_not_a_number_comes_back_as_one() -> None:
    back = round_trip([math.nan])
    assert type(back) is list
    assert math.isnan(back[0])


def test_the_order_of_a_dict_is_kept() -> None:
    """Records on the store have sorted keys; a state that is iterated over, in its own order, must not notice."""
    ordered = OrderedDict([("z", 1), ("a", OrderedDict([("y", 1), ("b", 2)])), ("m", 3)])
    back = round_trip(ordered)
    assert OrderedDict(back) == ordered  # OrderedDicts compare their order, too
    assert list(back["a"]) == ["y", "b"]
    assert type(back) is dict


def test_random_floats_come_back_to_the_bit(seed: int) -> None:
    draw = random.Random(seed)
    floats = [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(2000)]
    floats = [value for value in floats if not math.isnan(value)]
    assert_same(round_trip(floats), floats)


def random_value(draw: random.Random, depth: int) -> Any:
    """Any supported value, containers up to `depth`."""
    kind = draw.randrange(5 if depth == 0 else 9)
    if kind == 0:
        return draw.choice([None, True, False])
    if kind == 1:
        return draw.choice([0, 1, -1]) * draw.getrandbits(draw.choice([1, 31, 64, 200]))
    if kind == 2:
        return draw.choice([math.inf, -math.inf, -0.0, draw.uniform(-1e9, 1e9), draw.random() * 1e-300])
    if kind in (3, 4):
        return "".join(draw.choice('$a.é😀 \\"\n') for _ in range(draw.randrange(4)))
    if kind == 5:
        return [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return tuple(random_value(draw, depth - 1) for _ in range(draw.randrange(4)))
    if kind == 7:
        return Counter({draw.randrange(9): draw.randrange(9) for _ in range(draw.randrange(4))})
    return {random_key(draw): random_value(draw, depth - 1) for _ in range(draw.randrange(4))}


def random_key(draw: random.Random) -> Any:
    return draw.choice([None, True, False, draw.randrange(-9, 9), draw.random(), "$", "b", "a", "", "x.y", "0"])


def test_random_trees_come_back_exactly(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        value = random_value(draw, 4)
        assert_same(round_trip(value), value)


def test_tensors_are_taken_out_under_their_path_and_put_back() -> None:
    one, two, three = Tensor(), Tensor(), Tensor()
    tensors: dict[str, Any] = {}
    value = {"exp_avg": one, "history": [two, (three,)], "step": 4}
    tree = encode(value, "optimizer", is_tensor, tensors)
    assert tensors == {"optimizer.exp_avg": one, "optimizer.history.0": two, "optimizer.history.1.0": three}
    assert decode(through_the_store(tree), "optimizer", tensors.__getitem__) == value


def with_tensors(draw: random.Random, value: Any) -> Any:
    """The value with tensors in place of its texts."""
    if type(value) in (list, tuple):
        return type(value)(with_tensors(draw, item) for item in value)
    if type(value) is dict:
        return {key: with_tensors(draw, item) for key, item in value.items()}
    return Tensor() if type(value) is str else value


def test_the_places_of_tensors_are_found(seed: int) -> None:
    draw, count = random.Random(seed), 0
    for _ in range(300):
        tensors: dict[str, Any] = {}
        try:
            tree = encode(with_tensors(draw, random_value(draw, 4)), "part", is_tensor, tensors)
        except StateError:  # keys that are alike as text
            continue
        assert sorted(tensor_places(through_the_store(tree), "part")) == sorted((name, name) for name in tensors)
        count += len(tensors)
    assert count > 100


# --------------------------------------------------------------------------------------------------- refusals


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {1: value}  # takes the most levels of JSON
    return value


def within_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: {"0": {"fn": lambda: None}}, "part.0.fn"),
    (lambda: [1, {2}], "part.1"),
    (lambda: {"a": (b"bytes",)}, "part.a.0"),
    (lambda: [np.float64(1.5)], "part.0"),
    (lambda: [np.int64(1)], "part.0"),
    (lambda: {"x": np.bool_(True)}, "part.x"),
    (lambda: [np.str_("text")], "part.0"),
    (lambda: {"x": np.zeros(2)}, "part.x"),
    (lambda: {"x": object()}, "part.x"),
    (lambda: {"x": complex(1, 2)}, "part.x"),
    (lambda: {"x": Colour.RED}, "part.x"),
    (lambda: {"x": Word.WORD}, "part.x"),
    (lambda: {"x": Point(1)}, "part.x"),
    (lambda: {"x": defaultdict(int)}, "part.x"),
    (lambda: {"x": {(1, 2): 3}}, "part.x"),
    (lambda: {"x": {Colour.RED: 3}}, "part.x"),
    (lambda: {"x": {Word.WORD: 3}}, "part.x"),
    (lambda: {"x": {math.nan: 3}}, "part.x"),
    (lambda: {"x": {math.inf: 3}}, "part.x"),
    (lambda: {"x": Counter({b"y": 3})}, "part.x"),
    (lambda: {"x": ["\ud800"]}, "part.x.0"),
    (lambda: {"x": {"\udfff": 1}}, "part.x"),
    (lambda: {"x": 1 << INT_BITS_MAX}, "part.x"),
    (lambda: {"x": {-(1 << INT_BITS_MAX): 1}}, "part.x"),
    (lambda: nested(DEPTH_MAX + 1), "part" + ".1" * DEPTH_MAX),
    (within_itself, "part" + ".0" * DEPTH_MAX),
]


@pytest.mark.parametrize(("value", "path"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_come_back_is_refused_by_its_path(value: Callable[[], Any], path: str) -> None:
    """F111: no pickle to fall back on. What would not come back exactly is refused when it is saved."""
    with pytest.raises(StateError) as caught:
        encode(value(), "part", is_tensor, {})
    assert caught.value.path == path


def test_the_deepest_supported_state_can_be_read() -> None:
    assert_same(round_trip(nested(DEPTH_MAX)), nested(DEPTH_MAX))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a.b": Tensor(), "a": {"b": Tensor()}}, "part.a.b"),
        ({1: Tensor(), "1": Tensor()}, "part.1"),
        ({"a": [Tensor()], "a.0": Tensor()}, "part.a.0"),
    ],
)
def test_two_tensors_of_one_name_are_refused(value: Any, name: str) -> None:
    """One of them would be lost without a word."""
    with pytest.raises(StateError, match="two tensors") as caught:
        encode(value, "part", is_tensor, {})
    assert caught.value.path == name


def test_a_tensor_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(StateError) as caught:
        encode(Tensor(), "part.\ud800", is_tensor, {})
    assert caught.value.path == r"part.\ud800"


# ----------------------------------------------------------------------------------------------- hostile trees


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "pickle", "value": "gASVAA=="},
        {"$": None},
        {"$": ["tuple"]},
        {"$": {"$": "tuple"}},
        {"$": "tuple"},
        {"$": "tuple", "items": "abc"},
        {"$": "tuple", "items": {"0": 1}},
        {"$": "tuple", "items": [], "more": 1},
        {"$": "float"},
        {"$": "float", "value": 1.5},
        {"$": "float", "value": "1.5"},
        {"$": "float", "value": "__import__('os')"},
        {"$": "float", "value": ["nan"]},
        {"$": "tensor"},
        {"$": "tensor", "name": ["x"]},
        {"$": "tensor", "name": "missing"},
        {"$": "dict"},
        {"$": "dict", "items": {"a": 1}},
        {"$": "dict", "items": ["ab"]},
        {"$": "dict", "items": [["a", 1, 2]]},
        {"$": "dict", "items": [[["a"], 1]]},
        {"$": "dict", "items": [[{"$": "tuple", "items": []}, 1]]},
        {"$": "counter", "items": [["a"]]},
        {"a": [0, {"$": "dict", "items": [["b", {"$": "what"}]]}]},
    ],
    ids=json.dumps,
)
def test_a_tree_that_is_never_written_is_a_format_error(tree: Any) -> None:
    """F110: nothing in a checkpoint can make the reader do anything but raise."""
    tensors: dict[str, Any] = {"there": Tensor()}
    with pytest.raises(FormatError, match="part"):
        decode(tree, "part", tensors.__getitem__)
    assert list(tensor_places(tree, "part")) in ([], [("part", "missing")])

"""Boxes against the elements that they are, counted one by one."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest

from orchestrator.checkpoint.boxes import (
    Box,
    box_at,
    boxes_of_range,
    corner,
    is_range,
    overlap,
    places,
    span,
    spans,
    whole,
)


def random_shape(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randrange(1, 6) for _ in range(draw.randrange(4)))


def random_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw.randrange(size) for size in shape)
    return Box(offsets, tuple(draw.randrange(1, size - at + 1) for size, at in zip(shape, offsets, strict=True)))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """The tensor's elements that a box is, in the box's order."""
    numbers = np.arange(prod(shape)).reshape(shape)
    cut = numbers[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))]
    return [int(one) for one in np.asarray(cut).ravel()]


def test_a_box_comes_back_from_its_corner(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        shape = random_shape(draw)
        box = random_box(draw, shape)
        mine = elements(shape, box)
        assert corner(box, shape) == mine[0]
        assert box_at(mine[0], box.lengths, shape) == box
        contiguous = mine[-1] - mine[0] + 1 == len(mine)
        assert is_range(box.lengths, shape) is contiguous
        assert span(box, whole(shape)) == ((mine[0], mine[-1] + 1) if contiguous else None)


@pytest.mark.parametrize(
    ("element", "lengths"), [(3, (1, 2)), (8, (2, 1)), (12, (1, 1)), (0, (4, 1)), (0, (1, 0)), (1 << 70, (1, 1))]
)
def test_a_box_outside_is_refused(element: int, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lies outside its shape"):
        box_at(element, lengths, (3, 4))


def test_an_overlap_has_the_elements_of_both(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(1000):
        shape = random_shape(draw)
        one, other = random_box(draw, shape), random_box(draw, shape)
        both = set(elements(shape, one)) & set(elements(shape, other))
        common = overlap(one, other)
        assert set(elements(shape, common) if common else ()) == both
        if common is None:
            continue
        inside = elements(shape, one)
        for gap in (1, 2, 5, 1000):
            found = spans(common, one, gap)
            assert all(low[1] + gap <= high[0] for low, high in itertools.pairwise(found))
            read = [element for start, stop in found for element in inside[start:stop]]
            assert both <= set(read)
            assert gap > 1 or sorted(both) == read
            assert found[0][0] >= 0
            assert found[-1][1] <= len(inside)


def test_elements_of_a_box_are_found_in_the_tensor(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        shape = random_shape(draw)
        box = random_box(draw, shape)
        start = draw.randrange(box.elements + 1)
        stop = draw.randrange(start, box.elements + 1)
        found = [element for low, high in places(box, start, stop, shape) for element in range(low, high)]
        assert found == elements(shape, box)[start:stop]


def test_a_range_of_a_box_is_few_boxes(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(1000):
        shape = random_shape(draw)
        start = draw.randrange(prod(shape) + 1)
        stop = draw.randrange(start, prod(shape) + 1)
        found = list(boxes_of_range(shape, start, stop))
        assert [one for box in found for one in elements(shape, box)] == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)

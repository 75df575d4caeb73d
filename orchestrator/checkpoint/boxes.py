"""Boxes: what a rank holds of a tensor that is cut along its dimensions, and how they lie in each other. Pure.

A **box** is an offset and a length in each dimension. Elements of a box, and of a tensor, are counted in row-major
order; a box that is one range of its tensor's elements needs no box to be written down. Called by
`checkpoint.chunks`, `checkpoint.meshes`, `checkpoint.layout` and `checkpoint.restore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Offsets and lengths by dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.lengths)


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def is_range(lengths: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box of these lengths is one range of the elements of a tensor of that shape."""
    if 0 in lengths:
        return True
    cut = next((place for place, length in enumerate(lengths) if length != 1), len(shape))
    return tuple(lengths[cut + 1 :]) == tuple(shape[cut + 1 :])


def corner(box: Box, shape: Sequence[int]) -> int:
    """The box's first element, as an element of the tensor."""
    return sum(offset * stride for offset, stride in zip(box.offsets, strides(shape), strict=True))


def box_at(element: int, lengths: tuple[int, ...], shape: Sequence[int]) -> Box:
    """The box of these lengths that begins at an element of the tensor. Raises ValueError if it does not lie in it."""
    offsets = []
    for stride, length, size in zip(strides(shape), lengths, shape, strict=True):
        offset, element = divmod(element, stride)
        if not 0 < length <= size - offset:
            raise ValueError(f"a box of {list(lengths)} lies outside its shape {list(shape)}")
        offsets.append(offset)
    return Box(tuple(offsets), lengths)


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one place to the next, by dimension."""
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(found))


def overlap(one: Box, other: Box) -> Box | None:
    """What lies in both, or None."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    lengths = tuple(min(a + n, b + m) - offset for a, n, b, m, offset in zip(*one, *other, offsets, strict=True))
    return Box(offsets, lengths) if all(length > 0 for length in lengths) else None


def within(inner: Box, outer: Box) -> Box:
    """The inner box, its offsets counted from the beginning of the outer one."""
    return Box(tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.lengths)


def span(inner: Box, outer: Box) -> tuple[int, int] | None:
    """The range of the outer box's elements that the inner one is, or None if it is not one range."""
    if not is_range(inner.lengths, outer.lengths):
        return None
    start = corner(within(inner, outer), outer.lengths)
    return start, start + inner.elements


def spans(inner: Box, outer: Box, gap: int) -> list[tuple[int, int]]:
    """Ranges of the outer box's elements that have all of the inner box, in order.

    What lies between is included where it is fewer than `gap` elements: reading on is cheaper than beginning anew.
    """
    local, steps = within(inner, outer), strides(outer.lengths)
    first, extent, apart = 0, 1, len(steps)
    for place in reversed(range(len(steps))):
        if local.lengths[place] > 1 and steps[place] - extent >= gap:
            break
        extent += (local.lengths[place] - 1) * steps[place]
        apart = place
    starts = [range(offset, offset + length) for offset, length in zip(*local, strict=True)]
    first = sum(offset * step for offset, step in zip(local.offsets[apart:], steps[apart:], strict=True))
    return [
        (start, start + extent)
        for places in product(*starts[:apart])
        for start in [first + sum(place * step for place, step in zip(places, steps, strict=False))]
    ]


def boxes_of_range(lengths: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The range [start, stop) of a box's elements as boxes within it, in order: at most two for each dimension."""
    steps = strides(lengths)
    if not steps and start < stop:
        yield Box((), ())
    while steps and start < stop:
        dimension = next(
            place for place, step in enumerate(steps) if step == 1 or (start % step == 0 and stop - start >= step)
        )
        offsets, left = [], start
        for step in steps:
            offset, left = divmod(left, step)
            offsets.append(offset)
        step = steps[dimension]
        count = min((stop - start) // step, lengths[dimension] - offsets[dimension])
        yield Box(tuple(offsets), (1,) * dimension + (count,) + tuple(lengths[dimension + 1 :]))
        start += count * step


def places(box: Box, start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where elements [start, stop) of a box lie in the tensor: ranges of its elements, in the box's order."""
    for part in boxes_of_range(box.lengths, start, stop):
        offsets = tuple(inner + outer for inner, outer in zip(part.offsets, box.offsets, strict=True))
        yield from spans(Box(offsets, part.lengths), whole(shape), 1)

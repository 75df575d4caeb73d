"""Who writes what of the state that several ranks hold alike. Pure; called by `checkpoint.layout`, `training.portions`.

The ranks that hold the same part of a tensor are its holders: all ranks (DDP), those of one place in a shard group
(HSDP), or one rank alone. Tensors of the same holders are laid end to end in a fixed order and cut into equal byte
windows, one for each present holder, so that each writes 1/N. A rank that is announced absent owns nothing that a
present one holds: a node that may vanish takes nothing along that is anywhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements [start, stop) of one tensor, in its row-major order, owned by one rank."""

    tensor: int
    start: int
    stop: int


def present_ranks(world_size: int, absent: Collection[int]) -> tuple[int, ...]:
    """The ranks that own shared state; all of them if everyone is announced absent."""
    return present_of(range(world_size), absent)


def present_of(holders: Sequence[int], absent: Collection[int]) -> tuple[int, ...]:
    """The holders that own what these hold; all of them if every one is announced absent: nobody else has it."""
    return tuple(rank for rank in holders if rank not in absent) or tuple(holders)


def owned_spans(
    sizes: Sequence[tuple[int, int]], *, rank: int, holders: Sequence[int], absent: Collection[int]
) -> list[Span]:
    """The spans that `rank` owns of what `holders` (by rising rank) hold alike.

    `sizes` gives (elements, bytes per element) of each tensor, in the order that all holders share. Windows are cut
    at element boundaries; every element belongs to exactly one holder. A tensor without elements belongs to the
    first present one, so that its name and shape are stored.
    """
    present = present_of(holders, absent)
    if rank not in present:
        return []
    place, count = present.index(rank), len(present)
    total_bytes = sum(elements * width for elements, width in sizes)
    low, high = total_bytes * place // count, total_bytes * (place + 1) // count
    spans: list[Span] = []
    offset = 0
    for index, (elements, width) in enumerate(sizes):
        size_bytes = elements * width
        if elements == 0:
            if place == 0:
                spans.append(Span(tensor=index, start=0, stop=0))
            continue
        start = _first_element_at(low - offset, width, elements)
        stop = _first_element_at(high - offset, width, elements)
        if start < stop:
            spans.append(Span(tensor=index, start=start, stop=stop))
        offset += size_bytes
    return spans


def equal_windows(sizes: Sequence[tuple[int, int]], count: int) -> list[list[Span]]:
    """What each of `count` ranks would own if all were present, in one walk; tensors without elements are left out."""
    total_bytes = sum(elements * width for elements, width in sizes)
    windows: list[list[Span]] = [[] for _ in range(count)]
    place = offset = 0
    for index, (elements, width) in enumerate(sizes):
        start = 0
        while start < elements:
            stop = _first_element_at(total_bytes * (place + 1) // count - offset, width, elements)
            if start < stop:
                windows[place].append(Span(tensor=index, start=start, stop=stop))
                start = stop
            if start < elements:
                place += 1
        offset += elements * width
    return windows


def _first_element_at(byte: int, width: int, elements: int) -> int:
    """The first element whose first byte is at or after `byte`, clamped to the tensor."""
    return min(max(-(-byte // width), 0), elements)

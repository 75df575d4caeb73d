"""Which rank reads what for all: everything once, in equal parts, in bounded and aligned buckets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from orchestrator.checkpoint.boxes import corner, is_range
from orchestrator.core.ownership import owned_spans
from orchestrator.training.portions import Bucket, Needed, bucket_bytes, buckets_by_rank

KIB = 1 << 10


def random_needed(draw: random.Random) -> list[Needed]:
    """Tensors of any shape: numbers, empty ones, rows, columns, some larger than all others together."""
    shapes = [(), (0,), (3, 0, 2), (1, 500), (500, 1), (7, 11, 13), (draw.randint(1, 5000),), (2, draw.randint(1, 99))]
    return [
        Needed(f"t{number}", draw.choice([1, 2, 4, 8]), draw.choice(shapes)) for number in range(draw.randint(0, 12))
    ]


def total_bytes(buckets: list[Bucket]) -> int:
    return sum(map(bucket_bytes, buckets))


def test_every_element_is_read_by_one_rank(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        needed, ranks = random_needed(draw), draw.randint(1, 7)
        plan = buckets_by_rank(needed, ranks=ranks, bytes_max=draw.choice([8, 100, 4 * KIB, 1 << 20]))
        assert len(plan) == ranks
        readers = {one.name: np.zeros(one.shape, int) for one in needed}
        for buckets in plan:
            for bucket in buckets:
                for piece in bucket:
                    place = tuple(slice(a, a + n) for a, n in zip(*piece.box, strict=True))
                    readers[piece.name][place] += 1
        assert all((found == 1).all() for found in readers.values())


def test_ranks_read_equally_much_whatever_the_sizes(seed: int) -> None:
    """One huge tensor, or many small ones: to within the widest element."""
    draw = random.Random(seed)
    for _ in range(60):
        needed, ranks = random_needed(draw), draw.randint(1, 7)
        plan = buckets_by_rank(needed, ranks=ranks, bytes_max=64)
        total = sum(int(np.prod(one.shape)) * one.width for one in needed)
        assert all(abs(total_bytes(buckets) - total / ranks) <= 8 for buckets in plan)


def test_buckets_are_bounded_full_and_aligned(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        needed, bytes_max = random_needed(draw), draw.choice([8, 24, 100, KIB])
        widths, shapes = {one.name: one.width for one in needed}, {one.name: one.shape for one in needed}
        for buckets in buckets_by_rank(needed, ranks=3, bytes_max=bytes_max):
            assert all(bytes_max - 8 < bucket_bytes(bucket) for bucket in buckets[:-1])
            for bucket in buckets:
                assert 0 < bucket_bytes(bucket) <= bytes_max
                first = 0
                for piece in bucket:
                    width = widths[piece.name]
                    assert piece.first_byte == first
                    assert piece.first_byte % width == 0
                    assert piece.last_byte - first == piece.box.elements * width
                    assert is_range(piece.box.lengths, shapes[piece.name])
                    first = piece.last_byte


def test_the_order_in_which_a_rank_names_its_tensors_does_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    needed = random_needed(draw)
    other_way = draw.sample(needed, len(needed))
    assert buckets_by_rank(needed, ranks=3, bytes_max=KIB) == buckets_by_rank(other_way, ranks=3, bytes_max=KIB)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_rank_reads_what_it_would_have_saved(seed: int, ranks: int) -> None:
    """So at the same world size its portion lies in its own shard, which may be in this node's memory."""
    needed = random_needed(random.Random(seed))
    ordered = sorted(needed, key=lambda one: (-one.width, one.name))
    sizes = [(int(np.prod(one.shape)), one.width) for one in ordered]
    for rank, buckets in enumerate(buckets_by_rank(needed, ranks=ranks, bytes_max=1 << 30)):
        owned = owned_spans(sizes, rank=rank, holders=range(ranks), absent=())
        expected = [(ordered[span.tensor].name, span.start, span.stop) for span in owned if span.start < span.stop]
        found: list[tuple[str, int, int]] = []
        for piece in (piece for bucket in buckets for piece in bucket):
            start = corner(piece.box, next(one.shape for one in needed if one.name == piece.name))
            if found and found[-1][0] == piece.name and found[-1][2] == start:
                found[-1] = (piece.name, found[-1][1], start + piece.box.elements)
            else:
                found.append((piece.name, start, start + piece.box.elements))
        assert found == expected


def test_nothing_needed_is_nothing_to_do() -> None:
    assert buckets_by_rank([], ranks=3, bytes_max=8) == [[], [], []]
    assert buckets_by_rank([Needed("none", 4, (0, 3))], ranks=2, bytes_max=8) == [[], []]

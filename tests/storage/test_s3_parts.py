"""Pieces cut into parts: nothing lost, nothing copied, never more parts than S3 takes."""

from __future__ import annotations

import random
from base64 import b64decode
from collections.abc import Iterator

import numpy
import pytest
from crc32c import crc32c

from orchestrator.storage.s3 import parts as module
from orchestrator.storage.s3.parts import PARTS_MAX, SLICE_BYTES, Part, PartPlan, cut, plan_parts, whole

GIB = 1 << 30


def content(part: Part) -> bytes:
    return b"".join(iter(lambda: bytes(part.read(1 << 16)), b""))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 10 bytes; from the fourth on of 20, from the sixth on of 40."""
    monkeypatch.setattr(module, "PART_BYTES", 10)
    monkeypatch.setattr(module, "EQUAL_PARTS", 3)
    monkeypatch.setattr(module, "DOUBLING_PARTS", 2)


def test_cuts_at_exactly_the_sizes_of_parts(small_parts: None, seed: int) -> None:
    draw = random.Random(seed)
    data = draw.randbytes(137)
    for _ in range(50):
        places = sorted(draw.choices(range(len(data) + 1), k=draw.randrange(8)))
        pieces = [data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]
        found = list(cut(iter(pieces), plan_parts(None)))
        assert [len(part) for part in found] == [10, 10, 10, 20, 20, 40, 27]
        assert b"".join(map(content, found)) == data


@pytest.mark.parametrize(("size", "sizes"), [(0, [0]), (1, [1]), (9, [9]), (10, [10, 0]), (11, [10, 1])])
def test_small_ones(small_parts: None, size: int, sizes: list[int]) -> None:
    assert [len(part) for part in cut([bytes(size)], plan_parts(None))] == sizes


def test_a_part_comes_as_soon_as_its_bytes_are_there(small_parts: None) -> None:
    asked = []

    def pieces() -> Iterator[bytes]:
        for number in range(100):
            asked.append(number)
            yield b"12345"

    parts = cut(pieces(), plan_parts(None))
    next(parts)
    assert asked == [0, 1]


@pytest.mark.parametrize(
    ("size_bytes_max", "part_mib", "at_once"),
    [
        (0, 8, 4),
        (64 << 20, 8, 4),
        ((64 << 20) + 1, 16, 4),
        (256 << 20, 16, 4),
        ((256 << 20) + 1, 32, 4),
        (14_999_999_999, 32, 4),
        (15_000_000_000, 32, 8),
        (100 * GIB, 32, 8),
        (PARTS_MAX * (32 << 20), 32, 8),
        (PARTS_MAX * (32 << 20) + 1, 33, 8),
        (5 << 40, 525, 8),
    ],
)
def test_parts_are_chosen_by_what_is_known_of_the_size(size_bytes_max: int, part_mib: int, at_once: int) -> None:
    plan = plan_parts(size_bytes_max)
    assert (plan.first_bytes, plan.at_once) == (part_mib << 20, at_once)
    assert plan.part_bytes(1) == plan.part_bytes(PARTS_MAX)
    assert plan.count_max is not None
    assert plan.count_max <= PARTS_MAX
    assert plan.count_max * plan.first_bytes >= size_bytes_max


def test_a_bounded_object_is_cut_equally(small_parts: None) -> None:
    plan = PartPlan(first_bytes=7, at_once=1, count_max=20)
    assert [len(part) for part in cut([bytes(137)], plan)] == [7] * 19 + [4]


def test_a_shard_of_160_gib_fits_and_one_of_a_tebibyte_too() -> None:
    plan = plan_parts(None)
    sizes = [plan.part_bytes(number) for number in range(1, PARTS_MAX + 1)]
    assert sum(sizes) > 1000 * GIB
    assert sum(sizes[: PARTS_MAX - 2000]) > 160 * GIB
    assert max(sizes) <= 5 * GIB, "S3 takes no larger part"
    assert sizes == sorted(sizes)
    assert len({*sizes[: 156 * GIB // sizes[0]]}) == 1, "R2 takes equal parts only"


def test_reads_views_of_memory_without_a_copy() -> None:
    memory = memoryview(bytes(3 * SLICE_BYTES + 5))
    part = Part([memory[:7], memory[7:]])
    slices = list(iter(part.read_slice, b""))
    assert [len(one) for one in slices] == [7, SLICE_BYTES, SLICE_BYTES, SLICE_BYTES - 2]
    assert all(isinstance(one, memoryview) and one.obj is memory.obj for one in slices)


def test_reads_again_from_anywhere() -> None:
    part = whole([b"abc", bytearray(b"def"), b"", numpy.arange(3, dtype=numpy.uint8).data, numpy.zeros((0, 3)).data])
    data = b"abcdef\x00\x01\x02"
    assert content(part) == data
    assert part.tell() == len(part) == 9
    assert part.read(10) == b""
    for place in range(10):
        assert part.seek(place) == place
        assert part.read() == data[place:]


def test_checksums_are_as_s3_writes_them() -> None:
    part = Part([memoryview(b"12345"), memoryview(b"6789")])
    assert part.checksum() == "4waSgw=="  # the check value of crc32c: e3069283
    assert int.from_bytes(b64decode(part.checksum())) == crc32c(b"123456789")
    assert whole([]).checksum() == "AAAAAA=="


class Known:
    """Pieces whose digests somebody has already; they are asked for, and none is computed."""

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        self.asked: list[tuple[int, int]] = []
        self._data = data
        self._piece_bytes = piece_bytes

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._data), self._piece_bytes):
            yield self._data[start : start + self._piece_bytes]

    def crc32c(self, start: int, stop: int) -> int | None:
        self.asked.append((start, stop))
        return crc32c(self._data[start:stop]) ^ 1 if start else None


def test_a_digest_that_is_known_is_not_computed_again(small_parts: None) -> None:
    pieces = Known(bytes(range(137)), 7)
    found = [part.checksum() for part in cut(pieces, plan_parts(None))]
    assert pieces.asked == [(0, 10), (10, 20), (20, 30), (30, 50), (50, 70), (70, 110), (110, 137)]
    digests = [int.from_bytes(b64decode(one)) for one in found]
    assert digests[0] == crc32c(bytes(range(10))), "computed, as nobody knew it"
    assert digests[1:] == [crc32c(bytes(range(*span))) ^ 1 for span in pieces.asked[1:]]

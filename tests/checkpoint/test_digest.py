"""crc32c of files from the digests of their blocks."""

from __future__ import annotations

import random

import crc32c
import pytest

from orchestrator.checkpoint.digest import block_digests, combine, crc
from orchestrator.checkpoint.format import BLOCK_BYTES


@pytest.mark.parametrize(
    "size_bytes",
    [0, 1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES + 12_345],
)
def test_combined_digests_are_the_files(size_bytes: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size_bytes)
    digests = block_digests(memoryview(data))
    assert len(digests) == -(-size_bytes // BLOCK_BYTES)
    assert combine(digests, size_bytes) == crc32c.crc32c(data)


def test_combining_holds_for_any_sizes(seed: int) -> None:
    """More lengths of the last block than the tables that are kept, each several times."""
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 3 * BLOCK_BYTES) for _ in range(12)]
    data = draw.randbytes(max(sizes))
    for size_bytes in sizes * 2:
        part = memoryview(data)[:size_bytes]
        assert combine(block_digests(part), size_bytes) == crc32c.crc32c(part), size_bytes


def test_blocks_of_zeros_are_not_lost() -> None:
    """A crc32c of zeros only is not zero, and appending zeros must change the file's digest."""
    zeros = bytes(2 * BLOCK_BYTES)
    assert combine(block_digests(memoryview(zeros)), len(zeros)) == crc32c.crc32c(zeros)
    assert crc(zeros) != crc(zeros[1:])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_known_value(kind: type) -> None:
    """RFC 3720, appendix B.4: 32 bytes counting up."""
    assert crc(kind(bytes(range(32)))) == 0x46DD794E

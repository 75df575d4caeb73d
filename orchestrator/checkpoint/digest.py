"""crc32c of blocks and files: one pass over the bytes, the file's digest combined from its blocks'.

Combining uses that crc32c is linear over GF(2): appending n zero bytes to a message multiplies its crc by a fixed
32 × 32 bit matrix. The matrix for one full block is kept as four tables of 256 entries.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from functools import lru_cache

import crc32c as _crc32c

from orchestrator.checkpoint.format import BLOCK_BYTES

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


def crc(data: bytes | bytearray | memoryview | mmap.mmap, before: int = 0) -> int:
    """crc32c of the bytes, or of them and all bytes before, whose crc32c is given."""
    return int(_crc32c.crc32c(data, before))


def crc_of(pieces: Iterable[memoryview]) -> int:
    """crc32c of the bytes of all pieces, one after another."""
    total = 0
    for piece in pieces:
        total = _crc32c.crc32c(piece, total)
    return int(total)


def block_digests(data: memoryview) -> list[int]:
    """crc32c of each 1 MiB block; the last one may be shorter."""
    return [crc(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


def combine(digests: Iterable[int], size_bytes: int) -> int:
    """The crc32c of a whole file from its blocks' digests, without touching the bytes again."""
    total = 0
    remaining = size_bytes
    for digest in digests:
        length = min(BLOCK_BYTES, remaining)
        total = _shift(total, length) ^ digest
        remaining -= length
    return total


def _shift(value: int, length: int) -> int:
    tables = _tables(length)
    return (
        tables[0][value & 0xFF] ^ tables[1][value >> 8 & 0xFF] ^ tables[2][value >> 16 & 0xFF] ^ tables[3][value >> 24]
    )


@lru_cache(maxsize=8)
def _tables(length: int) -> tuple[list[int], list[int], list[int], list[int]]:
    matrix = _zeros_matrix(length)
    tables = tuple([_times(matrix, byte << shift) for byte in range(256)] for shift in (0, 8, 16, 24))
    return tables[0], tables[1], tables[2], tables[3]


def _zeros_matrix(length: int) -> list[int]:
    """The matrix that appends `length` zero bytes, by repeated squaring."""
    power = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # one zero bit
    for _ in range(3):
        power = [_times(power, column) for column in power]  # one zero byte
    result = [1 << bit for bit in range(32)]
    while length:
        if length & 1:
            result = [_times(power, column) for column in result]
        power = [_times(power, column) for column in power]
        length >>= 1
    return result


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    index = 0
    while vector:
        if vector & 1:
            total ^= matrix[index]
        vector >>= 1
        index += 1
    return total

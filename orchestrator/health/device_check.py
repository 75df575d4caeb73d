"""`python -m orchestrator.health.device_check`: do the CUDA devices compute and remember what they are given?

Small integers are multiplied so that each right answer is known exactly, whatever the order of the sums, and patterns
are written to memory and read back. One JSON line says how many devices there are, then one for each. Run by agents, as
a process of its own, before their node joins (`joining` reads the lines); alone it may be run by a person.

Everything but `main` takes a torch device's name, "cpu" included. It was never run on a CUDA device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    MatMul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

Matrix = np.ndarray[Any, np.dtype[np.int64]]

SIDE = 512
TILES = 8
"""The product has SIDE × TILES rows and columns, so that all of a device's processors have a part in it."""
MEMORY_BYTES = 256 << 20
PATTERNS = (0x55, 0xAA)
FLOAT32_ENTRY_MAX = 8
"""512 products of such numbers sum up to less than 2^24; each is exact in TensorFloat-32, too."""
BFLOAT16_STRIDE = 2
"""Every second entry is -1, 0 or 1, the others are 0: no sum, of a part either, exceeds 256, which is still exact."""


def check(
    device: str, *, tiles: int = TILES, memory_bytes: int = MEMORY_BYTES, matmul: MatMul | None = None
) -> str | None:
    """What is wrong with a device; None: all its answers are right. Raises what torch raises if it gives none."""
    return wrong_products(device, tiles=tiles, matmul=matmul) or wrong_memory(device, memory_bytes)


def wrong_products(device: str, *, tiles: int = TILES, matmul: MatMul | None = None) -> str | None:
    """Multiply matrices of integers in float32 and bfloat16; the answers are computed on the host, in integers."""
    import torch

    multiply = matmul or torch.matmul
    for dtype in (torch.float32, torch.bfloat16):
        left, right, product = _known(dtype is torch.bfloat16)
        expected = torch.from_numpy(product).to(dtype).repeat(tiles, tiles)
        rows = torch.from_numpy(left).to(dtype).repeat(tiles, 1).to(device)
        columns = torch.from_numpy(right).to(dtype).repeat(1, tiles).to(device)
        found = multiply(rows, columns).cpu()
        wrong = int((found != expected).sum())
        if wrong:
            row, column = (int(place) for place in (found != expected).nonzero()[0])
            first = f"{found[row, column].item():g} instead of {expected[row, column].item():g} at ({row}, {column})"
            return f"{wrong} of {found.numel()} results of a {_name(dtype)} product are wrong, the first: {first}"
    return None


@lru_cache
def _known(sparse: bool) -> tuple[Matrix, Matrix, Matrix]:
    """Two factors and their product, in integers."""
    draw = np.random.default_rng(20240229)
    largest = 1 if sparse else FLOAT32_ENTRY_MAX
    left, right = (draw.integers(-largest, largest, (SIDE, SIDE), dtype=np.int64, endpoint=True) for _ in range(2))
    if sparse:
        left[:, ::BFLOAT16_STRIDE] = 0
    return left, right, left @ right


def wrong_memory(device: str, memory_bytes: int = MEMORY_BYTES) -> str | None:
    """Fill a part of the memory with patterns, then each word with its own number, and read all of it back."""
    import torch

    words = memory_bytes // 8
    memory = torch.empty(words, dtype=torch.int64, device=device)
    numbers = torch.arange(words, dtype=torch.int64)
    for pattern in PATTERNS:
        memory.view(torch.uint8).fill_(pattern)
        problem = _differences(memory, torch.full((1,), pattern, dtype=torch.uint8).repeat(8).view(torch.int64))
        if problem is not None:
            return f"{problem} after writing 0x{pattern:02x}"
    memory.copy_(numbers)
    problem = _differences(memory, numbers)
    return None if problem is None else f"{problem} after writing each word's number"


def _differences(memory: torch.Tensor, expected: torch.Tensor) -> str | None:
    wrong = int((memory.cpu() != expected).sum())
    return f"{wrong} of {memory.numel()} words of memory differ" if wrong else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    """Check all devices that CUDA shows to this process."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _say({"devices": count})
    for index in range(count):
        _say(_checked(f"cuda:{index}"))
    return 0


def _checked(device: str) -> dict[str, object]:
    import torch

    started = time.monotonic()
    problem: str | None = None
    skipped: str | None = None
    try:
        problem = check(device)
    except torch.OutOfMemoryError as error:  # somebody else uses it, which is not its fault
        skipped = _first_line(error)
    except RuntimeError as error:
        problem = _first_line(error)
    return {"device": device, "problem": problem, "skipped": skipped, "seconds": round(time.monotonic() - started, 3)}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

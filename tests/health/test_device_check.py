"""Known answers, on the processor: right ones pass, and one wrong number in a million is found."""

from __future__ import annotations

import json

import pytest
import torch

from orchestrator.health import device_check
from orchestrator.health.device_check import check, wrong_memory, wrong_products

MEMORY_BYTES = 1 << 20


def test_a_processor_that_computes_right() -> None:
    assert check("cpu", tiles=1, memory_bytes=MEMORY_BYTES) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_number_is_found(dtype: torch.dtype) -> None:
    def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = torch.matmul(left, right)
        if left.dtype is dtype:
            product[700, 3] += 1
        return product

    problem = wrong_products("cpu", tiles=2, matmul=matmul)
    assert problem is not None
    assert f"1 of {1024 * 1024} results of a {str(dtype).removeprefix('torch.')} product are wrong" in problem
    assert "at (700, 3)" in problem


def test_a_number_that_is_none_is_wrong() -> None:
    def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.matmul(left, right) * float("nan")

    assert "nan instead of" in (wrong_products("cpu", tiles=1, matmul=matmul) or "")


def test_answers_are_exact_whatever_the_order_of_the_sums() -> None:
    """In reverse, and in parts that are rounded in between: a device may split a product as it likes."""

    def in_parts(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(left.shape[0], right.shape[1], dtype=left.dtype)
        for start in reversed(range(0, left.shape[1], 64)):
            total += torch.matmul(left[:, start : start + 64], right[start : start + 64])
        return total

    assert wrong_products("cpu", tiles=1, matmul=in_parts) is None


def test_inputs_survive_tensor_float_32() -> None:
    """Ten bits of mantissa: what a device's matrix units may round float32 to."""
    for factor in device_check._known(False)[:2]:
        assert abs(factor).max() < 1 << 10


@pytest.mark.parametrize(("sparse", "exact"), [(False, 1 << 24), (True, 1 << 8)])
def test_no_part_of_a_sum_is_too_large_to_be_exact(sparse: bool, exact: int) -> None:
    left, right, _ = device_check._known(sparse)
    assert (abs(left) @ abs(right)).max() <= exact


def test_memory_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_memory("cpu", MEMORY_BYTES) is None
    real = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        read = real(tensor).clone()
        read[17] ^= 1 << 40
        return read

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    words = MEMORY_BYTES // 8
    assert wrong_memory("cpu", MEMORY_BYTES) == f"1 of {words} words of memory differ after writing 0x55"


@pytest.mark.parametrize(
    ("error", "problem", "skipped"),
    [
        (None, None, None),
        (RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors…"), "CUDA error: an illegal", None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256 MiB"), None, "CUDA out of memory"),
    ],
)
def test_what_is_said_of_a_device(
    error: Exception | None, problem: str | None, skipped: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(device: str) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(device_check, "check", check)
    line = device_check._checked("cuda:1")
    assert line["device"] == "cuda:1"
    for name, words in (("problem", problem), ("skipped", skipped)):
        assert (line[name] is None) if words is None else words in str(line[name])


def test_without_a_cuda_device_nothing_is_tested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_check.main() == 0
    assert json.loads(capsys.readouterr().out) == {"devices": 0}

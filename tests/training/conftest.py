"""Tests of the training side share one process, in which each may attach once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from orchestrator.training import rng, session


@pytest.fixture(autouse=True)
def not_attached_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins as a new process would."""
    monkeypatch.setattr(session, "_attached_pid", 0)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Leave the process's generators and number of threads as they were; with one thread sums have one order."""
    before, threads = rng.capture(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    rng.restore(before)

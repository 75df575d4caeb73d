"""Tests of the training side share one process, in which each may attach once."""

from __future__ import annotations

import pytest

from orchestrator.training import session


@pytest.fixture(autouse=True)
def not_attached_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins as a new process would."""
    monkeypatch.setattr(session, "_attached_pid", 0)

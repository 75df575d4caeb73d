"""What the verbs' tests share: a state folder of their own, and the command line as a person types it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli import build_app

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees this user's jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path / "state"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command("run", "--job", …)`, in an empty folder; the result has exit_code, stdout and stderr."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*words: str) -> Any:
        result = CliRunner().invoke(build_app(loaded=words[:1]), list(words), prog_name="orchestrator")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call

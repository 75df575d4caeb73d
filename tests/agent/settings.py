"""What an agent is told, for tests that run none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.agent.settings import AgentSettings


def settings_in(folder: Path, **others: Any) -> AgentSettings:
    """Settings of one node whose files lie in `folder`."""
    return AgentSettings(
        job="job",
        node="node-1",
        workers=1,
        command=("true",),
        store=str(folder / "store"),
        owner="owner",
        claimant="claimant",
        supervisor_url="http://127.0.0.1:1",
        token="token",
        staging=folder,
        logs=folder / "logs",
    ).model_copy(update=others)

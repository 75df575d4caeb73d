"""`python -m orchestrator.agent < settings.json`: one node's agent."""

from __future__ import annotations

import asyncio
import sys

from orchestrator.agent.node import run_agent
from orchestrator.agent.settings import AgentSettings
from orchestrator.storage.opening import open_store


def main() -> int:
    """Read the settings, run the agent."""
    text = sys.stdin.read()
    if not text:
        sys.stderr.write("no settings on standard input: whoever started this agent is gone\n")
        return 1
    settings = AgentSettings.model_validate_json(text)
    return asyncio.run(run_agent(settings, open_store(settings.store)))


if __name__ == "__main__":
    sys.exit(main())

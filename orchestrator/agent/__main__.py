"""`python -m orchestrator.agent < settings.json`: one node's agent. `--settings FILE` where nobody can write to it.

What differs from pod to pod of a run comes as arguments then, beside the file that all of them share.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from orchestrator.agent.first_process import stand_before
from orchestrator.agent.node import run_agent
from orchestrator.agent.settings import AgentSettings
from orchestrator.errors import ExitCode
from orchestrator.storage.opening import open_store


def read_settings(words: Sequence[str]) -> AgentSettings | str:
    """The settings, or in one sentence what is wrong with them (nothing of their text: it holds secrets)."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.agent", description="One node's agent.")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings as JSON; standard input if not given")
    parser.add_argument("--node", help="this node's name")
    parser.add_argument("--address", help="where other nodes reach this one")
    parser.add_argument("--grace-seconds", type=float, help="time that a signal leaves")
    parser.add_argument("--staging", type=Path, help="folder in memory for this node's slots")
    parser.add_argument("--logs", type=Path, help="folder for the workers' output")
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    source = given.pop("settings", None)
    try:
        text = sys.stdin.read() if source is None else source.read_text()
    except OSError as error:
        return f"{source}: {error.strerror}"
    if not text:
        return f"no settings in {source or 'standard input'}: whoever started this agent is gone"
    try:
        settings = AgentSettings.model_validate_json(text)
        return AgentSettings.model_validate({**dict(settings), **given})
    except ValidationError as error:
        wrong = sorted({".".join(map(str, problem["loc"])) or "the whole" for problem in error.errors()})
        return f"{source or 'standard input'}: no settings of this release's agent: {', '.join(wrong)}"


def main(words: Sequence[str] = ()) -> int:
    """Read the settings, run the agent. `words`: the command line's."""
    if os.getpid() == 1:
        stand_before()
    settings = read_settings(words)
    if isinstance(settings, str):
        sys.stderr.write(f"{settings}\n")
        return int(ExitCode.FAILED)
    return asyncio.run(run_agent(settings, open_store(settings.store)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

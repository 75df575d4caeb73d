"""The command line as a whole: help without torch and in time, versions, usage errors, errors as sentences."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator import __version__
from orchestrator.cli import VERBS, build_app
from tests.cli.conftest import Command


def test_help_names_every_verb(command: Command) -> None:
    result = command("--help")
    assert result.exit_code == 0
    for verb in VERBS:
        assert verb in result.stdout


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "demo"])
def test_every_verb_has_help(command: Command, verb: str) -> None:
    assert command(verb, "--help").exit_code == 0


def test_all_verbs_can_be_loaded_together() -> None:
    assert {info.name for info in build_app().registered_commands} | {
        info.name for info in build_app().registered_groups
    } == set(VERBS)


def test_version(command: Command) -> None:
    result = command("--version")
    assert (result.exit_code, result.stdout) == (0, f"orchestrator {__version__}\n")


@pytest.mark.parametrize("words", [["nosuch"], ["drain"], ["resize", "job", "0"], ["run", "--nosuch"], []])
def test_usage_errors(command: Command, words: list[str]) -> None:
    assert command(*words).exit_code == 2


def test_the_verbs_load_no_torch_and_nothing_heavy_for_help() -> None:
    program = (
        "import sys\n"
        "from orchestrator.cli import VERBS, build_app\n"
        "build_app(loaded=())\n"
        "assert not {'torch', 'aiohttp', 'pydantic', 'rich.live'} & set(sys.modules), 'the list of verbs'\n"
        "build_app(loaded=[verb for verb in VERBS if verb != 'demo'])\n"
        "assert not {'torch', 'aiohttp', 'pydantic'} & set(sys.modules), 'the verbs'\n"
        "import orchestrator.controller.crd, orchestrator.controller.reconcile\n"
        "assert 'kubernetes' not in sys.modules, 'what a TrainingJob is'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "status", "nosuch"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no supervisor of a job 'nosuch' runs on this machine")
    assert "Traceback" not in done.stderr

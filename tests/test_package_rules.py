"""Rules for the whole package that no linter knows: nothing that runs code from data, no torch where none belongs."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator

ROOT = Path(__file__).parent.parent
SHIPPED = (ROOT / "orchestrator", ROOT / "examples")

RUNS_CODE_FROM_DATA = re.compile(
    r"""
      \b (?:import|from) \s+ (?:c?[pP]ickle|dill|cloudpickle|marshal|shelve) \b
    | \b (?:c?[pP]ickle|dill|cloudpickle|marshal|shelve) \.
    | \b torch \. (?:load|save) \b
    | \b from \s+ torch (?:\.serialization)? \s+ import \b .* \b (?:load|save) \b
    | (?<! [\w.] ) (?:eval|exec) \s* \(       # the built-ins, not model.eval()
    | \b allow_pickle \s* = \s* True
    """,
    re.VERBOSE,
)

WITHOUT_TORCH = ("orchestrator.agent", "orchestrator.supervisor", "orchestrator.core", "orchestrator.storage")


def test_nothing_that_runs_code_from_data() -> None:
    offences = [
        f"{source.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in SHIPPED
        for source in sorted(folder.rglob("*.py"))
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1)
        if RUNS_CODE_FROM_DATA.search(line)
    ]
    assert offences == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "x = pickle.loads(b)",
        "torch.load(path)",
        "torch.save(state, path)",
        "from torch import nn, save",
        "import marshal",
        "shelve.open(p)",
        "eval(text)",
        "y = exec (code)",
        "numpy.load(p, allow_pickle=True)",
    ],
)
def test_the_pattern_finds(line: str) -> None:
    assert RUNS_CODE_FROM_DATA.search(line)


@pytest.mark.parametrize(
    "line", ["model.eval()", "await asyncio.create_subprocess_exec(a)", "No pickle anywhere", "from torch import nn"]
)
def test_the_pattern_passes(line: str) -> None:
    assert not RUNS_CODE_FROM_DATA.search(line)


def modules_under(package: str) -> list[str]:
    """`package` and all modules in it, as dotted names."""
    parts = package.split(".")[1:]
    folder = Path(orchestrator.__path__[0]).joinpath(*parts)
    return [package, *(module.name for module in pkgutil.walk_packages([str(folder)], f"{package}."))]


@pytest.mark.parametrize("package", ["orchestrator", *WITHOUT_TORCH])
def test_no_torch_is_loaded(package: str) -> None:
    names = [package] if package == "orchestrator" else modules_under(package)
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'importing {name} loads torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

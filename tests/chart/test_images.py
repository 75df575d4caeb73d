"""The images, as far as they can be read: who they run as, what they start, and that what is imported is in them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.chart.chart import ROOT

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
PACKAGE = ROOT / "orchestrator"
RUN_BY_THE_CONTROLLER = ("controller", "supervisor", "schedulers", "agent")
"""All that is imported in these, and in what they import."""
ONLY_AT_ONCE = ("orchestrator.storage", "orchestrator.checkpoint", "orchestrator.preemption", "orchestrator.health")
"""But for these, and the package's own names: what functions import there (SDKs, torch) is for agents and workers."""
COMES_WITH = {"pydantic_core": "pydantic"}
NOT_IN_THE_CONTROLLER = ("torch", "numpy", "boto3", "botocore", "google")


# ---------------------------------------------------------------------------------------------- who imports what


def source_of(module: str) -> Path | None:
    """The file of one of this package's modules; None: there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)


def module_of(source: Path) -> str:
    """The other way round."""
    parts = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node: ast.AST, *, inside_functions: bool) -> Iterator[str]:
    """What is imported below `node` by name, but not for type checkers."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield module
                yield from (f"{module}.{one.name}" for one in names if source_of(f"{module}.{one.name}"))
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not inside_functions:
                continue
            case _:
                yield from imports(child, inside_functions=inside_functions)


def third_party(packages: tuple[str, ...]) -> dict[str, str]:
    """Import name → a module that imports it: of these packages, and of all that is loaded with them."""
    sources = [one for package in packages for one in (PACKAGE / package).rglob("*.py")]
    waiting = [*map(module_of, sources), "orchestrator.__main__", "orchestrator.cli", "orchestrator.cli.controller"]
    seen: set[str] = set()
    found: dict[str, str] = {}
    while waiting:
        module = waiting.pop(0)
        source = source_of(module)
        if module in seen or source is None:
            continue
        seen.add(module)
        inside_functions = module != "orchestrator" and not module.startswith(ONLY_AT_ONCE)
        for name in imports(ast.parse(source.read_text()), inside_functions=inside_functions):
            top = name.partition(".")[0]
            if top == "orchestrator":
                waiting.append(name)
            elif top not in sys.stdlib_module_names:
                found.setdefault(top, module)
    return found


def names_in(requirements: Path) -> set[str]:
    """The names of a list of requirements, as packages are compared."""
    lines = [line.partition("#")[0].strip() for line in requirements.read_text().splitlines()]
    return {name_of(line) for line in lines if line}


def name_of(requirement: str) -> str:
    """Without versions."""
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("_", "-")


def test_what_the_controller_imports_is_in_its_image() -> None:
    listed = names_in(DOCKER / "controller-requirements.txt")
    distributions = packages_distributions()
    missing = {
        f"{module} imports {name}"
        for name, module in third_party(RUN_BY_THE_CONTROLLER).items()
        if not {name_of(one) for one in distributions.get(COMES_WITH.get(name, name), [name])} & listed
    }
    assert not missing


def test_the_walk_finds_something() -> None:
    found = third_party(("supervisor", "agent"))
    assert {"aiohttp", "pydantic", "prometheus_client", "typer", "cryptography"} <= set(found)
    assert not set(found) & set(NOT_IN_THE_CONTROLLER)


def test_the_controller_s_modules_load_without_what_its_image_lacks() -> None:
    """The command line, and every module of the packages that the controller runs."""
    folders = [PACKAGE / name for name in RUN_BY_THE_CONTROLLER]
    modules = sorted(module_of(one) for folder in folders for one in folder.rglob("*.py"))
    program = (
        "import importlib, json, sys\n"
        f"for name in {NOT_IN_THE_CONTROLLER}: sys.modules[name] = None\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(["orchestrator.cli", *modules])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------- lists of packages


def test_workers_get_all_dependencies_but_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"][0].startswith("torch>=2.6")
    lines = (DOCKER / "worker-requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["dependencies"][1:]


@pytest.mark.parametrize("list_of", ["controller", "worker"])
def test_every_package_has_a_pinned_version(list_of: str) -> None:
    pinned = names_in(ROOT / "constraints.txt")
    assert names_in(DOCKER / f"{list_of}-requirements.txt") <= pinned


# ---------------------------------------------------------------------------------------------- Dockerfiles


def instructions(file: Path) -> list[tuple[str, str]]:
    """(Instruction, its text), lines joined, comments left out."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(line.split(maxsplit=1)[0].upper(), line.split(maxsplit=1)[1]) for line in whole]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_it_does_not_run_as_root(file: Path) -> None:
    """A number, which the kubelet can compare with runAsNonRoot without the image's list of users."""
    last = [text for name, text in instructions(file) if name == "USER"][-1]
    assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", last)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_bases_are_named_exactly(file: Path) -> None:
    for image in (text.split()[0] for name, text in instructions(file) if name == "FROM"):
        assert image == "${BASE}" or (":" in image and not image.endswith(":latest"))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_nothing_is_fetched_beside_packages(file: Path) -> None:
    assert "ADD" not in {name for name, _ in instructions(file)}
    assert not re.search(r"\b(curl|wget)\b", file.read_text())


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_is_started_is_process_1(file: Path) -> None:
    """Exec form: with a shell in between SIGTERM would not reach it."""
    for name, text in instructions(file):
        if name in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(text), list)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_is_copied_is_there_and_sent_to_the_build(file: Path) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name, text in instructions(file):
        if name == "COPY" and not text.startswith("--from="):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(Path(source).match(pattern) for pattern in sent), source


def test_they_start_the_package() -> None:
    words = [
        json.loads(text)
        for name, text in instructions(DOCKER / "controller.Dockerfile")
        if name in ("ENTRYPOINT", "CMD")
    ]
    assert [word for part in words for word in part] == ["python3", "-m", "orchestrator", "controller", "run"]

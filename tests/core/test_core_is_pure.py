"""core imports the standard library, itself and `orchestrator.errors`, nothing else.

The linter's contract names the I/O modules and known packages that core may not import; this one catches
the packages that nobody thought of. Inside core, imports point one way.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import orchestrator.core

CORE = Path(orchestrator.core.__path__[0])
OWN = ("orchestrator.core", "orchestrator.errors")


def imported_names(source: Path) -> Iterator[str]:
    """Full dotted names of all modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"), str(source))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import"
            if node.module in ("orchestrator", "orchestrator.core"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def is_allowed(name: str) -> bool:
    """Whether core may import the module `name`."""
    if name.split(".", maxsplit=1)[0] in sys.stdlib_module_names:
        return True
    return any(name == own or name.startswith(f"{own}.") for own in OWN)


def test_core_imports_only_the_standard_library_and_itself() -> None:
    offences = [
        f"{source.relative_to(CORE)} imports {name}"
        for source in sorted(CORE.rglob("*.py"))
        for name in imported_names(source)
        if not is_allowed(name)
    ]
    assert offences == []


def test_modules_of_core_do_not_import_each_other_in_a_circle() -> None:
    graph = {
        f"orchestrator.core.{source.stem}": set(imported_names(source))
        for source in CORE.glob("*.py")
        if source.stem != "__init__"
    }
    inside = {module: names & graph.keys() for module, names in graph.items()}
    assert sum(map(len, inside.values())) > len(inside)
    list(graphlib.TopologicalSorter(inside).static_order())  # raises CycleError

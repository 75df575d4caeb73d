"""The command line: one module per verb. Here: the table of verbs, and how errors become sentences and exit codes.

What it is not: no verb does its work here, and nothing here loads torch. The console script and
`python -m orchestrator` call `main`.

A verb raises `OrchestratorError`; what a person sees of it is one sentence per problem on standard error, and the
error's exit code. A traceback means a bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from orchestrator import __version__
from orchestrator.errors import ConfigError, OrchestratorError

VERBS: Mapping[str, str] = {
    "run": "Train here: get nodes, save, and get going again after losses.",
    "status": "Show what a running job is doing.",
    "drain": "Save, then end; the same command resumes.",
    "resize": "Go on with another number of nodes.",
    "rollback": "Go on from an older checkpoint.",
    "cancel": "End a job for good.",
    "checkpoints": "List, show and verify checkpoints.",
    "check": "Check this machine, the store and the staging folder.",
    "drill": "Rehearse failures and notices.",
    "controller": "Keep the training jobs of a Kubernetes cluster.",
    "simulate": "Replay a spot trace: what would be left of the machines' time?",
    "demo": "Lose a machine in the middle of a small training and resume exactly.",
}
"""Each verb is `orchestrator.cli.<verb>`, which holds a function or a group of that name."""


class _Verbs(TyperGroup):
    """A group whose commands may raise OrchestratorError."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; its error becomes sentences and an exit code."""
        try:
            return super().invoke(ctx)
        except OrchestratorError as error:
            from orchestrator.cli.terminal import printable  # names of files and keys may stand in it

            for problem in _problems(error):
                sys.stderr.write(f"error: {printable(problem)}\n")
            raise typer.Exit(int(error.exit_code)) from error


def _problems(error: OrchestratorError) -> tuple[str, ...]:
    if isinstance(error, ConfigError):
        return error.problems
    return (" ".join(str(error).removeprefix(": ").split()),)


def build_app(loaded: Collection[str] = tuple(VERBS)) -> typer.Typer:
    """The command line. Verbs that are not `loaded` are only listed: nothing that they need is imported."""
    app = typer.Typer(
        cls=_Verbs,
        help="Keeps a training job going on machines that may be taken away at any time.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # they print local variables, and with them tokens
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for verb, summary in VERBS.items():
        if verb in loaded:
            _add(app, verb, summary)
        else:
            app.command(verb, short_help=summary)(_not_loaded)
    return app


def _add(app: typer.Typer, verb: str, summary: str) -> None:
    module = import_module(f"orchestrator.cli.{verb}")
    work: typer.Typer | Callable[..., None] = getattr(module, verb)
    if isinstance(work, typer.Typer):
        app.add_typer(work, name=verb, help=summary, no_args_is_help=True)
    else:
        app.command(verb, short_help=summary, context_settings=getattr(module, "CONTEXT", {}))(work)


def _not_loaded() -> None:
    raise AssertionError("a verb that was only listed was run")


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"orchestrator {__version__}\n")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Nothing is done before the verb."""


def main() -> None:
    """Run the verb that the command line names, and end the process with its exit code."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]  # options before the verb take no values
    build_app(loaded=words[:1])(prog_name="orchestrator")

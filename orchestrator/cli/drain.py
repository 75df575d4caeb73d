"""`orchestrator drain JOB`: save at the next step that all ranks agree on, then end; the same command resumes."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.client import ask_to_end
from orchestrator.cli.kubernetes import Namespace


def drain(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")] = False,
    timeout_seconds: Annotated[float, typer.Option(min=0, help="Longest wait with --wait (seconds).")] = 600.0,
    namespace: Namespace = None,
) -> None:
    """Save, then end; `orchestrator run` with the same arguments resumes. Returns when the request is accepted."""
    ask_to_end(job, "drain", "saves and ends", wait_seconds=timeout_seconds if wait else None, namespace=namespace)

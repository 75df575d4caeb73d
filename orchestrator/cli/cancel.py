"""`orchestrator cancel JOB`: end a job without another save; it is not started again by accident."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.client import ask_to_end
from orchestrator.cli.kubernetes import Namespace


def cancel(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")] = False,
    timeout_seconds: Annotated[float, typer.Option(min=0, help="Longest wait with --wait (seconds).")] = 600.0,
    namespace: Namespace = None,
) -> None:
    """End a job without saving; checkpoints stay. `run --take-over` would start it again. Returns when accepted."""
    ask_to_end(
        job, "cancel", "ends without another save", wait_seconds=timeout_seconds if wait else None, namespace=namespace
    )

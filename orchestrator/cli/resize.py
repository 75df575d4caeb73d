"""`orchestrator resize JOB NODES`: save, then go on with another number of nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import kubernetes
from orchestrator.cli.client import connect
from orchestrator.cli.kubernetes import Namespace
from orchestrator.cli.terminal import say
from orchestrator.core.wording import counted


def resize(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    nodes: Annotated[int, typer.Argument(metavar="NODES", min=1, max=4096, help="The new number of nodes.")],
    namespace: Namespace = None,
) -> None:
    """Save, then go on with NODES nodes; new nodes join soon after they are there. Returns when it is accepted."""
    (kubernetes.find(job, namespace) or connect(job)).request("resize", nodes=nodes)
    say(f"accepted: the job {job!r} goes on with {counted(nodes, 'node')} after its next save")

"""`orchestrator controller run | crd`: what runs in a Kubernetes cluster, and the definition of what it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from orchestrator.controller.loop import Controller
    from orchestrator.telemetry import EventRecord

controller = typer.Typer()
THREADS_MAX = 64
"""For requests to the API server, of all jobs together."""


@controller.command()
def crd(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False) -> None:
    """Print the TrainingJob's definition, for `kubectl apply -f -`. The chart has it, too."""
    from orchestrator.controller.crd import definition

    if as_json:
        sys.stdout.write(json.dumps(definition(), indent=2) + "\n")
        return
    import yaml

    sys.stdout.write(yaml.safe_dump(definition(), sort_keys=False, width=120, allow_unicode=True))


@controller.command()
def run(
    *,
    url: Annotated[str, typer.Option(metavar="URL", help="How pods reach it: https://SERVICE.NAMESPACE.svc:8443")],
    namespace: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Keep the jobs of this one only; several; else of all.")
    ] = None,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Where it listens.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port, with TLS.")] = 8443,
    lease_name: Annotated[
        str, typer.Option(metavar="NAME", help="Of the Lease that one controller holds at a time, and of its Secret.")
    ] = "orchestrator-controller",
    lease_namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where both are; this pod's, or the context's, if not given.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="NAME", help="The kubeconfig's context; else the cluster this runs in.")
    ] = None,
) -> None:
    """Supervise the TrainingJobs of a cluster, until the lease is lost or a signal comes. What runs is left running.

    The cluster is the one that this runs in, else the kubeconfig's. Events of the jobs are printed as JSON lines.
    """
    from orchestrator.controller.loop import Controller, ControllerSettings
    from orchestrator.schedulers.kubernetes.client import connect
    from orchestrator.storage.opening import job_url

    if not url.startswith("https://"):
        raise ConfigError(f"--url: {url} has to begin with https://: agents send a token there")
    client = connect(context)
    settings = ControllerSettings(
        url=url,
        address=listen,
        port=port,
        namespaces=tuple(namespace or ()),
        lease_name=lease_name,
        lease_namespace=lease_namespace or client.namespace,
    )
    found = Controller(client, settings, job_url=job_url, sinks=(_print_event,))
    reason = asyncio.run(_run(found))
    sys.stderr.write(f"controller: ends: {reason}\n")
    sys.stderr.flush()
    # Watches are read in threads that nobody can interrupt; nothing of theirs is worth waiting for.
    os._exit(int(ExitCode.DONE if reason == STOPPED else ExitCode.FAILED))


STOPPED = "a signal has ended it; what runs is left running"


async def _run(found: Controller) -> str:
    from concurrent.futures import ThreadPoolExecutor

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="api"))
    running = asyncio.create_task(found.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        return STOPPED


def _print_event(record: EventRecord) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(record.as_dict()) + "\n")
        sys.stdout.flush()

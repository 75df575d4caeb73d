"""`orchestrator drill`: rehearse failures on a running job of this machine: a notice, a kill, a stall, a cloud's word.

Signals go only to processes that the job's own supervisor started: user, start time and ancestry are checked on the
very process (a pidfd), so that a reused pid is never hit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.client import connect
from orchestrator.cli.terminal import say
from orchestrator.errors import ConfigError, SupervisorError
from orchestrator.schedulers.leftovers import start_ticks

if TYPE_CHECKING:
    from orchestrator.testing.machines import Machines
    from orchestrator.testing.metadata_server import Fault

ANCESTORS_MAX = 64

drill = typer.Typer(rich_markup_mode="rich")

Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
Rank = Annotated[int | None, typer.Option(min=0, help="The rank; the highest if not given.")]


@drill.command()
def notice(
    job: Job,
    node: Annotated[str | None, typer.Option(help="The node; the last one if not given.")] = None,
    deadline: Annotated[float, typer.Option(min=0, max=86400, metavar="SECONDS", help="Time until it goes.")] = 30.0,
) -> None:
    """Announce that a node will go, as a cloud would; at the deadline it is really taken away."""
    client = connect(job)
    chosen = _node(client.status(), node)["node"]
    client.notice(chosen, deadline)
    say(f"{chosen} of the job {job!r} goes once its state is saved, in {deadline:g} s at the latest")


@drill.command()
def kill(
    job: Job,
    rank: Rank = None,
    node: Annotated[str | None, typer.Option(help="Kill this node's agent, and with it all that runs there.")] = None,
) -> None:
    """Kill a worker or a whole node with SIGKILL, without any notice."""
    if rank is not None and node is not None:
        raise ConfigError("--rank and --node: give one of them")
    client = connect(job)
    now = client.status()
    what, pid = _agent(now, node) if node is not None else _worker(now, rank)
    with own_process(what, pid, client.address.pid) as handle:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    say(f"killed {what} (process {pid}) of the job {job!r}")


@drill.command()
def stall(
    job: Job,
    rank: Rank = None,
    seconds: Annotated[float, typer.Option(min=0, max=86400, help="How long the worker stands still.")] = 10.0,
) -> None:
    """Stop a worker with SIGSTOP, and let it go on after some time, or at Ctrl-C.

    Longer than the job's hang_seconds is a hang: the worker is named, and the job starts again from its checkpoint.
    """
    client = connect(job)
    what, pid = _worker(client.status(), rank)
    with own_process(what, pid, client.address.pid) as handle, _ended_by_signals():
        try:
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
            say(f"stopped {what} (process {pid}) of the job {job!r} for {seconds:g} s")
            time.sleep(seconds)
        finally:
            ended = _let_go_on(handle)
    say(f"{what} was ended in the meantime: see the job's events" if ended else f"{what} goes on")


def _let_go_on(handle: int) -> bool:
    """SIGCONT; whether the process is gone instead."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGCONT)
    except ProcessLookupError:
        return True
    return False


# -------------------------------------------------------------------------------------- a metadata service


class FaultName(StrEnum):
    """How a metadata service misbehaves."""

    UNAUTHORIZED = "unauthorized"
    ERROR = "error"
    SLOW = "slow"
    PAGE = "page"
    CUT = "cut"


@drill.command()
def metadata(
    cloud: Annotated[str, typer.Argument(metavar="CLOUD", help="aws, gcp, azure, alibaba, tencent or volcengine.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where it listens on 127.0.0.1; 0: a free port.")] = 0,
    after: Annotated[
        float, typer.Option(min=0, max=86400, metavar="SECONDS", help="From the first request to the announcement.")
    ] = 30.0,
    deadline: Annotated[
        float | None,
        typer.Option(min=0, max=86400, metavar="SECONDS", help="Time until it goes; the cloud's usual if not given."),
    ] = None,
    fault: Annotated[FaultName | None, typer.Option(help="How the service misbehaves until the announcement.")] = None,
) -> None:
    """Serve a cloud's metadata on this machine, and announce there that the machine is taken, until Ctrl-C.

    What is printed is for `run`, which watches this in place of the cloud: notice, save, commit and restart are real.
    """
    from orchestrator.testing.machines import Machines
    from orchestrator.testing.metadata import SERVICES

    if cloud not in SERVICES:
        raise ConfigError(f"CLOUD: the metadata of {cloud!r} announce nothing; those of {', '.join(SERVICES)} do")
    service = SERVICES[cloud]
    if deadline is not None and service.lead_seconds is None:
        raise ConfigError(f"--deadline: the metadata of {cloud} say no time; `run --grace-seconds` is what is taken")
    machines = Machines(service)
    if fault is not None:
        machines.misbehave(_faults()[fault])
    asyncio.run(_serve(machines, cloud, port, after, deadline))


async def _serve(machines: Machines, cloud: str, port: int, after: float, deadline: float | None) -> None:
    try:
        await machines.start(port)
    except OSError as error:
        raise ConfigError(f"--port: cannot listen at 127.0.0.1:{port}: {os.strerror(error.errno or 0)}") from error
    announcing = asyncio.create_task(_announce(machines, after, deadline))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, announcing.cancel)
    say(f"the metadata of {cloud}, simulated, for jobs that are run with these words; Ctrl-C ends it")
    sys.stdout.write(f"--notices {cloud}@http://127.0.0.1:{machines.port}\n")
    sys.stdout.flush()
    try:
        await announcing
    except asyncio.CancelledError:
        say("ended")
    finally:
        await machines.stop()


async def _announce(machines: Machines, after: float, deadline: float | None) -> None:
    """The notice, and what becomes of it; never ends by itself."""
    from orchestrator.testing.metadata import SimulatedAzure

    await machines.until(lambda: machines.all)
    say(f"{machines.all[0]} has asked first; the notice comes in {after:g} s")
    await asyncio.sleep(after)
    machines.behave()
    await machines.until(lambda: machines.present)
    machine = machines.present[-1]
    server = machine.server
    left = server.lead_seconds if deadline is None else deadline
    server.interrupt(left)
    say(f"announced to {machine}: its machine goes {'soon, no time is said' if left is None else f'in {left:g} s'}")
    began = time.monotonic()
    try:
        async with asyncio.timeout(left):
            await machines.until(lambda: machine.gone)
    except TimeoutError:
        say(f"the time is over, and {machine} still runs: a cloud would have taken its machine by now")
        await machines.until(lambda: machine.gone)
    if isinstance(server, SimulatedAzure) and server.acknowledged:
        say(f"{machine} has acknowledged it")
    say(f"{machine} has ended, {time.monotonic() - began:.1f} s after the announcement; no other is told anything")
    await asyncio.Event().wait()


def _faults() -> dict[FaultName, Fault]:
    from orchestrator.testing.metadata_server import Body, Cut, Slow, Status, Unauthorized

    return {
        FaultName.UNAUTHORIZED: Unauthorized(),
        FaultName.ERROR: Status(),
        FaultName.SLOW: Slow(),
        FaultName.PAGE: Body(body=b"<html>please log in</html>"),
        FaultName.CUT: Cut(),
    }


# ------------------------------------------------------------------------------------------- who is meant


def _node(now: dict[str, Any], name: str | None) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = now["nodes"]
    if not nodes:
        raise SupervisorError(f"the job {now['job']!r} has no node at present")
    if name is None:
        return next((node for node in reversed(nodes) if not node["going"]), nodes[-1])
    for node in nodes:
        if node["node"] == name:
            return node
    raise ConfigError(f"--node: {name!r} is none of this job's nodes: {', '.join(node['node'] for node in nodes)}")


def _agent(now: dict[str, Any], name: str) -> tuple[str, int]:
    node = _node(now, name)
    if node["agent_pid"] is None:
        raise SupervisorError(f"{name} has no process on this machine")
    return name, int(node["agent_pid"])


def _worker(now: dict[str, Any], rank: int | None) -> tuple[str, int]:
    pids = {int(state["rank"]): int(state["pid"]) for state in now["ranks"]}
    if not pids:
        raise SupervisorError(f"the job {now['job']!r} has no workers at present: it is {now['phase']}")
    chosen = max(pids) if rank is None else rank
    if chosen not in pids:
        raise ConfigError(f"--rank: there is no rank {chosen}; there are 0 to {max(pids)}")
    if pids[chosen] <= 1:
        raise SupervisorError(f"rank {chosen} has not attached yet; try again once the job is running")
    return f"rank {chosen}", pids[chosen]


# ------------------------------------------------------------------------------------------- its process


@contextmanager
def own_process(what: str, pid: int, supervisor_pid: int) -> Iterator[int]:
    """A pidfd of a process of this user's that descends from the job's supervisor. Raises SupervisorError."""
    gone = f"{what} (process {pid}) is gone already"
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OSError) as error:
        raise SupervisorError(gone) from error
    try:
        started = start_ticks(pid)
        owner, ancestors = _owner(pid), _ancestors(pid)
        if started is None or owner is None:
            raise SupervisorError(gone)
        if owner != os.getuid():
            raise SupervisorError(f"{what} (process {pid}) belongs to another user")
        if supervisor_pid not in ancestors:
            raise SupervisorError(
                f"{what} (process {pid}) was not started by this job's supervisor (process {supervisor_pid}), "
                "so it is not touched"
            )
        if start_ticks(pid) != started:  # the pid changed hands while we looked: what we saw was another process
            raise SupervisorError(gone)
        yield handle
    except ProcessLookupError as error:
        raise SupervisorError(gone) from error
    finally:
        os.close(handle)


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _ancestors(pid: int) -> list[int]:
    """Parent, grandparent, …"""
    found: list[int] = []
    while pid > 1 and len(found) < ANCESTORS_MAX:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block like Ctrl-C does, so that what is stopped goes on."""

    def leave(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

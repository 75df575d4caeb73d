"""`orchestrator rollback JOB --to STEP`: go on from an older checkpoint; what is newer never counts again.

A job that runs here is asked: its supervisor ends the generation and claims the next one with the step. Otherwise the
claim is made here, under the same lock and owner as `orchestrator run` has, and the next start goes on from there.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import kubernetes
from orchestrator.cli.client import POLL_SECONDS, SupervisorClient, this_user
from orchestrator.cli.kubernetes import Namespace
from orchestrator.cli.terminal import say
from orchestrator.core.wording import counted
from orchestrator.errors import ConfigError, RollbackError, SupervisorError

if TYPE_CHECKING:
    from orchestrator.core.messages import CheckpointId
    from orchestrator.storage.base import ObjectStore
    from orchestrator.supervisor.state_folder import StateFolder, SupervisorAddress


def rollback(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    step: Annotated[int, typer.Option("--to", metavar="STEP", min=0, help="Step of a committed checkpoint.")],
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="As for run; needed where the job has never run here.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also if the job belongs to a run elsewhere; that one stops.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when a running job has gone back.")] = False,
    timeout_seconds: Annotated[float, typer.Option(min=0, help="Longest wait with --wait (seconds).")] = 600.0,
    namespace: Namespace = None,
) -> None:
    """Go on from the checkpoint of STEP. What was trained after it is left behind, and is never resumed from again.

    A running job does so at once, without a save. One that has ended does so when it is started again. Returns when the
    request is accepted; a supervisor that dies before it has claimed the next generation forgets it.
    """
    from orchestrator.checkpoint.catalog import survey
    from orchestrator.checkpoint.rollback import left_behind, rollback_target
    from orchestrator.cli.checkpoints import open_job

    found = kubernetes.find(job, namespace)
    if found is not None:
        if store is not None or take_over:
            raise ConfigError("--store and --take-over are for jobs that no TrainingJob stands for: its spec says both")
        if wait:
            raise ConfigError("--wait: the events of a TrainingJob say when it has gone back")
        found.request("rollback", step=step)
        say(f"accepted: the job {job!r} ends its generation and goes on from step {step}; its events say if it cannot")
        return
    state = _state_of(job, store)
    objects = open_job(state.job_url, None)
    catalog = survey(objects)
    left = left_behind(catalog, step)
    target = rollback_target(catalog, step)
    address = state.supervisor()
    if address is not None:
        SupervisorClient(address).request("rollback", step=step)
        say(f"accepted: the job {job!r} ends its generation and goes on from checkpoint {target}")
        if wait:
            _await_claim(objects, state, address, step, max(catalog.generations), timeout_seconds)
            say(f"done: it goes on from checkpoint {target}")
    else:
        target = _claim(state, step, take_over=take_over)
        say(f"done: the next start of the job {job!r} goes on from checkpoint {target}")
    say(f"{counted(len(left), 'newer checkpoint')} will not be used again")


def _state_of(job: str, store: str | None) -> StateFolder:
    from orchestrator.cli.run import plain_store_url
    from orchestrator.storage.opening import job_url
    from orchestrator.supervisor.state_folder import StateFolder, known_job

    return known_job(job) if store is None else StateFolder(job, job_url(plain_store_url(store), job))


def _await_claim(
    store: ObjectStore, state: StateFolder, asked: SupervisorAddress, step: int, highest: int, timeout_seconds: float
) -> None:
    """Until a generation above `highest` is claimed with the step.

    Raises RollbackError if the supervisor that was asked has ended without it, or does not want it any more,
    SupervisorError when the time is over.
    """
    from orchestrator.checkpoint.catalog import claimed
    from orchestrator.checkpoint.generations import read_claim

    until, seen, was_wanted = time.monotonic() + timeout_seconds, highest, False
    while time.monotonic() < until:
        address = state.supervisor()  # before the look: it may claim, and end
        is_wanted = _is_wanted(asked, step)
        for number in sorted(number for number in claimed(store) if number > seen):
            if read_claim(store, number).rollback_to == step:
                return
            seen = number
        if address is None or (address.pid, address.start_ticks) != (asked.pid, asked.start_ticks):
            # one that takes the gang back has the same token, and knows nothing of the request
            raise RollbackError(f"the job {state.job!r} has ended before it went back; give the same command again")
        if was_wanted and is_wanted is False:
            raise RollbackError(f"the job {state.job!r} has not gone back; its events say why")
        was_wanted = was_wanted or is_wanted is True
        time.sleep(POLL_SECONDS)
    raise SupervisorError(
        f"the job {state.job!r} has not gone back within {timeout_seconds:g} s; `orchestrator status {state.job}` "
        "shows what it waits for"
    )


def _is_wanted(asked: SupervisorAddress, step: int) -> bool | None:
    """Whether the supervisor still means to go back to the step; None if it does not say."""
    with contextlib.suppress(SupervisorError):
        status = SupervisorClient(asked).status()
        return bool(status["rollback_to"] == step) if "rollback_to" in status else None
    return None


def _claim(state: StateFolder, step: int, *, take_over: bool) -> CheckpointId:
    from orchestrator.checkpoint.generations import Claimant, roll_back
    from orchestrator.cli.checkpoints import open_job

    state.acquire()
    try:
        state.forget_supervisor()  # workers that it left running are on the course that is left
        who = Claimant(job=state.job, owner=state.owner(), claimant=secrets.token_hex(8), take_over=take_over)
        return roll_back(open_job(state.job_url, None), who, step, this_user(), time.time())
    finally:
        state.release()

"""`orchestrator rollback JOB --to STEP`: go on from an older checkpoint; what is newer never counts again.

A job that runs here is asked: its supervisor ends the generation and claims the next one with the step. Otherwise the
claim is made here, under the same lock and owner as `orchestrator run` has, and the next start goes on from there.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

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
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Return when a running job has claimed its next generation: it has gone back."),
    ] = False,
    timeout_seconds: Annotated[float, typer.Option(min=0, help="Longest wait with --wait (seconds).")] = 600.0,
    namespace: Namespace = None,
) -> None:
    """Go on from the checkpoint of STEP. What was trained after it is left behind, and is never resumed from again.

    A running job does so at once, without a save. One that has ended, was cancelled or is done goes on from there when
    it is started again. Returns when the request is accepted: `status` says if it cannot be; a supervisor that dies
    before it has claimed the next generation forgets it.
    """
    from orchestrator.checkpoint.catalog import survey
    from orchestrator.checkpoint.rollback import left_behind, rollback_target
    from orchestrator.cli.checkpoints import open_job

    found = kubernetes.find(job, namespace)
    if found is not None:
        if store is not None or take_over:
            raise ConfigError("--store and --take-over are for jobs that no TrainingJob stands for: its spec says both")
        if wait:
            how = f"`kubectl -n {found.namespace} describe tj {job}` shows RolledBack or NotRolledBack"
            raise ConfigError(f"--wait is not for a TrainingJob: {how}")
        found.request("rollback", step=step)
        say(
            f"accepted: the job {job!r} goes back to step {step}, now or with its next run; its events say if it cannot"
        )
        return
    state = _state_of(job, store)
    objects = open_job(state.job_url, None)
    catalog = survey(objects)
    left = left_behind(catalog, step)
    target = rollback_target(catalog, step)
    address = state.supervisor()
    if address is not None:
        client = SupervisorClient(address)
        client.request("rollback", step=step)
        say(f"accepted: the job {job!r} ends its generation and goes on from checkpoint {target}")
        if wait:
            highest = max(catalog.generations)
            _await_claim(client, state, objects, step, highest=highest, timeout_seconds=timeout_seconds)
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
    client: SupervisorClient,
    state: StateFolder,
    store: ObjectStore,
    step: int,
    *,
    highest: int,
    timeout_seconds: float,
) -> None:
    """Until a generation above `highest` is claimed with the step.

    Raises RollbackError if none will be, because it was refused, another request has taken its place, or the supervisor
    that was asked has ended; SupervisorError when the time is over.
    """
    job, until, was_wanted = state.job, time.monotonic() + timeout_seconds, False
    while time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        runs, answer = _is_there(state, client.address), _answer(client)  # before the store: it may claim, and end
        if _is_claimed(store, step, highest):
            return
        if answer is not None and answer["refusal"] is not None:
            raise RollbackError(f"not rolled back: {answer['refusal']}")
        if not runs:
            raise RollbackError(f"the job {job!r} has ended before it went back; give the same command again")
        is_wanted = answer is not None and answer["to"] == step
        if was_wanted and answer is not None and not is_wanted:
            other = "another step" if answer["to"] is None else f"step {answer['to']}"
            raise RollbackError(f"the job {job!r} was asked meanwhile to go back to {other}")
        was_wanted = was_wanted or is_wanted
    raise SupervisorError(
        f"the job {job!r} has not gone back within {timeout_seconds:g} s; the request stands, and "
        f"`orchestrator status {job}` shows what it waits for"
    )


def _is_there(state: StateFolder, asked: SupervisorAddress) -> bool:
    """Whether the supervisor that was asked still is the job's.

    One that takes its gang back has the same token, and knows nothing of the request.
    """
    found = state.supervisor()
    return found is not None and (found.pid, found.start_ticks) == (asked.pid, asked.start_ticks)


def _answer(client: SupervisorClient) -> dict[str, Any] | None:
    """What it says of going back; None if it says nothing."""
    try:
        answer: dict[str, Any] = client.status()["rollback"]
    except SupervisorError:  # it is busy, or gone
        return None
    return answer


def _is_claimed(store: ObjectStore, step: int, highest: int) -> bool:
    from orchestrator.checkpoint.catalog import claimed
    from orchestrator.checkpoint.generations import read_claim

    return any(read_claim(store, number).rollback_to == step for number in claimed(store) if number > highest)


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

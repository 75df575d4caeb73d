"""`orchestrator rollback JOB --to STEP`: go on from an older checkpoint; what is newer never counts again.

A job that runs here is asked: its supervisor ends the generation and claims the next one with the step. Otherwise the
claim is made here, under the same lock and owner as `orchestrator run` has, and the next start goes on from there.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import kubernetes
from orchestrator.cli.client import SupervisorClient, this_user
from orchestrator.cli.kubernetes import Namespace
from orchestrator.cli.terminal import say
from orchestrator.core.wording import counted
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.core.messages import CheckpointId
    from orchestrator.supervisor.state_folder import StateFolder


def rollback(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    step: Annotated[int, typer.Option("--to", metavar="STEP", min=0, help="Step of a committed checkpoint.")],
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="As for run; needed where the job has never run here.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also if the job belongs to a run elsewhere; that one stops.")
    ] = False,
    namespace: Namespace = None,
) -> None:
    """Go on from the checkpoint of STEP. What was trained after it is left behind, and is never resumed from again.

    A running job does so at once, without a save. One that has ended does so when it is started again.
    """
    from orchestrator.checkpoint.catalog import survey
    from orchestrator.checkpoint.rollback import left_behind, rollback_target
    from orchestrator.cli.checkpoints import open_job

    found = kubernetes.find(job, namespace)
    if found is not None:
        if store is not None or take_over:
            raise ConfigError("--store and --take-over are for jobs that no TrainingJob stands for: its spec says both")
        found.request("rollback", step=step)
        say(f"accepted: the job {job!r} ends its generation and goes on from step {step}; its events say if it cannot")
        return
    state = _state_of(job, store)
    catalog = survey(open_job(state.job_url, None))
    left = left_behind(catalog, step)
    target = rollback_target(catalog, step)
    address = state.supervisor()
    if address is not None:
        SupervisorClient(address).request("rollback", step=step)
        say(f"accepted: the job {job!r} ends its generation and goes on from checkpoint {target}")
    else:
        target = _claim(state, step, take_over=take_over)
        say(f"done: the next start of the job {job!r} goes on from checkpoint {target}")
    say(f"{counted(len(left), 'newer checkpoint')} will not be used again")


def _state_of(job: str, store: str | None) -> StateFolder:
    from orchestrator.cli.run import plain_store_url
    from orchestrator.storage.opening import job_url
    from orchestrator.supervisor.state_folder import StateFolder, known_job

    return known_job(job) if store is None else StateFolder(job, job_url(plain_store_url(store), job))


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

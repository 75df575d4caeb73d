"""Why a job that a verb asks for does not run: what Slurm waits for, or how the store says that it ended. No verb."""

from __future__ import annotations

from orchestrator.checkpoint.catalog import survey
from orchestrator.checkpoint.generations import read_end
from orchestrator.cli.checkpoints import open_job
from orchestrator.errors import ConfigError, OrchestratorError, SchedulerError
from orchestrator.schedulers.slurm.commands import SlurmCommands
from orchestrator.schedulers.slurm.records import ENDED_STATES, JobRecord
from orchestrator.schedulers.slurm.submission import explain_waiting
from orchestrator.supervisor.state_folder import known_job


def why_not_running(job: str) -> str | None:
    """In words, with what to do; None if nobody can say."""
    try:
        state = known_job(job)
    except ConfigError:
        return None
    record = _slurms_record(state.slurm_job())
    if record is not None and record.state not in ENDED_STATES:
        return explain_waiting(record)
    try:
        return _how_it_ended(job, state.job_url)
    except OrchestratorError:
        return None if record is None else explain_waiting(record)


def _slurms_record(job_id: str | None) -> JobRecord | None:
    try:
        return None if job_id is None else SlurmCommands().job(job_id)
    except SchedulerError:
        return None


def _how_it_ended(job: str, url: str) -> str | None:
    """By its newest end record. None if there is none. Raises StoreError, FormatError, NotFoundError."""
    store = open_job(url, None)
    catalog = survey(store)
    end = read_end(store, max(catalog.generations, default=0))
    newest = catalog.newest()
    where = f"its newest checkpoint is {newest.id}" if newest else "it has no checkpoint"
    if end is None:
        return f"the job {job!r} does not run, and nobody wrote down how it ended; {where}: `orchestrator run` goes on"
    return f"the job {job!r} does not run: {end.outcome}, {end.reason}; {where}"

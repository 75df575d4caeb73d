"""Why a job that a verb asks for does not run: what Slurm waits for, what a dead supervisor left, how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.catalog import survey
from orchestrator.checkpoint.generations import read_end
from orchestrator.cli.checkpoints import open_job
from orchestrator.core.wording import counted
from orchestrator.errors import ConfigError, OrchestratorError, SchedulerError
from orchestrator.schedulers.leftovers import read_leftovers
from orchestrator.schedulers.slurm.commands import SlurmCommands
from orchestrator.schedulers.slurm.records import ENDED_STATES, JobRecord
from orchestrator.schedulers.slurm.submission import explain_waiting
from orchestrator.supervisor.state_folder import StateFolder, known_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Of a job that does not run."""

    words: str
    """For people, with what to do."""
    outcome: str | None = None
    """How it ended: done, drained, cancelled or failed; None: it did not, or nobody knows."""
    reason: str | None = None
    newest_committed: str | None = None


def absence_of(job: str) -> Absence | None:
    """What can be said; None: nothing."""
    try:
        state = known_job(job)
    except ConfigError:
        return None
    left = _left_running(state)
    if left is not None:
        return Absence(words=left)
    record = _slurms_record(state.slurm_job())
    waiting = None if record is None else explain_waiting(record)
    if record is not None and waiting is not None and record.state not in ENDED_STATES:
        return Absence(words=waiting)
    try:
        return _how_it_ended(state)
    except OrchestratorError:
        return None if waiting is None else Absence(words=waiting)


def _left_running(state: StateFolder) -> str | None:
    """Nodes that a supervisor which died has left on this machine."""
    alive = [node for node in read_leftovers(state.path / "nodes.json").nodes if node.is_alive()]
    if not alive:
        return None
    pids = ", ".join(str(node.pid) for node in alive)
    then = "takes what runs back"
    if not state.address_path.exists():  # a rollback took it away
        then = "ends it, and goes on from what was gone back to"
    return (
        f"the supervisor of the job {state.job!r} has died, and {counted(len(alive), 'node')} of it (process {pids}) "
        f"may still train: the same `orchestrator run` {then}; `orchestrator cancel` ends it after that"
    )


def _slurms_record(job_id: str | None) -> JobRecord | None:
    try:
        return None if job_id is None else SlurmCommands().job(job_id)
    except SchedulerError:
        return None


def _how_it_ended(state: StateFolder) -> Absence:
    """By its newest end record. Raises StoreError, FormatError, NotFoundError."""
    store = open_job(state.job_url, None)
    catalog = survey(store)
    end = read_end(store, max(catalog.generations, default=0))
    newest = catalog.newest()
    where = f"its newest checkpoint is {newest.id}" if newest else "it has no checkpoint"
    newest_id = None if newest is None else str(newest.id)
    if end is None:
        words = f"the job {state.job!r} does not run, and nobody wrote down how it ended; {where}"
        return Absence(words=f"{words}: `orchestrator run` goes on", newest_committed=newest_id)
    told = end.reason.startswith((end.outcome, "rolled back"))
    how = end.reason if told else f"{end.outcome}: {end.reason}"
    return Absence(
        words=f"the job {state.job!r} has ended: {how}; {where}",
        outcome=str(end.outcome),
        reason=end.reason,
        newest_committed=newest_id,
    )

"""What saving will need, said before it is needed: memory, upload time, whether that fits a notice. Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.deadline import Course, Option, Pending, to_store
from orchestrator.core.states import Job
from orchestrator.core.turn import Turn


def save_on_notice_seconds(job: Job) -> float | None:
    """How long a save takes from the notice to the commit where all nodes go at once, its margin included.

    None before every part of it was measured.
    """
    save = _save_on_notice(job, all_go=True)
    return save.seconds if save is not None and save.all_measured else None


def _save_on_notice(job: Job, *, all_go: bool) -> Option | None:
    """What a save takes by what is known; None before all ranks have planned.

    Where all nodes go at once each rank's whole shard has to get to the store, else what its node alone holds.
    """
    ranks = job.ranks
    largest_bytes = ranks.slot_bytes.highest
    if not largest_bytes or not ranks.everyone <= ranks.planned:
        return None
    one = Pending(
        step=job.highest_step + 1,
        complete=False,
        steps_away=1,
        size_bytes=(job.shard_bytes or largest_bytes) if all_go else ranks.unique_bytes.highest or 0,
    )
    measured = replace(job.measured, step_seconds=ranks.step_seconds.highest or job.measured.step_seconds)
    return to_store(Course.SAVE, one, measured)


def report(turn: Turn) -> None:
    """Note the numbers, once all ranks of the gang have planned; again when the upload speed is first measured."""
    job = turn.job
    ranks = job.ranks
    option = _save_on_notice(job, all_go=job.gang is not None and len(job.gang.nodes) == 1)
    if option is None:
        return
    fits = option.seconds <= job.spec.grace_seconds
    word = "fits in" if fits else "cannot make it in"
    memory_bytes = 2 * ranks.staging_bytes
    turn.note(
        "preflight",
        f"{memory_bytes / 2**20:.1f} MiB of staging memory in two slots per rank; on notice {option.arithmetic}; "
        f"{word} {job.spec.grace_seconds:.1f} s of notice",
        facts=turn.facts(staging_bytes=memory_bytes, largest_shard_bytes=ranks.slot_bytes.highest, fits=fits),
    )

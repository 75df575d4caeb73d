"""What saving will need, said before it is needed: memory, upload time, whether that fits a notice. Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.deadline import Course, Pending, to_store
from orchestrator.core.turn import Turn


def report(turn: Turn) -> None:
    """Note the numbers, once all ranks of the gang have planned; again when the upload speed is first measured."""
    job = turn.job
    ranks = job.ranks
    largest_bytes = ranks.slot_bytes.highest
    if not largest_bytes or not ranks.everyone <= ranks.planned:
        return
    alone = job.gang is not None and len(job.gang.nodes) == 1
    one = Pending(
        step=job.highest_step + 1,
        complete=False,
        steps_away=1,
        size_bytes=largest_bytes if alone else ranks.unique_bytes.highest or 0,
    )
    measured = replace(job.measured, step_seconds=ranks.step_seconds.highest or job.measured.step_seconds)
    option = to_store(Course.SAVE, one, measured)
    fits = option.seconds <= job.spec.grace_seconds
    word = "fits in" if fits else "cannot make it in"
    memory_bytes = 2 * ranks.staging_bytes
    turn.note(
        "preflight",
        f"{memory_bytes / 2**20:.1f} MiB of staging memory in two slots per rank; on notice {option.arithmetic}; "
        f"{word} {job.spec.grace_seconds:.1f} s of notice",
        facts=turn.facts(staging_bytes=memory_bytes, largest_shard_bytes=largest_bytes, fits=fits),
    )

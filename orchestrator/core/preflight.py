"""What saving will need, said before it is needed: memory, upload time, whether that fits a notice. Pure."""

from __future__ import annotations

from orchestrator.core.policy import fit_deadline
from orchestrator.core.turn import Turn


def report(turn: Turn) -> None:
    """Note the numbers, once all ranks of the gang have planned; again when the upload speed is first measured."""
    job = turn.job
    ranks = job.ranks
    largest_bytes = ranks.slot_bytes.highest
    if not largest_bytes or not ranks.everyone <= ranks.planned:
        return
    fit = fit_deadline(
        steps_away=1,
        step_seconds=job.step_seconds,
        stage_seconds=job.stage_seconds,
        size_bytes=largest_bytes,
        bandwidth_bytes_per_second=job.bandwidth_bytes_per_second,
        remaining_seconds=job.spec.grace_seconds,
    )
    memory_bytes = 2 * ranks.staging_bytes
    turn.note(
        "preflight",
        f"{memory_bytes / 2**20:.1f} MiB of staging memory in two slots per rank; on notice {fit.reason} of notice",
        facts=turn.facts(staging_bytes=memory_bytes, largest_shard_bytes=largest_bytes, fits=fit.fits),
    )

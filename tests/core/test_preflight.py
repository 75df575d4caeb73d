"""How long a save on notice takes, by what was measured: what a pod's grace and Slurm's limits are compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.deadline import MARGIN_SECONDS, MARGIN_SHARE, Measured
from orchestrator.core.job import new_job
from orchestrator.core.preflight import save_on_notice_seconds
from orchestrator.core.ranks import Ranks, RankSet
from orchestrator.core.states import Job, JobSpec

GIB = 1 << 30
MEASURED = Measured(step_seconds=2.0, stage_seconds=1.0, commit_seconds=0.5, store_bytes_per_second=GIB / 2)


def job_of(measured: Measured, *, planned: int = 2) -> Job:
    """Two ranks, of which `planned` have told what they will stage: 10 and 12 GiB, of which a MiB is theirs alone."""
    ranks = Ranks.starting(2, 0)
    for rank, size_bytes in list(enumerate((10 * GIB, 12 * GIB)))[:planned]:
        ranks = ranks.plan(rank, slot_bytes=size_bytes, unique_bytes=1 << 20, twins=(RankSet.of((0, 1)),))
    spec = JobSpec(name="job", nodes_min=1, nodes_max=2, workers_per_node=1, save_every_steps=10)
    return new_job(spec, 0.0).changed(ranks=ranks, measured=measured)


def test_where_all_nodes_go_the_largest_shard_has_to_get_to_the_store() -> None:
    seconds = 2.0 + 1.0 + 24.0 + 0.5
    assert save_on_notice_seconds(job_of(MEASURED)) == pytest.approx(seconds * (1 + MARGIN_SHARE) + MARGIN_SECONDS)


def test_a_shard_counts_as_it_was_staged_not_as_its_slot_which_has_room_for_more() -> None:
    seconds = 2.0 + 1.0 + 12.0 + 0.5
    job = job_of(MEASURED).changed(shard_bytes=6 * GIB)
    assert save_on_notice_seconds(job) == pytest.approx(seconds * (1 + MARGIN_SHARE) + MARGIN_SECONDS)


@pytest.mark.parametrize("unknown", ["step_seconds", "stage_seconds", "store_bytes_per_second"])
def test_nothing_is_said_before_it_was_measured(unknown: str) -> None:
    assert save_on_notice_seconds(job_of(replace(MEASURED, **{unknown: None}))) is None


def test_nothing_is_said_before_every_rank_has_planned() -> None:
    assert save_on_notice_seconds(job_of(MEASURED, planned=1)) is None

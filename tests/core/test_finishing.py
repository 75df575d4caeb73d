"""What is said when a job ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.finishing import reason_of
from orchestrator.core.job import new_job
from orchestrator.core.messages import CheckpointId, Outcome
from orchestrator.core.states import Ending, JobSpec

SPEC = JobSpec(name="small", nodes_min=1, nodes_max=1, workers_per_node=1, save_every_steps=10)
NEWEST = CheckpointId(generation=1, step=10)


@pytest.mark.parametrize(
    ("outcome", "trouble", "newest", "reason"),
    [
        (Outcome.DRAINED, None, NEWEST, "drained by tests"),
        (
            Outcome.DRAINED,
            "no space is left",
            NEWEST,
            "drained by tests; its last save failed (no space is left): the newest checkpoint is g00000001-s0000000010",
        ),
        (
            Outcome.DRAINED,
            "no space is left",
            None,
            "drained by tests; its last save failed (no space is left): there is no checkpoint",
        ),
        (Outcome.CANCELLED, "no space is left", NEWEST, "drained by tests"),
    ],
)
def test_a_drain_whose_save_failed_says_so(
    outcome: Outcome, trouble: str | None, newest: CheckpointId | None, reason: str
) -> None:
    """Its status promises that the same command goes on; from where, a person has to know."""
    ending = Ending(outcome=outcome, exit_code=75, reason="drained by tests")
    job = replace(new_job(SPEC, 0.0), ending=ending, trouble=trouble, newest_committed=newest)
    assert reason_of(job) == reason

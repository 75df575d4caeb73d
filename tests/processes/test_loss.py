"""A script that tells its loss, in a real job: what goes wrong is an event, said once for all ranks, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.harness import final_digests, run_job

FROM_STEP = 20


async def test_a_loss_that_is_nan_is_told_once_and_training_goes_on(
    tmp_path: Path, staging: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on two nodes tell it; what they save is to the bit what ranks save that tell nothing."""
    monkeypatch.setenv("LOSS_NAN_FROM", str(FROM_STEP))
    result = await run_job(tmp_path, nodes="2", staging=staging)
    assert result.finish.exit_code == 0, result.output()
    (told,) = result.kinds("loss trouble")
    assert (told.step, told.generation, told.facts["value"]) == (FROM_STEP, 1, "nan")
    assert told.rank in (0, 1)
    assert told.facts["good_step"] == FROM_STEP - 1
    assert told.reason.startswith(f"rank {told.rank}: the loss is nan at step {FROM_STEP}; ")
    assert not result.kinds("loss well")
    assert not result.kinds("gang broken")
    assert final_digests(result.store) == reference

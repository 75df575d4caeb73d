"""Ten kills at random times of a real job. `make soak` does two hundred."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.kill_plans import Victim, draw
from tests.processes.kill_times import Soak, closing_words, soak
from tests.processes.observation import Moment
from tests.processes.reference import Entry, Reference

KILLS = 10


def test_a_kill_is_drawn_from_seed_and_number_alone() -> None:
    """Sixteen kills in a row hold every victim with every aim, and one of them alone is drawn the same."""
    plans = [draw(3, number) for number in range(16)]
    assert len({(plan.victim, plan.aim) for plan in plans}) == len(Victim) * 4
    assert [draw(3, number) for number in reversed(range(16))] == plans[::-1]
    assert draw(4, 0) != plans[0]
    assert all(plan.settle for plan in plans if plan.aim is not None)
    assert {plan.aim for plan in plans} == {Moment.STAGING, Moment.UPLOADING, Moment.COMMITTING, None}


def test_another_state_than_the_uninterrupted_runs_is_noticed(tmp_path: Path) -> None:
    """One bit, one missing tensor, one other position: each is told by its name."""
    true: dict[str, Any] = {
        "generation": 1,
        "step": 5,
        "rank": 0,
        "tensors": {"a": "F32[1]:0", "b": "F32[1]:1"},
        "values": {"p": 80},
    }
    (tmp_path / "generation-0001-step-000005-rank-0.json").write_text(json.dumps(true))
    reference = Reference(tmp_path)

    def problem(**changes: object) -> str | None:
        return reference.problem_of_entry(Entry(**{**true, **changes}))

    assert problem(generation=7) is None
    assert "a is F32[1]:2, not F32[1]:0" in str(problem(tensors={"a": "F32[1]:2", "b": "F32[1]:1"}))
    assert "b is None" in str(problem(tensors={"a": "F32[1]:0"}))
    assert "p is 64, not 80" in str(problem(values={"p": 64}))
    assert "no such entry" in str(problem(step=6))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_kills_at_random_times(tmp_path: Path, staging: str, seed: int) -> None:
    """F19, F20, F22, F24, F29, F30: whatever is killed whenever, the newest committed checkpoint is bit-identical."""
    result = Soak(seed=seed)
    soak(result, range(KILLS), tmp_path, Path(staging), lambda line: print(line, file=sys.stderr))
    assert result.passed, "\n".join(closing_words(result))
    assert len(result.kills) == KILLS
    saving = (Moment.STAGING, Moment.UPLOADING, Moment.COMMITTING)
    assert any(kill.landed in saving for kill in result.kills), "no kill hit a save"

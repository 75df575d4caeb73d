"""A rank that comes last to the boundary again and again: said once, by how much, and only if it is always the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.core.job import step as job_step
from orchestrator.core.messages import Action, Note
from orchestrator.core.straggling import STEPS_LAST, STRAGGLER
from tests.core.test_scenarios import SCENARIOS, Play, parse_event, play

STEP_SECONDS = 2.0


def told(steps: int, late: Callable[[int], tuple[str, float]]) -> list[Note]:
    """Two ranks on two nodes take so many steps; `late` says which node comes how much later to a step."""
    run, _ = play(SCENARIOS / "fresh-start.txt")
    notes: list[Note] = []

    def take(now_seconds: float, node: str, step: int) -> None:
        progress = f"Progress(node={node}, step={step}, step_seconds={STEP_SECONDS})"
        for action in _actions(run, now_seconds, progress):
            if isinstance(action, Note) and action.kind == STRAGGLER:
                notes.append(action)

    for step in range(2, steps + 2):
        node, seconds = late(step)
        now = 10.0 + step * STEP_SECONDS
        take(now, "a" if node == "b" else "b", step)
        take(now + seconds, node, step)
    return notes


def _actions(run: Play, now_seconds: float, text: str) -> tuple[Action, ...]:
    run.job, actions = job_step(run.job, parse_event(text, run.job), now_seconds)
    return actions


def test_always_the_same_rank_is_told_once() -> None:
    (note,) = told(3 * STEPS_LAST, lambda step: ("b", 0.6))
    assert (note.rank, note.node) == (1, "b")
    assert note.reason.startswith(
        f"it came last to {STEPS_LAST} steps in a row, 0.6 s after the first (30 % of a step)"
    )


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(lambda step: ("b", 0.3), id="too-little"),
        pytest.param(lambda step: ("b" if step % 10 else "a", 0.6), id="not-always-the-same"),
        pytest.param(lambda step: ("b", 0.0 if step % 10 == 0 else 0.6), id="not-always-late"),
    ],
)
def test_what_is_no_straggler(late: Callable[[int], tuple[str, float]]) -> None:
    assert told(3 * STEPS_LAST, late) == []


def test_twice_in_a_generation_is_not_told_twice() -> None:
    spell = STEPS_LAST + 5
    assert len(told(3 * spell, lambda step: ("b", 0.6 if (step // spell) % 2 == 0 else 0.0))) == 1

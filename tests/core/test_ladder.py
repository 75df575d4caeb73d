"""What is tried after a failure, how often, and how fast (F86, F119)."""

from __future__ import annotations

import pytest

from orchestrator.core.ladder import (
    FREE_RESTARTS,
    PAUSE_SECONDS_MAX,
    Attempt,
    Rung,
    climb,
    evidence,
    growing_seconds,
    may_read_memory,
    pause_seconds,
)
from orchestrator.core.messages import CheckpointId

NEWEST, OLDER, OLDEST = (CheckpointId(generation=6, step=step) for step in (40, 30, 20))


def failed(*bases: CheckpointId | None) -> list[Attempt]:
    """One failed generation from each of these bases."""
    return [Attempt(generation=number, base=base, how=f"failed {number}") for number, base in enumerate(bases, start=1)]


@pytest.mark.parametrize(
    ("bases", "failures_max", "rung"),
    [
        ([NEWEST], 2, Rung.AGAIN),
        ([NEWEST] * 2, 2, Rung.AGAIN),
        ([NEWEST] * 3, 2, Rung.OLDER),
        ([NEWEST] * 3 + [OLDER], 2, Rung.AGAIN),
        ([NEWEST] * 3 + [OLDER] * 2, 2, Rung.AGAIN),
        ([NEWEST] * 3 + [OLDER] * 3, 2, Rung.STOP),
        ([None], 2, Rung.AGAIN),
        ([None] * 3, 2, Rung.STOP),
        ([NEWEST], 0, Rung.STOP),
        ([NEWEST], 1, Rung.AGAIN),
        # Unreadable ones, one after another: a rung each, and an end.
        ([NEWEST, OLDER, OLDEST], 1, Rung.AGAIN),
        ([NEWEST, OLDER, OLDEST, OLDEST], 1, Rung.STOP),
    ],
)
def test_the_rungs(bases: list[CheckpointId | None], failures_max: int, rung: Rung) -> None:
    choice = climb(failed(*bases), failures_max=failures_max)
    assert choice.rung is rung
    assert choice.reason


def test_memory_is_believed_once() -> None:
    """After a failure the next start reads its base from memory; if that fails too, the ones after it use the store."""
    assert may_read_memory([], NEWEST)
    assert may_read_memory(failed(NEWEST), NEWEST)
    assert not may_read_memory(failed(NEWEST, NEWEST), NEWEST)
    assert may_read_memory(failed(NEWEST, NEWEST, OLDER), OLDER)


def test_whatever_fails_the_ladder_ends() -> None:
    for failures_max in range(6):
        attempts = failed(NEWEST)
        base: CheckpointId | None = NEWEST
        while (choice := climb(attempts, failures_max=failures_max)).rung is not Rung.STOP:
            if choice.rung is Rung.OLDER:
                base = OLDER
            attempts = failed(*(attempt.base for attempt in attempts), base)
        assert len(attempts) == (2 * (failures_max + 1) if failures_max else 1)


def test_the_evidence_names_generations_bases_and_ends_and_is_short() -> None:
    assert evidence([]) == ""
    assert evidence(failed(NEWEST, None)) == (
        "tried: generation 1 from g00000006-s0000000040: failed 1; generation 2 from a fresh start: failed 2"
    )
    many = evidence(failed(*[NEWEST] * 20))
    assert "12 earlier ones; generation 13" in many
    assert len(str(Attempt(generation=1, base=None, how="x" * 10_000))) < 300


def test_generations_without_a_commit_come_slower_and_slower() -> None:
    pauses = [pause_seconds(number) for number in range(40)]
    assert pauses[: FREE_RESTARTS + 3] == [0.0] * (FREE_RESTARTS + 1) + [2.0, 4.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSE_SECONDS_MAX
    assert (growing_seconds(10**9, 1.0, 60.0), growing_seconds(-1, 1.0, 60.0)) == (60.0, 0.0)

"""The whole job in a model with random delays and faults: what the protocol promises, for hundreds of seeds.

`tests.core.job_model` says what is simulated and which rules are checked all along. A failure prints its seed and the
end of what happened; `ORCHESTRATOR_TEST_SEED` (see `tests/conftest.py`) replays the random part. The planted bugs show
that the model can find what it is there for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace

import pytest

from orchestrator.checkpoint.slots import Record
from orchestrator.core import agreement, settling
from orchestrator.core.agreement import Proposal
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.messages import Decide, Note, Request
from orchestrator.core.states import Phase
from orchestrator.core.turn import Turn
from tests.core.job_model import Model, Worker, run_seed

SEEDS = range(250)
RANDOM_SEEDS = 50
SHORT_SEEDS = range(60)
PLANTED_SEEDS = range(400)


def problems(seeds: Iterable[int], ending: Request | None = None) -> list[str]:
    """What went wrong in which seeds."""
    return [problem for seed in seeds if (problem := run_seed(seed, ending)[0]) is not None]


def test_every_seed_ends_well() -> None:
    """Losses, notices (true, false, withdrawn), deaths, a failing store, resizes (F1, F9, F28, F87, F97, W6, W12).

    Also guards against a model that has become too tame to find anything.
    """
    seen: Counter[str] = Counter()
    for number in SEEDS:
        problem, model = run_seed(number)
        assert problem is None, problem
        seen.update({what for _, thing in model.trace for what in occurrences(thing)})
    kinds = (
        "Refused",
        "Passed",
        "IndexFailed",
        "UploadFailed",
        "leave",
        "remapped",
        "abandoned",
        "NodeLost",
        "leaving",
        "cannot make it",
    )
    assert {kind: seen[kind] for kind in kinds if seen[kind] < 5} == {}, seen


def occurrences(thing: object) -> set[str]:
    """What one entry of the trace shows."""
    match thing:
        case Phase():
            return {str(thing)}
        case Decide():
            return {str(thing.mode)}
        case Note():
            return {thing.kind}
        case _:
            return {type(thing).__name__}


def test_short_notices_with_a_slow_store_end_well() -> None:
    """Saves that do not fit, shards that are handed over to peers, and both while nodes vanish (F3)."""
    seen: Counter[str] = Counter()
    for number in SHORT_SEEDS:
        problem, model = run_seed(number, short_of_time=True)
        assert problem is None, problem
        seen.update({what for _, thing in model.trace for what in occurrences(thing)})
    kinds = ("course chosen", "cannot make it", "hand-over asked", "handed over", "abandoned", "leaving")
    assert {kind: seen[kind] for kind in kinds if seen[kind] < 5} == {}, seen


def test_random_seeds_end_well(seed: int) -> None:
    draw = random.Random(seed)
    assert problems(draw.randrange(1 << 32) for _ in range(RANDOM_SEEDS)) == []


@pytest.mark.parametrize("ending", [Request.DRAIN, Request.CANCEL])
def test_drained_and_cancelled_jobs_end_as_asked(ending: Request) -> None:
    assert problems(range(50), ending) == []


# ------------------------------------------------------------------------------------------- planted bugs


def decided_without_echoes(patch: pytest.MonkeyPatch) -> None:
    """The naive rule: the highest step plus a margin, without hearing from every rank (W6)."""
    patch.setattr(agreement, "agreed", lambda proposal, world_size: proposal.refused_by is None)


def refusal_taken_for_an_echo(patch: pytest.MonkeyPatch) -> None:
    """A rank that was past the step already is counted among those who will stage it."""

    def refuse(proposal: Proposal, *, ballot: int, rank: int) -> Proposal:
        return replace(proposal, echoes=proposal.echoes.plus(rank)) if ballot == proposal.ballot else proposal

    patch.setattr(agreement, "refuse", refuse)


def committed_before_the_last_receipt(patch: pytest.MonkeyPatch) -> None:
    """The index is asked for as soon as any shard is durable (F28)."""
    patch.setattr(settling, "committable", lambda save, **_: bool(save.durable))


def abandoned_by_a_node_that_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Nobody takes over the abandoned index: clearing waits for a node that is gone."""
    move = settling.move_save

    def keep(turn: Turn, save: Save) -> None:
        if save.state is not SaveState.ABANDONING:
            move(turn, save)

    patch.setattr(settling, "move_save", keep)
    patch.setattr(settling, "give_up", lambda turn, save, reason: None)


def nobody_waits_for_the_decision(patch: pytest.MonkeyPatch) -> None:
    """Workers echo, but go on at the proposed step when the decision is not there yet."""
    real = Model.boundary

    def boundary(self: Model, worker: Worker, number: int) -> Generator[float, None, bool]:
        record: Record = worker.record
        if number == record.proposed_step != self.until:
            self.echo(worker, record, number)
            yield self.tiny()
            worker.published = worker.past = number
            return False
        return (yield from real(self, worker, number))

    patch.setattr(Model, "boundary", boundary)


PLANTED = [
    decided_without_echoes,
    refusal_taken_for_an_echo,
    committed_before_the_last_receipt,
    abandoned_by_a_node_that_is_lost,
    nobody_waits_for_the_decision,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_model_finds_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    number = next((number for number in PLANTED_SEEDS if run_seed(number)[0] is not None), None)
    print(f"{plant.__name__}: found by seed {number}")
    assert number is not None

"""What a node knows of its decided steps: who has ordered an upload, what is settled, which slots may go."""

from __future__ import annotations

import pytest

from orchestrator.agent.saves import LocalSaves
from orchestrator.core.messages import Decide, Mode, Settled, StepDecided, Upload, Uploaded

NODE, GENERATION, WORLD_SIZE = "node-1", 4, 3


def decide(saves: LocalSaves, step: int, mode: Mode = Mode.STAY, absent: tuple[int, ...] = ()) -> None:
    action = Decide(
        node=NODE, generation=GENERATION, ballot=1, step=step, mode=mode, absent=absent, remaining_seconds=None
    )
    saves.decide(action)


def upload(step: int, absent: tuple[int, ...] = ()) -> Upload:
    return Upload(node=NODE, generation=GENERATION, step=step, world_size=WORLD_SIZE, absent=absent)


def settle(saves: LocalSaves, step: int, committed: bool) -> None:
    saves.settle(Settled(node=NODE, generation=GENERATION, step=step, committed=committed))


@pytest.fixture
def saves() -> LocalSaves:
    return LocalSaves(GENERATION, WORLD_SIZE)


def test_nothing_is_ordered_before_anything_is_decided(saves: LocalSaves) -> None:
    assert saves.orders_alone(NODE) == []
    assert saves.order_of(10) is None
    assert saves.undecided({10: (0,)}) == ()  # staged, but never decided here


def test_a_decided_step_is_ordered_alone_with_its_absent_ranks(saves: LocalSaves) -> None:
    decide(saves, 10, absent=(2,))
    assert saves.order_of(10) is None  # only once the supervisor is away
    assert saves.orders_alone(NODE) == [upload(10, absent=(2,))]
    assert saves.order_of(10) == upload(10, absent=(2,))


def test_an_order_of_the_supervisor_is_repeated_until_the_step_is_settled(saves: LocalSaves) -> None:
    """It may have failed: nobody else would ask for it again."""
    decide(saves, 10)
    saves.order(upload(10))
    decide(saves, 20)
    assert saves.orders_alone(NODE) == [upload(10), upload(20)]
    settle(saves, 10, committed=True)
    settle(saves, 20, committed=False)
    assert saves.orders_alone(NODE) == []


def test_what_is_not_settled_is_told_with_who_has_staged_it(saves: LocalSaves) -> None:
    decide(saves, 10)
    decide(saves, 20, Mode.LEAVE, (1,))
    assert saves.undecided({20: (0, 2)}) == (
        StepDecided(step=10, mode=Mode.STAY, absent=(), staged=()),
        StepDecided(step=20, mode=Mode.LEAVE, absent=(1,), staged=(0, 2)),
    )
    settle(saves, 10, committed=True)
    assert [step.step for step in saves.undecided({})] == [20]


def test_the_newest_committed_step_is_no_abandoned_one(saves: LocalSaves) -> None:
    assert saves.committed_step is None
    settle(saves, 10, committed=True)
    settle(saves, 20, committed=False)
    assert saves.committed_step == 10
    settle(saves, 5, committed=True)  # an older upload ends later
    assert saves.committed_step == 10


def test_a_committed_step_keeps_its_slot_until_a_newer_one_is_complete(saves: LocalSaves) -> None:
    decide(saves, 10)
    saves.order(upload(10))
    assert not saves.may_free(10)
    settle(saves, 10, committed=True)
    assert not saves.may_free(10)
    decide(saves, 20)
    assert not saves.may_free(10)
    saves.order(upload(20))
    assert saves.may_free(10)
    assert not saves.may_free(20)


def test_a_step_that_is_settled_after_a_newer_one_gives_its_slot_back(saves: LocalSaves) -> None:
    """Else both slots would be held for ever: the newer step keeps the other one."""
    for step in (10, 20):
        decide(saves, step)
        saves.order(upload(step))
    settle(saves, 20, committed=True)
    decide(saves, 30)
    settle(saves, 10, committed=True)
    assert saves.may_free(10)
    assert not saves.may_free(20)


def test_an_abandoned_step_gives_its_slot_back_at_once(saves: LocalSaves) -> None:
    decide(saves, 10)
    settle(saves, 10, committed=False)
    assert saves.may_free(10)


def test_an_order_of_ones_own_does_not_make_a_step_complete(saves: LocalSaves) -> None:
    """Alone nobody knows whether the newer step is complete: the older one stays in memory."""
    decide(saves, 10)
    saves.order(upload(10))
    settle(saves, 10, committed=True)
    decide(saves, 20)
    assert saves.orders_alone(NODE) == [upload(20)]
    assert not saves.may_free(10)


def test_an_upload_is_remembered_by_step_and_rank(saves: LocalSaves) -> None:
    done = Uploaded(node=NODE, generation=GENERATION, step=10, rank=1, size_bytes=5, seconds=0.1)
    saves.uploaded(done)
    assert saves.upload_of(10, 1) == done
    assert saves.upload_of(10, 0) is None
    assert saves.upload_of(20, 1) is None

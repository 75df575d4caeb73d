"""When a decided step is complete, when all may leave, and when its index may be written (F28, F30, F16)."""

from __future__ import annotations

import pytest

from orchestrator.core.commit import NOTICE_SECONDS_ASSUMED, Save, committable, hopeless, staging_over
from orchestrator.core.messages import CheckpointId, Mode
from orchestrator.core.ranks import NOBODY, RankSet

DEADLINE = 30.0


def save(
    *,
    absent: str = "",
    staged: str = "",
    durable: str = "",
    given_up: str = "",
    held: str = "",
    deadline: bool = True,
) -> Save:
    """A save of four ranks; ranks are given as digits."""
    return Save(
        id=CheckpointId(generation=1, step=10),
        mode=Mode.LEAVE,
        world_size=4,
        absent=ranks(absent),
        decided_at_seconds=0.0,
        deadline_seconds=DEADLINE if deadline else None,
        staged=ranks(staged),
        durable=ranks(durable),
        given_up=ranks(given_up),
        held=ranks(held),
    )


def ranks(digits: str) -> RankSet:
    """ "013" → ranks 0, 1 and 3."""
    return RankSet.of(int(digit) for digit in digits)


@pytest.mark.parametrize(
    ("absent", "staged", "complete"),
    [("", "012", False), ("", "0123", True), ("3", "012", True), ("3", "013", False), ("3", "0123", True)],
)
def test_complete_is_every_rank_outside_the_absent_set(absent: str, staged: str, complete: bool) -> None:
    assert save(absent=absent, staged=staged).complete is complete


@pytest.mark.parametrize(
    ("decided", "gone", "now", "over"),
    [
        (save(staged="012"), "", 0, False),
        (save(staged="012"), "3", 0, False),
        (save(staged="012"), "", 99, False),
        (save(staged="0123"), "", 0, True),
        (save(absent="3", staged="012"), "", 29, False),
        (save(absent="3", staged="012"), "", 30, True),
        (save(absent="3", staged="012"), "3", 0, True),
        (save(absent="3", staged="012", given_up="3"), "", 0, True),
        (save(absent="3", staged="0123"), "", 0, True),
        (save(absent="3", staged="012", deadline=False), "", NOTICE_SECONDS_ASSUMED - 1, False),
        (save(absent="3", staged="012", deadline=False), "", NOTICE_SECONDS_ASSUMED, True),
    ],
)
def test_absent_ranks_are_awaited_until_they_are_gone_or_their_time_is_over(
    decided: Save, gone: str, now: float, over: bool
) -> None:
    assert staging_over(decided, gone=ranks(gone), now_seconds=now) is over


@pytest.mark.parametrize(
    ("decided", "gone", "now", "may"),
    [
        (save(absent="3", staged="012", durable="012"), "", 29, False),
        (save(absent="3", staged="012", durable="012"), "", 30, True),
        (save(absent="3", staged="012", durable="012"), "3", 0, True),
        (save(staged="0123", durable="012"), "", 0, False),
        (save(staged="0123", durable="012"), "3", 99, False),
        (save(staged="0123", durable="0123"), "", 0, True),
        (save(absent="3", staged="0123", durable="012"), "", 29, False),
        (save(absent="3", staged="0123", durable="012"), "", 30, True),
        (save(absent="3", staged="0123", durable="012"), "3", 0, True),
        (save(absent="3", staged="0123", durable="012", given_up="3"), "", 0, True),
        (save(absent="3", staged="0123", durable="013"), "", 99, False),
        (save(absent="3", staged="0123", durable="0123"), "", 0, True),
        (save(absent="3", staged="0123", durable="012", deadline=False), "", NOTICE_SECONDS_ASSUMED, True),
        (save(absent="3", staged="0123", durable="012", held="3"), "", 99, False),
        (save(absent="3", staged="0123", durable="012", held="3"), "3", 99, True),
        (save(absent="3", staged="0123", durable="0123", held="3"), "", 99, True),
    ],
)
def test_the_index_needs_every_required_receipt_and_waits_for_the_others_while_there_is_time(
    decided: Save, gone: str, now: float, may: bool
) -> None:
    assert committable(decided, gone=ranks(gone), exited=NOBODY, now_seconds=now) is may


@pytest.mark.parametrize(("staged", "may"), [("012", True), ("0123", False)])
def test_a_worker_that_has_ended_stages_no_more(staged: str, may: bool) -> None:
    decided = save(absent="3", staged=staged, durable="012")
    assert committable(decided, gone=NOBODY, exited=ranks("0123"), now_seconds=0) is may


@pytest.mark.parametrize(
    ("decided", "gone", "lost"),
    [
        (save(durable="01"), "", ""),
        (save(durable="01"), "12", "2"),
        (save(durable="01"), "23", "23"),
        (save(absent="3", durable="01"), "3", ""),
        (save(durable="0123"), "0123", ""),
    ],
)
def test_a_required_shard_that_is_not_durable_is_lost_with_its_node(decided: Save, gone: str, lost: str) -> None:
    assert hopeless(decided, gone=ranks(gone)) == ranks(lost)

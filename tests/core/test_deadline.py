"""What a notice's time is used for: the newest state that can be safe before the deadline (F3, F18)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from orchestrator.core.deadline import (
    Choice,
    Course,
    Measured,
    Pending,
    Situation,
    choose,
    needs_hand_over,
    reach_seconds,
)

MEASURED = Measured(
    step_seconds=1.0, stage_seconds=2.0, commit_seconds=1.0, store_bytes_per_second=10.0, peer_bytes_per_second=100.0
)
UNKNOWN = Measured()
COMPLETE = Pending(step=10, complete=True, steps_away=0, size_bytes=100)
STAGING = Pending(step=12, complete=False, steps_away=0, size_bytes=100)
SITUATION = Situation(
    remaining_seconds=30.0,
    trained=True,
    next_step=15,
    steps_away=2,
    idle_seconds=0.0,
    unique_bytes=0,
    pending=(),
    can_hand_over=True,
    standing="checkpoint x",
    measured=MEASURED,
)


def chosen(**changes: object) -> tuple[Course, int | None, bool]:
    """The course, its step, and whether with hand-over."""
    choice = choose(replace(SITUATION, **changes))  # type: ignore[arg-type]
    return choice.course, choice.step, choice.hand_over


@pytest.mark.parametrize(
    ("changes", "course"),
    [
        ({}, (Course.SAVE, 15, False)),
        ({"remaining_seconds": None, "unique_bytes": 10**9}, (Course.SAVE, 15, False)),
        # 2 s to the step, 2 s staging, 1 s commit, a tenth more and 1 s: 6.5 s
        ({"remaining_seconds": 6.5}, (Course.SAVE, 15, False)),
        ({"remaining_seconds": 6.4}, (Course.STAND, None, False)),
        ({"remaining_seconds": 0.0}, (Course.STAND, None, False)),
        ({"unique_bytes": 200}, (Course.SAVE, 15, False)),
        ({"unique_bytes": 300}, (Course.SAVE, 15, True)),
        ({"unique_bytes": 300, "can_hand_over": False}, (Course.STAND, None, False)),
        ({"unique_bytes": 3000}, (Course.STAND, None, False)),
        ({"unique_bytes": 3000, "pending": (COMPLETE,)}, (Course.UPLOAD, 10, False)),
        ({"unique_bytes": 3000, "pending": (STAGING, COMPLETE)}, (Course.WAIT, 12, False)),
        ({"remaining_seconds": 5.0, "pending": (STAGING, COMPLETE)}, (Course.WAIT, 12, True)),
        ({"remaining_seconds": 3.0, "pending": (STAGING, COMPLETE)}, (Course.UPLOAD, 10, True)),
        ({"remaining_seconds": 3.0, "pending": (COMPLETE,), "can_hand_over": False}, (Course.STAND, None, False)),
        ({"trained": False}, (Course.STAND, None, False)),
        ({"trained": False, "remaining_seconds": None}, (Course.STAND, None, False)),
        ({"next_step": None, "pending": (STAGING,)}, (Course.END, None, False)),
        ({"idle_seconds": 4.0}, (Course.SAVE, 15, False)),
        ({"idle_seconds": 60.0}, (Course.STAND, None, False)),
        ({"idle_seconds": 60.0, "remaining_seconds": 120.0}, (Course.SAVE, 15, False)),
    ],
)
def test_the_newest_state_that_can_be_safe_in_time(
    changes: dict[str, object], course: tuple[Course, int | None, bool]
) -> None:
    assert chosen(**changes) == course


@pytest.mark.parametrize(
    ("notice", "remaining", "changes", "course"),
    [
        # 6.5 s for a save: twice that and 10 s are 23 s, a third of the notice is 40 s
        (120.0, 120.0, {}, Course.TRAIN),
        (120.0, 40.1, {}, Course.TRAIN),
        (120.0, 40.0, {}, Course.SAVE),
        (60.0, 23.1, {}, Course.TRAIN),
        (60.0, 23.0, {}, Course.SAVE),
        (30.0, 30.0, {}, Course.SAVE),
        (31.0, 31.0, {}, Course.TRAIN),
        (None, 120.0, {}, Course.SAVE),
        (120.0, None, {}, Course.SAVE),
        (120.0, 120.0, {"measured": UNKNOWN}, Course.SAVE),
        (120.0, 120.0, {"next_step": None}, Course.END),
        (120.0, 120.0, {"trained": False}, Course.TRAIN),
        (120.0, 40.0, {"trained": False}, Course.STAND),
        (120.0, 60.0, {"idle_seconds": 60.0}, Course.STAND),
        # 50.5 s for a save: all have to leave while 111 s are left, which leaves no room for the first save
        (120.0, 120.0, {"unique_bytes": 400}, Course.SAVE),
        (200.0, 200.0, {"unique_bytes": 400}, Course.TRAIN),
    ],
)
def test_a_long_notice_is_trained_through_until_a_generous_margin_is_left(
    notice: float | None, remaining: float | None, changes: dict[str, object], course: Course
) -> None:
    situation = replace(SITUATION, notice_seconds=notice, remaining_seconds=remaining)
    assert choose(replace(situation, **changes)).course is course  # type: ignore[arg-type]


def test_all_leave_while_several_saves_would_still_fit() -> None:
    for notice, unique, steps in itertools.product((31.0, 60.0, 120.0, 600.0), (0, 100, 1000), (1, 20)):
        situation = replace(SITUATION, notice_seconds=notice, unique_bytes=unique, steps_away=steps)
        for remaining in (1.0 * seconds for seconds in range(int(notice) + 1)):
            choice = choose(replace(situation, remaining_seconds=remaining))
            if choice.course is Course.TRAIN:
                assert choice.needed_seconds is not None
                assert remaining > max(2 * choice.needed_seconds + 10.0, notice / 3)


def test_without_any_measurement_the_save_is_tried_and_that_is_said() -> None:
    choice = choose(replace(SITUATION, measured=UNKNOWN, unique_bytes=10**12))
    assert (choice.course, choice.hand_over) == (Course.SAVE, False)
    assert "not all of it measured yet" in choice.reason
    assert "not all of it measured yet" not in choose(SITUATION).reason


def test_an_upload_under_way_is_not_counted_from_its_beginning() -> None:
    short = replace(SITUATION, remaining_seconds=6.0, unique_bytes=10**6, can_hand_over=False)
    assert choose(replace(short, pending=(COMPLETE,))).course is Course.STAND
    assert choose(replace(short, pending=(replace(COMPLETE, uploading_seconds=8.0),))).course is Course.UPLOAD


def test_whatever_is_chosen_fits_and_nothing_newer_does() -> None:
    """More time never leads to an older state, and no time is negative."""
    order = [Course.STAND, Course.UPLOAD, Course.WAIT, Course.SAVE]
    for unique, idle, peers, pending in itertools.product(
        (0, 50, 500, 5000), (0.0, 30.0), (True, False), ((), (COMPLETE,), (STAGING, COMPLETE))
    ):
        before = -1
        for remaining in (-5.0, 0.0, 1.0, 3.0, 5.0, 8.0, 20.0, 60.0, 300.0, 1e9):
            choice = choose(
                replace(
                    SITUATION,
                    remaining_seconds=remaining,
                    unique_bytes=unique,
                    idle_seconds=idle,
                    can_hand_over=peers,
                    pending=pending,
                )
            )
            assert order.index(choice.course) >= before
            before = order.index(choice.course)
            assert choice.needed_seconds is None or 0 <= choice.needed_seconds <= remaining
            assert f"{max(remaining, 0.0):.1f} s are left" in choice.reason


def test_only_the_newest_state_makes_it() -> None:
    made = {course: Choice(course=course, step=1, hand_over=False, needed_seconds=1.0, reason="") for course in Course}
    assert [course for course, choice in made.items() if choice.makes_it] == [Course.TRAIN, Course.SAVE, Course.END]


@pytest.mark.parametrize(
    ("size_bytes", "uploading", "remaining", "measured", "needed"),
    [
        (100, 0.0, 30.0, MEASURED, False),
        (300, 0.0, 30.0, MEASURED, True),
        (300, 25.0, 30.0, MEASURED, False),
        (300, 0.0, None, MEASURED, False),
        (300, 0.0, 0.0, MEASURED, False),
        (300, 0.0, 30.0, UNKNOWN, False),
        (3000, 0.0, 20.0, MEASURED, False),
        (3000, 0.0, 20.0, replace(MEASURED, peer_bytes_per_second=None), True),
    ],
)
def test_a_shard_is_handed_over_if_it_would_get_to_a_peer_but_not_to_the_store(
    size_bytes: int, uploading: float, remaining: float | None, measured: Measured, needed: bool
) -> None:
    answer = needs_hand_over(
        size_bytes=size_bytes, uploading_seconds=uploading, remaining_seconds=remaining, measured=measured
    )
    assert answer is needed


@pytest.mark.parametrize(
    ("steps", "idle", "seconds"), [(2, 0.0, 2.0), (2, 4.0, 2.0), (2, 5.0, 7.0), (0, 100.0, 0.0), (1, 100.0, 101.0)]
)
def test_where_no_step_ends_for_long_as_long_again_is_expected(steps: int, idle: float, seconds: float) -> None:
    assert reach_seconds(steps, 1.0, idle) == seconds

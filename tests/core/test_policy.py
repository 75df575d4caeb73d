"""The rhythm of periodic saves, and what follows from workers' exits (F18, F119, F125)."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.core.agreement import margin_steps
from orchestrator.core.causes import describe_exit
from orchestrator.core.messages import RankExited, Verdict
from orchestrator.core.policy import AfterExit, after_exits, arm_now, periodic_step, steps_between, worth_growing


@pytest.mark.parametrize(
    ("last", "every", "until", "step"),
    [
        (0, 10, None, 10),
        (9, 10, None, 10),
        (10, 10, None, 20),
        (10, 10, 15, 15),
        (10, 10, 20, 20),
        (15, 10, 15, None),
        (16, 10, 15, None),
        (3, 0, None, None),
        (3, 0, 15, 15),
        (15, 0, 15, None),
    ],
)
def test_the_next_periodic_save(last: int, every: int, until: int | None, step: int | None) -> None:
    assert periodic_step(last=last, every=every, until=until) == step


@pytest.mark.parametrize(
    ("step", "highest", "step_seconds", "armed"),
    [(10, 5, 1.0, False), (10, 6, 1.0, True), (10, 8, 1.0, True), (200, 90, 0.01, False), (200, 100, 0.01, True)],
)
def test_a_periodic_save_is_armed_about_a_second_ahead(
    step: int, highest: int, step_seconds: float, armed: bool
) -> None:
    assert arm_now(step=step, highest=highest, step_seconds=step_seconds, margin=margin_steps(step_seconds)) is armed


def test_however_many_refusals_a_periodic_save_can_still_be_armed() -> None:
    """The nearest step that may be proposed is armed: refusals never end periodic saves for good."""
    for attempt, step_seconds in itertools.product(range(1, 9), [0.0001, 0.001, 0.01, 0.1, 0.5, 1.0, 30.0]):
        margin = margin_steps(step_seconds, attempt)
        assert arm_now(step=100 + margin, highest=100, step_seconds=step_seconds, margin=margin)


@pytest.mark.parametrize(
    ("waited", "trained", "rest", "worth_it"),
    [
        (25.0, 10.0, None, True),
        (24.9, 100.0, None, False),
        (1000.0, 2.4, None, False),
        (1000.0, 100.0, 10.0, False),
        (1000.0, 2.5, 10.1, True),
    ],
)
def test_new_nodes_are_let_in_when_their_waiting_has_cost_a_share_of_a_restart(
    waited: float, trained: float, rest: float | None, worth_it: bool
) -> None:
    growth = worth_growing(
        waited_node_seconds=waited, members=10, restart_seconds=10.0, trained_seconds=trained, rest_seconds=rest
    )
    assert growth.worth_it is worth_it
    assert "25 are the price" in growth.reason


def exited(code: int | None, verdict: Verdict = Verdict.NONE, *, by_us: bool = False, evidence: str = "") -> RankExited:
    """An exit of rank 1."""
    return RankExited(
        node="a",
        generation=1,
        rank=1,
        exit_code=code,
        attached=True,
        verdict=verdict,
        ended_by_us=by_us,
        evidence=evidence,
    )


def judge(*exits: RankExited, ever_attached: bool = True, fault: str | None = None) -> AfterExit:
    """What follows from these exits."""
    return after_exits(exits, ever_attached=ever_attached, fault=fault)


@pytest.mark.parametrize(
    ("verdict", "restart", "counts", "exit_code"),
    [
        (judge(), True, False, 0),
        (judge(exited(-9, by_us=True)), True, False, 0),
        (judge(exited(1, by_us=True), exited(0)), True, False, 0),
        (judge(exited(1)), True, True, 0),
        (judge(exited(-11)), True, True, 0),
        (judge(exited(None)), True, True, 0),
        (judge(exited(-9, by_us=True), fault="ranks [3] did not attach"), True, True, 0),
        (judge(exited(1), fault="ranks [3] did not attach"), True, True, 0),
        (judge(exited(1, Verdict.REFUSED)), False, True, 78),
        (judge(exited(1), exited(1, Verdict.REFUSED)), False, True, 78),
        (judge(exited(1, Verdict.REFUSED, by_us=True)), True, False, 0),
        (judge(exited(7), ever_attached=False), False, True, 7),
        (judge(exited(-11), ever_attached=False), False, True, 1),
        (judge(exited(-9), ever_attached=False), True, True, 0),
        (judge(exited(-15), ever_attached=False), True, True, 0),
        (judge(exited(1, Verdict.UNREADABLE)), True, True, 0),
    ],
)
def test_what_follows_from_exits(verdict: AfterExit, restart: bool, counts: bool, exit_code: int) -> None:
    assert (verdict.restart, verdict.counts_as_failure, verdict.exit_code) == (restart, counts, exit_code)
    assert verdict.reason


TRACEBACK = """step 3
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
  File "train.py", line 1, in main
    raise ValueError("no such shard")
ValueError: no such shard
"""


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (TRACEBACK, "ValueError: no such shard"),
        (TRACEBACK + "terminate called without an active exception\n", "ValueError: no such shard"),
        (TRACEBACK + "Segmentation fault\n" * 6, "Segmentation fault"),
        (TRACEBACK * 2 + "terminate called\n", "ValueError: no such shard"),
        (
            "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()) + "terminate called\n",
            "ValueError: no such shard",
        ),
        ("Traceback (most recent call last):\n  File", "File"),
        ("out of memory\n\n", "out of memory"),
        ("", "it printed nothing"),
    ],
)
def test_what_brought_it_down_counts_not_how_it_fell(evidence: str, words: str) -> None:
    """Gloo's threads end a process that fails by SIGABRT, after its traceback."""
    assert judge(exited(-6, evidence=evidence)).reason == f"rank 1 was killed by signal 6: {words}"


def test_the_reason_names_the_rank_and_its_last_words() -> None:
    reason = judge(exited(1, evidence="Traceback\n  …\nValueError: nan\n\n")).reason
    assert reason == "rank 1 exited with status 1: ValueError: nan"


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with status 0"), (-9, "was killed by signal 9"), (None, "ended with an unknown status")],
)
def test_describe_exit(code: int | None, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(("every", "steps"), [(1000, 250), (5, 1), (3, 1), (1, 1), (0, 0)])
def test_a_hint_makes_four_times_as_many_periodic_saves_but_none_where_there_are_none(every: int, steps: int) -> None:
    assert steps_between(every=every, hinted=True) == steps
    assert steps_between(every=every, hinted=False) == every

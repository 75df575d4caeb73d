"""Who holds the others up, from one look at each rank; how long is too long."""

from __future__ import annotations

import pytest

from orchestrator.core.hangs import PATIENCE, Judgement, Quiet, Sign, ending_seconds, judge, limit_seconds
from orchestrator.core.membership import Gang, form
from orchestrator.core.messages import RankLook

GANG: Gang = form(generation=1, nodes=("a", "b"), workers_per_node=2)
WAITING = "graph.py:979 in _engine_run_backward, called at train.py:30 in main"


def look(rank: int, **given: object) -> RankLook:
    """A rank that waits for others, as gloo has it."""
    values: dict[str, object] = {"step": 7, "state": "S", "traced": False, "busy_seconds": 0.0, "waits": True}
    return RankLook(**{"rank": rank, "where": WAITING, **values, **given})  # type: ignore[arg-type]


def judgement(**changed: dict[str, object]) -> Judgement:
    """Of a gang of four waiting ranks, but for `r1={…}` and so on; `r1={}` stands for a rank that is not seen."""
    looks = [look(rank, **changed.get(f"r{rank}", {})) for rank in range(4) if changed.get(f"r{rank}") != {}]
    found = judge(GANG, looks)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changed", "ranks", "sign"),
    [
        pytest.param({"r2": {"state": "T", "waits": None}}, (2,), Sign.STOPPED, id="stopped"),
        pytest.param({"r2": {"state": "T"}, "r0": {"state": "D"}}, (2,), Sign.STOPPED, id="stopped-beside-a-disk"),
        pytest.param({"r2": {"state": "T"}, "r1": {"step": 6}}, (2,), Sign.STOPPED, id="stopped-though-not-the-last"),
        pytest.param({"r3": {"state": "D"}}, (3,), Sign.BLOCKED, id="disk"),
        pytest.param({"r3": {"state": "D", "busy_seconds": 0.5, "waits": False}}, (3,), Sign.BUSY, id="disk-is-read"),
        pytest.param({"r1": {"waits": False}}, (1,), Sign.IDLE, id="elsewhere-idle"),
        pytest.param({"r1": {"waits": False, "busy_seconds": 0.9}}, (1,), Sign.BUSY, id="elsewhere-computing"),
        pytest.param({"r1": {"waits": False, "state": "R"}}, (1,), Sign.BUSY, id="elsewhere-without-a-processor"),
        pytest.param({"r1": {"waits": None, "where": ""}}, (1,), Sign.IDLE, id="does-not-even-write-its-stack"),
        pytest.param({"r1": {"step": 6, "waits": False}}, (1,), Sign.IDLE, id="behind"),
        pytest.param({"r1": {"step": 6, "waits": False}, "r2": {"step": 6}}, (1,), Sign.IDLE, id="behind-not-waiting"),
        pytest.param({"r1": {"step": 6}, "r2": {"step": 6}}, (1, 2), Sign.IDLE, id="behind-both-waiting"),
        pytest.param({"r2": {}, "r3": {}}, (2, 3), Sign.SILENT, id="node-does-not-answer"),
        pytest.param({"r2": {}, "r3": {}, "r0": {"waits": False}}, (0,), Sign.IDLE, id="somebody-before-the-silent"),
        pytest.param({}, (), Sign.IDLE, id="all-wait"),
        pytest.param({f"r{rank}": {"busy_seconds": 1.0} for rank in range(4)}, (), Sign.BUSY, id="all-spin"),
        pytest.param({f"r{rank}": {"state": "D"} for rank in range(4)}, (), Sign.ALL_BLOCKED, id="the-file-system"),
    ],
)
def test_the_culprit(changed: dict[str, dict[str, object]], ranks: tuple[int, ...], sign: Sign) -> None:
    found = judgement(**changed)
    assert (found.ranks, found.sign) == (ranks, sign)
    assert all(f"rank {rank} on {GANG.node_of(rank)}" in found.words for rank in ranks)


def test_without_a_known_call_the_one_who_is_elsewhere_stands_out() -> None:
    """NCCL: ranks wait where the loss is printed, in the script's own line."""
    spins = {"waits": False, "busy_seconds": 1.0, "where": "train.py:40 in main"}
    found = judgement(r0=spins, r1=spins, r3=spins, r2={"waits": False, "where": "queue.py:171 in get"})
    assert (found.ranks, found.sign) == ((2,), Sign.IDLE)
    assert "queue.py:171 in get" in found.words


def test_two_and_two_in_different_places_name_nobody() -> None:
    here, there = {"waits": False, "where": "a.py:1 in f"}, {"waits": False, "where": "b.py:2 in g"}
    assert judgement(r0=here, r1=here, r2=there, r3=there).ranks == ()


def test_nobody_answers_so_nothing_is_known() -> None:
    assert judge(GANG, []) is None


def test_a_single_rank() -> None:
    alone = form(generation=1, nodes=("a",), workers_per_node=1)
    found = judge(alone, [look(0, state="T", waits=None)])
    assert found is not None
    assert (found.ranks, found.sign) == ((0,), Sign.STOPPED)


def test_the_limit_follows_the_steps_and_the_pauses() -> None:
    assert limit_seconds(Quiet(), 60.0) == 60.0
    assert limit_seconds(Quiet(paces_seconds=(9.0, 10.0, 300.0)), 60.0) == 100.0, "a pause among the steps is none"
    assert limit_seconds(Quiet(paces_seconds=(1.0,), longest_seconds=300.0), 60.0) == 600.0


def test_the_less_certain_the_longer_is_waited() -> None:
    assert PATIENCE[Sign.STOPPED] == 1.0
    assert all((patience or 99.0) >= 3.0 for sign, patience in PATIENCE.items() if sign is not Sign.STOPPED)
    assert PATIENCE.keys() == set(Sign)


@pytest.mark.parametrize(
    ("quiet", "sign", "seconds"),
    [
        (Quiet(), Sign.BUSY, 600.0),
        (Quiet(ended_after_seconds=600.0), Sign.BUSY, 1200.0),
        (Quiet(ended_after_seconds=600.0), Sign.IDLE, 1200.0),
        (Quiet(ended_after_seconds=10.0), Sign.IDLE, 180.0),
        (Quiet(ended_after_seconds=600.0), Sign.STOPPED, 60.0),
        (Quiet(ended_after_seconds=600.0), Sign.ALL_BLOCKED, None),
    ],
)
def test_a_gang_is_ended_twice_as_late_as_the_last_one(quiet: Quiet, sign: Sign, seconds: float | None) -> None:
    assert ending_seconds(quiet, 60.0, sign) == seconds

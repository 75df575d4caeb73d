"""One is said as one."""

from __future__ import annotations

from orchestrator.core.wording import all_of, counted


def test_counts() -> None:
    assert [counted(number, "node loads", "nodes load") for number in range(3)] == [
        "0 nodes load",
        "1 node loads",
        "2 nodes load",
    ]
    assert (counted(1, "step"), counted(20, "step")) == ("1 step", "20 steps")
    assert (all_of(1, "rank is", "ranks are"), all_of(4, "rank")) == ("the only rank is", "all 4 ranks")

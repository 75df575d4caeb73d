"""Counts in sentences: one is said as one. Pure; used by whoever gives a reason."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """`counted(2, "node")` is "2 nodes"; `counted(1, "node loads", "nodes load")` is "1 node loads"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def all_of(number: int, one: str, many: str = "") -> str:
    """`all_of(4, "rank")` is "all 4 ranks"; `all_of(1, "rank is", "ranks are")` is "the only rank is"."""
    return f"the only {one}" if number == 1 else f"all {counted(number, one, many)}"

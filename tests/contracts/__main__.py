"""`python -m tests.contracts`: runs the contract suite of stores, and prints which store keeps which guarantee.

One row for each test, one column for each store; Markdown, as it stands in docs/stores.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("test_object_store.py")
SIGNS = {"passed": "✓", "failed": "✗", "skipped": "–"}


class Outcomes:
    """A pytest plugin that remembers how each test ended, by test and store."""

    def __init__(self, stores: tuple[str, ...]) -> None:
        self._stores = stores
        self.found: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst outcome of all cases of a test counts."""
        if report.when != "call" and report.outcome == "passed":
            return
        test, _, case = report.nodeid.partition("::")[2].partition("[")
        words = case.rstrip("]").split("-")
        stores = [store for store in self._stores if store in words] or ["folder"]  # where no store is named
        for store in stores:
            row = self.found.setdefault(test, {})
            if row.get(store) != "failed":
                row[store] = report.outcome

    def markdown(self) -> str:
        """The table."""
        lines = ["| what is tested | " + " | ".join(self._stores) + " |", "|---" * (len(self._stores) + 1) + "|"]
        for test, row in self.found.items():
            words = test.removeprefix("test_").replace("_", " ")
            cells = [SIGNS[row[store]] if store in row else "" for store in self._stores]
            lines.append(f"| {words} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


def main() -> int:
    """Exit status of pytest."""
    sys.path.insert(0, str(SUITE.parents[2]))
    from tests.contracts.test_object_store import STORES

    outcomes = Outcomes(tuple(STORES))
    status = pytest.main(["-q", "--no-header", str(SUITE)], plugins=[outcomes])
    print(outcomes.markdown())
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())

"""Every benchmark of the checkpoint engine runs, with tiny states: whether it works, never how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measuring import Samples, report_of

ROOT = Path(__file__).parents[2]
GOALS = {"G1", "G3", "G4", "G5", "G6", "G7", "G10", "G14", "G15"}
COMPARED = {"G1", "G4", "G5", "G6", "G7"}
"""Those that save or load, and so compare bits, on most of their lines."""


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_every_script_runs_with_tiny_states(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    report = report_of(json.loads(done.stdout))
    assert {line.goal for line in report.lines} == GOALS
    assert all(line.pairs > 0 for line in report.lines)
    assert {line.bit_equal for line in report.lines} == {True, None}
    assert {line.goal for line in report.lines if line.bit_equal} >= COMPARED
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_of_medians_and_say_which_goal_they_reach() -> None:
    samples = Samples(by_side={"orchestrator": [1.0, 2.0, 9.0], "theirs": [4.0, 5.0, 6.0]})
    at_most = samples.line("G1", "it", than="theirs", must=0.5, moonshot=0.1)
    assert (at_most.ratio, at_most.ratio_lowest, at_most.ratio_highest) == (0.4, 0.25, 1.5)
    assert at_most.reached() == "must"
    at_least = samples.line("G4", "it", than="theirs", must=2.0, moonshot=2.5, at_least=True)
    assert (at_least.ratio, at_least.reached()) == (2.5, "moonshot")
    assert samples.line("G4", "it", than="theirs", must=3.0, at_least=True).reached() == "no"
    assert samples.line("G4", "it", than="theirs", must=None).reached() == "–"

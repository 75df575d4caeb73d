"""Many simulated disasters: what the protocol promises, for hundreds of seeds; and that planted bugs are found.

`python -m tests.simulation` runs any number of seeds, `make disasters` ten thousand. A failure prints its seed;
`python -m tests.simulation --first SEED --seeds 1` replays it.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter

import pytest

from tests.simulation.disaster import run_seed
from tests.simulation.many import Runner
from tests.simulation.planted import PLANTED, Plant

pytestmark = pytest.mark.processes  # it takes all cores for minutes

SEEDS = 150
RANDOM_SEEDS = 30
PLANTED_SEEDS_MAX = 200
SEEN_MIN = 3
OCCURRENCES = (
    "event: abandoned",
    "event: cannot make it",
    "event: committed",
    "event: course chosen",
    "event: host trouble",
    "event: node lost",
    "event: remapped",
    "event: rolled back",
    "event: save failed",
    "event: store failed",
    "event: store swept",
    "event: taken back",
    "rollback",
    "rollback asked",
    "sweep",
    "twin",
)


@pytest.mark.timeout(900)
def test_every_seed_keeps_every_promise() -> None:
    """F1, F2, F9, F15, F19, F20, F24, F28, F36, F80, F86, F87, F88, F90, F93, F94, F97, W1, W3, W5, W6, W8, W12.

    Also guards against a simulation that has become too tame to find anything.
    """
    seen: Counter[str] = Counter()
    problems: list[str] = []
    with Runner(os.cpu_count() or 1) as runner:
        for _, part, part_seen in runner.run(0, SEEDS):
            problems += part
            seen += part_seen
    assert problems == []
    assert {what: seen[what] for what in OCCURRENCES if seen[what] < SEEN_MIN} == {}, seen


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_random_seeds_keep_every_promise(seed: int) -> None:
    with Runner(os.cpu_count() or 1) as runner:
        first = random.Random(seed).randrange(1 << 32)
        assert [problem for _, part, _ in runner.run(first, RANDOM_SEEDS) for problem in part] == []


def test_a_seed_gives_the_same_run_again() -> None:
    first, again = run_seed(17), run_seed(17)
    assert (first.seconds, first.seen) == (again.seconds, again.seen)


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_simulation_finds_a_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # a planted bug may break anything on its way
    plant(monkeypatch)
    for seed in range(PLANTED_SEEDS_MAX):
        outcome = run_seed(seed)
        if outcome.problem is not None:
            print(f"{plant.__name__}: found by seed {seed}: {outcome.problem}")
            return
    pytest.fail(f"none of {PLANTED_SEEDS_MAX} seeds found it")

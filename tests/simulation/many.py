"""Many disasters on all cores, for people (`python -m tests.simulation`) and for the tests."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.simulation.disaster import run_seed
from tests.simulation.planted import PLANTED

SEEDS_AT_ONCE = 25
SEEDS_SHOWN = 1000


def run_seeds(seeds: Iterable[int], plant: str | None = None) -> tuple[list[str], Counter[str]]:
    """What went wrong in which seeds, and what was seen; with a planted bug if its name is given."""
    sys.unraisablehook = lambda _: None  # what a killed process was about to do is nobody's error
    problems, seen = [], Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            next(one for one in PLANTED if one.__name__ == plant)(patch)
        for seed in seeds:
            outcome = run_seed(seed)
            seen.update(outcome.seen)
            if outcome.problem is not None:
                problems.append(outcome.problem)
    gc.collect()
    return problems, seen


Part = tuple[int, list[str], Counter[str]]


class Runner:
    """Processes that run seeds; a context manager."""

    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, first: int, count: int, plant: str | None = None) -> Iterator[Part]:
        """(seeds in this part, problems, what was seen) part by part."""
        starts = range(first, first + count, SEEDS_AT_ONCE)
        parts = [range(start, min(start + SEEDS_AT_ONCE, first + count)) for start in starts]
        for part, (problems, seen) in zip(parts, self._pool.map(run_seeds, parts, [plant] * len(parts)), strict=True):
            yield len(part), problems, seen


def disasters(first: int, count: int, processes: int) -> int:
    """Run seeds; the number of those in which something went wrong."""
    started, done, wrong, seen = time.perf_counter(), 0, 0, Counter[str]()
    with Runner(processes) as runner:
        for size, problems, part_seen in runner.run(first, count):
            for problem in problems:
                print(problem, flush=True)
            done, wrong, seen = done + size, wrong + len(problems), seen + part_seen
            if done % SEEDS_SHOWN == 0:
                print(f"{done} of {count} seeds, {wrong} went wrong", flush=True)
    seconds = time.perf_counter() - started
    print(f"{done} seeds in {seconds:.0f} s with {processes} processes: {60 * done / seconds:.0f} a minute")
    for what, times in sorted(seen.items()):
        print(f"  {times:8d}  {what}")
    print(f"{wrong} of {done} seeds went wrong")
    return wrong


def planted(first: int, count: int, processes: int) -> int:
    """Plant each bug; the number of those that were not found."""
    missed = 0
    with Runner(processes) as runner:
        for plant in PLANTED:
            problems = [one for _, part, _ in runner.run(first, count, plant.__name__) for one in part]
            missed += not problems
            example = problems[0][:160] if problems else "not found"
            print(f"{plant.__name__:36} in {len(problems):4d} of {count} seeds: {example}", flush=True)
    print(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs were found")
    return missed

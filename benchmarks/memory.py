"""G14: host memory that saving takes at its peak, beside the training state.

A slot in /dev/shm that holds the staged shard, and what the process takes more while it stages, uploads and commits
(its anonymous memory, looked at every half millisecond). Both slots are reserved for as long as the job runs; their
sum is a line of its own. For comparison, `dcp.save` and `dcp.async_save`, which keep their copy in anonymous memory.

    python -m benchmarks.memory [--state A|B] [--pairs 7] [--folder DISK] [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

from benchmarks import engine, rivals
from benchmarks.costs import peak_extra_bytes
from benchmarks.measuring import (
    MEMORY,
    MIB,
    OURS,
    Line,
    Options,
    Report,
    Samples,
    State,
    after,
    interleave,
    options,
    scratch,
    show,
)


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    with rivals.process_group():
        for state in given.states:
            with scratch(MEMORY) as staging, scratch(given.folder) as folder:
                measure(state, given, report, staging, folder)
    show(report, "Peak of host memory in a save (G14)", given)


def measure(state: State, given: Options, report: Report, staging: Path, folder: Path) -> None:
    """One state."""
    tensors = state.make()
    store, steps = engine.open_folder(folder / "ours"), count(1)
    rank = engine.Rank(tensors, staging)
    staged = rank.slot_bytes / MIB

    def removed(save: Callable[[], object]) -> float:
        try:
            return peak_extra_bytes(save) / MIB
        finally:
            rivals.remove(folder / "dcp")
            rivals.remove(folder / "ours" / "checkpoints")

    sides = {
        OURS: lambda: staged + removed(lambda: rank.save(store, next(steps))),
        "dcp.save": lambda: removed(lambda: rivals.dcp_save(tensors, folder / "dcp")),
        "dcp.async_save": lambda: removed(lambda: rivals.dcp_async_save(tensors, folder / "dcp").result()),
    }
    samples = interleave(sides, min(given.pairs, 3), after(given.limit_seconds))
    pairs = len(samples.by_side[OURS])
    extra = (rank.slots_bytes - rank.slot_bytes) / MIB
    samples.by_side |= {"staged": [staged] * pairs, "both slots": [one + extra for one in samples.by_side[OURS]]}
    what = f"peak, {state.name}"
    report.add(what, samples, lines_of(what, samples))


def lines_of(what: str, samples: Samples) -> list[Line]:
    """Of the staged bytes, and of what torch takes."""
    return [
        samples.line("G14", what, than="staged", must=1.05, unit="MiB", floor="staged"),
        samples.line("G14", f"{what}, both slots", ours="both slots", than="staged", must=None, unit="MiB"),
        samples.line("G14", what, than="dcp.save", must=None, unit="MiB", floor="staged"),
        samples.line("G14", what, than="dcp.async_save", must=None, unit="MiB", floor="staged"),
    ]


if __name__ == "__main__":
    main()

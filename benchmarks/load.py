"""G5: a committed checkpoint into existing tensors, every byte verified.

Against `dcp.load` and a raw read of the same bytes into warm memory. `from a slot`: a restart whose base is still in
its node's memory. `through the agent`: over the agent's object server, as another node's memory or a bucket is read.
Everything is in the page cache; the tensors are overwritten before each load and compared bit by bit after it, with the
clock stopped.

    python -m benchmarks.load [--state A|B] [--pairs 7] [--folder DISK] [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import engine, rivals
from benchmarks.measuring import (
    MEMORY,
    OURS,
    Line,
    Options,
    Report,
    State,
    after,
    equal,
    interleave,
    options,
    scratch,
    seconds_of,
    show,
)

STEP = 1
SLOT = "from a slot"
AGENT = "through the agent"


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    for state in given.states:
        with scratch(given.folder) as folder:
            measure(state, given, report, folder)
    show(report, "Loading into existing tensors (G5)", given)


class Loads:
    """Loads into one set of tensors, and remembers whether all were right."""

    def __init__(self, state: State, tensors: dict[str, torch.Tensor]) -> None:
        self._true = tensors
        self.into = state.zeros()
        self.all_equal = True

    def timed(self, load: Callable[[], None], *, compare: bool = True) -> float:
        """Seconds of one load."""
        for tensor in self.into.values():
            tensor.fill_(0.5)
        took = seconds_of(load)
        if compare:
            self.all_equal = self.all_equal and equal(self._true, self.into)
        return took


def measure(state: State, given: Options, report: Report, folder: Path) -> None:
    """One state."""
    tensors = state.make()
    raw = memoryview(bytearray(state.size_bytes))
    rivals.raw_write(raw, folder / "raw")
    rivals.dcp_save(tensors, folder / "dcp")
    store, checkpoint = engine.open_folder(folder / "ours"), engine.checkpoint_of(STEP)
    loads = Loads(state, tensors)
    with scratch(MEMORY) as staging, engine.through_agent(folder / "ours") as served:
        rank = engine.Rank(tensors, staging)
        rank.save(store, STEP)
        near = rank.near(store, STEP)
        sides = {
            SLOT: lambda: loads.timed(lambda: engine.load(near, checkpoint, loads.into)),
            OURS: lambda: loads.timed(lambda: engine.load(store, checkpoint, loads.into)),
            AGENT: lambda: loads.timed(lambda: engine.load(served, checkpoint, loads.into)),
            "dcp.load": lambda: loads.timed(lambda: rivals.dcp_load(loads.into, folder / "dcp")),
            "raw read": lambda: loads.timed(lambda: rivals.raw_read(folder / "raw" / "raw", raw), compare=False),
        }
        samples = interleave(sides, given.pairs, after(given.limit_seconds))
    must, moonshot = {"A": (1.7, 2.0), "B": (18.0, 25.0)}[state.name]

    def line(what: str, ours: str, than: str, must: float | None, moonshot: float | None) -> Line:
        return samples.line(
            "G5",
            f"{what}, {state.name}",
            ours=ours,
            than=than,
            must=must,
            moonshot=moonshot,
            at_least=True,
            floor="raw read",
            bit_equal=loads.all_equal,
        )

    lines = [
        line("load", OURS, "dcp.load", must, moonshot),
        line(f"load {SLOT}", SLOT, "dcp.load", must, moonshot),
        line(f"load {AGENT}", AGENT, "dcp.load", None, None),
    ]
    report.add(f"load, {state.name}", samples, lines)


if __name__ == "__main__":
    main()

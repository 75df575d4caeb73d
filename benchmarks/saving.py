"""G4: a blocking save with digests, from live tensors to a committed checkpoint, in memory and on a disk.

Against `dcp.save`, `safetensors.save_file` and a raw write of the same bytes; every file is flushed on all sides. Ours
is what happens when all leave: staged, followed by the agent in a process of its own (but at normal priority) and
committed. Each kind is loaded and compared.

    python -m benchmarks.saving [--state A|B] [--pairs 7] [--folder DISK] [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import engine, rivals
from benchmarks.measuring import (
    MEMORY,
    OURS,
    Line,
    Options,
    Report,
    Samples,
    State,
    after,
    equal,
    interleave,
    options,
    scratch,
    seconds_of,
    show,
)

Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    for state in given.states:
        tensors = state.make()
        for place, parent in (("memory disk", MEMORY), ("disk", given.folder)):
            with scratch(MEMORY) as staging, scratch(parent) as folder:
                with engine.agent_process(folder / "ours", staging / "agent"):
                    samples, bit_equal = measure(state, Saver(tensors, staging, folder), given)
                what = f"save, {place}, {state.name}"
                report.add(what, samples, lines_of(state, what, samples, bit_equal))
    show(report, "A blocking save (G4)", given)


class Saver:
    """The four sides, each into a new folder that is removed after the clock has stopped."""

    def __init__(self, tensors: Tensors, staging: Path, folder: Path) -> None:
        self._tensors = tensors
        self._folder = folder
        self._steps = count(1)
        self._rank = engine.Rank(tensors, staging)
        self._agent = engine.Agent(staging / "agent")
        self._store = engine.open_folder(folder / "ours")
        self._raw = memoryview(torch.cat([tensor.view(-1) for tensor in tensors.values()]).numpy().data).cast("B")

    def ours(self, _: Path) -> None:
        """Another step of the same job."""
        self._save(next(self._steps))

    def _save(self, step: int) -> None:
        self._rank.save_leaving(self._agent, step)
        self._agent.commit(step)

    def dcp(self, target: Path) -> None:
        """torch.distributed.checkpoint, without a process group."""
        rivals.dcp_save(self._tensors, target)

    def safetensors(self, target: Path) -> None:
        """The same file format, without digests."""
        rivals.safetensors_save(self._tensors, target)

    def raw(self, target: Path) -> None:
        """The floor."""
        rivals.raw_write(self._raw, target)

    def timed(self, save: Callable[[Path], None]) -> float:
        """Seconds of one save."""
        target = self._folder / "target"
        try:
            return seconds_of(lambda: save(target))
        finally:
            rivals.remove(target)
            rivals.remove(self._folder / "ours" / "checkpoints")

    def equal(self, state: State) -> bool:
        """Whether each kind of save loads with the same bits."""
        loaded, other = state.zeros(), state.zeros()
        step = next(self._steps)
        self._save(step)
        engine.load(self._store, engine.checkpoint_of(step), loaded)
        self.dcp(self._folder / "dcp")
        rivals.dcp_load(other, self._folder / "dcp")
        self.safetensors(self._folder / "safetensors")
        third = load_file(self._folder / "safetensors" / "state.safetensors")
        return all(equal(self._tensors, one) for one in (loaded, other, third))


def measure(state: State, saver: Saver, given: Options) -> tuple[Samples, bool]:
    """One state in one place."""
    acts = {OURS: saver.ours, "dcp.save": saver.dcp, "save_file": saver.safetensors, "raw write": saver.raw}
    sides = {name: partial(saver.timed, act) for name, act in acts.items()}
    return interleave(sides, given.pairs, after(given.limit_seconds / 2)), saver.equal(state)


def lines_of(state: State, what: str, samples: Samples, bit_equal: bool) -> list[Line]:
    """× faster than each other side."""
    must, moonshot = {"A": (2.0, 2.5), "B": (8.0, 11.0)}[state.name]

    def line(than: str, must: float | None, moonshot: float | None = None) -> Line:
        return samples.line(
            "G4",
            what,
            than=than,
            must=must,
            moonshot=moonshot,
            at_least=True,
            floor="raw write",
            bit_equal=bit_equal,
        )

    return [line("dcp.save", must, moonshot), line("save_file", {"A": None, "B": 1.3}[state.name])]


if __name__ == "__main__":
    main()

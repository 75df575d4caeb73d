"""G10: load a checkpoint of 4 ranks at another world size (3, 6), every byte verified, and what is read for that.

Each new rank needs its share of the tensors, in order, and loads it into existing ones; the ranks load one after
another, and their times are added up. Against the same at 4 ranks (per needed byte: all need the whole state once), and
against `dcp.load` of a checkpoint that 4 ranks have made. Bytes read are the kernel's count for this process; needed is
what the tensors take, in whole digest blocks.

    python -m benchmarks.remap [--state A|B] [--pairs 7] [--folder DISK] [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import engine, rivals
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
    equal,
    in_processes,
    interleave,
    options,
    scratch,
    seconds_of,
    show,
)

SAVED_BY = 4
LOADED_BY = (4, 3, 6)
STEP = 1
SAVE_SECONDS_MAX = 300
Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    torch.set_num_threads(1)
    for state in given.states:
        with scratch(given.folder) as folder:
            measure(state, given, report, folder)
    show(report, "Loading at another world size (G10)", given)


def shares(tensors: Tensors, world_size: int) -> list[Tensors]:
    """What each rank needs: its part of the tensors, in order."""
    names = list(tensors)
    cuts = [len(names) * rank // world_size for rank in range(world_size + 1)]
    return [{name: tensors[name] for name in names[low:high]} for low, high in pairwise(cuts)]


def save(tensors: Tensors, folder: Path) -> None:
    """As 4 ranks: ours one after another, torch's in forks that form a group."""
    store = engine.open_folder(folder / "ours")
    with scratch(MEMORY) as staging:
        for rank in range(SAVED_BY):
            saver = engine.Rank(tensors, staging, rank=rank, world_size=SAVED_BY)
            saver.upload(store, STEP, saver.stage(STEP))
    engine.commit_step(store, STEP)

    def be_rank(rank: int) -> None:
        with rivals.process_group(rank, SAVED_BY, folder / "meeting"):
            rivals.dcp_save(tensors, folder / "dcp")

    in_processes(SAVED_BY, be_rank, SAVE_SECONDS_MAX)


def measure(state: State, given: Options, report: Report, folder: Path) -> None:
    """One state."""
    tensors, into = state.make(), state.zeros()
    save(tensors, folder)
    store, checkpoint = engine.open_folder(folder / "ours"), engine.checkpoint_of(STEP)

    def ours(share: Tensors) -> None:
        engine.load(store, checkpoint, share)

    def theirs(share: Tensors) -> None:
        rivals.dcp_load(share, folder / "dcp")

    all_equal = True

    def timed(load: Callable[[Tensors], None], world_size: int) -> float:
        nonlocal all_equal
        for tensor in into.values():
            tensor.fill_(0.5)
        took = sum(seconds_of(partial(load, share)) for share in shares(into, world_size))
        all_equal = all_equal and equal(tensors, into)
        return took

    sides: dict[str, Callable[[], float]] = {}
    for size in LOADED_BY:
        sides[f"{OURS} {SAVED_BY}→{size}"] = partial(timed, ours, size)
        if size != SAVED_BY:
            sides[f"dcp.load {SAVED_BY}→{size}"] = partial(timed, theirs, size)
    samples = interleave(sides, given.pairs, after(given.limit_seconds))
    lines = []
    for size in LOADED_BY[1:]:
        needed = sum(engine.needed_bytes(store, checkpoint, list(share)) for share in shares(into, size))
        samples.by_side |= {f"read {size}": [bytes_read(ours, into, size) / MIB], f"needed {size}": [needed / MIB]}
        lines += lines_of(state, size, samples, all_equal)
    report.add(f"remap, {state.name}", samples, lines)


def bytes_read(load: Callable[[Tensors], None], into: Tensors, world_size: int) -> int:
    """That this process asked the kernel for, in one load by all ranks."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    for share in shares(into, world_size):
        load(share)
    return so_far() - before


def lines_of(state: State, size: int, samples: Samples, bit_equal: bool) -> list[Line]:
    """Time against the same size and against torch, and bytes."""
    side, same = f"{SAVED_BY}→{size}", f"{SAVED_BY}→{SAVED_BY}"
    what, mine = f"{side}, {state.name}", f"{OURS} {side}"
    must = 0.3 if state.name == "B" else None
    return [
        samples.line("G10", what, ours=mine, than=f"{OURS} {same}", must=1.3, moonshot=1.1, bit_equal=bit_equal),
        samples.line("G10", what, ours=mine, than=f"dcp.load {side}", must=must, bit_equal=bit_equal),
        samples.line("G10", f"bytes, {what}", ours=f"read {size}", than=f"needed {size}", must=1.05, unit="MiB"),
    ]


if __name__ == "__main__":
    main()

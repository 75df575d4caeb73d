"""G3: the blocking stage against a flat memory copy of the same bytes, and against a loop of copies per tensor.

Ours is what training waits for at a boundary: the state is captured, the header built, everything copied into the slot
in /dev/shm. `slot alone` is the copy without capturing anew. Both others copy between two pieces of warm memory.

    python -m benchmarks.staging [--state A|B] [--pairs 7] [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import engine
from benchmarks.measuring import (
    MEMORY,
    OURS,
    Options,
    Report,
    State,
    after,
    interleave,
    options,
    scratch,
    seconds_of,
    show,
)


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    torch.set_num_threads(1)  # as most training processes have it, and as a copy is bound by memory
    for state in given.states:
        measure(state, given, report)
    show(report, "Staging at a boundary (G3)", given)


def measure(state: State, given: Options, report: Report) -> None:
    """One state."""
    tensors = state.make()
    flat = torch.cat(list(tensors.values()))  # written once: zeros that nobody wrote are one page, always in the cache
    flat_target = torch.ones_like(flat)
    pool = [torch.ones_like(tensor) for tensor in tensors.values()]

    def loop() -> None:
        for target, source in zip(pool, tensors.values(), strict=True):
            target.copy_(source)

    with scratch(MEMORY) as folder:
        rank = engine.Rank(tensors, folder)
        bare = engine.BareSlot(tensors, folder / "bare")
        acts: dict[str, Callable[[], object]] = {
            OURS: lambda: rank.stage(1),
            "slot alone": bare.stage,
            "flat copy": lambda: flat_target.copy_(flat),
            "copy loop": loop,
        }
        sides = {name: lambda act=act: seconds_of(act) for name, act in acts.items()}
        samples = interleave(sides, given.pairs, after(given.limit_seconds))
    what = f"stage, {state.name}"
    lines = [
        samples.line("G3", what, than="flat copy", must=1.1, moonshot=1.0, floor="flat copy"),
        samples.line("G3", what, than="copy loop", must=None, floor="flat copy"),
        samples.line(
            "G3", f"slot alone, {state.name}", ours="slot alone", than="flat copy", must=None, floor="flat copy"
        ),
    ]
    report.add(what, samples, lines)


if __name__ == "__main__":
    main()

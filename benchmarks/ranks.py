"""G6: several ranks save many small tensors together: 1024 of 32 KiB for each of two ranks, half as many for four.

All ranks hold the same tensors, as under DDP, and share the writing; so they do with `dcp.save`. `sharded`: each rank
holds its rows of each tensor, as under `fully_shard`. Each rank is a process that takes part in both; a save begins and
ends at a barrier, and counts for as long as its slowest rank takes. Ours is staged by each rank, uploaded and committed
by one agent; `raw write` is each rank's share, flushed.

    python -m benchmarks.ranks [--pairs 7] [--folder DISK] [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

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
    in_processes,
    interleave,
    options,
    scratch,
    seconds_of,
    show,
)
from orchestrator.checkpoint.layout import local_part

WORLD_SIZES = (2, 4)
STATE = State(name="2048 × 32 KiB", tensors=2048, tensor_bytes=32 << 10)
QUICK_STATE = State(name="32 × 8 KiB", tensors=32, tensor_bytes=8 << 10)
RANK_SECONDS_MAX = 600


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    torch.set_num_threads(1)
    found, tensors = {}, (QUICK_STATE if given.quick else STATE).tensors
    for world_size in WORLD_SIZES:
        samples, bit_equal = found[world_size] = measure(world_size, given, sharded=False)
        what = f"{world_size} ranks × {tensors // world_size}"
        report.add(what, samples, [line_of(what, samples, bit_equal, goal=world_size == WORLD_SIZES[0])])
    report.lines.append(growth(*(found[world_size][0] for world_size in WORLD_SIZES)))
    samples, bit_equal = measure(WORLD_SIZES[0], given, sharded=True)
    what = f"{WORLD_SIZES[0]} ranks × {tensors}, sharded"
    report.add(what, samples, [line_of(what, samples, bit_equal, goal=True)])
    show(report, "Several ranks, many small tensors (G6)", given)


def line_of(what: str, samples: Samples, bit_equal: bool, *, goal: bool) -> Line:
    """What ours takes, of what `dcp.save` takes."""
    must, moonshot = (0.12, 0.08) if goal else (None, None)
    return samples.line(
        "G6", what, than="dcp.save", must=must, moonshot=moonshot, floor="raw write", bit_equal=bit_equal
    )


def growth(two: Samples, four: Samples) -> Line:
    """What four ranks take, of what two ranks take for the same bytes."""
    pairs = min(len(two.by_side[OURS]), len(four.by_side[OURS]))
    both = Samples(by_side={"4": four.by_side[OURS][:pairs], "2 ranks": two.by_side[OURS][:pairs]})
    theirs = four.median("dcp.save") / two.median("dcp.save")
    return both.line(
        "G6", "4 ranks", ours="4", than="2 ranks", must=1.3, note=f"dcp.save takes {theirs:.2f} times as long"
    )


def measure(world_size: int, given: Options, *, sharded: bool) -> tuple[Samples, bool]:
    """All ranks, each in a process of its own; of each save, what the slowest rank took."""
    with scratch(MEMORY) as staging, scratch(given.folder) as folder:
        limit_seconds = given.limit_seconds / (len(WORLD_SIZES) + 1)

        def act(rank: int) -> dict[str, Any]:
            with rivals.process_group(rank, world_size, folder / "meeting"):
                return be_rank(given, limit_seconds, staging, folder, sharded=sharded)

        with engine.agent_process(folder / "ours", staging / "agent"):
            found = in_processes(world_size, act, RANK_SECONDS_MAX)
    slowest = {
        side: [max(each) for each in zip(*(one["seconds"][side] for one in found), strict=True)]
        for side in found[0]["seconds"]
    }
    return Samples(by_side=slowest), all(one["equal"] for one in found)


# -------------------------------------------------------------------------------------------- in each rank


def be_rank(given: Options, limit_seconds: float, staging: Path, folder: Path, *, sharded: bool) -> dict[str, Any]:
    """Take part in every save; what each took."""
    state = QUICK_STATE if given.quick else STATE
    held = sharded_over_all if sharded else dict[str, torch.Tensor]
    saver = Saver(held(state.make()), staging, folder)
    acts = {OURS: saver.ours, "dcp.save": saver.dcp, "raw write": saver.raw}
    sides = {name: partial(saver.timed, act) for name, act in acts.items()}
    samples = interleave(sides, given.pairs, agreed(after(limit_seconds)))
    return {"seconds": samples.by_side, "equal": saver.equal(held(state.zeros()), held(state.zeros()))}


def sharded_over_all(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's rows of each tensor."""
    mesh, ranks = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    return {
        name: DTensor.from_local(tensor.chunk(ranks)[dist.get_rank()].clone(), mesh, [Shard(0)], run_check=False)
        for name, tensor in tensors.items()
    }


def agreed(over: Callable[[], bool]) -> Callable[[], bool]:
    """The first rank's answer, for all."""

    def ask() -> bool:
        answer = torch.tensor([int(over())])
        dist.broadcast(answer, 0)
        return bool(answer.item())

    return ask


class Saver:
    """One rank's part of each side."""

    def __init__(self, tensors: dict[str, torch.Tensor], staging: Path, folder: Path) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._tensors = tensors
        self._folder = folder
        self._steps = count(1)
        self._step = 0
        self._saves = engine.Rank(tensors, staging, rank=self._rank, world_size=self._world_size)
        self._agent = engine.Agent(staging / "agent")
        self._store = engine.open_folder(folder / "ours")
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._share = memoryview(bytearray(size_bytes // self._world_size))

    def ours(self, _: Path) -> None:
        """Stage, followed by the agent of all ranks, which writes the index when all receipts are there."""
        self._step = next(self._steps)
        self._saves.save_leaving(self._agent, self._step)
        dist.barrier()
        if self._rank == 0:
            self._agent.commit(self._step)

    def dcp(self, target: Path) -> None:
        """All ranks together."""
        rivals.dcp_save(self._tensors, target)

    def raw(self, target: Path) -> None:
        """The floor: this rank's share."""
        rivals.raw_write(self._share, target.with_name(f"raw-{self._rank}"))

    def timed(self, save: Callable[[Path], None]) -> float:
        """Seconds from one barrier to the next."""
        dist.barrier()
        target = self._folder / "target"

        def whole() -> None:
            save(target)
            dist.barrier()

        took = seconds_of(whole)
        if self._rank == 0:
            for folder in (target, self._folder / "ours" / "checkpoints"):
                rivals.remove(folder)
        rivals.remove(self._folder / f"raw-{self._rank}")
        dist.barrier()
        return took

    def equal(self, loaded: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        """Whether a save of each kind loads with the same bits, here. Takes tensors to load into."""
        self.ours(self._folder)
        self.dcp(self._folder / "dcp")
        dist.barrier()
        engine.load(self._store, engine.checkpoint_of(self._step), loaded)
        rivals.dcp_load(other, self._folder / "dcp")
        true, mine, theirs = (
            {name: local_part(tensor) for name, tensor in tensors.items()} for tensors in (self._tensors, loaded, other)
        )
        return equal(true, mine) and equal(true, theirs)


if __name__ == "__main__":
    main()

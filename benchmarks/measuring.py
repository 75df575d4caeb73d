"""What the benchmarks share: states, interleaved measuring, ratios of medians, the table, `--json`, the machine.

A script measures several sides of one question in turn, pair after pair, and gives `Line`s: ours, another's, their
ratio, what it must be. Nothing here fails on a time. Called by the scripts beside it and by `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

MEMORY = "/dev/shm"
MIB = 1 << 20
OURS = "orchestrator"
PAIRS = 7
PAIRS_MIN = 3
"""The time limit stops no measurement before that many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """So many float32 tensors of so many bytes each, as parameters of one model."""

    name: str
    tensors: int
    tensor_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensors * self.tensor_bytes

    def make(self, seed: int = 1) -> dict[str, torch.Tensor]:
        """Random tensors [tensor_bytes / 4], by name."""
        generator = torch.Generator().manual_seed(seed)
        return {
            f"t{number}": torch.randn(self.tensor_bytes // 4, generator=generator) for number in range(self.tensors)
        }

    def zeros(self) -> dict[str, torch.Tensor]:
        """Tensors to load into; their pages are touched, as those of a model are."""
        return {f"t{number}": torch.zeros(self.tensor_bytes // 4).fill_(0.5) for number in range(self.tensors)}


STATES = {
    "A": State(name="A", tensors=64, tensor_bytes=8 * MIB),
    "B": State(name="B", tensors=4096, tensor_bytes=32 << 10),
}
QUICK_STATES = {
    "A": State(name="A", tensors=3, tensor_bytes=MIB + 4096),
    "B": State(name="B", tensors=48, tensor_bytes=8 << 10),
}


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether all bits are the same."""
    return one.keys() == other.keys() and all(
        torch.equal(tensor.detach().view(torch.uint8), other[name].detach().view(torch.uint8))
        for name, tensor in one.items()
    )


# ------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a person may say to each script."""

    states: tuple[State, ...]
    pairs: int
    limit_seconds: float
    folder: Path | None
    quick: bool
    json: bool


def options(description: str | None) -> Options:
    """From the command line. SIGTERM ends the script from now on with its folders and processes cleared away."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=sorted(STATES), action="append", help="A, B; both if not given")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="interleaved measurements of each side")
    parser.add_argument("--limit-seconds", type=float, default=600, help="for one state: fewer pairs after that")
    parser.add_argument("--folder", type=Path, help="where the disk is; a temporary folder if not given")
    parser.add_argument("--quick", action="store_true", help="tiny states, two pairs: does it work at all?")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args()
    known = QUICK_STATES if given.quick else STATES
    return Options(
        states=tuple(known[name] for name in given.state or sorted(STATES)),
        pairs=2 if given.quick else given.pairs,
        limit_seconds=given.limit_seconds,
        folder=given.folder,
        quick=given.quick,
        json=given.json,
    )


@contextmanager
def scratch(parent: Path | str | None) -> Iterator[Path]:
    """A folder for the time of a measurement."""
    with tempfile.TemporaryDirectory(prefix="orchestrator-bench-", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


# ----------------------------------------------------------------------------------------------- measuring


def seconds_of(act: Callable[[], object]) -> float:
    """How long it takes, on the wall."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


@dataclass(kw_only=True)
class Samples:
    """What each side took, pair by pair."""

    by_side: dict[str, list[float]] = field(default_factory=dict)

    def median(self, side: str) -> float:
        """Of one side."""
        return statistics.median(self.by_side[side])

    def line(
        self,
        goal: str,
        what: str,
        *,
        than: str,
        must: float | None,
        moonshot: float | None = None,
        ours: str = OURS,
        floor: str | None = None,
        at_least: bool = False,
        unit: str = "s",
        bit_equal: bool | None = None,
        note: str = "",
    ) -> Line:
        """One ratio: ours of theirs (at most), or, with `at_least`, how many times faster ours is."""
        mine, theirs = self.by_side[ours], self.by_side[than]
        each = [_ratio(one, other, at_least) for one, other in zip(mine, theirs, strict=True)]
        return Line(
            goal=goal,
            what=what,
            unit=unit,
            ours=self.median(ours),
            than=than,
            theirs=self.median(than),
            ratio=_ratio(self.median(ours), self.median(than), at_least),
            ratio_lowest=min(each),
            ratio_highest=max(each),
            at_least=at_least,
            must=must,
            moonshot=moonshot,
            floor_name=floor,
            floor=None if floor is None else self.median(floor),
            pairs=len(mine),
            bit_equal=bit_equal,
            note=note,
        )


def _ratio(ours: float, theirs: float, at_least: bool) -> float:
    above, below = (theirs, ours) if at_least else (ours, theirs)
    return above / below if below else float("inf")


def after(limit_seconds: float) -> Callable[[], bool]:
    """Whether the time is over."""
    end = time.monotonic() + limit_seconds
    return lambda: time.monotonic() > end


def interleave(sides: Mapping[str, Callable[[], float]], pairs: int, over: Callable[[], bool]) -> Samples:
    """Measure all sides in turn, beginning with another one each time; each side returns what it took.

    The first round is thrown away: libraries are imported and pools filled in it. `over` is asked before each further
    pair whether that was enough.
    """
    samples = Samples(by_side={side: [] for side in sides})
    names = list(sides)
    for name in names:
        sides[name]()
    for pair in range(pairs):
        if pair >= PAIRS_MIN and over():
            break
        first = pair % len(names)
        for name in names[first:] + names[:first]:
            samples.by_side[name].append(sides[name]())
    return samples


def in_processes(count: int, act: Callable[[int], Any], limit_seconds: float) -> list[Any]:
    """`act(rank)` in as many processes, each a fork of this one, which saves their imports; their results, by JSON.

    Before it torch may have computed with one thread only: a fork does not take other threads along.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]

    def be(rank: int) -> None:
        pipes[rank][1].send_bytes(json.dumps(act(rank)).encode())

    processes = [context.Process(target=be, args=(rank,)) for rank in range(count)]
    end = time.monotonic() + limit_seconds
    for process in processes:
        process.start()
    try:
        for _, sender in pipes:
            sender.close()
        for receiver, _ in pipes:
            if not receiver.poll(max(end - time.monotonic(), 0)):
                sys.exit(f"the ranks did not end within {limit_seconds:.0f} s")
        return [json.loads(receiver.recv_bytes()) for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


# ------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One ratio that was measured, and what it should be."""

    goal: str
    what: str
    unit: str
    ours: float
    than: str
    theirs: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    at_least: bool
    must: float | None
    moonshot: float | None
    floor_name: str | None
    floor: float | None
    """The same bytes with nothing around them, in the same unit."""
    pairs: int
    bit_equal: bool | None
    """Whether what was saved or loaded was compared bit by bit, and was equal; None: there was nothing to compare."""
    note: str = ""

    def reached(self) -> str:
        """Which goal this ratio reaches."""
        if self.must is None:
            return "–"
        for word, bound in (("moonshot", self.moonshot), ("must", self.must)):
            if bound is not None and (self.ratio >= bound if self.at_least else self.ratio <= bound):
                return word
        return "no"


@dataclass(kw_only=True)
class Report:
    """All that one script found."""

    lines: list[Line] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What was not measured, and why."""
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, name: str, samples: Samples, lines: Sequence[Line]) -> None:
        """Take one comparison in."""
        self.samples[name] = samples.by_side
        self.lines.extend(lines)

    def leave_out(self, reason: str) -> None:
        """Say once what was not measured."""
        if reason not in self.left_out:
            self.left_out.append(reason)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        lines = [asdict(line) | {"reached": line.reached()} for line in self.lines]
        return {"machine": machine(), "lines": lines, "left_out": self.left_out, "samples": self.samples}


def report_of(plain: Mapping[str, Any]) -> Report:
    """From what `plain` gave."""
    lines = [Line(**{name: value for name, value in line.items() if name != "reached"}) for line in plain["lines"]]
    return Report(lines=lines, left_out=plain["left_out"], samples=plain["samples"])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def show(report: Report, title: str, given: Options) -> None:
    """Print a report: a table for a person, or everything as JSON."""
    if given.json:
        print(json.dumps(report.plain(), indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(_table(report.lines, title))
    if given.quick:
        console.print("tiny states: these figures say only that it works")
    for line in report.lines:
        if line.note:
            console.print(f"{line.goal} {line.what}, {line.than}: {line.note}", highlight=False)
    for reason in report.left_out:
        console.print(f"not measured: {reason}", highlight=False)
    facts = machine()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)


def _table(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=title)
    for column in ("goal", "what"):
        table.add_column(column)
    for column in ("ours", "of", "theirs", "ratio", "lowest–highest", "must", "moonshot"):
        table.add_column(column, justify="right")
    for column in ("reached", "floor", "pairs", "bit-equal"):
        table.add_column(column)
    for line in lines:
        sign = "≥ " if line.at_least else "≤ "
        floor = "" if line.floor is None else f"{line.floor_name} {amount(line.floor, line.unit)}"
        table.add_row(
            line.goal,
            line.what,
            amount(line.ours, line.unit),
            line.than,
            amount(line.theirs, line.unit),
            f"{line.ratio:.3g}",
            f"{line.ratio_lowest:.3g} – {line.ratio_highest:.3g}",
            "" if line.must is None else f"{sign}{line.must:g}",
            "" if line.moonshot is None else f"{sign}{line.moonshot:g}",
            line.reached(),
            floor,
            str(line.pairs),
            {True: "yes", False: "NO", None: ""}[line.bit_equal],
        )
    return table


def amount(value: float, unit: str) -> str:
    """A figure with its unit, seconds below one as milliseconds."""
    if unit == "s" and abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} {unit}"

"""G15: what supervision costs: a step boundary at which nothing happens, and its share of a step of 10 ms.

The boundary: `for step in run.steps(…)` with nothing in its body, less a plain loop; the best of a few batches.
The share: a job of one local node whose worker takes steps of 10 ms; the boundary, and the processor time that agent
and supervisor take meanwhile, as if the worker had to give it away. The goal is for a host where they use other cores
than training (`boundary`); their own time is the line after it.

    python -m benchmarks.boundary [--pairs 7] [--quick] [--json]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import engine
from benchmarks.measuring import MEMORY, OURS, Line, Options, Report, Samples, after, interleave, options, scratch, show
from benchmarks.notice_to_commit import await_file, descendants, started

BATCH_STEPS = 50_000
BATCHES = 3
STEP_SECONDS = 0.01
WATCH_SECONDS, QUICK_WATCH_SECONDS = 10.0, 1.0
STEPS_MAX = 1 << 40


def main() -> None:
    """Measure and print; with `--as-worker`, be the worker."""
    given, report = options(__doc__), Report()
    boundary = measure_boundary(given)
    line = boundary.line("G15", "step boundary", than="bound", must=1.0, moonshot=0.1, unit="µs")
    report.add("boundary", boundary, [line])
    report.add("share", *measure_share(given, boundary.median(OURS)))
    show(report, "What supervision costs (G15)", given)


def measure_boundary(given: Options) -> Samples:
    """Microseconds of one boundary, beside the bound of 10."""
    with scratch(MEMORY) as staging, engine.attached({"t0": torch.zeros(8)}, staging) as run:
        steps = run.steps(until=STEPS_MAX)
        next(steps)
        batch = BATCH_STEPS // 50 if given.quick else BATCH_STEPS

        def once(turns: Iterator[int]) -> float:
            begin = time.perf_counter_ns()
            for _ in zip(range(batch), turns, strict=False):
                pass
            return (time.perf_counter_ns() - begin) / batch / 1000

        def boundary() -> float:
            return min(once(steps) for _ in range(BATCHES)) - min(once(iter(range(batch + 1))) for _ in range(BATCHES))

        return interleave({OURS: boundary, "bound": lambda: 10.0}, given.pairs, after(given.limit_seconds))


# ------------------------------------------------------------------------------------------- a job of one node


def measure_share(given: Options, boundary_microseconds: float) -> tuple[Samples, list[Line]]:
    """Of a step of 10 ms."""
    watch_seconds = QUICK_WATCH_SECONDS if given.quick else WATCH_SECONDS
    with scratch(None) as folder, scratch(MEMORY) as staging, running(folder, staging) as others:
        before, begin = processor_seconds(others), time.monotonic()
        time.sleep(watch_seconds)
        taken = (processor_seconds(others) - before) / (time.monotonic() - begin)
    step = STEP_SECONDS * 1e6
    samples = Samples(
        by_side={
            OURS: [boundary_microseconds],
            "agent + supervisor": [taken * step],
            "10 ms": [step],
        }
    )
    lines = [
        samples.line("G15", "share of a step", than="10 ms", must=0.001, unit="µs"),
        samples.line(
            "G15",
            "beside a step",
            ours="agent + supervisor",
            than="10 ms",
            must=None,
            unit="µs",
            note="processor time of both, on whichever core is free",
        ),
    ]
    return samples, lines


@contextmanager
def running(folder: Path, staging: Path) -> Iterator[list[int]]:
    """A job that trains; the process ids of its supervisor and agent."""
    command = [
        *(sys.executable, "-m", "orchestrator", "run", "--notices", "none"),
        *("--job", "job", "--store", str(folder / "store")),
        *("--nodes", "1", "--workers-per-node", "1", "--save-every", "0", "--staging", str(staging), "--"),
        *(sys.executable, "-m", "benchmarks.ten_millisecond_steps", str(folder), str(STEP_SECONDS)),
    ]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(engine.ROOT), os.environ.get("PYTHONPATH"))))
    with started([command], [environment], folder) as processes:
        worker = int(await_file(folder, "worker").read_text())
        supervisor = processes[0].pid
        below_worker = {worker, *descendants(worker)}
        yield [pid for pid in (supervisor, *descendants(supervisor)) if pid not in below_worker]


def processor_seconds(pids: list[int]) -> float:
    """That the processes' threads have had so far."""
    return (
        sum(int(path.read_text().split()[0]) for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        / 1e9
    )


if __name__ == "__main__":
    main()

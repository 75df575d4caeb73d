"""G1 and G2: how much longer training takes for each save, not how soon the call returns.

One job of one local node, started as a person starts it, so that the agent uploads at nice 19. Its worker trains in
phases of at least 12 steps with a save asked for at step 0 and 6, each between phases without: ours by `run.save()`,
then in the same process `dcp.save`, `dcp.async_save` and, where they are installed, `torchsnapshot` and
`torch_checkpointing`. A phase lasts until its saves are durable; added time is what it took more than so many steps
without a save. All sides write to the same disk and flush, but for `torch_checkpointing`, which does not.

The interval is the lowest and the highest added time of ours; the noise is how far steps without a save are apart.

    python -m benchmarks.inflation [--state A|B] [--pairs 7] [--folder DISK] [--quick] [--json]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import engine
from benchmarks.measuring import MEMORY, OURS, Line, Options, Report, Samples, State, options, scratch, show
from benchmarks.notice_to_commit import await_file, started

COMPUTE_SECONDS, QUICK_COMPUTE_SECONDS = 0.06, 0.02
START_SECONDS = 120.0
GOALS: dict[str, tuple[str, dict[str, tuple[float, float | None]]]] = {
    "A": ("G2", {"dcp.async_save": (1.0, 0.5), "dcp.save": (0.5, None)}),
    "B": ("G1", {"dcp.async_save": (0.05, None), "torchsnapshot": (0.25, None)}),
}
"""State → goal, and by what it is compared with: must, moonshot."""
PHASES = 12
"""Steps of a phase, as `training_to_inflate` has them."""


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    for state in given.states:
        with scratch(given.folder) as folder, scratch(MEMORY) as staging:
            take_in(state, measure(state, given, folder, staging), report)
    show(report, "Training inflation per save (G1, G2)", given)


def measure(state: State, given: Options, folder: Path, staging: Path) -> dict[str, Any]:
    """What the worker has written when all pairs were done."""
    setting = {
        "state": state.name,
        "quick": given.quick,
        "pairs": given.pairs,
        "limit_seconds": given.limit_seconds,
        "folder": str(folder),
        "threads": max((os.cpu_count() or 1) // 2, 1),
        "compute_seconds": QUICK_COMPUTE_SECONDS if given.quick else COMPUTE_SECONDS,
    }
    command = [
        *(sys.executable, "-m", "orchestrator", "run", "--notices", "none"),
        *("--job", "job", "--store", str(folder / "store")),
        *("--nodes", "1", "--workers-per-node", "1", "--save-every", "0", "--staging", str(staging), "--"),
        *(sys.executable, "-m", "benchmarks.training_to_inflate", json.dumps(setting)),
    ]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(engine.ROOT), os.environ.get("PYTHONPATH"))))
    with started([command], [environment], folder):
        limit_seconds = START_SECONDS + 4 * given.limit_seconds
        result: dict[str, Any] = json.loads(await_file(folder, "result.json", limit_seconds).read_text())
    if "error" in result:
        sys.exit(f"the training failed:\n{result['error']}")
    return result


def take_in(state: State, found: dict[str, Any], report: Report) -> None:
    """One state's figures as lines."""
    samples = Samples(by_side=found["added_seconds"])
    for reason in found["left_out"]:
        report.leave_out(reason)
    bases = found["base_step_seconds"]
    noise = statistics.median(abs(one - other) for one, other in pairwise(bases)) * PHASES / 2
    ours = samples.by_side[OURS]
    note = (
        f"ours adds {min(ours) * 1e3:.0f} to {max(ours) * 1e3:.0f} ms per save, noise {noise * 1e3:.0f} ms, "
        f"a step takes {statistics.median(bases) * 1e3:.0f} ms"
    )
    goal, bounds = GOALS[state.name]
    what = f"inflation, {state.name}"

    def line(than: str) -> Line:
        must, moonshot = bounds.get(than, (None, None))
        first = than == "dcp.async_save"
        return samples.line(
            goal,
            what,
            than=than,
            must=must,
            moonshot=moonshot,
            bit_equal=found["equal"],
            note=note if first else "",
        )

    report.add(what, samples, [line(than) for than in sorted(samples.by_side, key=_order) if than != OURS])


def _order(side: str) -> int:
    return ("dcp.async_save", "dcp.save", "torchsnapshot", "torch_checkpointing", OURS).index(side)


if __name__ == "__main__":
    main()

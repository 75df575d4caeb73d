"""All benchmarks of the checkpoint engine, one after another, and one table: `make bench`, or `python -m benchmarks`.

Each script runs in a process of its own with its part of the time; on two cores all take about ten minutes. Scripts
that need a job or a scale of their own are not among them: `notice_to_commit`, `index_scale`, `supervisor_scale`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import Options, Report, report_of, show

LIMIT_SECONDS = {
    "inflation": 80,
    "staging": 20,
    "saving": 50,
    "load": 30,
    "ranks": 50,
    "remap": 35,
    "memory": 20,
    "boundary": 20,
}
"""Script → seconds for each of its states (`ranks`, `boundary`: for all); each adds what its start and checks take."""
SCRIPT_SECONDS_MAX = 600


def main() -> int:
    """Run all and print; 1 if a script failed, which no figure makes it do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(LIMIT_SECONDS), action="append", help="this script alone; repeatable")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the disk is; a temporary folder if not given")
    parser.add_argument("--quick", action="store_true", help="tiny states: does it work at all?")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args()
    shared = ["--json", "--pairs", str(given.pairs)]
    shared += ["--quick"] if given.quick else []
    shared += ["--folder", str(given.folder)] if given.folder else []
    whole, failed = Report(), []
    for script in given.only or LIMIT_SECONDS:
        print(f"{script} …", file=sys.stderr, flush=True)
        found = run(script, [*shared, "--limit-seconds", str(LIMIT_SECONDS[script])])
        if found is None:
            failed.append(script)
            whole.leave_out(f"{script}: it failed, see above")
            continue
        whole.lines += found.lines
        whole.samples |= found.samples
        for reason in found.left_out:
            whole.leave_out(reason)
    how = Options(states=(), pairs=given.pairs, limit_seconds=0, folder=None, quick=given.quick, json=given.json)
    show(whole, "The checkpoint engine: ratios of medians", how)
    return 1 if failed else 0


def run(script: str, words: list[str]) -> Report | None:
    """One script's report; None if it failed."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *words]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, check=False, timeout=SCRIPT_SECONDS_MAX, cwd=Path(__file__).parents[1]
        )
    except subprocess.TimeoutExpired:
        print(f"{script} did not end within {SCRIPT_SECONDS_MAX} s", file=sys.stderr)
        return None
    return report_of(json.loads(done.stdout)) if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())

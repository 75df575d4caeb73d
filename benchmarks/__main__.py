"""All benchmarks of the checkpoint engine, one after another, and one table: `make bench`, or `python -m benchmarks`.

Each script runs in a fork of this process with its part of the time; on two cores all take about a quarter of an hour.
Scripts that need a job or a scale of their own are not among them: `notice_to_commit`, `notice_latency`,
`index_scale`, `supervisor_scale`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measuring import Options, Report, in_processes, report_of, show

LIMIT_SECONDS = {
    "inflation": 80,
    "staging": 20,
    "saving": 50,
    "load": 30,
    "ranks": 70,
    "remap": 35,
    "uploading": 60,
    "memory": 20,
    "boundary": 20,
}
"""Script → seconds for each of its states (`ranks`, `boundary`: for all); each adds what its start and checks take."""
QUICK_WORDS = {"inflation": ["--state", "B"], "uploading": ["--state", "A"]}
"""With `--quick`: jobs and servers take seconds to start, one will do."""
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
        words = [*shared, *QUICK_WORDS.get(script, [])] if given.quick else shared
        found = run(script, [*words, "--limit-seconds", str(LIMIT_SECONDS[script])])
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
    module = importlib.import_module(f"benchmarks.{script}")

    def act(_: int) -> Any:
        sys.argv = [script, *words]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            module.main()
        return json.loads(printed.getvalue())

    try:
        return report_of(in_processes(1, act, SCRIPT_SECONDS_MAX)[0])
    except EOFError:  # its process has ended without an answer, and has said why
        return None


if __name__ == "__main__":
    sys.exit(main())

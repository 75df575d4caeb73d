"""`python -m tests.simulation [--seeds N] [--first S] [--processes P] [--planted]`: many disasters, on all cores.

Prints what went wrong with its seed, the speed, and what happened how often. `--planted` plants each known bug in turn
and says in how many of the seeds it was found. Exit status 1 if anything went wrong, or a planted bug was not found.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation.many import disasters, planted


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulated disasters, by seed.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--planted", action="store_true", help="plant each known bug and count the seeds that find it")
    options = parser.parse_args()
    run = planted if options.planted else disasters
    return int(run(options.first, options.seeds, options.processes) > 0)


if __name__ == "__main__":
    sys.exit(main())

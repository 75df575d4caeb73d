"""Kills at random times of real jobs, one after another; each job's store is compared with an uninterrupted run's.

Each kill is drawn from (seed, number) alone: the victim, the moment of a save to aim at, and the instant within it. A
job survives many kills, because it restarts itself; a killed supervisor is started again by the same command. After
each kill the newest committed checkpoint must be there and load bit-identically, and the restarted workers' live state
must be that of the uninterrupted run. Run by `test_kill_times.py` and `make soak`:
`python -m tests.processes.kill_times --kills 200`; `--seed S --only N` draws one kill again.
"""

from __future__ import annotations

import argparse
import math
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.processes.kill_plans import Kill, Victim, draw
from tests.processes.killed_job import SAVE_EVERY, STEPS_LEFT_MIN, Job, JobIsOverError, KilledJob, Place, StuckError
from tests.processes.observation import Moment

STEPS_PER_KILL = 7
STEPS_MAX = 420
PROBLEMS_SHOWN_MAX = 20


# ------------------------------------------------------------------------------------------------- the soak


@dataclass(kw_only=True)
class Soak:
    """What all kills came to."""

    seed: int
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What went wrong beside single kills: a job that did not go on, or came to another end."""
    jobs: int = 0
    entries: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every kill left a bit-identical checkpoint and every job came to the same end."""
        return not self.problems and not any(kill.problems for kill in self.kills)


def soak(result: Soak, numbers: Sequence[int], folder: Path, staging: Path, say: Callable[[str], None]) -> None:
    """Carry out the kills with these numbers; one job after another, as many as it takes."""
    began = time.monotonic()
    place = Place(folder=folder, staging=staging, steps=_steps_for(len(numbers)))
    say(f"seed {result.seed}; an undisturbed run of {place.steps} steps first")
    place.train_undisturbed()
    say(f"it took {time.monotonic() - began:.1f} s")
    left = list(numbers)
    while left and result.jobs <= 2 + len(numbers):
        job = Job(place, f"job-{result.jobs}")
        result.jobs += 1
        try:
            _kill_until_done(KilledJob(job, place), left, result, say)
        except StuckError as problem:
            at = f"kill {left[0]}" if left else "the end"
            result.problems.append(f"seed {result.seed}, job {result.jobs}, before {at}: {problem}")
            say(result.problems[-1])
            break
        finally:
            job.remove()
            result.seconds = time.monotonic() - began


def _steps_for(kills: int) -> int:
    """A multiple of SAVE_EVERY: long enough for the kills, or for a part of many of them."""
    wanted = STEPS_LEFT_MIN + 2 * SAVE_EVERY + STEPS_PER_KILL * kills
    return math.ceil(min(wanted, STEPS_MAX) / SAVE_EVERY) * SAVE_EVERY


def _kill_until_done(killed: KilledJob, left: list[int], result: Soak, say: Callable[[str], None]) -> None:
    """Kills until none is left or the job is near its end; then its end."""
    try:
        while left and killed.steps_left >= STEPS_LEFT_MIN:
            kill = killed.carry_out(draw(result.seed, left[0]))
            left.pop(0)
            result.kills.append(kill)
            say(kill.line())
    except JobIsOverError:
        say("the job was done before the kill")
    problems = killed.finish()
    result.entries += killed.check.entries
    result.problems.extend(f"seed {result.seed}, job {result.jobs}, after its end: {problem}" for problem in problems)
    say(f"job {result.jobs} is done: " + ("; ".join(problems) or "the same end as the uninterrupted run"))


def table(result: Soak) -> Table:
    """Kills by victim and by what was going on when they hit: how many of how many left a bit-identical checkpoint."""
    good = sum(not kill.problems for kill in result.kills)
    shown = Table(
        title=f"{len(result.kills)} kills, seed {result.seed}: after {good} the newest committed checkpoint, if any, "
        "was loadable and bit-identical"
    )
    shown.add_column("victim")
    for moment in Moment:
        shown.add_column(moment, justify="right")
    for name in ("all", "s, median", "s, longest"):
        shown.add_column(name, justify="right")
    for victim in (*Victim, None):
        mine = [kill for kill in result.kills if victim in (None, kill.plan.victim)]
        cells = [_count([kill for kill in mine if kill.landed is moment]) for moment in Moment]
        seconds = [kill.seconds for kill in mine] or [0.0]
        times = [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
        shown.add_row(victim or "all", *cells, _count(mine), *times, end_section=victim is Victim.SUPERVISOR)
    return shown


def _count(kills: Sequence[Kill]) -> str:
    return f"{sum(not kill.problems for kill in kills)} of {len(kills)}" if kills else "–"


def closing_words(result: Soak) -> Iterator[str]:
    """What the table does not say."""
    borders = sum(kill.after is not kill.landed for kill in result.kills)
    none_yet = sum(kill.newest is None for kill in result.kills)
    yield f"{borders} kills fell on a border between two moments; {none_yet} before anything was committed"
    yield f"{result.jobs} jobs went to their end; {result.entries} entries of live state were compared"
    yield f"{result.seconds:.0f} s in all"
    failed = [
        f"--seed {result.seed} --only {kill.plan.number}: {text}" for kill in result.kills for text in kill.problems
    ]
    failed += result.problems
    yield from (f"FAILED: {problem}" for problem in failed[:PROBLEMS_SHOWN_MAX])
    if len(failed) > PROBLEMS_SHOWN_MAX:
        yield f"and {len(failed) - PROBLEMS_SHOWN_MAX} more"


def main() -> int:
    """The soak as a command."""
    parser = argparse.ArgumentParser(prog="python -m tests.processes.kill_times", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="draw these kills again")
    parser.add_argument("--only", type=int, default=None, metavar="N", help="only the kill with this number")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    numbers = range(options.kills) if options.only is None else [options.only]
    result = Soak(seed=seed)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # not without ending its job
    console = Console(width=None if sys.stdout.isatty() else 140)
    with (
        tempfile.TemporaryDirectory(prefix="orchestrator-soak-") as folder,
        tempfile.TemporaryDirectory(prefix="orchestrator-soak-", dir=memory) as staging,
    ):
        try:
            soak(result, numbers, Path(folder), Path(staging), lambda line: print(line, flush=True))
        finally:  # also if it is broken off
            console.print(table(result), *closing_words(result), sep="\n", highlight=False)
    return 0 if result.passed and len(result.kills) == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())

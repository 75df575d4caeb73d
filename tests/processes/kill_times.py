"""Kills at random times: one real job after another is shot at, and its store is compared with an uninterrupted run's.

Each kill is drawn from (seed, number) alone: the victim, the moment of a save to aim at, and the instant within it. A
job survives many kills, because it restarts itself; a killed supervisor is started again by the same command. After
each kill the newest committed checkpoint must be there and load bit-identically, and the restarted workers' live state
must be that of the uninterrupted run. Run by `test_kill_times.py` and `make soak`:
`python -m tests.processes.kill_times --kills 200`; `--seed S --only N` draws one kill again.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import secrets
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.storage.opening import open_store
from tests.processes.sights import Moment, Sight, Watch, processes, staging_folder_of
from tests.processes.truth import Truth, Witness

TRAINING = Path(__file__).with_name("ledger_training.py")
NODES = 2
SAVE_EVERY = 5
BALLAST_MIB = 40
STEP_SECONDS = 0.05
LOOK_SECONDS = 0.001
LOOK_SECONDS_RESTARTING = 0.02
STEPS_PER_KILL = 7
STEPS_MAX = 420
STEPS_LEFT_MIN = 40
"""A job with fewer steps left is not shot at any more, so that it does not end meanwhile."""
FIRST_GUESSES = dict.fromkeys(Moment, 0.02) | {Moment.UPLOADING: 0.2}
"""How long a moment lasts, in seconds, until it has been seen."""
PAUSE_SECONDS_MAX = 1.5
DEATH_SECONDS_MAX = 20.0
PHASE_SECONDS_MAX = 60.0
PROGRESS_SECONDS_MAX = 120.0
END_SECONDS_MAX = 240.0


class Victim(StrEnum):
    """What is killed."""

    WORKER = "worker"
    AGENT = "agent"
    NODE = "node"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One kill."""

    number: int
    victim: Victim
    aim: Moment | None
    """The moment of a save to hit; None: any instant."""
    part: float
    """How far into that moment, 0 to 1; how long after the kill before, in parts of `any_seconds`."""
    any_seconds: float
    settle: bool
    """Wait until the job has committed a checkpoint after the last kill; else it may be hit while it restarts."""
    which: int
    """Which of the victims there are."""
    pause_seconds: float
    """How long nobody starts a killed supervisor again."""


def draw(seed: int, number: int) -> Plan:
    """The kill with that number: each run of 16 holds every victim with every aim."""
    pairs = [(victim, aim) for victim in Victim for aim in (Moment.STAGING, Moment.UPLOADING, Moment.COMMITTING, None)]
    random.Random(f"{seed}-{number // len(pairs)}").shuffle(pairs)
    victim, aim = pairs[number % len(pairs)]
    numbers = random.Random(f"{seed}-kill-{number}")
    settle = aim is not None or numbers.random() < 0.5
    return Plan(
        number=number,
        victim=victim,
        aim=aim,
        part=numbers.random(),
        any_seconds=1.0 if settle else 4.0,
        settle=settle,
        which=numbers.randrange(2),
        pause_seconds=numbers.choice((0.0, numbers.uniform(0, PAUSE_SECONDS_MAX))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What came of a plan."""

    plan: Plan
    landed: Moment
    after: Moment
    """What was seen once the victim was dead: another moment than `landed` if the kill fell on a border."""
    generation: int
    newest: str | None
    seconds: float
    problems: tuple[str, ...]

    def line(self) -> str:
        """One line for people."""
        plan = self.plan
        aim = f"{plan.part:.2f} of {plan.aim}" if plan.aim else f"{plan.part * plan.any_seconds:.2f} s after"
        verdict = "; ".join(self.problems) or (
            f"{self.newest} is bit-identical" if self.newest else "nothing was committed yet"
        )
        border = "" if self.after is self.landed else f" → {self.after}"
        return (
            f"{plan.number:4d}  {plan.victim:<10} aimed {aim:<20} hit {self.landed + border:<24} "
            f"g{self.generation:<3} {self.seconds:5.1f} s  {verdict}"
        )


class JobIsOverError(Exception):
    """The job came to its end before the kill."""


class Stuck(Exception):
    """The job does not do what it must."""


@dataclass(kw_only=True)
class Range:
    """A folder for jobs, and what they have in common."""

    folder: Path
    staging: Path
    steps: int
    truth: Truth | None = None
    durations: dict[Moment, deque[float]] = field(
        default_factory=lambda: {moment: deque([seconds], maxlen=25) for moment, seconds in FIRST_GUESSES.items()}
    )

    def train_undisturbed(self) -> None:
        """Compute what every other job must come to."""
        job = Job(self, "undisturbed", save_every=0)
        job.start()
        job.await_end()
        self.truth = Truth(job.ledger)
        job.remove()


class Job:
    """One job as a real `orchestrator run`."""

    def __init__(self, place: Range, name: str, save_every: int = SAVE_EVERY) -> None:
        self.folder = place.folder / name
        self.staging = place.staging / name
        self.ledger = self.folder / "ledger"
        self.pace = self.folder / "pace"
        self.store = self.folder / "store" / "job"
        self.output = self.folder / "output"
        self._save_every = save_every
        self._steps = place.steps
        for made in (self.ledger, self.staging):
            made.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The same command each time."""
        command = [
            *(sys.executable, "-m", "orchestrator", "run", "--job", "job", "--store", str(self.store.parent)),
            *("--nodes", str(NODES), "--workers-per-node", "1", "--save-every", str(self._save_every)),
            *("--max-failures", "1000", "--staging", str(self.staging), "--", sys.executable, str(TRAINING)),
        ]
        variables = {
            "XDG_STATE_HOME": self.folder / "state",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": 1,
            "PYTHONWARNINGS": "ignore",
            "STEPS": self._steps,
            "SAVE_EVERY": SAVE_EVERY,
            "STEP_SECONDS": STEP_SECONDS,
            "BALLAST_MIB": BALLAST_MIB,
            "LEDGER": self.ledger,
            "PACE": self.pace,
        }
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        assert self.process is not None
        return self.process.pid

    def check_running(self) -> None:
        """Raises JobIsOverError if it has ended as it should, Stuck if otherwise."""
        assert self.process is not None
        status = self.process.poll()
        if status == 0:
            raise JobIsOverError
        if status is not None:
            raise Stuck(f"orchestrator run ended with status {status}: {self.last_words()}")

    def await_end(self) -> None:
        """Let it train to the end without pauses. Raises Stuck."""
        assert self.process is not None
        self.pace.unlink(missing_ok=True)
        try:
            status = self.process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise Stuck(f"not done within {END_SECONDS_MAX:.0f} s: {self.last_words()}") from None
        if status != 0:
            raise Stuck(f"orchestrator run ended with status {status}: {self.last_words()}")

    def last_words(self) -> str:
        """The end of what it printed."""
        return self.output.read_text(errors="replace")[-1500:]

    def remove(self) -> None:
        """End what is left of it; its files go."""
        if self.process is not None and self.process.poll() is None:
            descendants = processes(self.pid, str(TRAINING)).below(self.pid)
            for pid in (self.pid, *descendants):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.staging, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The processes that a kill hits (held by pidfd: a number may be given to another), and what goes with them."""

    handles: tuple[int, ...]
    memory: Path | None = None

    def kill(self) -> bool:
        """SIGKILL to all; False if the first of them was gone already."""
        for number, handle in enumerate(self.handles):
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            except ProcessLookupError:
                if number == 0:
                    return False
        return True

    def await_death(self) -> None:
        """Until the kernel says that they are gone; then their memory goes too. Raises Stuck."""
        for handle in self.handles:
            if not select.select([handle], [], [], DEATH_SECONDS_MAX)[0]:
                raise Stuck(f"a killed process was not gone within {DEATH_SECONDS_MAX:.0f} s")
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)

    def close(self) -> None:
        """Forget the processes."""
        for handle in self.handles:
            os.close(handle)


class Shooting:
    """One job and the kills that it goes through."""

    def __init__(self, job: Job, place: Range) -> None:
        assert place.truth is not None
        self.job = job
        self.watch = Watch(job.staging, job.store, NODES, place.durations)
        self.witness = Witness(truth=place.truth, store=open_store(str(job.store)), ledger=job.ledger)
        self._steps = place.steps
        job.pace.touch()
        job.start()
        self._since = time.monotonic()

    @property
    def steps_left(self) -> int:
        """Steps between the newest committed checkpoint and the end."""
        return self._steps - (self.witness.newest.step if self.witness.newest else 0)

    def shoot(self, plan: Plan) -> Kill:
        """Carry out one plan. Raises Stuck, JobIsOverError."""
        if plan.settle:
            self._await_progress()
        target, sight = self._hit(plan)
        after = self.watch.look()
        try:
            target.await_death()
        finally:
            target.close()
        if plan.victim is Victim.SUPERVISOR:
            assert self.job.process is not None
            self.job.process.wait()
        problems = self.witness.problems()
        self.witness.retire_old()
        if plan.victim is Victim.SUPERVISOR:
            time.sleep(plan.pause_seconds)  # training goes on meanwhile: part of what is drawn
            self.job.start()
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        newest = str(self.witness.newest) if self.witness.newest else None
        return Kill(
            plan=plan,
            landed=sight.moment,
            after=after.moment,
            generation=sight.generation,
            newest=newest,
            seconds=seconds,
            problems=tuple(problems),
        )

    def finish(self) -> list[str]:
        """To the end; then everything is compared once more, and the last step with the uninterrupted run's."""
        self.job.await_end()
        problems = self.witness.problems()
        newest = self.witness.newest
        if newest is None or newest.step != self._steps:
            problems.append(f"the job is done, but its newest checkpoint is {newest}")
        return problems

    # -- waiting -----------------------------------------------------------------------------------------

    def _await_progress(self) -> None:
        """Until a checkpoint is committed that was not there at the last kill: the job really goes on."""
        before = self.witness.newest
        last = "" if before is None else _folder_name(before.generation, before.step)
        folder = self.job.store / "checkpoints"
        end = time.monotonic() + PROGRESS_SECONDS_MAX
        while not any(path.parent.name > last for path in folder.glob("*/index.json")):
            self.job.check_running()
            if time.monotonic() > end:
                seen = self.watch.look()
                raise Stuck(f"nothing new was committed within {PROGRESS_SECONDS_MAX:.0f} s; last seen: {seen}")
            self._look_for(0.05)

    def _look_for(self, seconds: float) -> None:
        """Look again and again, so that the watch learns how long the moments of a save take here."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(_pause_after(self.watch.look()))

    def _hit(self, plan: Plan) -> tuple[Target, Sight]:
        """Wait for the instant and kill; what was seen immediately before."""
        if plan.aim is None:
            end = self._since if not plan.settle else time.monotonic()
            end += plan.part * plan.any_seconds
            time.sleep(max(0.0, end - time.monotonic()))
        end = time.monotonic() + PHASE_SECONDS_MAX
        while time.monotonic() < end:
            target = self._target(plan)
            if target is None:
                self.job.check_running()
                time.sleep(LOOK_SECONDS_RESTARTING)
                continue
            sight = self._await_moment(plan) if plan.aim is not None else self._honest_look()
            if target.kill():
                return target, sight
            target.close()
        raise Stuck(f"no {plan.victim} was there to be killed within {PHASE_SECONDS_MAX:.0f} s")

    def _honest_look(self) -> Sight:
        """Control blocks outlive their workers: without all workers, the job is restarting."""
        sight = self.watch.look()
        if len(processes(self.job.pid, str(TRAINING)).workers) < NODES:
            return Sight(moment=Moment.RESTARTING, generation=sight.generation, step=sight.step)
        return sight

    def _await_moment(self, plan: Plan) -> Sight:
        """The beginning of the aimed moment, then a part of the time that it usually takes."""
        assert plan.aim is not None
        before = self.watch.look().moment
        end = time.monotonic() + PHASE_SECONDS_MAX
        while time.monotonic() < end:
            sight = self.watch.look()
            now = sight.moment
            if now is plan.aim and before is not plan.aim:
                until = time.monotonic() + plan.part * statistics.median(self.watch.durations[plan.aim])
                while time.monotonic() < until and self.watch.look().moment is plan.aim:
                    time.sleep(LOOK_SECONDS)
                return self.watch.look()
            before = now
            self.job.check_running()
            time.sleep(_pause_after(sight))
        raise Stuck(f"no {plan.aim} was seen within {PHASE_SECONDS_MAX:.0f} s")

    def _target(self, plan: Plan) -> Target | None:
        """The victim's processes, the most important one first; None while there is none."""
        found = processes(self.job.pid, str(TRAINING))
        if plan.victim is Victim.SUPERVISOR:
            return _held([self.job.pid])
        candidates = found.workers if plan.victim is Victim.WORKER else found.agents
        if not candidates:
            return None
        pid = candidates[plan.which % len(candidates)]
        if plan.victim is not Victim.NODE:
            return _held([pid])
        return _held([pid, *found.below(pid)], staging_folder_of(pid, self.job.staging))


def _held(pids: Sequence[int], memory: Path | None = None) -> Target | None:
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return Target(handles=tuple(handles), memory=memory) if handles else None


def _pause_after(sight: Sight) -> float:
    """Seconds until the next look: a restart takes long."""
    return LOOK_SECONDS_RESTARTING if sight.moment is Moment.RESTARTING else LOOK_SECONDS


def _folder_name(generation: int, step: int) -> str:
    return f"g{generation:08d}-s{step:010d}"


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


def soak(numbers: Sequence[int], seed: int, folder: Path, staging: Path, say: Callable[[str], None]) -> Soak:
    """Carry out the kills with these numbers; one job after another, as many as it takes."""
    began = time.monotonic()
    result = Soak(seed=seed)
    place = Range(folder=folder, staging=staging, steps=_steps_for(len(numbers)))
    say(f"seed {seed}; an undisturbed run of {place.steps} steps first")
    place.train_undisturbed()
    say(f"it took {time.monotonic() - began:.1f} s")
    left = list(numbers)
    while left and result.jobs <= 2 + len(numbers):
        job = Job(place, f"job-{result.jobs}")
        result.jobs += 1
        try:
            _shoot_at(Shooting(job, place), left, result, say)
        except Stuck as problem:
            at = f"kill {left[0]}" if left else "the end"
            result.problems.append(f"seed {seed}, job {result.jobs}, before {at}: {problem}")
            say(result.problems[-1])
            break
        finally:
            job.remove()
    result.seconds = time.monotonic() - began
    return result


def _steps_for(kills: int) -> int:
    """A multiple of SAVE_EVERY: long enough for the kills, or for a part of many of them."""
    wanted = STEPS_LEFT_MIN + 2 * SAVE_EVERY + STEPS_PER_KILL * kills
    return math.ceil(min(wanted, STEPS_MAX) / SAVE_EVERY) * SAVE_EVERY


def _shoot_at(shooting: Shooting, left: list[int], result: Soak, say: Callable[[str], None]) -> None:
    """Kills until none is left or the job is near its end; then its end."""
    try:
        while left and shooting.steps_left >= STEPS_LEFT_MIN:
            kill = shooting.shoot(draw(result.seed, left[0]))
            left.pop(0)
            result.kills.append(kill)
            say(kill.line())
    except JobIsOverError:
        say("the job was done before the kill")
    problems = shooting.finish()
    result.entries += shooting.witness.entries
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
    for kill in result.kills:
        for problem in kill.problems:
            yield f"FAILED: --seed {result.seed} --only {kill.plan.number}: {problem}"
    for problem in result.problems:
        yield f"FAILED: {problem}"


def main() -> int:
    """The soak as a command."""
    parser = argparse.ArgumentParser(prog="python -m tests.processes.kill_times", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="draw these kills again")
    parser.add_argument("--only", type=int, default=None, metavar="N", help="only the kill with this number")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    numbers = range(options.kills) if options.only is None else [options.only]
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    console = Console(width=None if sys.stdout.isatty() else 140)
    with (
        tempfile.TemporaryDirectory(prefix="orchestrator-soak-") as folder,
        tempfile.TemporaryDirectory(prefix="orchestrator-soak-", dir=memory) as staging,
    ):
        result = soak(numbers, seed, Path(folder), Path(staging), lambda line: print(line, flush=True))
    console.print(table(result))
    for line in closing_words(result):
        console.print(line, highlight=False)
    return 0 if result.passed and len(result.kills) == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())

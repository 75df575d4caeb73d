"""A real job, as a person starts it, and kills of its processes at chosen instants.

The job restarts itself; a killed supervisor is started again by the same command. After each kill its store is checked.
Used by `tests.processes.kill_times`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.storage.opening import open_store
from tests.commands import RUN
from tests.processes.kill_plans import Kill, Plan, Victim
from tests.processes.observation import Moment, Observation, Observer, processes, staging_folder_of
from tests.processes.reference import Reference, StoreCheck

TRAINING = Path(__file__).with_name("ledger_training.py")
NODES = 2
SAVE_EVERY = 5
BALLAST_MIB = 40
STEP_SECONDS = 0.05
LOOK_SECONDS = 0.001
LOOK_SECONDS_RESTARTING = 0.02
STEPS_LEFT_MIN = 40
"""A job with fewer steps left is left alone, so that it does not end meanwhile."""
FIRST_GUESSES = dict.fromkeys(Moment, 0.02) | {Moment.UPLOADING: 0.2}
"""How long a moment lasts, in seconds, until it has been seen."""
DEATH_SECONDS_MAX = 20.0
PHASE_SECONDS_MAX = 60.0
PROGRESS_SECONDS_MAX = 120.0
END_SECONDS_MAX = 240.0


class JobIsOverError(Exception):
    """The job came to its end before the kill."""


class StuckError(Exception):
    """The job does not do what it must."""


@dataclass(kw_only=True)
class Place:
    """A folder for jobs, and what they have in common."""

    folder: Path
    staging: Path
    steps: int
    reference: Reference | None = None
    durations: dict[Moment, deque[float]] = field(
        default_factory=lambda: {moment: deque([seconds], maxlen=25) for moment, seconds in FIRST_GUESSES.items()}
    )

    def train_undisturbed(self) -> None:
        """Compute what every other job must come to."""
        job = Job(self, "undisturbed", save_every=0)
        try:
            job.start()
            job.await_end()
            self.reference = Reference(job.ledger)
        finally:
            job.remove()


class Job:
    """One job as a real `orchestrator run`."""

    def __init__(self, place: Place, name: str, save_every: int = SAVE_EVERY) -> None:
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
            *RUN,
            *("--job", "job", "--store", str(self.store.parent)),
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
        """Raises JobIsOverError if it has ended as it should, StuckError if otherwise."""
        assert self.process is not None
        status = self.process.poll()
        if status == 0:
            raise JobIsOverError
        if status is not None:
            raise StuckError(f"orchestrator run ended with status {status}: {self.last_words()}")

    def await_end(self) -> None:
        """Let it train to the end without pauses. Raises StuckError."""
        assert self.process is not None
        self.pace.unlink(missing_ok=True)
        try:
            status = self.process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise StuckError(f"not done within {END_SECONDS_MAX:.0f} s: {self.last_words()}") from None
        if status != 0:
            raise StuckError(f"orchestrator run ended with status {status}: {self.last_words()}")

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
        """Until the kernel says that they are gone; then their memory goes too. Raises StuckError."""
        for handle in self.handles:
            if not select.select([handle], [], [], DEATH_SECONDS_MAX)[0]:
                raise StuckError(f"a killed process was not gone within {DEATH_SECONDS_MAX:.0f} s")
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)

    def close(self) -> None:
        """Forget the processes."""
        for handle in self.handles:
            os.close(handle)


class KilledJob:
    """One job and the kills that it goes through."""

    def __init__(self, job: Job, place: Place) -> None:
        assert place.reference is not None
        self.job = job
        self.observer = Observer(job.staging, job.store, NODES, place.durations)
        self.check = StoreCheck(reference=place.reference, store=open_store(str(job.store)), ledger=job.ledger)
        self._steps = place.steps
        job.pace.touch()
        job.start()
        self._since = time.monotonic()
        self._trained = False

    @property
    def steps_left(self) -> int:
        """Steps between the newest committed checkpoint and the end."""
        return self._steps - (self.check.newest.step if self.check.newest else 0)

    def carry_out(self, plan: Plan) -> Kill:
        """Carry out one plan. Raises StuckError, JobIsOverError."""
        if plan.settle:
            self._await_progress()
        elif plan.victim is Victim.WORKER:
            self._await_attached()
        target, seen = self._hit(plan)
        after = self.observer.look()
        try:
            target.await_death()
        finally:
            target.close()
        if plan.victim is Victim.SUPERVISOR:
            assert self.job.process is not None
            self.job.process.wait()
        problems = self.check.problems()
        self.check.retire_old()
        if plan.victim is Victim.SUPERVISOR:
            time.sleep(plan.pause_seconds)  # training goes on meanwhile: part of what is drawn
            self.job.start()
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        newest = str(self.check.newest) if self.check.newest else None
        return Kill(
            plan=plan,
            landed=seen.moment,
            after=after.moment,
            generation=seen.generation,
            newest=newest,
            seconds=seconds,
            problems=tuple(problems),
        )

    def finish(self) -> list[str]:
        """To the end; then everything is compared once more, and the last step with the uninterrupted run's."""
        self.job.await_end()
        problems = self.check.problems()
        newest = self.check.newest
        if newest is None or newest.step != self._steps:
            problems.append(f"the job is done, but its newest checkpoint is {newest}")
        return problems

    # -- waiting -----------------------------------------------------------------------------------------

    def _await_progress(self) -> None:
        """Until a checkpoint is committed that was not there at the last kill: the job really goes on."""
        before = self.check.newest
        last = "" if before is None else _folder_name(before.generation, before.step)
        folder = self.job.store / "checkpoints"
        end = time.monotonic() + PROGRESS_SECONDS_MAX
        while not any(path.parent.name > last for path in folder.glob("*/index.json")):
            self.job.check_running()
            if time.monotonic() > end:
                seen = self.observer.look()
                raise StuckError(f"nothing new was committed within {PROGRESS_SECONDS_MAX:.0f} s; last seen: {seen}")
            self._look_for(0.05)

    def _await_attached(self) -> None:
        """A worker that ends before anything ever attached ends the job: that is the script's failure, by rule."""
        end = time.monotonic() + PROGRESS_SECONDS_MAX
        while not self._trained and time.monotonic() < end:
            self.job.check_running()
            self._look_for(0.05)

    def _look_for(self, seconds: float) -> None:
        """Look again and again, so that the observer learns how long the moments of a save take here."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            seen = self.observer.look()
            self._trained = self._trained or seen.moment is not Moment.RESTARTING
            time.sleep(_pause_after(seen))

    def _hit(self, plan: Plan) -> tuple[Target, Observation]:
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
            seen = self._await_moment(plan) if plan.aim is not None else self._honest_look()
            if target.kill():
                return target, seen
            target.close()
        raise StuckError(f"no {plan.victim} was there to be killed within {PHASE_SECONDS_MAX:.0f} s")

    def _honest_look(self) -> Observation:
        """Control blocks outlive their workers: without all workers, the job is restarting."""
        seen = self.observer.look()
        if len(processes(self.job.pid, str(TRAINING)).workers) < NODES:
            return Observation(moment=Moment.RESTARTING, generation=seen.generation, step=seen.step)
        return seen

    def _await_moment(self, plan: Plan) -> Observation:
        """The beginning of the aimed moment, then a part of the time that it usually takes."""
        assert plan.aim is not None
        before = self.observer.look().moment
        end = time.monotonic() + PHASE_SECONDS_MAX
        while time.monotonic() < end:
            seen = self.observer.look()
            now = seen.moment
            if now is plan.aim and before is not plan.aim:
                until = time.monotonic() + plan.part * statistics.median(self.observer.durations[plan.aim])
                while time.monotonic() < until and self.observer.look().moment is plan.aim:
                    time.sleep(LOOK_SECONDS)
                return self.observer.look()
            before = now
            self.job.check_running()
            time.sleep(_pause_after(seen))
        raise StuckError(f"no {plan.aim} was seen within {PHASE_SECONDS_MAX:.0f} s")

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


def _pause_after(seen: Observation) -> float:
    """Seconds until the next look: a restart takes long."""
    return LOOK_SECONDS_RESTARTING if seen.moment is Moment.RESTARTING else LOOK_SECONDS


def _folder_name(generation: int, step: int) -> str:
    return f"g{generation:08d}-s{step:010d}"

"""Several machines that are given the same command: each has a state folder and a staging folder of its own.

A machine's whole process group can be frozen and thawed, as a suspended virtual machine is. Used by `test_zombies`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from crc32c import crc32c

from orchestrator.checkpoint import format as fmt
from orchestrator.storage.arguments import is_probe
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import job_url
from tests.processes.observation import processes

TRAINING = Path(__file__).with_name("ledger_training.py")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 120
SAVE_EVERY = 10
SAVING = ("--save-every", str(SAVE_EVERY))
STEP_SECONDS = 0.03
BALLAST_MIB = 4
WAIT_SECONDS = 60.0
JOB = "job"


class Machine:
    """One machine, on which the job is started at most once."""

    def __init__(self, folder: Path, staging: Path, name: str, store: str, variables: Mapping[str, str]) -> None:
        self.folder = folder / name
        self.staging = staging / name
        self.store = store
        self.ledger = self.folder / "ledger"
        self.pace = self.folder / "pace"
        self.marker = self.folder / "stopped"
        self.output = self.folder / "output"
        for made in (self.ledger, self.staging):
            made.mkdir(parents=True)
        self.pace.touch()
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, stop_at: str | None = None) -> None:
        """Give the command; with `stop_at` the first agent that reaches this point of a save stands still there."""
        program = ["-m", "orchestrator"]
        if stop_at is not None:
            program = ["-m", "tests.processes.stopping_run", str(self.marker), stop_at]
        command = [
            *(sys.executable, *program, "run", "--job", JOB, "--store", self.store, "--nodes", "2"),
            *("--staging", str(self.staging), *(flags if "--save-every" in flags else (*SAVING, *flags))),
            *("--", sys.executable, str(TRAINING)),
        ]
        variables = {
            "XDG_STATE_HOME": self.folder / "state",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": 1,
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": f"{ROOT}:{TRAINING.parent}",
            "STEPS": STEPS,
            "SAVE_EVERY": SAVE_EVERY,
            "STEP_SECONDS": STEP_SECONDS,
            "BALLAST_MIB": BALLAST_MIB,
            "LEDGER": self.ledger,
            "PACE": self.pace,
        }
        environment = {**os.environ, **self._variables, **{name: str(value) for name, value in variables.items()}}
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(command, env=environment, cwd=self.folder, stdout=output, stderr=output)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def status(self) -> int | None:
        """The exit status of the command, None while it runs."""
        return self._running.poll()

    def await_end(self) -> int:
        """The command's exit status; fails after the limit."""
        until(lambda: self.status is not None, self.words)
        return self._running.returncode

    def words(self) -> str:
        """The end of what it printed."""
        return self.output.read_text(errors="replace")[-3000:]

    def last_words(self) -> str:
        """The last line of what it printed."""
        return self.words().strip().splitlines()[-1]

    def owner_from(self, other: Machine) -> None:
        """Be the same owner, as a job that Slurm has requeued is: the owner id lies in the state folder."""
        (path,) = (other.folder / "state").rglob("owner")
        self.owned_by(path.read_text())

    def owned_by(self, owner: str) -> None:
        """Have this owner id before the first start."""
        name = f"{JOB}-{hashlib.sha256(job_url(self.store, JOB).encode()).hexdigest()[:8]}"
        path = self.folder / "state" / "orchestrator" / name / "owner"
        path.parent.mkdir(parents=True)
        path.write_text(owner)

    def freeze(self) -> None:
        """SIGSTOP to every process of the job here."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to every process of the job here."""
        self._signal_all(signal.SIGCONT)

    def remove(self) -> None:
        """End what is left."""
        if self._process is not None and self._process.poll() is None:
            self._signal_all(signal.SIGKILL)
            self._process.wait(WAIT_SECONDS)

    def _signal_all(self, number: int) -> None:
        """The supervisor first: it starts the others, and must not see them go."""
        os.kill(self._running.pid, number)
        for pid in self._descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _descendants(self) -> list[int]:
        found = processes(self._running.pid, str(TRAINING))
        return found.below(self._running.pid)


def until(condition: Callable[[], bool], words: Callable[[], str] = str) -> None:
    """Wait for a condition; fails after the limit."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"the condition did not come true in time\n{words()}"
        time.sleep(0.02)


def contents(store: ObjectStore) -> dict[str, str]:
    """A digest of every object, but for those with which an agent tries the store before its first write."""
    kept = (entry.key for entry in store.entries("") if not is_probe(entry.key))
    return {key: f"{crc32c(store.read(key)):08x}" for key in kept}


def generation_of(key: str) -> int:
    """The generation that an object belongs to."""
    parsed = fmt.parse_checkpoint_key(key)
    return parsed[0].generation if parsed else int(key.removeprefix("generations/").partition(".")[0])

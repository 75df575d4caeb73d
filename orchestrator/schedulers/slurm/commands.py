"""Slurm's own commands, each with a limit: they wait for a controller that is away. Blocking; call it in a thread.

Used where the supervisor runs (the batch step) and on the host where a job is submitted; never by agents or workers,
whose container may have no Slurm in it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from orchestrator.errors import SchedulerError
from orchestrator.schedulers.slurm.records import (
    ClusterSettings,
    HostRecord,
    JobRecord,
    Partition,
    parse_hosts,
    parse_job,
    parse_partition,
    parse_settings,
)

ANSWER_SECONDS_MAX = 15.0
ERROR_CHARACTERS_MAX = 300


class SlurmCommands:
    """Runs them in this process's environment, or in one that a test gives."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = environment

    def job(self, job_id: str) -> JobRecord | None:
        """A job, or a task of an array (`7_1`); None if the controller has forgotten it. Raises SchedulerError."""
        try:
            return parse_job(self._run("scontrol", "show", "job", job_id), job_id)
        except SchedulerError as error:
            if "Invalid job id" in str(error):
                return None
            raise

    def host_names(self, hosts: str) -> list[str]:
        """The names in a list such as `n[1-3]`. Raises SchedulerError."""
        return self._run("scontrol", "show", "hostnames", hosts).split()

    def hosts(self, hosts: str) -> dict[str, HostRecord]:
        """What the controller knows of these hosts. Raises SchedulerError."""
        return parse_hosts(self._run("scontrol", "show", "node", hosts))

    def partition(self, name: str) -> Partition:
        """Raises SchedulerError."""
        return parse_partition(self._run("scontrol", "show", "partition", name))

    def default_partition(self) -> str | None:
        """The one that jobs go to which name none. Raises SchedulerError."""
        names = [name for name in self._run("sinfo", "-h", "-o", "%P").split() if name.endswith("*")]
        return names[0].rstrip("*") if names else None

    def settings(self) -> ClusterSettings:
        """Raises SchedulerError."""
        return parse_settings(self._run("scontrol", "show", "config"))

    def submit(self, script: str) -> str:
        """Submit a batch script; its job id. Raises SchedulerError."""
        answer = self._run("sbatch", "--parsable", text=script)
        return answer.strip().split(";")[0]

    def requeue(self, job_id: str) -> None:
        """Give the allocation back, and be started again in another one. Raises SchedulerError."""
        self._run("scontrol", "requeue", job_id)

    def release(self, job_id: str) -> None:
        """Let a held job be started. Raises SchedulerError."""
        self._run("scontrol", "release", job_id)

    def end_step(self, job_id: str, name: str) -> None:
        """Kill every process of the steps of this name. Raises SchedulerError."""
        listed = self._run("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i %j")
        steps = [words[0] for line in listed.splitlines() if len(words := line.split()) == 2 and words[1] == name]
        if steps:
            self._run("scancel", "--signal=KILL", *steps)

    def _run(self, *words: str, text: str | None = None) -> str:
        try:
            done = subprocess.run(
                words,
                env=None if self.environment is None else dict(self.environment),
                input="" if text is None else text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER_SECONDS_MAX,
                check=False,
            )
        except FileNotFoundError as error:
            raise SchedulerError(f"there is no {words[0]} here: is this a host of a Slurm cluster?") from error
        except subprocess.TimeoutExpired as error:
            raise SchedulerError(f"{_said(words)}: no answer within {ANSWER_SECONDS_MAX:g} s") from error
        except OSError as error:
            raise SchedulerError(f"{_said(words)}: {error.strerror}") from error
        if done.returncode != 0:
            problem = " ".join((done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").split())
            raise SchedulerError(f"{_said(words)}: {problem[:ERROR_CHARACTERS_MAX]}")
        return done.stdout


def _said(words: Sequence[str]) -> str:
    return " ".join(words[:4])

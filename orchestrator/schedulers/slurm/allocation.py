"""One agent on each host of a Slurm allocation, as a job step of its own. Runs in the batch step.

The allocation does not grow: a host that is lost or drained is done without, and used again if the cluster says that it
is well. What no host of the allocation can give is said once (`on_short`); whether that means another allocation is
`supervisor.slurm_job`'s affair. No time is spent in Slurm's commands on the event loop.

A step whose `srun` has ended may still run (its slurmd died): its agent is told so by the supervisor as soon as it
speaks, its ranks by their generation's number. Hosts are asked about before anything is started on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.causes import describe_exit
from orchestrator.errors import SchedulerError
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.schedulers.slurm.commands import SlurmCommands

ASK_AGAIN_SECONDS = 10.0
"""Between two looks for a host that can be used."""
STOP_SECONDS = 5.0
"""For an agent that was dismissed to end by itself."""
KILL_SECONDS = 20.0
START_SECONDS_MAX = 1800.0
"""For an agent to join, a container's image fetched and all; then its step is ended."""
STEADY_SECONDS = 60.0
"""A step that ends sooner than that after its agent has joined, or without that, counts as a failed start."""
START_FAILURES_MAX = 3
"""In a row on one host; then it is not used any more."""

TASK_VARIABLES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID")
"""What Slurm says of the agent's step means nothing to a worker, and frameworks would take it for the job's."""
AGENT_COMMAND = ("env", *(f"--unset={name}" for name in TASK_VARIABLES), sys.executable, "-m", "orchestrator.agent")
_STEP_VARIABLES = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_TASKS_PER_NODE"),
    *(
        "SLURM_EXPORT_ENV",
        "SLURM_GPUS_PER_TASK",
        "SLURM_TRES_PER_TASK",
        "SLURM_CPU_BIND",
        "SLURM_DISTRIBUTION",
        "SLURM_SPREAD_JOB",
    ),
)
"""What the submission says of tasks, and of the environment: a step of one agent is something else."""

AGAIN = "~"
"""Between a host's name and the number of its second agent and later ones; no host has it in its name."""

SettingsOf = Callable[[str, str, str, str], str]
"""(node, its address, supervisor URL, token) → the agent's settings as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of the allocation."""

    name: str
    address: str
    """By which the others reach it."""
    cpus: int | None = None
    """That the job has there; None: not known."""


@dataclass(kw_only=True)
class _Step:
    node: str
    host: str
    process: subprocess.Popen[bytes]
    pidfd: int
    joined_seconds: float | None = None
    released: bool = False


class SlurmAllocation:
    """Starts agents by `srun`. See `schedulers.base.Scheduler`."""

    def __init__(
        self,
        *,
        job_id: str,
        reference: str = "",
        hosts: Sequence[Host],
        settings_of: SettingsOf,
        commands: SlurmCommands,
        srun_options: Sequence[str] = (),
        agent_command: Sequence[str] = AGENT_COMMAND,
    ) -> None:
        self._job_id = job_id
        self._reference = reference or job_id
        self._hosts = {host.name: host for host in hosts}
        self._settings_of = settings_of
        self._commands = commands
        self._srun_options = tuple(srun_options)
        self._agent_command = tuple(agent_command)
        self._steps: dict[str, _Step] = {}
        self._starts: dict[str, int] = {}
        """How often an agent was started on a host: the next one has another name."""
        self._failures: dict[str, int] = {}
        self._wanted = 0
        self._filling: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._url = self._token = ""
        self._on_lost: OnLost = lambda node, reason: None
        self.on_short: Callable[[str], None] = lambda reason: None
        """Called with the reason when a node is wanted and no host can give it."""

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        """Nothing is left of an earlier supervisor: it was the batch step, and with it the job has ended."""
        self._url, self._token, self._on_lost = supervisor_url, token, on_lost
        return ()

    def request(self, count: int) -> None:
        """On hosts that have no agent, as soon as the cluster says that they can be used."""
        self._wanted += count
        if self._filling is None or self._filling.done():
            self._filling = self._spawn(self._fill())

    async def _fill(self) -> None:
        while self._wanted > 0:
            free = [host for host in self._hosts.values() if self._is_free(host.name)]
            usable, problem = await self._usable(free)
            for host in usable[: self._wanted]:
                if self._is_free(host.name):
                    self._wanted -= 1
                    self._start(host)
            if self._wanted > 0:
                self.on_short(problem or self._why_short())
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    def _why_short(self) -> str:
        failed = [name for name in self._hosts if self._failures.get(name, 0) >= START_FAILURES_MAX]
        if failed:
            said = f"agents have ended {START_FAILURES_MAX} times in a row, soon or before they joined"
            return f"{said}, on {', '.join(failed)}"
        return f"no other host of the allocation is free ({', '.join(self._hosts)})"

    def _is_free(self, host: str) -> bool:
        busy = any(step.host == host for step in self._steps.values())
        return not busy and self._failures.get(host, 0) < START_FAILURES_MAX

    async def _usable(self, free: list[Host]) -> tuple[list[Host], str]:
        """Which of them can be used, and what is wrong with the others. A controller that is away stops nothing."""
        if not free:
            return [], ""
        try:
            known = await asyncio.to_thread(self._commands.hosts, ",".join(host.name for host in free))
        except SchedulerError:
            return free, ""
        bad = {name: record for name, record in known.items() if not record.usable}
        said = [f"{name} is {'+'.join(sorted(record.states))} {record.reason}".strip() for name, record in bad.items()]
        return [host for host in free if host.name not in bad], "; ".join(said)

    def _start(self, host: Host) -> None:
        number = self._starts.get(host.name, 0) + 1
        self._starts[host.name] = number
        node = host.name if number == 1 else f"{host.name}{AGAIN}{number}"
        settings = self._settings_of(node, host.address, self._url, self._token)
        try:
            process = subprocess.Popen(
                self.step_command(host, node),
                env=step_environment(self._commands.environment or os.environ),
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in an interactive allocation is the supervisor's
            )
        except OSError as error:
            self._failures[host.name] = START_FAILURES_MAX
            self._on_lost(node, f"its agent could not be started: srun: {error.strerror}")
            return
        step = _Step(node=node, host=host.name, process=process, pidfd=os.pidfd_open(process.pid))
        self._steps[node] = step
        self._spawn(self._end_unless_joined(step))
        asyncio.get_running_loop().add_reader(step.pidfd, self._gone, step)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(settings.encode())
            process.stdin.close()

    def step_command(self, host: Host, node: str) -> tuple[str, ...]:
        """One task on one host, with all that the job has there, beside whatever else runs."""
        return (
            *("srun", f"--jobid={self._job_id}", f"--nodelist={host.name}", "--nodes=1", "--ntasks=1"),
            *(() if host.cpus is None else (f"--cpus-per-task={host.cpus}",)),
            *("--mem=0", "--overlap", "--input=0", "--unbuffered", "--quiet"),
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", f"--job-name={step_name(node)}"),
            *self._srun_options,
            *self._agent_command,
        )

    def _gone(self, step: _Step) -> None:
        asyncio.get_running_loop().remove_reader(step.pidfd)
        os.close(step.pidfd)
        del self._steps[step.node]
        status = step.process.wait()
        steady = step.joined_seconds is not None and time.monotonic() - step.joined_seconds >= STEADY_SECONDS
        if not step.released:
            self._failures[step.host] = 0 if steady else self._failures.get(step.host, 0) + 1
        if not step.released:
            self._spawn(self._end_step(step))  # if its slurmd has died it may still run
            self._on_lost(step.node, f"its step on {step.host} has ended: srun {describe_exit(status)}")

    def joined(self, node: str) -> None:
        """Its agent has reported to the supervisor."""
        if (step := self._steps.get(node)) is not None:
            step.joined_seconds = time.monotonic()

    async def _end_unless_joined(self, step: _Step) -> None:
        await asyncio.sleep(START_SECONDS_MAX)
        if self._steps.get(step.node) is step and step.joined_seconds is None:
            await self._end_step(step)

    def release(self, node: str) -> None:
        """The agent was dismissed and ends by itself; a step that does not is killed."""
        step = self._steps.get(node)
        if step is not None:
            step.released = True
            self._spawn(self._end_later(step, STOP_SECONDS))

    def lose(self, node: str, after_seconds: float) -> None:
        """Kill every process of the node's step."""
        step = self._steps.get(node)
        if step is not None:
            self._spawn(self._end_later(step, after_seconds))

    async def _end_later(self, step: _Step, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._steps.get(step.node) is step:
            await self._end_step(step)

    async def _end_step(self, step: _Step) -> None:
        """By the controller; if that does not answer, by srun, which takes the step along when it is told to end."""
        with contextlib.suppress(SchedulerError):
            await asyncio.to_thread(self._commands.end_step, self._reference, step_name(step.node))
        until = time.monotonic() + KILL_SECONDS
        while step.process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.1)
        if step.process.poll() is None:
            step.process.kill()

    def nodes(self) -> list[NodeInfo]:
        """Hosts whose step runs. Their processes are not this host's."""
        return [NodeInfo(node=step.node, pid=None) for step in self._steps.values()]

    async def stop(self) -> None:
        """Let dismissed agents end, then kill what is left."""
        self._wanted = 0
        for step in self._steps.values():
            step.released = True
        until = time.monotonic() + STOP_SECONDS
        while self._steps and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end_step(step) for step in list(self._steps.values())))
        while self._steps and time.monotonic() < until + KILL_SECONDS:
            await asyncio.sleep(0.02)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def host_of(node: str) -> str:
    """The host on which a node's agent runs."""
    return node.partition(AGAIN)[0]


def step_name(node: str) -> str:
    """What the step of a node's agent is called."""
    return f"agent-{node}"


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The batch step's, without what the submission says of tasks."""
    return {name: value for name, value in environment.items() if name not in _STEP_VARIABLES}

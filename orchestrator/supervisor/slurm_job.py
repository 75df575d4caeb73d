"""A job inside a Slurm allocation: it runs in the batch step, with an agent on each host. Used by `orchestrator run`.

The owner is Slurm's job: after a requeue the same one goes on. With the batch step the whole job ends, so there is no
earlier supervisor whose nodes could be taken back; a lock on this host would mean nothing to the other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.agent.settings import AgentSettings
from orchestrator.certificates import Identity, new_identity
from orchestrator.checkpoint.staging_folder import private_name
from orchestrator.clock import SystemClock
from orchestrator.config import JobConfig
from orchestrator.core.job import Phase
from orchestrator.core.messages import Finish
from orchestrator.core.preflight import save_on_notice_seconds
from orchestrator.core.states import JobSpec
from orchestrator.errors import ConfigError, SchedulerError
from orchestrator.schedulers.slurm.allocation import AGENT_COMMAND, Host, SlurmAllocation
from orchestrator.schedulers.slurm.commands import SlurmCommands
from orchestrator.schedulers.slurm.records import ENDED_STATES, ClusterSettings, parse_cpus
from orchestrator.schedulers.slurm.submission import limit_notice_seconds
from orchestrator.supervisor.loop import Supervisor
from orchestrator.supervisor.server import SupervisorServer
from orchestrator.supervisor.slurm_watch import Departure, SlurmWatch
from orchestrator.supervisor.state_folder import StateFolder
from orchestrator.telemetry import EventLog, EventRecord, Sink, json_lines_sink

SHORT_SECONDS_MIN = 10.0
"""Too few nodes for shorter than this is no reason to leave the allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Where this process is: the batch step (or a shell) of a Slurm job."""

    job_id: str
    cluster: str
    hosts: tuple[Host, ...]
    host_list: str
    """As Slurm writes it."""
    address: str
    """By which the other hosts reach this one."""
    settings: ClusterSettings
    array_task: str = ""
    """`7_1`, if this is a task of a job array: Slurm takes the id of one of them for all of them."""

    @property
    def reference(self) -> str:
        """What Slurm's commands are to call this very job."""
        return self.array_task or self.job_id

    @property
    def owner(self) -> str:
        """What may start the job again: Slurm's job, on whatever hosts."""
        return owner_of(self.cluster, self.job_id)


def owner_of(cluster: str, job_id: str) -> str:
    """The owner id of what runs in a job of Slurm's."""
    return f"slurm-{cluster}-{job_id}"


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs inside a job of Slurm's."""
    return "SLURM_JOB_ID" in environment and "SLURM_JOB_NODELIST" in environment


def read_allocation(commands: SlurmCommands, environment: Mapping[str, str] = os.environ) -> Allocation:
    """Ask Slurm where we are. Blocking. Raises SchedulerError."""
    job_id, listed = environment["SLURM_JOB_ID"], environment["SLURM_JOB_NODELIST"]
    names, records = commands.host_names(listed), commands.hosts(listed)
    cpus: Sequence[int | None] = parse_cpus(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if len(cpus) != len(names):
        cpus = [None] * len(names)
    hosts = tuple(
        Host(name=name, address=records[name].address if name in records else name, cpus=count)
        for name, count in zip(names, cpus, strict=True)
    )
    here = environment.get("SLURMD_NODENAME") or socket.gethostname()
    settings = commands.settings()
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return Allocation(
        job_id=job_id,
        cluster=environment.get("SLURM_CLUSTER_NAME") or settings.cluster,
        hosts=hosts,
        host_list=listed,
        address=next((host.address for host in hosts if host.name == here), here),
        settings=settings,
        array_task=f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else "",
    )


def is_over(commands: SlurmCommands, owner: str, cluster: str) -> bool:
    """Whether an owner is a job of this cluster's that has ended for certain. Blocking; in doubt it has not."""
    prefix = owner_of(cluster, "")
    if not owner.startswith(prefix):
        return False
    try:
        record = commands.job(owner.removeprefix(prefix))
    except SchedulerError:
        return False
    return record is None or record.state in ENDED_STATES


def spec_in(spec: JobSpec, host_count: int, kill_wait_seconds: float) -> JobSpec:
    """An allocation does not grow: nobody waits for more nodes than it has hosts. Who cancels it leaves it KillWait."""
    return replace(
        spec,
        nodes_max=max(spec.nodes_min, min(spec.nodes_max, host_count)),
        grace_seconds=min(spec.grace_seconds, kill_wait_seconds),
    )


class SlurmJob:
    """One run of a job in one allocation."""

    def __init__(
        self,
        config: JobConfig,
        place: Allocation,
        *,
        job_url: str,
        commands: SlurmCommands,
        take_over: bool,
        sinks: tuple[Sink, ...] = (),
        agent_command: Sequence[str] = AGENT_COMMAND,
    ) -> None:
        self._config = config
        self._place = place
        self._job_url = job_url
        self._commands = commands
        self._take_over = take_over
        self._sinks = sinks
        self._agent_command = agent_command
        self._clock = SystemClock()
        self._claimant = secrets.token_hex(8)
        self._short_since: float | None = None
        self._watch: SlurmWatch | None = None
        self._allocation: SlurmAllocation | None = None
        self._republish: Callable[[], None] = lambda: None
        self.state = StateFolder(config.job, job_url)
        self.supervisor: Supervisor | None = None

    @property
    def logs(self) -> Path:
        """Folder of the workers' output, on each host if it is not shared."""
        return self.state.path / "logs"

    @property
    def departure(self) -> Departure | None:
        """Why the job leaves, if that is Slurm's doing."""
        return None if self._watch is None else self._watch.departure

    def wake(self) -> None:
        """A signal came: see at once what Slurm means by it."""
        if self._watch is not None:
            self._watch.wake()

    async def run(self) -> Finish:
        """Run to the end; every agent has ended when this returns."""
        identity, token = new_identity(), secrets.token_urlsafe(32)
        allocation = self._allocation = SlurmAllocation(
            job_id=self._place.job_id,
            reference=self._place.reference,
            hosts=self._place.hosts,
            settings_of=self._settings_of(identity),
            commands=self._commands,
            srun_options=self._config.srun,
            agent_command=self._agent_command,
        )
        self.state.make()
        self.state.note_slurm_job(self._place.reference)
        supervisor = self.supervisor = Supervisor(
            spec_in(self._config.spec(), len(self._place.hosts), self._place.settings.kill_wait_seconds),
            allocation,
            self._clock,
            EventLog(json_lines_sink(self.state.path / "events.jsonl"), self._on_event, *self._sinks),
            token,
            open_server=lambda one, key: SupervisorServer(one, key, address=self._place.address, identity=identity),
        )

        def publish(url: str) -> None:
            self.state.publish(url, token, host=socket.gethostname(), certificate=identity.certificate)
            self._republish = lambda: None if self.state.published_token() == token else publish(url)

        supervisor.on_listening = publish
        watch = self._watch = self._make_watch(supervisor, allocation)
        allocation.on_short = lambda reason: self._on_short(watch, supervisor, reason)
        watching = asyncio.create_task(watch.run())
        try:
            return await supervisor.run()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            if self.state.published_token() == token:  # not that of a copy of this job, whichever of them goes on
                self.state.forget_supervisor()

    def _make_watch(self, supervisor: Supervisor, allocation: SlurmAllocation) -> SlurmWatch:
        return SlurmWatch(
            job_id=self._place.reference,
            hosts=self._place.host_list,
            commands=self._commands,
            clock=self._clock,
            submit=supervisor.submit,
            nodes=lambda: [node.node for node in allocation.nodes()],
            limit_notice_seconds=limit_notice_seconds(self._config.grace_seconds),
            kill_wait_seconds=self._place.settings.kill_wait_seconds,
        )

    def _settings_of(self, identity: Identity) -> Callable[[str, str, str, str], str]:
        config, place = self._config, self._place
        run = Path(config.staging) / private_name() / f"{self.state.path.name}-{self._claimant}"

        def settings_of(node: str, address: str, url: str, token: str) -> str:
            return AgentSettings(
                job=config.job,
                node=node,
                workers=config.workers_per_node,
                command=config.command,
                store=self._job_url,
                owner=place.owner,
                claimant=self._claimant,
                take_over=self._take_over,
                supervisor_url=url,
                token=token,
                identity=identity,
                address=address,
                staging=run / node,
                sweep_staging=f"{self.state.path.name}-*",
                logs=self.logs,
                grace_seconds=None,  # how much a signal leaves the controller says
                device_check_seconds=config.device_check_seconds,
                notices=config.notices,
                acknowledge_notices=True,
            ).model_dump_json()

        return settings_of

    def _on_event(self, record: EventRecord) -> None:
        match record.kind:
            case "notice received" if self.departure is None:
                self.wake()
            case "node joined" if self._allocation is not None and record.node is not None:
                self._allocation.joined(record.node)
            case "committed" if self.supervisor is not None:
                seconds = save_on_notice_seconds(self.supervisor.job)
                if seconds is not None:
                    with contextlib.suppress(ConfigError):  # a home that is full must not end the job
                        self.state.note_save(seconds)
            case "generation opened":  # a copy that came later has lost the claim, its address may stand there
                with contextlib.suppress(ConfigError):
                    self._republish()

    def _on_short(self, watch: SlurmWatch, supervisor: Supervisor, reason: str) -> None:
        """Too few nodes to train at all, for as long as a first start would wait: another allocation has them."""
        job, now = supervisor.job, self._clock.monotonic()
        if job.phase is not Phase.GATHERING or job.available_count >= self._config.nodes_min:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since >= max(self._config.gather_seconds, SHORT_SECONDS_MIN):
            words = f"{self._config.nodes_min} nodes are needed, {job.available_count} are left: {reason}"
            watch.leave(Departure(reason=words, remaining_seconds=None, comes_again=True))

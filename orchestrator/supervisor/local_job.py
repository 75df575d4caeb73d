"""A job on this machine, put together: state folder, scheduler, supervisor, event log. Used by `run` and `demo`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.settings import AgentSettings
from orchestrator.checkpoint.staging_folder import private_folder
from orchestrator.clock import SystemClock
from orchestrator.config import JobConfig
from orchestrator.core.messages import Finish
from orchestrator.schedulers.leftovers import read_leftovers
from orchestrator.schedulers.local import AGENT_COMMAND, LocalScheduler
from orchestrator.supervisor.loop import Supervisor
from orchestrator.supervisor.state_folder import StateFolder
from orchestrator.telemetry import EventLog, Sink, json_lines_sink


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJobOptions:
    """What a caller may choose beyond the configuration."""

    job_url: str
    take_over: bool = False
    echo_output: bool = True
    sinks: tuple[Sink, ...] = ()
    agent_command: Sequence[str] = AGENT_COMMAND
    notice_look_seconds: float | None = None
    """Between two looks at a source of notices; None: what is right for each."""


class LocalJob:
    """One run of a job on this machine. `acquire` first: it proves that no other supervisor runs it here."""

    def __init__(self, config: JobConfig, options: LocalJobOptions) -> None:
        self._config = config
        self._options = options
        self.state = StateFolder(config.job, options.job_url)
        self._token = secrets.token_urlsafe(32)
        self._terms = terms_of(config, options.job_url)
        self._claimant = ""
        self._owner = ""
        self.takes_back = False
        """Nodes of a supervisor that died still run, and this one goes on in its name; known once acquired."""
        self.supervisor: Supervisor | None = None

    @property
    def owner(self) -> str:
        """What may start this job again; known once acquired."""
        return self._owner

    @property
    def logs(self) -> Path:
        """Folder of the workers' output."""
        return self.state.path / "logs"

    @property
    def staging(self) -> Path:
        """Folder in memory for this run's nodes: another owner's run of the same job has another one."""
        return private_folder(Path(self._config.staging), f"{self.state.path.name}-{self._claimant}")

    def acquire(self) -> None:
        """Lock the job on this machine. Raises FencedError if it runs here already, ConfigError.

        A supervisor that died may have left its nodes running; on the same terms this one goes on in its name.
        """
        self.state.acquire()
        self._owner = self.state.owner()
        left = read_leftovers(self._nodes_file)
        same = left.terms == self._terms and not self._options.take_over
        self.takes_back = same and any(node.is_alive() for node in left.nodes)
        self._claimant = left.claimant if self.takes_back else secrets.token_hex(8)
        if self.takes_back:  # nodes read from each other: those that are left and those that come later need one token
            self._token = self.state.published_token() or self._token

    @property
    def _nodes_file(self) -> Path:
        return self.state.path / "nodes.json"

    async def run(self) -> Finish:
        """Run to the end; everything that was started is gone when this returns."""
        config, options, staging = self._config, self._options, self.staging
        scheduler = LocalScheduler(
            settings_of=self._settings_of,
            staging=staging,
            state_file=self._nodes_file,
            claimant=self._claimant,
            terms=self._terms,
            replacement_seconds=config.replacement_seconds,
            agent_command=options.agent_command,
        )
        log = EventLog(json_lines_sink(self.state.path / "events.jsonl"), *options.sinks)
        supervisor = Supervisor(config.spec(), scheduler, SystemClock(), log, self._token)
        self.supervisor = supervisor
        supervisor.on_listening = lambda url: self.state.publish(url, self._token)
        try:
            return await supervisor.run()
        finally:
            with contextlib.suppress(OSError):  # not empty: a node did not end in time
                staging.rmdir()
            self.state.release()

    def _settings_of(self, node: str, url: str, token: str, staging: Path) -> str:
        config, options = self._config, self._options
        return AgentSettings(
            job=config.job,
            node=node,
            workers=config.workers_per_node,
            command=config.command,
            store=options.job_url,
            owner=self._owner,
            claimant=self._claimant,
            take_over=options.take_over,
            supervisor_url=url,
            token=token,
            supervisor_file=self.state.address_path,
            staging=staging,
            logs=self.logs,
            echo_output=options.echo_output,
            grace_seconds=config.grace_seconds,
            notices=config.notices,
            notice_look_seconds=options.notice_look_seconds,
            acknowledge_notices=config.nodes_max == 1,
            device_check_seconds=config.device_check_seconds,
        ).model_dump_json()


SESSION_VARIABLES = (
    *("_", "SHLVL", "PWD", "OLDPWD", "SSH_", "GPG_TTY", "XDG_SESSION", "DBUS_"),
    *("TERM", "TMUX", "STY", "WINDOWID", "COLUMNS", "LINES"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID"),
)
"""Beginnings of variables that differ from login to login and mean nothing to a training."""


def terms_of(config: JobConfig, job_url: str) -> str:
    """A digest of everything that a running node was started with: nodes with another one are not taken back."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SESSION_VARIABLES)}
    terms = {
        "command": config.command,
        "workers_per_node": config.workers_per_node,
        "grace_seconds": config.grace_seconds,
        "notices": config.notices,
        "staging": config.staging,
        "job_url": job_url,
        "folder": os.getcwd(),
        "environment": environment,
    }
    return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()

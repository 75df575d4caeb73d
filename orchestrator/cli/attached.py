"""`python -m orchestrator.cli.attached < settings`: supervisor and agent of one unsupervised script.

Started by `training.attached` in a session of its own, so that it outlives the script until the last checkpoint is
decided. It adopts the script's workers and never starts any.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from orchestrator.agent.node import Agent
from orchestrator.agent.ports import real_ports
from orchestrator.agent.settings import AgentSettings
from orchestrator.checkpoint.generations import Claimant
from orchestrator.cli.store_probe import require_fit
from orchestrator.clock import SystemClock
from orchestrator.core.messages import Finish
from orchestrator.core.states import JobSpec
from orchestrator.errors import ConfigError, FencedError, OrchestratorError
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import job_url, open_store
from orchestrator.supervisor.loop import Supervisor
from orchestrator.supervisor.state_folder import StateFolder
from orchestrator.telemetry import EventLog, json_lines_sink

LOCK_WAIT_SECONDS = 30.0
"""An earlier start of the same script may still be uploading its last checkpoint."""
TELL_SECONDS = 60.0
"""How long the reason for not starting is kept for the script to read."""


class AttachedSettings(BaseModel):
    """What the script's rank 0 says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path
    store: str
    job: str
    save_every: int
    keep_last: int
    keep_every: int
    notices: str
    world_size: int


class ThisMachine:
    """The scheduler of attached mode: one node, which is here already and cannot be replaced."""

    def __init__(self, settings: AgentSettings, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        self._agent: asyncio.Task[str] | None = None

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        """Run the agent in this process."""
        settings = self._settings.model_copy(update={"supervisor_url": supervisor_url, "token": token})
        self._agent = asyncio.create_task(Agent(settings, real_ports(settings, self._store)).run(handle_signals=False))
        self._agent.add_done_callback(lambda task: on_lost(settings.node, "the agent has ended"))
        return ()

    def request(self, count: int) -> None:
        """There is only this machine."""

    def release(self, node: str) -> None:
        """The agent was dismissed."""

    def lose(self, node: str, after_seconds: float) -> None:
        """Refused: nobody here may kill the user's script."""
        raise ConfigError("an attached script's machine cannot be taken away; send it SIGTERM instead")

    def nodes(self) -> list[NodeInfo]:
        """This machine."""
        return [NodeInfo(node=self._settings.node, pid=os.getpid())]

    async def stop(self) -> None:
        """Wait for the agent's end."""
        if self._agent is not None:
            await asyncio.wait([self._agent], timeout=10)


async def supervise(settings: AttachedSettings, state: StateFolder, url: str) -> Finish:
    """Run the job for as long as the script lives, and until its last checkpoint is decided."""
    token = secrets.token_urlsafe(32)
    agent = AgentSettings(
        job=settings.job,
        node="this-machine",
        workers=settings.world_size,
        command=(),
        store=url,
        owner=state.owner(),
        claimant=secrets.token_hex(8),
        supervisor_url="",
        token=token,
        staging=settings.folder / "staging",
        logs=settings.folder,
        echo_output=False,
        attach_folder=settings.folder,
        notices=settings.notices,
    )
    spec = JobSpec(
        name=settings.job,
        nodes_min=1,
        nodes_max=1,
        workers_per_node=settings.world_size,
        save_every_steps=settings.save_every,
        keep_last=settings.keep_last,
        keep_every_steps=settings.keep_every,
        attached=True,
    )
    log = EventLog(json_lines_sink(state.path / "events.jsonl"))
    supervisor = Supervisor(spec, ThisMachine(agent, open_store(url)), SystemClock(), log, token)
    supervisor.on_listening = lambda address: state.publish(address, token)
    return await supervisor.run()


def main() -> int:
    """Take the job's lock, supervise, and tell the script if it cannot be done."""
    settings = AttachedSettings.model_validate(json.loads(sys.stdin.read()))
    url = job_url(settings.store, settings.job)
    state = StateFolder(settings.job, url)
    try:
        _acquire(state)
        _require_fit_store(settings.job, state, url)
        finish = asyncio.run(supervise(settings, state, url))
    except OrchestratorError as error:
        finish = Finish(exit_code=int(error.exit_code), reason=str(error))
    except OSError as error:
        finish = Finish(exit_code=1, reason=f"the script cannot be supervised: {error}")
    finally:
        state.release()
    _tell(settings, finish)
    shutil.rmtree(settings.folder, ignore_errors=True)
    return finish.exit_code


def _acquire(state: StateFolder) -> None:
    until = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            state.acquire()
            return
        except FencedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _require_fit_store(job: str, state: StateFolder, url: str) -> None:
    """Raises FencedError, ConfigError."""
    told = require_fit(url, Claimant(job=job, owner=state.owner(), claimant="", take_over=False))
    if told:
        sys.stderr.write(told + "\n")


def _tell(settings: AttachedSettings, finish: Finish) -> None:
    """If the script never got its launch files, leave the reason where it looks, until it is gone."""
    launches = [settings.folder / f"launch-{rank:05d}.json" for rank in range(settings.world_size)]
    if all(path.exists() for path in launches):
        return
    draft = settings.folder / "failed.draft"
    draft.write_text(json.dumps({"exit_code": finish.exit_code, "reason": finish.reason}))
    draft.rename(settings.folder / "failed.json")
    until = time.monotonic() + TELL_SECONDS
    while time.monotonic() < until and any(_alive(path) for path in settings.folder.glob("worker-*.pid")):
        time.sleep(0.1)


def _alive(pid_path: Path) -> bool:
    return Path(f"/proc/{pid_path.read_text()}").exists()


if __name__ == "__main__":
    sys.exit(main())

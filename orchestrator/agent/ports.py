"""What an agent touches outside its own memory, as ports: the supervisor, worker processes, its object server.

The real ones are put together by `real_ports`; simulation brings its own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aiohttp.web import RouteDef

from orchestrator.agent.client import WebSocketConnector
from orchestrator.agent.link import Connect
from orchestrator.agent.objects import HttpObjectServer
from orchestrator.agent.settings import AgentSettings
from orchestrator.agent.workers import ProcessRuntime, Worker
from orchestrator.clock import Clock, SystemClock
from orchestrator.health.gpu import NVIDIA_SMI, Answer, read_devices
from orchestrator.health.host import HostReading, read_host
from orchestrator.health.joining import has_devices, reason_not_to_join
from orchestrator.health.kernel_log import KernelLog
from orchestrator.health.progress import ProcessReading
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.peers import PeerStore

OnExit = Callable[[Worker], None]


class Runtime(Protocol):
    """Starts and ends workers. An exit is certain when `on_exit` is called."""

    def launch(self, worker: Worker, command: Sequence[str], environment: Mapping[str, str], on_exit: OnExit) -> None:
        """Start the user's command for one rank; its output goes to its log file."""
        ...

    def adopt(self, worker: Worker, pid: int, on_exit: OnExit) -> None:
        """Watch a process that somebody else started."""
        ...

    def end(self, worker: Worker) -> None:
        """End it at once, with everything it started."""
        ...

    def read(self, workers: Sequence[Worker]) -> list[ProcessReading]:
        """What each of them does at this moment."""
        ...

    def ask_stacks(self, worker: Worker) -> bool:
        """Have it write its stacks where its control block says; whether it can be expected to."""
        ...


class ObjectServer(Protocol):
    """Serves a store to this node's workers and peers, who hold no credentials."""

    async def start(
        self, store: ObjectStore, tokens: tuple[str, ...], address: str, routes: Sequence[RouteDef] = ()
    ) -> str:
        """Listen at the address, for whoever has one of the tokens; returns the URL. `routes`: served as well."""
        ...

    async def stop(self) -> None:
        """Close the port."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPorts:
    """Everything that an agent is given."""

    store: ObjectStore
    clock: Clock
    connect: Connect
    runtime: Runtime
    object_server: ObjectServer
    open_peer: Callable[[str, str], AbstractContextManager[ObjectStore]]
    """(URL, token) → what another node's object server serves, while it is wanted."""
    sleep: Callable[[float], None] = time.sleep
    """In a thread of its own."""
    read_host: Callable[[], HostReading] | None = None
    """Without it the host is not watched."""
    read_devices: Callable[[], Answer] | None = None
    """Without it no device is watched."""
    new_kernel_log_lines: Callable[[], list[str]] | None = None
    """What the kernel's log got since the last call, or since it was opened; waits for nothing. None: not readable."""
    reason_not_to_join: Callable[[], str | None] | None = None
    """Tests the node's devices, for as long as that takes. Without it every node joins."""
    look_seconds_busy: float = 0.005
    """Between two looks at the control blocks while an agreement is open."""
    look_seconds_idle: float = 0.05


def real_ports(settings: AgentSettings, store: ObjectStore) -> AgentPorts:
    """Processes, sockets and clocks of this machine."""
    folders = [settings.logs, *([Path(store.url)] if isinstance(store, FolderStore) else [])]
    watches_devices = shutil.which(NVIDIA_SMI) is not None
    return AgentPorts(
        store=store,
        clock=SystemClock(),
        connect=WebSocketConnector(settings),
        runtime=ProcessRuntime(),
        object_server=HttpObjectServer(),
        open_peer=PeerStore,
        read_host=lambda: read_host(folders),
        read_devices=read_devices if watches_devices else None,
        new_kernel_log_lines=_kernel_log() if watches_devices else None,
        reason_not_to_join=_device_check(settings.device_check_seconds),
    )


def _device_check(seconds: float) -> Callable[[], str | None] | None:
    return (lambda: reason_not_to_join(seconds)) if seconds > 0 and has_devices() else None


def _kernel_log() -> Callable[[], list[str]] | None:
    try:
        return KernelLog().new_lines
    except OSError:  # in most containers, and where it is kept from everybody but root: `orchestrator check` says so
        return None

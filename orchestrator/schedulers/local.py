"""Nodes as sessions of processes on this host. The same agent, supervisor and store code as on a cluster.

Losing a node kills its session and deletes its staging folder. Nodes that a dead supervisor left running are
taken back at the next start if they were started on the same terms, and ended otherwise (`schedulers.leftovers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.causes import describe_exit
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.schedulers.leftovers import (
    StartedNode,
    kill_session,
    node_name,
    read_leftovers,
    start_ticks,
    write_leftovers,
)

AGENT_COMMAND = (sys.executable, "-m", "orchestrator.agent")
START_FAILURES_MAX = 5
START_PAUSE_SECONDS_MAX = 60.0
START_SECONDS_MIN = 2.0
"""An agent that ends sooner than that failed to start."""
GIVEN_BACK_SECONDS_MIN = 10.0
"""One that is given back sooner was of no use: a notice stands for this machine, and the next one is none either."""
STOP_SECONDS = 5.0

SettingsOf = Callable[[str, str, str, Path], str]
"""(node, supervisor URL, token, staging folder) → the agent's settings as JSON."""


@dataclass(kw_only=True)
class _Node:
    started: StartedNode
    process: subprocess.Popen[bytes] | None
    """None for a node that an earlier supervisor started: its exit status cannot be known."""
    pidfd: int
    watched_since_seconds: float = field(default_factory=time.monotonic)
    released: bool = False

    @property
    def name(self) -> str:
        return self.started.name


class LocalScheduler:
    """Starts agents on this machine."""

    def __init__(
        self,
        *,
        settings_of: SettingsOf,
        staging: Path,
        state_file: Path,
        claimant: str,
        terms: str,
        replacement_seconds: float = 0.0,
        agent_command: Sequence[str] = AGENT_COMMAND,
    ) -> None:
        self._settings_of = settings_of
        self._staging = staging
        self._state_file = state_file
        self._claimant = claimant
        self._terms = terms
        self._replacement_seconds = replacement_seconds
        self._agent_command = tuple(agent_command)
        self._nodes: dict[str, _Node] = {}
        self._next = 0
        self._requested_before = False
        self._start_failures = 0
        self._timers: set[asyncio.TimerHandle] = set()
        self._url = ""
        self._token = ""
        self._on_lost: OnLost = lambda node, reason: None

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        """Take back or end what an earlier supervisor left; from now on nodes can be requested."""
        self._url, self._token, self._on_lost = supervisor_url, token, on_lost
        left = await asyncio.to_thread(read_leftovers, self._state_file)
        wanted = (left.claimant, left.terms) == (self._claimant, self._terms)
        for node in left.nodes:
            self._next = max(self._next, node.number + 1)
            if not (wanted and node.is_alive() and self._adopt(node)):
                await asyncio.to_thread(node.end)
        self._write_state()
        return tuple(node.name for node in self._nodes.values())

    def _adopt(self, left: StartedNode) -> bool:
        try:
            pidfd = os.pidfd_open(left.pid)
        except ProcessLookupError:
            return False
        if not left.is_alive():  # it died just now, and the number may be another's
            os.close(pidfd)
            return False
        self._watch(_Node(started=left, process=None, pidfd=pidfd))
        return True

    def _watch(self, node: _Node) -> None:
        self._nodes[node.name] = node
        asyncio.get_running_loop().add_reader(node.pidfd, self._gone, node)

    def request(self, count: int) -> None:
        """The first nodes come at once, replacements after `replacement_seconds`; later if several were useless."""
        pause = self._replacement_seconds if self._requested_before else 0.0
        if self._start_failures >= START_FAILURES_MAX:
            pause = max(pause, min(2.0**self._start_failures, START_PAUSE_SECONDS_MAX))
        self._requested_before = True
        for _ in range(count):
            self._later(pause, self._start_node)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(handle)
            work()

        handle = asyncio.get_running_loop().call_later(seconds, run)
        self._timers.add(handle)

    def _start_node(self) -> None:
        number = self._next
        name = node_name(number)
        self._next += 1
        staging = self._staging / name
        settings = self._settings_of(name, self._url, self._token, staging)
        try:
            process = subprocess.Popen(self._agent_command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            self._start_failures += 1
            self._on_lost(name, f"its agent could not be started: {error.strerror}")
            return
        ticks = start_ticks(process.pid)
        started = StartedNode(number=number, pid=process.pid, started_ticks=ticks, staging=str(staging))
        self._watch(_Node(started=started, process=process, pidfd=os.pidfd_open(process.pid)))
        self._write_state()  # before it learns what to do: no node works that a later supervisor would not find
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(settings.encode())
            process.stdin.close()

    def _gone(self, node: _Node) -> None:
        self._forget(node)
        kill_session(node.started.pid)  # a child is not waited for yet, so the number is still this node's
        status = None if node.process is None else node.process.wait()
        shutil.rmtree(node.started.staging, ignore_errors=True)
        least = GIVEN_BACK_SECONDS_MIN if node.released else START_SECONDS_MIN
        early = time.monotonic() - node.watched_since_seconds < least
        self._start_failures = self._start_failures + 1 if early else 0
        if node.released:
            return
        self._on_lost(node.name, f"its agent {describe_exit(status)}")

    def _forget(self, node: _Node) -> None:
        asyncio.get_running_loop().remove_reader(node.pidfd)
        os.close(node.pidfd)
        del self._nodes[node.name]
        self._write_state()

    def _write_state(self) -> None:
        nodes = [node.started for node in self._nodes.values()]
        write_leftovers(self._state_file, claimant=self._claimant, terms=self._terms, nodes=nodes)

    def release(self, node: str) -> None:
        """The agent was dismissed and ends by itself; one that does not is killed."""
        entry = self._nodes.get(node)
        if entry is not None:
            entry.released = True
            self._later(STOP_SECONDS, lambda: self._kill(entry))

    def lose(self, node: str, after_seconds: float) -> None:
        """Take a node away: its processes are killed and its memory is gone."""
        entry = self._nodes.get(node)
        if entry is not None:
            self._later(after_seconds, lambda: self._kill(entry))

    def _kill(self, node: _Node) -> None:
        if self._nodes.get(node.name) is node:
            kill_session(node.started.pid)

    def nodes(self) -> list[NodeInfo]:
        """Nodes whose agent runs."""
        return [NodeInfo(node=node.name, pid=node.started.pid) for node in self._nodes.values()]

    async def stop(self) -> None:
        """Let dismissed agents end, then kill what is left."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for node in self._nodes.values():
            node.released = True
        until = time.monotonic() + STOP_SECONDS
        while self._nodes and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for node in list(self._nodes.values()):
            self._kill(node)
        while self._nodes and time.monotonic() < until + STOP_SECONDS:
            await asyncio.sleep(0.02)
        with contextlib.suppress(OSError):  # whatever stands there in its place, it is not needed
            self._state_file.unlink(missing_ok=True)

"""Nodes as process groups on this host. The same agent, supervisor and store code as on a cluster.

Losing a node kills its process group and deletes its staging folder. Nodes that a dead supervisor left behind are
ended at the next start: their pids and start times stand in a file in the job's state folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.schedulers.base import NodeInfo, OnLost

AGENT_COMMAND = (sys.executable, "-m", "orchestrator.agent")
START_FAILURES_MAX = 5
START_PAUSE_SECONDS_MAX = 60.0
START_SECONDS_MIN = 2.0
"""An agent that ends sooner than that failed to start."""
STOP_SECONDS = 5.0

SettingsOf = Callable[[str, str, str, Path], str]
"""(node, supervisor URL, token, staging folder) → the agent's settings as JSON."""


@dataclass(kw_only=True)
class _Node:
    name: str
    process: subprocess.Popen[bytes]
    staging: Path
    started_seconds: float
    pidfd: int
    released: bool = False


class LocalScheduler:
    """Starts agents on this machine."""

    def __init__(
        self,
        *,
        settings_of: SettingsOf,
        staging: Path,
        state_file: Path,
        replacement_seconds: float = 0.0,
        agent_command: Sequence[str] = AGENT_COMMAND,
    ) -> None:
        self._settings_of = settings_of
        self._staging = staging
        self._state_file = state_file
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

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> None:
        """End what an earlier supervisor left; from now on nodes can be requested."""
        self._url, self._token, self._on_lost = supervisor_url, token, on_lost
        await asyncio.to_thread(self._end_leftovers)

    def _end_leftovers(self) -> None:
        try:
            left = json.loads(self._state_file.read_text())
        except (FileNotFoundError, ValueError):
            return
        for node in left:
            self._next = max(self._next, int(node["number"]) + 1)
            if start_ticks(node["pid"]) == node["start_ticks"]:
                kill_session(node["pid"])
                until = time.monotonic() + STOP_SECONDS
                while start_ticks(node["pid"]) == node["start_ticks"] and time.monotonic() < until:
                    time.sleep(0.01)
            shutil.rmtree(node["staging"], ignore_errors=True)

    def request(self, count: int) -> None:
        """The first nodes come at once, replacements after `replacement_seconds`."""
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
        name = f"node-{self._next}"
        self._next += 1
        staging = self._staging / name
        settings = self._settings_of(name, self._url, self._token, staging)
        try:
            process = subprocess.Popen(self._agent_command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            self._start_failures += 1
            self._on_lost(name, f"its agent could not be started: {error.strerror}")
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(settings.encode())
            process.stdin.close()
        node = _Node(
            name=name,
            process=process,
            staging=staging,
            started_seconds=time.monotonic(),
            pidfd=os.pidfd_open(process.pid),
        )
        self._nodes[name] = node
        asyncio.get_running_loop().add_reader(node.pidfd, self._gone, node)
        self._write_state()

    def _gone(self, node: _Node) -> None:
        self._forget(node)
        kill_session(node.process.pid)  # not waited for yet, so the number is still this node's
        status = node.process.wait()
        shutil.rmtree(node.staging, ignore_errors=True)
        if node.released:
            return
        early = time.monotonic() - node.started_seconds < START_SECONDS_MIN
        self._start_failures = self._start_failures + 1 if early else 0
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        self._on_lost(node.name, f"its agent {how}")

    def _forget(self, node: _Node) -> None:
        asyncio.get_running_loop().remove_reader(node.pidfd)
        os.close(node.pidfd)
        del self._nodes[node.name]
        self._write_state()

    def _write_state(self) -> None:
        rows = [
            {
                "number": int(node.name.rpartition("-")[2]),
                "pid": node.process.pid,
                "start_ticks": start_ticks(node.process.pid),
                "staging": str(node.staging),
            }
            for node in self._nodes.values()
        ]
        draft = self._state_file.with_suffix(".draft")
        with contextlib.suppress(OSError):  # a full disk: only the clean-up after our own death would miss it
            draft.write_text(json.dumps(rows))
            draft.rename(self._state_file)

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
            kill_session(node.process.pid)

    def nodes(self) -> list[NodeInfo]:
        """Nodes whose agent runs."""
        return [NodeInfo(node=node.name, pid=node.process.pid) for node in self._nodes.values()]

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
        self._state_file.unlink(missing_ok=True)


def kill_session(leader: int) -> None:
    """SIGKILL to every process of a node: workers and what they started are in groups of their own, in one session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(path.parent.name), signal.SIGKILL)


def start_ticks(pid: int) -> int | None:
    """When a process was started (clock ticks since boot); None if there is no such process. Tells a reused pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])

"""A node's worker processes: launch or adopt them, notice their exit, end them, keep their last words.

Used by `agent.node` only. An exit is what the kernel says through a pidfd; nothing is inferred from silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent import exec_worker
from orchestrator.checkpoint.slots import ControlBlock, Record
from orchestrator.health import memory, stacks
from orchestrator.health.progress import ProcessReading, read_processes

EVIDENCE_BYTES = 16384
OUTPUT_BYTES = 1 << 20  # copied at most at a time


@dataclass(kw_only=True)
class Worker:
    """One rank's process and its shared memory."""

    rank: int
    local_rank: int
    control: ControlBlock
    slot_paths: tuple[Path, Path]
    launch_path: Path
    log_path: Path | None = None
    pid: int = 0
    pidfd: int = -1
    process: subprocess.Popen[bytes] | None = None
    ended_by_us: bool = False
    exited: bool = False
    exit_code: int | None = None
    memory_counter: Path | None = None
    """Where the kernel counts what it kills for want of memory in the worker's cgroup."""
    memory_kills: int | None = None
    """So many at its start; once it is gone: in the meantime."""
    log_position: int = 0
    reported: dict[str, int] = field(default_factory=dict)
    """The last value of each control word that was reported, so that each is reported once."""
    seen: tuple[bytes, Record] | None = None
    """What the control block and the agent's record were at the last look: while both stay, there is no news."""

    def news(self, what: str, value: int) -> bool:
        """True if the value differs from the one reported before; remembers it."""
        if self.reported.get(what, 0) == value:
            return False
        self.reported[what] = value
        return True


class ProcessRuntime:
    """Workers as processes of this machine; an exit is what the kernel says through a pidfd."""

    def launch(
        self, worker: Worker, command: Sequence[str], environment: Mapping[str, str], on_exit: Callable[[Worker], None]
    ) -> None:
        """Start the user's command for one rank; its output goes to its log file."""
        assert worker.log_path is not None
        worker.log_path.parent.mkdir(parents=True, exist_ok=True)
        with worker.log_path.open("ab") as log:
            worker.process = subprocess.Popen(
                [sys.executable, "-I", "-S", exec_worker.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
            )
        self.adopt(worker, worker.process.pid, on_exit)

    def adopt(self, worker: Worker, pid: int, on_exit: Callable[[Worker], None]) -> None:
        """Watch a process; for one that is not our child the exit status stays unknown."""
        worker.pid = pid
        try:
            worker.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            worker.exited = True
            on_exit(worker)
            return
        worker.memory_counter = memory.counter_of(pid)
        if worker.memory_counter is not None:
            worker.memory_kills = memory.kills(worker.memory_counter)
        asyncio.get_running_loop().add_reader(worker.pidfd, _gone, worker, on_exit)

    def end(self, worker: Worker) -> None:
        """SIGKILL, to the worker and everything in its process group. Reported once the kernel confirms it."""
        if worker.exited or worker.process is None:
            return
        worker.ended_by_us = True
        if worker.pidfd >= 0:
            signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        _kill_group(worker)

    def read(self, workers: Sequence[Worker]) -> list[ProcessReading]:
        """See the port."""
        return read_processes([worker.pid for worker in workers])

    def ask_stacks(self, worker: Worker) -> bool:
        """See the port."""
        return stacks.ask(worker.pid, worker.pidfd, worker.control.stacks_path)


def _gone(worker: Worker, on_exit: Callable[[Worker], None]) -> None:
    asyncio.get_running_loop().remove_reader(worker.pidfd)
    os.close(worker.pidfd)
    worker.pidfd = -1
    if worker.process is not None:
        _kill_group(worker)  # what it started; not waited for yet, so the number is still this worker's
        worker.exit_code = worker.process.wait()
    worker.memory_kills = _kills_meanwhile(worker)
    worker.exited = True
    on_exit(worker)


def _kills_meanwhile(worker: Worker) -> int | None:
    now = None if worker.memory_counter is None else memory.kills(worker.memory_counter)
    return None if now is None or worker.memory_kills is None else max(0, now - worker.memory_kills)


def _kill_group(worker: Worker) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def evidence(worker: Worker) -> str:
    """The end of the worker's output: a traceback, if it left one."""
    if worker.log_path is None:
        return ""
    try:
        with worker.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - EVIDENCE_BYTES))
            found = log.read().decode(errors="replace")
        full = worker.exit_code != 0 and shutil.disk_usage(worker.log_path.parent).free == 0
    except FileNotFoundError:
        return ""
    return f"{found}\nno space is left in {worker.log_path.parent}, where its output goes\n" if full else found


def new_output(worker: Worker, *, everything: bool) -> str:
    """Whole lines (a progress bar's count, too) that the worker has printed since the last call."""
    if worker.log_path is None:
        return ""
    with contextlib.suppress(FileNotFoundError), worker.log_path.open("rb") as log:
        log.seek(worker.log_position)
        data = log.read(OUTPUT_BYTES)
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if everything or (cut == 0 and len(data) == OUTPUT_BYTES):
            cut = len(data)
        worker.log_position += cut
        return data[:cut].decode(errors="replace")
    return ""

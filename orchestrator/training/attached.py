"""Attached mode: a script that nobody supervises starts a supervisor and an agent on its own machine.

Rank 0 starts them in a session of their own; the other ranks find them through a folder in memory. The agent adopts
the workers and never restarts them. One machine; started by plain python or torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.staging_folder import private_folder
from orchestrator.config import parse_notices
from orchestrator.core.wording import counted
from orchestrator.errors import ConfigError, FencedError, OrchestratorError, SupervisorError

START_SECONDS_MAX = 60.0
DIE_WITH: dict[int, type[OrchestratorError]] = {2: ConfigError, 3: FencedError}


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What a script that nobody supervises asks of its own supervisor."""

    store: str
    job: str
    save_every: int
    keep_last: int
    keep_every: int
    notices: str

    def problems(self) -> Iterator[str]:
        """What no supervisor could do."""
        for name in ("save_every", "keep_last", "keep_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                yield f"attach({name}={value!r}): a whole number, 0 or more"
        if self.keep_every and not self.keep_last:
            yield "attach(keep_every=…) needs keep_last; without it all checkpoints are kept"
        try:
            parse_notices(self.notices)
        except (ValueError, AttributeError) as error:
            yield f"attach(notices={self.notices!r}): {error}"


def start(asked: Supervision) -> Launch:
    """Start what is missing and wait for this rank's launch file. Raises ConfigError, FencedError, SupervisorError."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if local != world_size:
        raise ConfigError(
            f"{world_size} ranks on several machines need a supervisor: start the job with `orchestrator run`"
        )
    folder = _meeting_folder(world_size)
    if rank == 0:
        _remove_left_over(folder.parent)
        _start_supervisor(folder, asked, world_size)
    pid_path = folder / f"worker-{rank:05d}.pid"
    draft = pid_path.with_suffix(".draft")
    draft.write_text(str(os.getpid()))
    draft.rename(pid_path)
    return _wait_for_launch(folder, rank)


def _meeting_folder(world_size: int) -> Path:
    """The same for all ranks of one start, and for no other start."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() else Path("/tmp")
    if world_size == 1:
        name = f"pid-{os.getpid()}"
    else:
        parts = [
            os.environ.get(key, "") for key in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        ]
        name = re.sub(r"[^A-Za-z0-9.-]", "_", f"meet-{os.getppid()}-" + "-".join(parts))
    return private_folder(base, "attached", name)


def _remove_left_over(folder: Path) -> None:
    """Earlier starts whose script and supervisor are both dead have left their memory behind."""
    for meeting in folder.iterdir():
        pids = [*meeting.glob("worker-*.pid"), *meeting.glob("supervisor.pid")]
        with contextlib.suppress(OSError):
            if pids and not any(Path("/proc", path.read_text()).exists() for path in pids):
                shutil.rmtree(meeting, ignore_errors=True)


def _valid_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63]
    return name or "script"


def _start_supervisor(folder: Path, asked: Supervision, world_size: int) -> None:
    job = _valid_name(asked.job)
    settings = {
        **asdict(asked),
        "folder": str(folder),
        "store": str(Path(asked.store).resolve()) if "://" not in asked.store else asked.store,
        "job": job,
        "world_size": world_size,
    }
    log = (folder / "supervisor.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.attached"],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    log.close()
    (folder / "supervisor.pid").write_text(str(process.pid))
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings).encode())
    process.stdin.close()
    process.returncode = 0  # it outlives us on purpose: no ResourceWarning, no wait
    sys.stderr.write(
        f"orchestrator: nobody supervises this script, so it supervises itself: checkpoints of job {job!r} go to "
        f"{settings['store']}, every {counted(asked.save_every, 'step')}, on SIGTERM and at the end\n"
    )


def _wait_for_launch(folder: Path, rank: int) -> Launch:
    launch_path, failed_path = folder / f"launch-{rank:05d}.json", folder / "failed.json"
    until = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < until:
        if launch_path.exists():
            return Launch.read(launch_path)
        if failed_path.exists():
            failed = json.loads(failed_path.read_text())
            if failed["exit_code"] == 0:
                sys.stderr.write(f"orchestrator: {failed['reason']}\n")
                raise SystemExit(0)
            raise DIE_WITH.get(int(failed["exit_code"]), SupervisorError)(failed["reason"])
        time.sleep(0.02)
    raise SupervisorError(f"no supervisor came up within {START_SECONDS_MAX:.0f} s; see {folder / 'supervisor.log'}")

"""The job's folder on this host: `~/.local/state/orchestrator/<job>-<hash of its URL>/` (mode 0700).

A lock proves that one supervisor at most runs here; `owner` may start the job again; `job.json` says where its
checkpoints are; `supervisor.json` (0600) tells verbs the address and token of the running supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from orchestrator.errors import ConfigError, FencedError, SupervisorError
from orchestrator.schedulers.leftovers import start_ticks

_OWNER = re.compile(rb"local-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorAddress:
    """How to reach a running supervisor."""

    job: str
    url: str
    token: str = field(repr=False)
    pid: int
    start_ticks: int | None = None
    """When the process was started: tells it from a later one with the same pid."""
    host: str | None = None
    """Where it runs, if the folder is shared among hosts; None: here."""
    certificate: str | None = None
    """What its port is known by (PEM), where that is not on loopback."""


def place_of(job_url: str) -> str:
    """Where a job's folder is: its URL without the settings that only say how to get there, such as a profile."""
    path, _, settings = job_url.partition("?")
    if "://" not in path or not settings:
        return job_url
    endpoint = [setting for setting in settings.split("&") if setting.startswith("endpoint=")]
    return "?".join((path, *endpoint))


class StateFolder:
    """One job's state on this host."""

    def __init__(self, job: str, job_url: str) -> None:
        digest = hashlib.sha256(place_of(job_url).encode()).hexdigest()[:8]
        self.job = job
        self.job_url = job_url
        self.path = state_root() / f"{job}-{digest}"
        self._lock: IO[bytes] | None = None
        self._has_published = False

    @property
    def address_path(self) -> Path:
        """Where the running supervisor's address and token stand."""
        return self.path / "supervisor.json"

    def make(self) -> None:
        """Make it, and write down where the job is, for verbs. Raises ConfigError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        _write_private(self.path / "job.json", json.dumps({"job": self.job, "url": self.job_url}))

    def forget(self) -> None:
        """Nothing came of the job: it is not known any more. What others have put there stays."""
        with contextlib.suppress(OSError):
            (self.path / "job.json").unlink()
            self.path.rmdir()

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the state folder {self.path} cannot be written: {error.strerror}; XDG_STATE_HOME names another place"
        )

    def acquire(self) -> None:
        """Take the lock. Raises FencedError if a supervisor of this job runs on this host already, ConfigError."""
        self.make()
        try:
            lock = (self.path / "lock").open("ab")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise FencedError(
                f"the job {self.job!r} is already running on this machine (its lock is {self.path / 'lock'}): "
                f"`orchestrator status {self.job}` shows it, `orchestrator drain {self.job}` ends it"
            ) from error
        self._lock = lock

    def supervisor(self) -> SupervisorAddress | None:
        """The supervisor that runs this very job on this host, if one does."""
        address = _read_address(self.address_path)
        return address if address is not None and is_running(address) else None

    def forget_supervisor(self) -> None:
        """No address any more: what a supervisor that died has left running is not taken back by the next one."""
        with contextlib.suppress(OSError):  # a file that stays names a process that is gone
            self.address_path.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back. Another supervisor's address stays: whom it has left running, the next one takes back."""
        if self._lock is not None:
            if self._has_published:
                self.forget_supervisor()
            self._lock.close()
            self._lock = None

    def note_slurm_job(self, job_id: str) -> None:
        """Which of Slurm's jobs this one was submitted as last: for `status` while it does not run."""
        _write_private(self.path / "slurm.json", json.dumps({"job_id": job_id}))

    def note_save(self, seconds: float) -> None:
        """How long a save of this job was measured to take from the notice to the commit: for its next submission.

        Raises ConfigError.
        """
        _write_private(self.path / "save.json", json.dumps({"seconds": seconds}))

    def save_seconds(self) -> float | None:
        """See `note_save`; None where nothing was measured."""
        seconds = self._noted("save.json", "seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    def note_cluster_job(self, namespace: str) -> None:
        """The job is a TrainingJob in that namespace of a Kubernetes cluster: for the verbs."""
        _write_private(self.path / "kubernetes.json", json.dumps({"namespace": namespace}))

    def cluster_job(self) -> str | None:
        """See `note_cluster_job`."""
        namespace = self._noted("kubernetes.json", "namespace")
        return None if namespace is None else str(namespace)

    def slurm_job(self) -> str | None:
        """See `note_slurm_job`."""
        job_id = self._noted("slurm.json", "job_id")
        return None if job_id is None else str(job_id)

    def _noted(self, name: str, field_name: str) -> object:
        """What stands in one of these files; None where nothing was noted, or it cannot be read."""
        try:
            return json.loads((self.path / name).read_text())[field_name]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def count_fruitless(self, owner: str, newest: str | None) -> int:
        """How many runs of this owner, with the one that ends now, have left the newest checkpoint what it was.

        Written down here: runs in which no agent started leave no trace on the store.
        """
        path = self.path / "fruitless.json"
        try:
            body = json.loads(path.read_text())
            same = (body["owner"], body["newest"]) == (owner, newest)
            runs = int(body["runs"]) + 1 if same else 0
        except (OSError, ValueError, KeyError, TypeError):
            runs = 0
        runs = runs or int(newest is None)
        _write_private(path, json.dumps({"owner": owner, "newest": newest, "runs": runs}))
        return runs

    def owner(self) -> str:
        """The owner id, made at the first call: the same for every start of this job from this host and user.

        Raises ConfigError if what stands in its file is none: under a wrong one the job would be another owner's.
        """
        path = self.path / "owner"
        try:
            found = path.read_bytes().strip()
            if _OWNER.fullmatch(found):
                return found.decode()
            problem = "holds no owner id"
        except FileNotFoundError:
            owner = f"local-{secrets.token_hex(8)}"
            _write_private(path, owner)
            return owner
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        raise ConfigError(f"{path} {problem}; remove it and give the command once with --take-over")

    def published_token(self) -> str | None:
        """The token of the supervisor that published its address last, if it did."""
        try:
            return str(json.loads(self.address_path.read_text())["token"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def publish(self, url: str, token: str, *, host: str | None = None, certificate: str | None = None) -> None:
        """Let verbs find the supervisor; those of other hosts, too, if it has a certificate."""
        body = {
            "job": self.job,
            "url": url,
            "token": token,
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()),
            "host": host,
            "certificate": certificate,
        }
        self._has_published = True
        _write_private(self.address_path, json.dumps(body))


def state_root() -> Path:
    """Where the jobs' state folders are (XDG_STATE_HOME is honoured)."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "orchestrator"


def find_supervisor(job: str) -> SupervisorAddress:
    """The running supervisor of a job on this host. Raises SupervisorError with what to do."""
    running = [address for address in _published() if is_running(address)]
    found = [address for address in running if address.job == job]
    if not found:
        others = ", ".join(sorted({address.job for address in running}))
        raise SupervisorError(
            f"no supervisor of a job {job!r} runs on this machine; "
            + (f"running are: {others}" if others else "`orchestrator run` starts one")
        )
    if len(found) > 1:
        raise SupervisorError(
            f"{len(found)} jobs on this machine are called {job!r}, in different stores: give them other names"
        )
    return found[0]


def known_jobs() -> list[StateFolder]:
    """The folders of all jobs that run or have run on this host, by name."""
    return [StateFolder(job, url) for job, url in sorted(set(_jobs()))]


def known_job(job: str) -> StateFolder:
    """The folder of a job that runs or has run on this host. Raises ConfigError with what to do."""
    urls = sorted({url for name, url in _jobs() if name == job})
    if len(urls) == 1:
        return StateFolder(job, urls[0])
    if urls:
        raise ConfigError(f"there are {len(urls)} jobs {job!r} on this machine: --store says which; {', '.join(urls)}")
    names = ", ".join(sorted({name for name, _ in _jobs()}))
    raise ConfigError(
        f"no job {job!r} has run on this machine" + (f", but {names}" if names else "") + "; --store says where it is"
    )


def _jobs() -> list[tuple[str, str]]:
    """Name and URL of every job that has run here; what is not whole is passed over."""
    found = []
    for path in sorted(state_root().glob("*/job.json")):
        try:
            body = json.loads(path.read_text())
            found.append((str(body["job"]), str(body["url"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def is_running(address: SupervisorAddress) -> bool:
    """Whether the process that published this address still runs (and not another one with its pid).

    Of another host's nothing can be known here: it is taken to run until it takes its address away.
    """
    if address.host not in (None, socket.gethostname()):
        return True
    ticks = start_ticks(address.pid)
    return ticks is not None and address.start_ticks in (None, ticks)


def _published() -> list[SupervisorAddress]:
    """What every supervisor.json says; those that are not whole are passed over."""
    found = map(_read_address, sorted(state_root().glob("*/supervisor.json")))
    return [address for address in found if address is not None]


def _read_address(path: Path) -> SupervisorAddress | None:
    try:
        return SupervisorAddress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write_private(path: Path, text: str) -> None:
    """Raises ConfigError: without what stands there neither agents nor the next start would find their way."""
    draft = path.with_name(path.name + ".draft")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file in its place
        draft.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

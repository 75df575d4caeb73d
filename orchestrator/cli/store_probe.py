"""Is a store fit for a job? Found out before any training time is spent; the answer says what to do.

Looks at whose the job's folder is, then writes one small object of a random name twice (the second time must be
refused), reads it and deletes it: all within PROBE_SECONDS_MAX, whatever an SDK or a file system waits for. The store
of a bucket has done the same by itself then, before this first write of its own.

Called by `run`, `demo`, `check`, and for scripts that nobody supervises by `attached`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.checkpoint.generations import Claimant, JobOverError, may_start
from orchestrator.errors import (
    AlreadyExistsError,
    ConfigError,
    FormatError,
    NotFoundError,
    StoreDeniedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from orchestrator.storage.arguments import probe_key
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store

PROBE_SECONDS_MAX = 6.0
"""For all that is asked of a store; with the start of the process it stays below the 10 s that are promised."""
PATIENCE_SECONDS = 3.0
"""For how long is tried again what fails for a moment."""
_FOLDER_ADVICE = "use a folder or file system that this user may write, with hard links; jobs would lose checkpoints"
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL, or endpoint= in the URL", "gs": "STORAGE_EMULATOR_HOST"}
"""What says where a bucket's server is, by scheme."""
_DENIED_ADVICE = "jobs list, read and write there: give credentials that may do that (docs/stores.md)"
_FULL_ADVICE = "make room, or name another store"
_BUCKET_ADVICE = "jobs cannot save there: docs/stores.md says what a bucket needs"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found. `problem` is empty if the store is fit; `advice` says what to do about it."""

    url: str
    problem: str = ""
    advice: str = ""
    silent: bool = False
    """There was no answer in time; nothing else is known."""
    left_key: str = ""
    """What was written and could not be deleted: these credentials may not delete."""

    @property
    def is_folder(self) -> bool:
        """Whether the store is a folder on this machine."""
        return self.url.startswith("/")


class _SilentError(Exception):
    """An action has not returned in time."""


def require_fit(job_url: str, who: Claimant) -> str:
    """Something to tell, or nothing. Raises FencedError if the job may not start, ConfigError if it cannot save there.

    A job that is over already is none of its concern: the first agent says so, with the right status. Neither is a
    folder that is slow to answer, as with a disk that is still busy with what was saved before: that is only told.
    """
    store = open_store(job_url, PATIENCE_SECONDS)
    try:
        found = probe(store, lambda: may_start(store, who))
    except (JobOverError, FormatError):
        return ""
    if found.silent and found.is_folder:
        return f"store: {found.url} {found.problem}; going on"
    if found.problem:
        raise ConfigError(f"store: {found.url}: {found.problem}; {found.advice}")
    return ""


def require_writable(url: str) -> None:
    """Raises ConfigError if a store is not fit for jobs."""
    found = probe(open_store(url, PATIENCE_SECONDS))
    if found.problem:
        raise ConfigError(f"store: {found.url}: {found.problem}; {found.advice}")


def probe(store: ObjectStore, first: Callable[[], object] = lambda: None) -> Probe:
    """Try the store. `first` is called before anything is written; its errors, but for StoreErrors, are raised."""

    def look() -> Probe:
        first()
        return _written_once(store)

    url = store.url
    try:
        return _within(PROBE_SECONDS_MAX, look)
    except _SilentError:
        problem = f"has not answered within {PROBE_SECONDS_MAX:.0f} s"
        return Probe(url=url, problem=problem, advice=_silence_advice(url), silent=True)
    except StoreError as error:
        problem, advice = _problem_and_advice(url, error)
        return Probe(url=url, problem=problem, advice=advice)
    except ConfigError as error:
        problem, _, advice = "; ".join(error.problems).removeprefix("store: ").partition("; ")
        return Probe(url=url, problem=problem, advice=advice or _default_advice(url))


def _written_once(store: ObjectStore) -> Probe:
    """Writes a key twice. The object is deleted again, if that is allowed."""
    key = probe_key()
    first, second = secrets.token_bytes(32), secrets.token_bytes(32)
    store.create(key, [first])
    try:
        store.create(key, [second])
        problem = "wrote one key twice: create-if-absent is not exclusive here"
    except AlreadyExistsError:
        problem = "" if store.read(key) == first else "gave back other bytes than were written"
    left = ""
    try:
        store.delete(key)
    except StoreDeniedError:  # not everybody who may write may delete; jobs do not need it
        left = key
    advice = _default_advice(store.url) if problem else ""
    return Probe(url=store.url, problem=problem, advice=advice, left_key=left)


def _within(seconds: float, action: Callable[[], _Result]) -> _Result:
    """What the action returns or raises. Raises _SilentError when it takes longer: it is left to itself then."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="store-probe", daemon=True)  # keeps no process from ending
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    raise _SilentError


def _problem_and_advice(url: str, error: StoreError) -> tuple[str, str]:
    """Where the problem's own words end in what to do, nothing is added."""
    if url.startswith("/"):
        return error.problem, _FULL_ADVICE if isinstance(error, StoreFullError) else _FOLDER_ADVICE
    if isinstance(error, NotFoundError):  # of a bucket's listing, or of what was just written
        return "what answers there knows neither bucket nor objects", _endpoint_advice(url)
    problem, _, own_advice = error.problem.partition("; ")
    match error:
        case _ if own_advice:
            return problem, own_advice
        case StoreFullError():
            return problem, _FULL_ADVICE
        case StoreUnavailableError():
            return problem, f"try again later, or {_endpoint_advice(url)}"
        case StoreDeniedError():
            return problem, _DENIED_ADVICE
        case _:
            return problem, _BUCKET_ADVICE


def _default_advice(url: str) -> str:
    return _FOLDER_ADVICE if url.startswith("/") else _BUCKET_ADVICE


def _endpoint_advice(url: str) -> str:
    named = _ENDPOINTS.get(url.partition("://")[0], "its URL")
    return f"see that its endpoint is the right one ({named}), and that this machine reaches it"


def _silence_advice(url: str) -> str:
    if url.startswith("/"):
        return "its disk or file server hangs, or is busy: try `ls` there, and again later"
    return f"{_endpoint_advice(url)}, and the place where its credentials come from"

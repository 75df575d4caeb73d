"""Every error the package raises on purpose, as one tree.

    OrchestratorError
    ├── ConfigError            flags, TOML or environment are wrong; nothing was started       (exit 2)
    ├── FencedError            another, newer run owns the job                                  (exit 3)
    ├── RollbackError          there is no checkpoint to go back to; nothing was changed        (exit 2)
    ├── RefusedError           restarting would not help: do not restart                        (exit 78)
    │   ├── StateError         the state cannot be saved or restored exactly; names the path
    │   └── GateError          what was restored is not what was saved; names the part
    ├── StoreError             the object store did not do what was asked
    │   ├── AlreadyExistsError the key is there already (create-if-absent lost)
    │   ├── NotFoundError      no such key
    │   ├── StoreFullError     no space left, or a quota is used up
    │   ├── StoreDeniedError   not readable or not writable for this user
    │   └── StoreUnavailableError  no answer, or "come again later": the same request may succeed soon
    ├── SweepRefusedError      nothing is deleted: something on the store cannot be read, or is being changed
    ├── FormatError            bytes are not what the format says
    │   ├── VersionError       written by a format version that this release does not know
    │   └── DigestError        size or crc32c differ from what was committed
    ├── SourceError            a source of notices cannot be read, or says what nobody understands
    ├── ProtocolError          a peer sent what the protocol does not allow
    ├── PeerError              another rank failed in what all ranks do together; names it
    │   └── PeerLostError      another rank has gone, or does not answer
    ├── SchedulerError         the cluster's scheduler does not answer, or refuses
    │   └── KubernetesError    the API server does not answer, or refuses; with its status and reason
    └── SupervisorError        the supervisor cannot be reached, or refused the request

Leaving on a notice is no failure: `Preempted` derives from SystemExit (status 75) so that a
script's `except Exception` does not swallow it. Exit codes are in `ExitCode`.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of `orchestrator run` and of attached scripts."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    FENCED = 3
    RESUMABLE = 75
    NEVER_RESTART = 78


class OrchestratorError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code: ExitCode = ExitCode.FAILED


class ConfigError(OrchestratorError):
    """Flags, TOML file or environment are wrong. `problems` lists all of them, with field paths."""

    exit_code = ExitCode.USAGE

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class FencedError(OrchestratorError):
    """Another run owns this job; this one must stop and must not be requeued."""

    exit_code = ExitCode.FENCED


class RollbackError(OrchestratorError):
    """A rollback names a step of which the job has no usable checkpoint; nothing was changed."""

    exit_code = ExitCode.USAGE


class RefusedError(OrchestratorError):
    """Restarting would fail in the same way; a person has to look."""

    exit_code = ExitCode.NEVER_RESTART


class StateError(RefusedError):
    """A part of the training state cannot be saved or restored exactly. `path` names it."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class GateError(RefusedError):
    """The restored state differs from what the checkpoint says. `parts` names what differs."""

    def __init__(self, parts: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.parts = parts


class StoreError(OrchestratorError):
    """The object store did not do what was asked. `key` is the key or prefix concerned."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem

    def about(self, what: str) -> None:
        """Say which part of the object it was that failed."""
        self.problem = f"{what}: {self.problem}"
        self.args = (f"{self.key}: {self.problem}",)


class AlreadyExistsError(StoreError):
    """Create-if-absent lost: the key is there already."""


class NotFoundError(StoreError):
    """There is no such key."""


class StoreFullError(StoreError):
    """No space is left on the store, or a quota is used up."""


class StoreDeniedError(StoreError):
    """The store may not be read or written by this user."""


class StoreUnavailableError(StoreError):
    """The store did not answer, broke off, or asked to come again later: the same request may succeed soon.

    `maybe_done`: what was asked may have been done all the same, and only the answer was lost.
    `retry_after_seconds`: what the store asked for, if it did.
    """

    def __init__(
        self, key: str, problem: str, *, maybe_done: bool = True, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(key, problem)
        self.maybe_done = maybe_done
        self.retry_after_seconds = retry_after_seconds


class SweepRefusedError(OrchestratorError):
    """Nothing is deleted, because something on the store cannot be read, or is just being changed."""


class FormatError(OrchestratorError):
    """Bytes in a checkpoint are not what the format says. `key` is the object concerned."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class VersionError(FormatError):
    """Written by a format version that this release does not know."""


class DigestError(FormatError):
    """Size or crc32c differ from what was committed."""


class SourceError(OrchestratorError):
    """A source of notices cannot be read, or says what nobody understands: whether a notice stands is not known."""


class ProtocolError(OrchestratorError):
    """A peer sent what the protocol does not allow."""


class PeerError(OrchestratorError):
    """Another rank failed in what all ranks do together, so this one cannot go on. `rank` is the first that did."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(PeerError):
    """Another rank has gone, or does not answer; which one is not known."""


class BrokenOffError(OrchestratorError):
    """This rank failed in the middle of what all ranks do together: the others lose it, and it does nothing more."""


class SchedulerError(OrchestratorError):
    """The cluster's scheduler does not answer, or refuses what was asked."""


class KubernetesError(SchedulerError):
    """The API server does not answer (`status` None), or refuses what was asked. `reason` is its word, as Forbidden."""

    def __init__(
        self,
        text: str,
        *,
        status: int | None = None,
        reason: str = "",
        message: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.message = message or text
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_not_found(self) -> bool:
        """There is no such object (a path that the server does not know is another thing)."""
        return self.status == 404 and self.reason == "NotFound"

    @property
    def is_permanent(self) -> bool:
        """The same request will be refused again: a person has to change something."""
        return self.status in (400, 403, 404, 405, 415, 422) and "exceeded quota" not in self.message


class SupervisorError(OrchestratorError):
    """The supervisor cannot be reached, or refused the request."""


class Preempted(SystemExit):
    """Raised in attached mode once the emergency checkpoint is committed or the deadline is over."""

    def __init__(self, message: str) -> None:
        super().__init__(int(ExitCode.RESUMABLE))
        self.message = message

    def __str__(self) -> str:
        return self.message

"""Why a worker is gone, with the evidence for it. Pure.

A cause is what can be shown: the exit status, what the kernel counted, the last lines of a traceback. What cannot be
shown is said to be unknown. What follows from a cause is `core.policy`'s affair.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from orchestrator.core.messages import RankExited, Verdict
from orchestrator.core.wording import counted
from orchestrator.errors import ExitCode

SIGKILL, SIGTERM = 9, 15
_RANK = re.compile(r"\[rank\d+\]: ?")
"""What torch puts before each line of a traceback, once there is a process group."""
LINES_AFTER_TRACEBACK_MAX = 5
"""How a process that has failed falls down (a library's threads, say) takes no more lines than these."""


class Cause(StrEnum):
    """Why a worker is gone."""

    FINISHED = "finished"
    REFUSED = "refused"
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out of memory"
    DEVICE_OUT_OF_MEMORY = "device out of memory"
    DEVICE_FAILED = "device failed"
    DISK_FULL = "disk full"
    PEERS_LOST = "lost its peers"
    KILLED = "killed"
    HUNG = "hung"
    CRASHED = "crashed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause and how it is told: the exit status, and what is known beyond it."""

    cause: Cause
    words: str


_SAID: Mapping[Cause, re.Pattern[str]] = MappingProxyType(
    {
        Cause.DEVICE_FAILED: re.compile(
            r"uncorrectable (?:NVLink|ECC) error|GPU is lost|fallen off the bus|no CUDA-capable device is detected"
            r"|CUDA-capable device\(s\) is/are busy"
        ),
        Cause.DEVICE_OUT_OF_MEMORY: re.compile(
            r"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        ),
        Cause.OUT_OF_MEMORY: re.compile(
            r"^MemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
        ),
        Cause.DISK_FULL: re.compile(r"No space left on device|no space is left in "),
        Cause.PEERS_LOST: re.compile(
            r"Connection (?:closed by peer|reset by peer|refused)|NCCL error|ncclRemoteError|ncclSystemError"
            r"|Watchdog caught collective operation timeout|Timed out waiting \d+ms for|DistBackendError"
            r"|DistNetworkError|PeerLostError|Broken pipe"
        ),
    }
)
"""What tells of a cause where it stands in the line of the exception; the first that fits counts."""
_CHILD_KILLED = re.compile(r"killed by signal: Killed")
"""torch's DataLoader, of a worker process that is gone by SIGKILL."""


def cause_of(event: RankExited, going: Collection[str] = ()) -> Diagnosis:
    """The cause of one exit that was not our doing; `going` are the nodes that a notice has named."""
    code = event.exit_code
    how = describe_exit(code)
    if code == 0:
        return Diagnosis(cause=Cause.FINISHED, words=how)
    if event.verdict is Verdict.REFUSED or code == ExitCode.NEVER_RESTART:
        return Diagnosis(cause=Cause.REFUSED, words=how)
    if code in (-SIGKILL, -SIGTERM) and event.node in going:
        return Diagnosis(cause=Cause.PREEMPTED, words=f"{how}: its node was announced to go")
    if code == -SIGKILL:
        return _killed(event, how)
    if code == -SIGTERM:
        return Diagnosis(cause=Cause.KILLED, words=f"{how}: somebody sent SIGTERM")
    said = last_words(event)
    if event.memory_kills and _CHILD_KILLED.search(said):
        return Diagnosis(cause=Cause.OUT_OF_MEMORY, words=f"{how}: a process of its own was killed, {_kills(event)}")
    cause = next((cause for cause, pattern in _SAID.items() if pattern.search(said)), None)
    if cause is not None:
        return Diagnosis(cause=cause, words=f"{how}: {cause}")
    if code is None:
        return Diagnosis(cause=Cause.UNKNOWN, words=how)
    return Diagnosis(cause=Cause.CRASHED, words=how + (f" ({_kills(event)})" if event.memory_kills else ""))


def _killed(event: RankExited, how: str) -> Diagnosis:
    if event.memory_kills is None:
        return Diagnosis(cause=Cause.KILLED, words=f"{how}: by whom cannot be seen, nor whether for want of memory")
    if event.memory_kills:
        return Diagnosis(cause=Cause.OUT_OF_MEMORY, words=f"{how}: out of memory, {_kills(event)}")
    return Diagnosis(cause=Cause.KILLED, words=f"{how}: by somebody, its cgroup counted no kill for want of memory")


def _kills(event: RankExited) -> str:
    return f"its cgroup counted {counted(event.memory_kills or 0, 'kill')} for want of memory"


def root_of(exits: Sequence[RankExited], going: Collection[str] = ()) -> RankExited | None:
    """The failure that brought the others down: the first that is no mere loss of peers, else the first."""
    failed = [event for event in exits if not event.ended_by_us and event.exit_code != 0]
    of_itself = (event for event in failed if cause_of(event, going).cause is not Cause.PEERS_LOST)
    return next(of_itself, failed[0] if failed else None)


def describe_exit(exit_code: int | None) -> str:
    """An exit status in words."""
    if exit_code is None:
        return "ended with an unknown status"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"


def last_words(event: RankExited) -> str:
    """The last line that it printed; the exception's, if what comes after it is only how the process fell down."""
    lines = [_RANK.sub("", line) for line in event.evidence.splitlines() if _RANK.sub("", line).strip()]
    if not lines:
        return "it printed nothing"
    for start in reversed(range(len(lines))):
        if lines[start].startswith("Traceback (most recent call last)"):
            said = next((place for place in range(start + 1, len(lines)) if not lines[place][0].isspace()), None)
            if said is not None and len(lines) - said <= LINES_AFTER_TRACEBACK_MAX:
                return lines[said].strip()
            break
    return lines[-1].strip()

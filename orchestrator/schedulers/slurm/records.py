"""What `scontrol show` prints, as values. Pure; `schedulers.slurm.commands` asks.

Slurm writes times in the zone of whoever asks, without saying so: they are read as this host's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from orchestrator.errors import SchedulerError

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:&]*)=(\S*)")
_REASON = re.compile(r"(?:^|\s)Reason=(.*?)(?:\s\[[^\[\]]*@[^\[\]]*\])?\s*$", re.MULTILINE)
_SETTING = re.compile(r"^(\S+)\s+= (.*)$", re.MULTILINE)
NOTHING = ("", "None", "(null)", "N/A", "Unknown", "NONE", "n/a")
ENDED_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""Of a job that does not come back by itself."""
_MARKS = {
    "*": "NOT_RESPONDING",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
}
UNUSABLE_FLAGS = {
    *("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "NOT_RESPONDING"),
    *("POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "REBOOT_ISSUED", "REBOOT_REQUESTED", "UNKNOWN"),
}
"""States and flags of a node on which nothing is to be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the controller knows it."""

    job_id: str
    state: str
    reason: str
    hosts: str
    """As Slurm writes a list of hosts: `n[1-3]`."""
    partition: str
    restarts: int
    may_requeue: bool
    ends_at_seconds: float | None
    """Wall time; of a preempted job, when its grace is over."""
    preempted: bool
    """It was chosen to make room, and its grace has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """A node as the controller knows it."""

    name: str
    address: str
    states: frozenset[str]
    reason: str

    @property
    def usable(self) -> bool:
        """Whether something can be started there."""
        return not self.states & UNUSABLE_FLAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What of a partition matters to a job that may be preempted."""

    name: str
    grace_seconds: float
    preempt_mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What of the cluster's configuration matters to a job that may be preempted."""

    version: str
    cluster: str
    preempt_type: str
    preempt_mode: str
    kill_wait_seconds: float
    slurmd_timeout_seconds: float
    requeues: bool
    requeue_delay_seconds: float
    """A requeued job is not started again before its credentials have expired."""


def parse_job(text: str, job_id: str) -> JobRecord | None:
    """`scontrol show job ID`; None if only other tasks of its array are shown. Raises SchedulerError.

    One task of a job array has the array's own id: asked for it, Slurm shows all tasks.
    """
    records = [dict(_PAIR.findall(part)) for part in re.split(r"(?m)^(?=JobId=)", text)]
    shown = [fields for fields in records if "JobId" in fields and "JobState" in fields]
    if not shown:
        raise SchedulerError(f"scontrol shows no job, but {text.strip()!r:.200}")
    asked = [fields for fields in shown if fields["JobId"] == job_id or "_" in job_id]
    if not asked:
        return None
    fields = asked[0]
    ends = fields.get("EndTime", "")
    return JobRecord(
        job_id=fields["JobId"],
        state=fields["JobState"],
        reason=_plain(fields.get("Reason", "")),
        hosts=_plain(fields.get("NodeList", "")),
        partition=fields.get("Partition", ""),
        restarts=int(restarts) if (restarts := fields.get("Restarts", "")).isdecimal() else 0,
        may_requeue=fields.get("Requeue", "1") == "1",
        ends_at_seconds=None if ends in NOTHING else _wall_seconds(ends),
        preempted=fields.get("PreemptTime", "") not in NOTHING or fields["JobState"] == "PREEMPTED",
    )


def parse_hosts(text: str) -> dict[str, HostRecord]:
    """`scontrol show node LIST`, by name. Raises SchedulerError."""
    found = {record.name: record for record in map(_host, re.split(r"(?m)^(?=NodeName=)", text)[1:])}
    if not found:
        raise SchedulerError(f"scontrol shows no node, but {text.strip()!r:.200}")
    return found


def _host(text: str) -> HostRecord:
    fields: dict[str, str] = dict(_PAIR.findall(text))
    reason = _REASON.search(text)
    name = fields["NodeName"]
    return HostRecord(
        name=name,
        address=fields.get("NodeAddr", name),
        states=frozenset(_states(fields.get("State", "UNKNOWN"))),
        reason=reason[1].strip() if reason else "",
    )


def _states(text: str) -> Iterator[str]:
    """The state and its flags; a mark behind it is a flag in short."""
    for word in text.split("+"):
        plain = word.rstrip("".join(_MARKS) + "~#$-")
        yield plain
        yield from (flag for mark, flag in _MARKS.items() if mark in word[len(plain) :])


def parse_partition(text: str) -> Partition:
    """`scontrol show partition NAME`. Raises SchedulerError."""
    fields = dict(_PAIR.findall(text))
    if "PartitionName" not in fields:
        raise SchedulerError(f"scontrol shows no partition, but {text.strip()!r:.200}")
    return Partition(
        name=fields["PartitionName"],
        grace_seconds=_duration_seconds(fields.get("GraceTime", "0")),
        preempt_mode=fields.get("PreemptMode", ""),
    )


def parse_settings(text: str) -> ClusterSettings:
    """`scontrol show config`. Raises SchedulerError."""
    fields = {name: value.strip() for name, value in _SETTING.findall(text)}
    if "SLURM_VERSION" not in fields:
        raise SchedulerError(f"scontrol shows no configuration, but {text.strip()!r:.200}")
    expires = re.search(r"cred_expire=(\d+)", fields.get("AuthInfo", ""))
    return ClusterSettings(
        version=fields["SLURM_VERSION"],
        cluster=fields.get("ClusterName", ""),
        preempt_type=_plain(fields.get("PreemptType", "")).removeprefix("preempt/"),
        preempt_mode=_plain(fields.get("PreemptMode", "")),
        kill_wait_seconds=_duration_seconds(fields.get("KillWait", "30")),
        slurmd_timeout_seconds=_duration_seconds(fields.get("SlurmdTimeout", "300")),
        requeues=fields.get("JobRequeue", "1") == "1",
        requeue_delay_seconds=1.0 + (float(expires[1]) if expires else 120.0),
    )


def _plain(value: str) -> str:
    return "" if value in NOTHING else value


def _wall_seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _duration_seconds(text: str) -> float:
    """`30 sec`, `12`, `00:01:30`, `1-00:00:00`; what is none is 0: no time is counted on."""
    number = re.match(r"(\d+)(?: sec)?$", text)
    if number:
        return float(number[1])
    clock = re.match(r"(?:(\d+)-)?(\d+):(\d+):(\d+)$", text)
    if clock is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_limit(text: str) -> float | None:
    """Seconds of a limit as sbatch takes it: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`; None: none of them."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, *parts = (None if part is None else int(part) for part in found.groups())
    numbers = [part for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return float((days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False)))


def parse_cpus(text: str) -> list[int]:
    """`SLURM_JOB_CPUS_PER_NODE`, host by host: `2(x3),4` → [2, 2, 2, 4]. What is none: nothing."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts

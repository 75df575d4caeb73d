"""What is submitted to Slurm, and what the cluster's configuration means for it. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.schedulers.slurm.records import ENDED_STATES, ClusterSettings, JobRecord, Partition, parse_limit

LIMIT_SLACK_SECONDS = 60.0
"""Slurm looks at time limits every half minute, and may warn a minute early."""
FIXED_OPTIONS = ("--job-name", "-J", "--nodes", "-N", "--open-mode", "--requeue", "--no-requeue", "--no-kill", "-k")
"""Of sbatch: the job's own settings say them, or a restart needs them as they are."""
KILL_WAIT_SECONDS_MIN = 30.0
"""Slurm's default: less than that is told as long as no save was measured that it could be compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about the cluster that costs training time, or checkpoints, and what can be done."""

    loses: bool
    """Whether work is lost by it; else it only takes time."""
    words: str
    remedy: str


def render(
    *, job: str, nodes_min: int, nodes_max: int, log: str, options: Sequence[str], command: Sequence[str]
) -> str:
    """The batch script: it becomes the supervisor, which starts an agent on each host.

    `options`: sbatch's, as a person would give them. `command`: `orchestrator run …` as it is to be run there.
    """
    nodes = str(nodes_min) if nodes_min == nodes_max else f"{nodes_min}-{nodes_max}"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --requeue",
        "#SBATCH --no-kill",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={log}",
        *(f"#SBATCH {option}" for option in options),
        "",
        "trap '' USR1 USR2  # until the supervisor listens",
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def limit_notice_seconds(grace_seconds: float) -> float:
    """How long before its time limit a job leaves."""
    return LIMIT_SLACK_SECONDS + grace_seconds


def too_short(seconds: float | None, grace_seconds: float) -> str | None:
    """Why what there is until the time limit leaves nothing to train in; None if it does, or there is no limit."""
    notice_seconds = limit_notice_seconds(grace_seconds)
    if seconds is None or seconds > notice_seconds:
        return None
    return (
        f"{seconds:.0f} s until the time limit leave no time to train: the job saves and leaves {notice_seconds:.0f} s "
        "before it (60 s, and grace_seconds); a longer --time or a smaller grace_seconds does"
    )


def asked_limit_seconds(options: Sequence[str]) -> float | None:
    """The time limit that sbatch's options name, the last one of them, in whole minutes as Slurm counts it.

    None if none does, it is 0 (no limit), or it cannot be read.
    """
    asked = re.findall(r"(?:^|\s)(?:--time[= ]\s*|-t\s*)([^\s-]\S*)", "\n".join(options))
    seconds = parse_limit(asked[-1]) if asked else None
    return 60.0 * math.ceil(seconds / 60) if seconds else None


def inspect(
    cluster: ClusterSettings, partition: Partition, *, save_every: int, save_seconds: float | None
) -> list[Finding]:
    """What is lost, or takes long, with this cluster and partition: first what loses work.

    `save_seconds`: how long a save of this job takes by what was measured; None where nothing was.
    """
    findings = [
        *_on_preemption(cluster, partition, save_every, save_seconds),
        *_on_cancellation(cluster, save_seconds),
        *_on_requeue(cluster),
    ]
    return sorted(findings, key=lambda finding: not finding.loses)


def _on_preemption(
    cluster: ClusterSettings, partition: Partition, save_every: int, save_seconds: float | None
) -> Iterator[Finding]:
    mode = partition.preempt_mode or cluster.preempt_mode
    if cluster.preempt_type in ("", "none") or mode in ("", "OFF"):
        return
    if "SUSPEND" in mode:
        words = f"the partition {partition.name} suspends what it preempts: the job stands still, and goes on"
        yield Finding(loses=False, words=words, remedy="nothing has to be done")
        return
    kept = f"what was trained since the last periodic checkpoint (every {save_every} steps)"
    if save_every == 0:
        kept = "everything that was trained since the start: there are no periodic checkpoints (save_every is 0)"
    if partition.grace_seconds == 0:
        yield Finding(
            loses=True,
            words=f"a job in the partition {partition.name} that is preempted is ended at once (GraceTime=0): "
            f"{kept} is lost",
            remedy="ask for a GraceTime of a minute or more; until then save more often",
        )
    elif save_seconds is not None and partition.grace_seconds < save_seconds:
        yield Finding(
            loses=True,
            words=f"a job in the partition {partition.name} that is preempted has {partition.grace_seconds:.0f} s "
            f"(GraceTime), and a save of this one takes {save_seconds:.0f} s, by what was measured: {kept} may be lost",
            remedy=f"ask for a GraceTime of {2 * save_seconds:.0f} s; until then save more often",
        )
    if mode == "CANCEL":
        yield Finding(
            loses=False,
            words=f"the partition {partition.name} cancels what it preempts (PreemptMode=CANCEL): only what has "
            "saved within its grace is started again",
            remedy="ask for PreemptMode=REQUEUE",
        )


def _on_cancellation(cluster: ClusterSettings, save_seconds: float | None) -> Iterator[Finding]:
    if cluster.kill_wait_seconds >= (KILL_WAIT_SECONDS_MIN if save_seconds is None else save_seconds):
        return
    needed = "" if save_seconds is None else f"; a save of this one takes {save_seconds:.0f} s, by what was measured"
    yield Finding(
        loses=save_seconds is not None,
        words=f"a job that is cancelled or requeued by hand is killed {cluster.kill_wait_seconds:.0f} s later "
        f"(KillWait), whatever it is saving{needed}",
        remedy="end it by `orchestrator drain`, which saves first",
    )


def _on_requeue(cluster: ClusterSettings) -> Iterator[Finding]:
    if cluster.requeue_delay_seconds > 60:
        yield Finding(
            loses=False,
            words=f"a requeued job is not started again for {cluster.requeue_delay_seconds:.0f} s "
            "(its credentials have to expire)",
            remedy="ask for AuthInfo=cred_expire=… of some seconds; losses of single hosts need no requeue anyway",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Whether the job is to be requeued, and why."""

    wanted: bool
    reason: str


PASSING_STATES = ("SIGNALING", "RESIZING", "CONFIGURING")
"""Of a job that runs: what the controller says of it for a moment."""


def judge_requeue(record: JobRecord | None, *, fruitless: int, fruitless_max: int) -> Requeue:
    """After a save: is it right to give the allocation back and come again?

    `fruitless`: runs in a row, with this one, that have committed nothing. Only a job that still runs is requeued: one
    that somebody has cancelled in the meantime would come back to life.
    """
    if record is None:
        return Requeue(wanted=False, reason="the controller does not know the job any more")
    if record.state != "RUNNING":
        return Requeue(wanted=False, reason=f"the job is {record.state} already")
    if not record.may_requeue:
        return Requeue(wanted=False, reason="the job was submitted with --no-requeue")
    if fruitless > fruitless_max:
        return Requeue(wanted=False, reason=f"{fruitless} runs in a row have committed nothing")
    return Requeue(wanted=True, reason="it goes on in another allocation")


def explain_waiting(record: JobRecord) -> str | None:
    """Why a submitted job does not run, with what to do; None if it does."""
    if record.state == "RUNNING":
        return None
    if record.state in ENDED_STATES:
        ended = f"Slurm's job {record.job_id} has ended: {record.state}" + (
            f" ({record.reason})" if record.reason else ""
        )
        if record.reason == "JobLaunchFailure":
            ended += ": its host could not start it, or not write its output; the host's slurmd.log says more"
        return ended
    if "held" in record.reason.lower() and "launch" not in record.reason.lower():
        return f"somebody holds Slurm's job {record.job_id} ({record.reason}): `scontrol release {record.job_id}`"
    if "held" in record.reason.lower():
        return (
            f"Slurm holds the job {record.job_id} ({record.reason.replace('_', ' ')}): its start has failed on a host; "
            f"`scontrol release {record.job_id}` lets it try again, the host's slurmd.log says what went wrong, "
            "`sinfo -R` whether the host is drained for it"
        )
    waiting = f"Slurm's job {record.job_id} is {record.state}" + (f" ({record.reason})" if record.reason else "")
    return f"{waiting}; `scancel {record.job_id}` takes it away" if record.state == "PENDING" else waiting

"""`scontrol show node` and `scontrol show job` as notices."""

from __future__ import annotations

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption.base import rfc3339_seconds
from orchestrator.preemption.slurm import parse_job, parse_node

NODE = """NodeName=gpu-7 Arch=x86_64 CoresPerSocket=48
   CPUAlloc=96 CPUTot=192 CPULoad=12.01
   AvailableFeatures=h100
   OS=Linux 6.1.0 #1 SMP
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=spot
   BootTime=2026-01-01T00:00:00 SlurmdStartTime=2026-01-01T00:01:00
   Reason={reason}
"""
NOW = rfc3339_seconds("2026-01-01T10:00:00Z")


@pytest.mark.parametrize(
    ("state", "reason", "kind"),
    [
        ("MIXED", "none", None),
        ("ALLOCATED", "none", None),
        ("IDLE+CLOUD", "none", None),
        ("ALLOCATED+DRAIN", "Kill task failed [root@2026-01-01T09:00:00]", NoticeKind.MAINTENANCE),
        ("MIXED+DRAIN", "k8s: cordon: pending preemption [slurm@2026-01-01T09:00:00]", NoticeKind.PREEMPT),
        ("ALLOCATED", "k8s: pod terminated: cordon: x [slurm@2026-01-01T09:00:00]", NoticeKind.PREEMPT),
        ("DOWN*", "Not responding [slurm@2026-01-01T09:00:00]", NoticeKind.MAINTENANCE),
        ("ALLOCATED*", "none", NoticeKind.HINT),
        ("MIXED+NOT_RESPONDING", "none", NoticeKind.HINT),
        ("ALLOCATED@", "none", NoticeKind.MAINTENANCE),
        ("MIXED+FAIL", "flaky [root@2026-01-01T09:00:00]", NoticeKind.MAINTENANCE),
    ],
)
@pytest.mark.parametrize("one_line", [False, True])
def test_nodes(state: str, reason: str, kind: NoticeKind | None, one_line: bool) -> None:
    text = NODE.format(state=state, reason=reason)
    if one_line:
        text = " ".join(text.split())
    found = parse_node(text).found
    assert [one.kind for one in found] == ([] if kind is None else [kind])
    if kind is not None and reason != "none":
        assert reason.partition(" [")[0] in found[0].words


@pytest.mark.parametrize("text", ["", "Node gpu-7 not found", "State=", "State=7", "<html>", "NodeName=a State=idle"])
def test_garbage_is_a_trouble(text: str) -> None:
    with pytest.raises(SourceError):
        parse_node(text)


JOB = (
    "JobId=7 JobName=gpt UserId=a(1) Priority=1 JobState={state} Reason=None Requeue=1 Restarts=0\n"
    "   SubmitTime=2026-01-01T08:00:00 StartTime=2026-01-01T08:00:00 EndTime={end} Deadline=N/A\n"
    "   PreemptEligibleTime=2026-01-01T08:00:00 PreemptTime={preempted}\n"
)


@pytest.mark.parametrize(
    ("state", "end", "preempted", "found"),
    [
        ("RUNNING", "2026-01-02T08:00:00", "None", []),
        ("RUNNING", "2026-01-01T11:01:00", "2026-01-01T11:00:00", [60.0]),
        ("PREEMPTED", "2026-01-01T10:59:00", "2026-01-01T10:58:00", [None]),
        ("PREEMPTED", "Unknown", "None", [None]),
    ],
)
def test_jobs(state: str, end: str, preempted: str, found: list[float | None]) -> None:
    reading = parse_job(JOB.format(state=state, end=end, preempted=preempted), NOW, zone_hours=1.0)
    assert [one.remaining_seconds for one in reading.found] == found


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobState=7"])
def test_job_garbage_is_a_trouble(text: str) -> None:
    with pytest.raises(SourceError):
        parse_job(text, NOW, zone_hours=0.0)


def test_an_end_that_nobody_understands_is_a_trouble() -> None:
    with pytest.raises(SourceError):
        parse_job(JOB.format(state="PREEMPTED", end="soon", preempted="None"), NOW, zone_hours=0.0)

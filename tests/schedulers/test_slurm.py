"""What Slurm's commands say; what is submitted; what the cluster's settings cost; when a job leaves and comes again."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.clock import SystemClock
from orchestrator.core.messages import Event, NoticeKind, NoticeReceived, Requested
from orchestrator.core.states import JobSpec
from orchestrator.errors import SchedulerError
from orchestrator.schedulers.slurm import allocation as allocation_module
from orchestrator.schedulers.slurm import commands as commands_module
from orchestrator.schedulers.slurm.allocation import Host, SlurmAllocation, host_of, step_environment
from orchestrator.schedulers.slurm.commands import SlurmCommands
from orchestrator.schedulers.slurm.records import (
    ClusterSettings,
    HostRecord,
    JobRecord,
    Partition,
    parse_cpus,
    parse_hosts,
    parse_job,
    parse_partition,
    parse_settings,
)
from orchestrator.schedulers.slurm.submission import (
    asked_limit_seconds,
    explain_waiting,
    inspect,
    judge_requeue,
    render,
    too_short,
)
from orchestrator.supervisor.slurm_job import in_allocation, is_over, owner_of, read_allocation, spec_in
from orchestrator.supervisor.slurm_watch import Departure, SlurmWatch, departure, host_notice

JOB = """JobId=7 JobName=gpt
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-11-30T20:55:07 EndTime=2026-11-30T22:55:07 Deadline=N/A
   PreemptEligibleTime=2026-11-30T20:55:07 PreemptTime=None
   Partition=low AllocNode:Sid=localhost:14549
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-3]
   BatchHost=n1
"""
HOSTS = """NodeName=n1 Arch=x86_64 CoresPerSocket=1
   NodeAddr=10.0.0.1 NodeHostName=gpu-1 Port=39031 Version=22.05.8
   State=MIXED+DRAIN ThreadsPerCore=1 TmpDisk=0
   Reason=a fan is broken [root@2026-11-30T20:00:00]

NodeName=n2 Arch=x86_64 CoresPerSocket=1
   NodeAddr=n2 NodeHostName=gpu-2
   State=DOWN* ThreadsPerCore=1

NodeName=n3 Arch=x86_64
   State=ALLOCATED
"""


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm writes times without a zone: this host's is meant."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_a_job(zone: None) -> None:
    record = parse_job(JOB, "7")
    assert record == JobRecord(
        job_id="7",
        state="RUNNING",
        reason="",
        hosts="n[1-3]",
        partition="low",
        restarts=2,
        may_requeue=True,
        ends_at_seconds=1796079307.0,
        preempted=False,
    )
    preempted = parse_job(JOB.replace("PreemptTime=None", "PreemptTime=2026-11-30T21:00:00"), "7")
    assert preempted is not None
    assert preempted.preempted
    unlimited = parse_job(JOB.replace("EndTime=2026-11-30T22:55:07", "EndTime=Unknown"), "7")
    assert unlimited is not None
    assert unlimited.ends_at_seconds is None


def test_one_task_of_an_array_has_the_id_of_them_all(zone: None) -> None:
    """Asked for 7, Slurm shows every task: the end of another one would be taken for this one's."""
    ended = JOB.replace("JobId=7", "JobId=8").replace("RUNNING", "COMPLETED")
    for shown in (f"{JOB}\n{ended}", f"{ended}\n{JOB}"):
        record = parse_job(shown, "7")
        assert record is not None
        assert (record.job_id, record.state) == ("7", "RUNNING")
    assert parse_job(ended, "7") is None
    task = parse_job(ended, "7_0")
    assert task is not None
    assert task.state == "COMPLETED"


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobName=x"])
def test_what_is_no_job(text: str) -> None:
    with pytest.raises(SchedulerError, match="no job"):
        parse_job(text, "7")


def test_hosts() -> None:
    found = parse_hosts(HOSTS)
    assert found["n1"] == HostRecord(
        name="n1", address="10.0.0.1", states=frozenset({"MIXED", "DRAIN"}), reason="a fan is broken"
    )
    assert found["n2"].states == {"DOWN", "NOT_RESPONDING"}
    assert found["n3"].address == "n3"
    assert [record.usable for record in found.values()] == [False, False, True]
    with pytest.raises(SchedulerError, match="no node"):
        parse_hosts("Node n9 not found")


@pytest.mark.parametrize(
    ("state", "reason", "kind"),
    [
        ("MIXED", "none", None),
        ("IDLE+CLOUD", "none", None),
        ("ALLOCATED+DRAIN", "Kill task failed [root@2026-01-01T09:00:00]", NoticeKind.MAINTENANCE),
        ("MIXED+DRAIN", "k8s: cordon: pending preemption [slurm@2026-01-01T09:00:00]", NoticeKind.PREEMPT),
        ("ALLOCATED", "k8s: pod terminated: cordon: x [slurm@2026-01-01T09:00:00]", NoticeKind.PREEMPT),
        ("DOWN*", "Not responding [slurm@2026-01-01T09:00:00]", NoticeKind.HINT),
        ("ALLOCATED*", "none", NoticeKind.HINT),
        ("MIXED+NOT_RESPONDING", "none", NoticeKind.HINT),
        ("ALLOCATED@", "none", NoticeKind.MAINTENANCE),
        ("MIXED+FAIL", "flaky [root@2026-01-01T09:00:00]", NoticeKind.MAINTENANCE),
    ],
)
def test_what_a_hosts_state_means(state: str, reason: str, kind: NoticeKind | None) -> None:
    (record,) = parse_hosts(f"NodeName=gpu-7 Arch=x86_64\n   State={state} Weight=1\n   Reason={reason}\n").values()
    assert host_notice(record) == kind
    assert "[" not in record.reason


@pytest.mark.parametrize(
    ("text", "seconds"), [("12", 12), ("00:01:30", 90), ("1-00:00:00", 86400), ("NONE", 0), ("", 0)]
)
def test_a_partition(text: str, seconds: float) -> None:
    shown = f"PartitionName=low\n   GraceTime={text} Hidden=NO\n   OverTimeLimit=NONE PreemptMode=REQUEUE\n"
    found = parse_partition(shown)
    assert found == Partition(name="low", grace_seconds=seconds, preempt_mode="REQUEUE")


def test_settings() -> None:
    text = """Configuration data as of 2026-11-30T20:55:06
AuthInfo                = socket=/run/munge,cred_expire=5
ClusterName             = test
JobRequeue              = 0
KillWait                = 8 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SlurmdTimeout           = 15 sec
SLURM_VERSION           = 22.05.8
"""
    assert parse_settings(text) == ClusterSettings(
        version="22.05.8",
        cluster="test",
        preempt_type="partition_prio",
        preempt_mode="REQUEUE",
        kill_wait_seconds=8,
        slurmd_timeout_seconds=15,
        requeues=False,
        requeue_delay_seconds=6,
    )
    assert parse_settings(text.replace("cred_expire=5", "ttl=9")).requeue_delay_seconds == 121
    with pytest.raises(SchedulerError, match="no configuration"):
        parse_settings("")


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3)", [2, 2, 2]), ("8,4(x2)", [8, 4, 4]), ("16", [16]), ("", []), ("2(x3", [])]
)
def test_processors(text: str, counts: list[int]) -> None:
    assert parse_cpus(text) == counts


# ------------------------------------------------------------------------------------------------- submitting


def test_the_batch_script() -> None:
    script = render(
        job="gpt",
        nodes_min=2,
        nodes_max=4,
        log="/home/me/slurm-%j.log",
        options=("--gres=gpu:8", "--time=24:00:00"),
        command=("/usr/bin/python3", "-m", "orchestrator", "run", "--", "python", "train.py", "--name=a b"),
    )
    assert script == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=gpt\n"
        "#SBATCH --nodes=2-4\n"
        "#SBATCH --requeue\n"
        "#SBATCH --no-kill\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --output=/home/me/slurm-%j.log\n"
        "#SBATCH --gres=gpu:8\n"
        "#SBATCH --time=24:00:00\n"
        "\n"
        "trap '' USR1 USR2  # until the supervisor listens\n"
        "exec /usr/bin/python3 -m orchestrator run -- python train.py '--name=a b'\n"
    )


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (("--time=2",), 120.0),
        (("--time 1:30",), 120.0),
        (("--time=1 --gres=gpu:8",), 60.0),
        (("--gres=gpu:8 -t 3",), 180.0),
        (("--time=0",), None),
        (("-t0",), None),
        (("--time=0:0",), None),
        (("-t 1:00:00",), 3600.0),
        (("-t2-0",), 172800.0),
        (("--time=1-02:30",), 95400.0),
        (("--time=0-00:01:40",), 120.0),
        (("--time=5", "-t", "--gres=gpu:8", "--time=7"), 420.0),
        (("--time-min=5", "--tres=x", "--gres=gpu:1"), None),
        (("--time=infinite",), None),
        ((), None),
    ],
)
def test_the_time_limit_that_is_asked_for(options: tuple[str, ...], seconds: float | None) -> None:
    assert asked_limit_seconds(options) == seconds


@pytest.mark.parametrize(("limit", "grace", "is_too_short"), [(90, 30, True), (91, 30, False), (120, 60, True)])
def test_a_time_limit_that_leaves_nothing_to_train_in(limit: float, grace: float, is_too_short: bool) -> None:
    assert (too_short(limit, grace) is not None) is is_too_short
    assert too_short(None, grace) is None


WELL = ClusterSettings(
    version="22.05.8",
    cluster="test",
    preempt_type="partition_prio",
    preempt_mode="REQUEUE",
    kill_wait_seconds=30,
    slurmd_timeout_seconds=300,
    requeues=True,
    requeue_delay_seconds=6,
)
LOW = Partition(name="low", grace_seconds=60, preempt_mode="REQUEUE")


@pytest.mark.parametrize(
    ("cluster", "partition", "save_every", "said"),
    [
        (WELL, LOW, 100, []),
        (WELL, replace(LOW, grace_seconds=0), 100, ["GraceTime=0"]),
        (WELL, replace(LOW, grace_seconds=0), 0, ["no periodic checkpoints"]),
        (WELL, replace(LOW, grace_seconds=0, preempt_mode="OFF"), 100, []),
        (WELL, replace(LOW, grace_seconds=0, preempt_mode="GANG,SUSPEND"), 100, ["stands still, and goes on"]),
        (WELL, replace(LOW, preempt_mode="CANCEL"), 100, ["PreemptMode=CANCEL"]),
        (replace(WELL, preempt_type="none"), replace(LOW, grace_seconds=0), 100, []),
        (replace(WELL, kill_wait_seconds=8), LOW, 100, ["killed 8 s later"]),
        (replace(WELL, requeue_delay_seconds=121), LOW, 100, ["121 s"]),
        (replace(WELL, kill_wait_seconds=8), replace(LOW, grace_seconds=0), 100, ["GraceTime=0", "killed 8 s later"]),
    ],
)
def test_what_the_cluster_costs(
    cluster: ClusterSettings, partition: Partition, save_every: int, said: list[str]
) -> None:
    found = inspect(cluster, partition, save_every=save_every, save_seconds=None)
    assert len(found) == len(said)
    for finding, words in zip(found, said, strict=True):
        assert words in finding.words
        assert finding.remedy


@pytest.mark.parametrize(
    ("cluster", "partition", "save_seconds", "said"),
    [
        (WELL, LOW, 29.0, []),
        (replace(WELL, kill_wait_seconds=8), LOW, 7.0, []),
        (WELL, LOW, 45.0, ["killed 30 s later (KillWait), whatever it is saving; a save of this one takes 45 s"]),
        (WELL, LOW, 75.0, ["60 s (GraceTime), and a save of this one takes 75 s, by what was measured", "KillWait"]),
        (WELL, replace(LOW, preempt_mode="OFF"), 75.0, ["KillWait"]),
        (WELL, replace(LOW, preempt_mode="GANG,SUSPEND"), 75.0, ["KillWait", "stands still"]),
    ],
)
def test_what_the_cluster_costs_by_what_was_measured(
    cluster: ClusterSettings, partition: Partition, save_seconds: float, said: list[str]
) -> None:
    found = inspect(cluster, partition, save_every=100, save_seconds=save_seconds)
    assert len(found) == len(said)
    for finding, words in zip(found, said, strict=True):
        assert words in finding.words
        assert finding.loses is ("measured" in finding.words)


RUNNING = JobRecord(
    job_id="7",
    state="RUNNING",
    reason="",
    hosts="n[1-3]",
    partition="low",
    restarts=0,
    may_requeue=True,
    ends_at_seconds=10_000.0,
    preempted=False,
)


@pytest.mark.parametrize(
    ("record", "fruitless", "wanted", "said"),
    [
        (RUNNING, 0, True, "another allocation"),
        (RUNNING, 3, True, "another allocation"),
        (RUNNING, 4, False, "4 runs in a row have committed nothing"),
        (replace(RUNNING, state="COMPLETING"), 0, False, "COMPLETING already"),  # cancelled: it would come back to life
        (replace(RUNNING, may_requeue=False), 0, False, "--no-requeue"),
        (None, 0, False, "does not know"),
    ],
)
def test_who_is_requeued(record: JobRecord | None, fruitless: int, wanted: bool, said: str) -> None:
    decided = judge_requeue(record, fruitless=fruitless, fruitless_max=3)
    assert decided.wanted is wanted
    assert said in decided.reason


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (RUNNING, None),
        (replace(RUNNING, state="PENDING", reason="Resources"), "PENDING (Resources)"),
        (
            replace(RUNNING, state="PENDING", reason="launch_failed_requeued_held"),
            "holds the job 7 (launch failed requeued held): its start has failed on a host; `scontrol release 7`",
        ),
        (replace(RUNNING, state="TIMEOUT"), "has ended: TIMEOUT"),
    ],
)
def test_why_a_job_does_not_run(record: JobRecord, said: str | None) -> None:
    explained = explain_waiting(record)
    assert (explained is None) is (said is None)
    assert said is None or said in (explained or "")


# ----------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize(
    ("record", "now", "expected"),
    [
        (RUNNING, 0.0, None),
        (RUNNING, 9_911.0, ("time limit", 89.0, True)),
        (RUNNING, 11_000.0, ("time limit", 0.0, True)),
        (replace(RUNNING, ends_at_seconds=None), 9_999.0, None),
        (replace(RUNNING, preempted=True), 9_000.0, ("preempts", 1000.0, True)),
        (replace(RUNNING, preempted=True, state="COMPLETING"), 9_000.0, ("COMPLETING", 8.0, False)),
        (replace(RUNNING, state="CANCELLED"), 0.0, ("CANCELLED", 8.0, False)),
        (replace(RUNNING, state="SUSPENDED"), 0.0, None),
        (replace(RUNNING, state="SIGNALING"), 0.0, None),
        (replace(RUNNING, state="SIGNALING", preempted=True), 9_000.0, ("preempts", 1000.0, True)),
    ],
)
def test_when_a_job_leaves(record: JobRecord, now: float, expected: tuple[str, float, bool] | None) -> None:
    found = departure(record, now_wall_seconds=now, limit_notice_seconds=90.0, kill_wait_seconds=8.0)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert expected[0] in found.reason
    assert (found.remaining_seconds, found.comes_again) == expected[1:]


def watch(events: list[Event], nodes: list[str], commands: SlurmCommands | None = None) -> SlurmWatch:
    return SlurmWatch(
        job_id="7",
        hosts="n[1-2]",
        commands=commands or SlurmCommands(),
        clock=SystemClock(),
        submit=events.append,
        nodes=lambda: nodes,
        limit_notice_seconds=90.0,
        kill_wait_seconds=8.0,
    )


PREEMPTED = Departure(reason="Slurm preempts the job", remaining_seconds=60.0, comes_again=True)
ENDED = Departure(reason="Slurm ends the job: it is COMPLETING", remaining_seconds=8.0, comes_again=False)


def test_every_node_is_told_and_the_job_drained_once() -> None:
    events: list[Event] = []
    told = watch(events, ["n1", "n2~2"])
    told.leave(PREEMPTED)
    told.leave(PREEMPTED)
    first, second, drain = events
    assert isinstance(first, NoticeReceived)
    assert isinstance(second, NoticeReceived)
    assert isinstance(drain, Requested)
    assert [(one.node, one.remaining_seconds) for one in (first, second)] == [("n1", 60.0), ("n2~2", 60.0)]
    assert drain.by == "Slurm preempts the job"


def test_one_that_is_cancelled_while_it_leaves_does_not_come_again() -> None:
    events: list[Event] = []
    told = watch(events, ["n1"])
    told.leave(PREEMPTED)
    told.leave(ENDED)
    assert told.departure == ENDED
    told.leave(PREEMPTED)
    assert told.departure == ENDED


def test_a_drained_host_and_one_that_is_well_again() -> None:
    events: list[Event] = []
    told = watch(events, ["n1", "n2~3", "n3"])
    record = HostRecord(name="n2", address="n2", states=frozenset({"MIXED", "DRAIN"}), reason="")
    told._look_at_hosts({"n2": record})
    told._look_at_hosts({"n2": replace(record, states=frozenset({"MIXED"}))})
    told._look_at_hosts({"n2": replace(record, states=frozenset({"MIXED"}))})
    notices = [event for event in events if isinstance(event, NoticeReceived)]
    assert [(one.node, one.kind) for one in notices] == [("n2~3", NoticeKind.MAINTENANCE), ("n2~3", NoticeKind.CANCEL)]
    assert notices[0].notice_id == notices[1].notice_id


async def test_a_job_leaves_though_nothing_is_heard_of_its_hosts(fake: SlurmCommands, tmp_path: Path) -> None:
    """The controller answers for the job, and not for the nodes."""
    answer(tmp_path, '[ "$2" = job ] || exit 1\necho JobId=7 JobState=RUNNING PreemptTime=2026-11-30T21:00:00\n')
    events: list[Event] = []
    told = watch(events, ["n1"], fake)
    await told._look()
    assert told.departure is not None
    assert told.departure.comes_again
    assert len(events) == 2


def test_a_host_that_does_not_respond_and_is_drained_then() -> None:
    """The hint is withdrawn once it has become more."""
    events: list[Event] = []
    told = watch(events, ["n2"])
    for states in (("MIXED", "NOT_RESPONDING"), ("MIXED", "NOT_RESPONDING", "DRAIN"), ("MIXED",)):
        told._look_at_hosts({"n2": HostRecord(name="n2", address="n2", states=frozenset(states), reason="")})
    notices = [event for event in events if isinstance(event, NoticeReceived)]
    assert [(one.kind, one.notice_id) for one in notices] == [
        (NoticeKind.HINT, "slurm-host-hint"),
        (NoticeKind.MAINTENANCE, "slurm-host-maintenance"),
        (NoticeKind.CANCEL, "slurm-host-hint"),
        (NoticeKind.CANCEL, "slurm-host-maintenance"),
    ]


# -------------------------------------------------------------------------------------------------- the steps


def test_the_command_of_a_step() -> None:
    allocation = SlurmAllocation(
        job_id="7",
        hosts=[],
        settings_of=lambda *_: "",
        commands=SlurmCommands(),
        srun_options=("--container-image=train.sqsh",),
        agent_command=("agent",),
    )
    words = allocation.step_command(Host(name="n1", address="10.0.0.1", cpus=16), "n1~2")
    assert words[0] == "srun"
    assert words[-2:] == ("--container-image=train.sqsh", "agent")
    said = {"--jobid=7", "--nodelist=n1", "--ntasks=1", "--cpus-per-task=16", "--no-kill", "--job-name=agent-n1~2"}
    assert said <= set(words)
    assert not any(word.startswith("--cpus") for word in allocation.step_command(Host(name="n1", address="n1"), "n1"))
    assert (host_of("n1~2"), host_of("gpu-3.example.org")) == ("n1", "gpu-3.example.org")


class Sleeping(SlurmAllocation):
    """Whose steps are `sleep` on this host."""

    def step_command(self, host: Host, node: str) -> tuple[str, ...]:
        return ("sleep", "0.01" if host.name == "n1" else "30")


async def test_a_host_whose_agents_never_join_is_not_tried_for_ever(
    fake: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long each of them takes to fail: a container that cannot be fetched, a module that is not found."""
    for name, seconds in (("ASK_AGAIN_SECONDS", 0.01), ("START_SECONDS_MAX", 0.05), ("KILL_SECONDS", 0.05)):
        monkeypatch.setattr(allocation_module, name, seconds)
    answer(tmp_path, "exit 1\n")
    hosts = [Host(name="n1", address="n1"), Host(name="n2", address="n2")]
    tried = Sleeping(job_id="7", hosts=hosts, settings_of=lambda *_: "", commands=fake)
    lost: list[str] = []
    short = asyncio.Event()

    def on_lost(node: str, reason: str) -> None:
        lost.append(node)
        tried.request(1)

    def on_short(reason: str) -> None:
        if "3 times in a row, soon or before they joined, on n1, n2" in reason:
            short.set()

    tried.on_short = on_short
    await tried.start("https://n1:1", "token", on_lost)
    tried.request(2)
    async with asyncio.timeout(20):
        await short.wait()
    await tried.stop()
    assert sorted(lost) == ["n1", "n1~2", "n1~3", "n2", "n2~2", "n2~3"]


async def test_a_host_whose_agents_were_steady_is_used_again(
    fake: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("ASK_AGAIN_SECONDS", 0.01), ("STEADY_SECONDS", 0.0)):
        monkeypatch.setattr(allocation_module, name, seconds)
    answer(tmp_path, "exit 1\n")
    tried = Sleeping(job_id="7", hosts=[Host(name="n1", address="")], settings_of=lambda *_: "", commands=fake)
    lost: list[str] = []

    def on_lost(node: str, reason: str) -> None:
        lost.append(node)
        tried.request(1)

    await tried.start("https://n1:1", "token", on_lost)
    tried.request(1)
    async with asyncio.timeout(20):
        while len(lost) < 5:
            for one in tried.nodes():
                tried.joined(one.node)
            await asyncio.sleep(0)
    await tried.stop()
    assert lost[:5] == ["n1", "n1~2", "n1~3", "n1~4", "n1~5"]


def test_what_the_submission_said_of_tasks_is_not_handed_on() -> None:
    given = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7", "HOME": "/root"}
    assert step_environment(given) == {"SLURM_JOB_ID": "7", "HOME": "/root"}


@pytest.mark.parametrize(("hosts", "nodes_max"), [(2, 2), (3, 3), (4, 4), (9, 4), (1, 2)])
def test_nobody_waits_for_more_nodes_than_there_are_hosts(hosts: int, nodes_max: int) -> None:
    spec = JobSpec(name="gpt", nodes_min=2, nodes_max=4, workers_per_node=8, save_every_steps=100)
    assert spec_in(spec, hosts, 40.0) == replace(spec, nodes_max=nodes_max)
    assert spec_in(spec, hosts, 8.0).grace_seconds == 8.0


def test_what_slurm_is_to_call_a_task_of_an_array(
    fake: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(tmp_path, 'case "$2" in hostnames) echo n1;; node) echo "NodeName=n1 State=MIXED";; config) cat <<E\n')
    with (tmp_path / "answer").open("a") as file:
        file.write("SLURM_VERSION = 22.05.8\nClusterName = test\nE\n;; esac\n")
    alone = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    assert read_allocation(fake, alone).reference == "7"
    place = read_allocation(fake, {**alone, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    assert (place.reference, place.owner) == ("7_3", "slurm-test-7")


def test_where_we_are() -> None:
    assert in_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"})
    assert not in_allocation({"SLURM_CONF": "/etc/slurm.conf"})


# ------------------------------------------------------------------------------------------- Slurm's commands


@pytest.fixture
def fake(tmp_path: Path) -> SlurmCommands:
    """A scontrol that does what the test writes into `answer`."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n. {tmp_path}/answer\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return SlurmCommands({"PATH": f"{tmp_path}:{os.environ['PATH']}"})


def answer(tmp_path: Path, script: str) -> None:
    (tmp_path / "answer").write_text(script)


def test_a_controller_that_is_away_is_waited_for_in_vain_but_not_for_ever(
    fake: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_module, "ANSWER_SECONDS_MAX", 0.2)
    answer(tmp_path, "exec sleep 30\n")
    with pytest.raises(SchedulerError, match=r"scontrol show job 7: no answer within 0\.2 s"):
        fake.job("7")


def test_errors_name_the_command(fake: SlurmCommands, tmp_path: Path) -> None:
    answer(tmp_path, "echo 'slurm_load_jobs error: Unable to contact\n slurm controller' >&2; exit 1\n")
    with pytest.raises(SchedulerError, match="scontrol show job 7: slurm_load_jobs error: Unable to contact slurm"):
        fake.job("7")
    with pytest.raises(SchedulerError, match="there is no scontrol here"):
        SlurmCommands({"PATH": str(tmp_path / "nowhere")}).job("7")


@pytest.mark.parametrize(
    ("script", "over"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
        ("echo 'JobId=6 JobState=TIMEOUT'", True),
        ("echo 'JobId=6 JobState=RUNNING'", False),
        ("echo 'JobId=6 JobState=PENDING'", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", False),
    ],
)
def test_whether_an_earlier_run_has_ended(fake: SlurmCommands, tmp_path: Path, script: str, over: bool) -> None:
    answer(tmp_path, script + "\n")
    assert is_over(fake, owner_of("test", "6"), "test") is over
    assert not is_over(fake, owner_of("another", "6"), "test")  # whose controller is not ours
    assert not is_over(fake, "local-0123456789abcdef", "test")

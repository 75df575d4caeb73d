"""`run --scheduler slurm` where it submits, and `status` of what Slurm has not started; Slurm is a script here."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.cli import slurm as slurm_verb
from orchestrator.cli.run import Talk
from orchestrator.cli.slurm import _check_limit, _of_array, _requeue, took_over_before
from orchestrator.config import JobConfig
from orchestrator.errors import ConfigError
from orchestrator.schedulers.slurm.commands import SlurmCommands
from orchestrator.schedulers.slurm.records import parse_settings
from orchestrator.storage.opening import job_url
from orchestrator.supervisor import slurm_job
from orchestrator.supervisor.slurm_job import Allocation, SlurmJob
from orchestrator.supervisor.state_folder import StateFolder, known_jobs
from orchestrator.telemetry import EventRecord
from tests.cli.conftest import Command

CONFIG = """AuthInfo                = (null)
ClusterName             = test
KillWait                = 30 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 22.05.8
"""


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that answer with files of their names, and write down what they were given."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("scontrol", "sbatch", "sinfo"):
        program = folder / name
        notes = f'echo "$@" >> {folder}/{name}.asked\ncat > {folder}/{name}.input\n'
        program.write_text(f"#!/bin/sh\n{notes}. {folder}/{name}.answer\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "config").write_text(CONFIG)
    (folder / "partition").write_text("PartitionName=low\n   GraceTime=0 PreemptMode=REQUEUE\n")
    (folder / "scontrol.answer").write_text(f"cat {folder}/$2\n")
    (folder / "sbatch.answer").write_text("echo '17;test'\n")
    (folder / "sinfo.answer").write_text("echo 'low* high'\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    return folder


WORDS = ("run", "--scheduler", "slurm", "--job", "gpt", "--nodes", "2:4")


def test_a_submission(command: Command, slurm: Path, tmp_path: Path) -> None:
    result = command(
        *(*WORDS, "--store", "jobs", "--workers-per-node", "8", "--sbatch=--gres=gpu:8", "--sbatch", "--time=1:00:00"),
        *("--srun=--container-image=a b", "--", "python", "train.py", "--name=a b"),
    )
    assert result.exit_code == 0, result.stderr
    assert "warning: a job in the partition low that is preempted is ended at once (GraceTime=0)" in result.stderr
    assert "a requeued job is not started again for 121 s" in result.stderr
    assert "submitted as Slurm's job 17: its output goes to " in result.stderr
    script = (slurm / "sbatch.input").read_text()
    lines = script.splitlines()
    assert lines[:7] == [
        "#!/bin/bash",
        "#SBATCH --job-name=gpt",
        "#SBATCH --nodes=2-4",
        "#SBATCH --requeue",
        "#SBATCH --no-kill",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={StateFolder('gpt', str(tmp_path / 'here' / 'jobs' / 'gpt')).path}/slurm-%j.log",
    ]
    assert lines[7:9] == ["#SBATCH --gres=gpu:8", "#SBATCH --time=1:00:00"]
    words = shlex.split(lines[-1])
    assert words[0] == "exec"
    assert f"--store={tmp_path}/here/jobs" in words  # wherever the batch script runs
    assert "--srun=--container-image=a b" in words
    assert "--workers-per-node=8" in words
    assert not any(word.startswith("--sbatch") for word in words)
    assert words[-4:] == ["--", "python", "train.py", "--name=a b"]


def test_a_dry_run_prints_the_script_and_submits_nothing(command: Command, slurm: Path) -> None:
    (slurm.parent / "here" / "orchestrator.toml").write_text(
        'job = "gpt"\nstore = "jobs"\nscheduler = "slurm"\nnodes = "2"\nsbatch = ["--gres=gpu:8"]\ncommand = ["true"]\n'
    )
    result = command("run", "--dry-run", "--take-over")
    assert result.exit_code == 0, result.stderr
    assert "#SBATCH --nodes=2\n" in result.stdout
    assert f"--config={slurm.parent}/here/orchestrator.toml" in result.stdout
    assert "--take-over -- true" in result.stdout
    assert result.stderr.endswith("nothing was submitted\n")
    assert not (slurm / "sbatch.asked").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sbatch=--nodes=9",), "sbatch: --nodes cannot be given: the job's own settings say so"),
        (("--sbatch=--gpus=16",), "sbatch: --gpus cannot be given: agents are started host by host; say --gres=gpu:N"),
        (("--sbatch=-G 16",), "-G cannot be given"),
        (("--sbatch=--gpus-per-task=1",), "--gpus-per-task cannot be given"),
        (("--sbatch=gpu",), "'gpu' is no option; write it with its value, as --partition=gpu"),
        (
            ("--sbatch=--time=1",),
            "60 s until the time limit leave no time to train: the job saves and leaves 90 s before it",
        ),
        (("--sbatch=-t 2", "--grace-seconds=60"), "120 s until the time limit leave no time"),
        (("--srun=",), "is no option"),
        (("--sbatch=--a\n#SBATCH --b",), "is no option"),
    ],
)
def test_options_that_cannot_be(command: Command, slurm: Path, flags: tuple[str, ...], said: str) -> None:
    result = command(*WORDS, "--store", "jobs", *flags, "--", "true")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (slurm / "sbatch.asked").exists()


def test_a_submission_of_which_nothing_came(command: Command, slurm: Path) -> None:
    (slurm / "sbatch.answer").write_text("echo 'sbatch: Job 18 to start at …' >&2\n")
    result = command(*WORDS, "--store", "jobs", "--sbatch=--test-only", "--", "true")
    assert result.exit_code == 1
    assert "sbatch has submitted nothing" in result.stderr


def test_an_output_of_ones_own(command: Command) -> None:
    result = command(*WORDS, "--store", "jobs", "--sbatch=--output=/scratch/%j.log", "--", "true")
    assert "its output goes where --output says" in result.stderr


def test_a_submission_that_slurm_refuses(command: Command, slurm: Path) -> None:
    (slurm / "sbatch.answer").write_text("echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n")
    result = command(*WORDS, "--store", "jobs", "--", "true")
    assert result.exit_code == 1
    assert "sbatch --parsable: sbatch: error: invalid partition specified: gpu" in result.stderr
    assert not known_jobs()


def test_a_cluster_that_cannot_be_asked_is_no_reason_not_to_submit(command: Command, slurm: Path) -> None:
    (slurm / "scontrol.answer").write_text("exit 1\n")
    assert command(*WORDS, "--store", "jobs", "--", "true").exit_code == 0
    assert (slurm / "sbatch.asked").exists()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            "JobId=17 JobState=PENDING Reason=Resources",
            "job 17 is PENDING (Resources); `scancel 17` takes it away",
        ),
        ("JobId=17 JobState=PENDING Reason=JobHeldUser", "somebody holds Slurm's job 17 (JobHeldUser)"),
        ("JobId=17 JobState=FAILED Reason=JobLaunchFailure", "could not start it, or not write its output"),
        ("JobId=17 JobState=PENDING Reason=launch_failed_requeued_held", "`scontrol release 17` lets it try again"),
        ("JobId=17 JobState=CANCELLED Reason=None", "Slurm's job 17 has ended: CANCELLED"),
        ("", "no supervisor of a job 'gpt' runs on this machine"),
    ],
)
def test_the_status_of_what_slurm_has_not_started(command: Command, slurm: Path, record: str, said: str) -> None:
    command(*WORDS, "--store", "jobs", "--", "true")
    (slurm / "job").write_text(record + "\n")
    for verb in ("status", "drain", "cancel"):
        result = command(verb, "gpt")
        assert result.exit_code == 1
        assert said in result.stderr


def test_runs_that_leave_no_trace_on_the_store_are_counted(tmp_path: Path) -> None:
    """Agents that start nowhere claim no generation: the job would be requeued for ever."""
    state = StateFolder("gpt", str(tmp_path / "jobs" / "gpt"))
    state.make()
    assert [state.count_fruitless("slurm-test-7", None) for _ in range(3)] == [1, 2, 3]
    assert state.count_fruitless("slurm-test-7", "g00000001-s0000000010") == 0
    assert state.count_fruitless("slurm-test-7", "g00000001-s0000000010") == 1
    assert state.count_fruitless("slurm-test-8", None) == 1  # submitted again, when it was mended


@pytest.mark.parametrize(
    ("owners", "environment", "used"),
    [
        ({"slurm-test-7"}, {"SLURM_RESTART_COUNT": "1"}, True),
        ({"slurm-test-7", "slurm-test-8"}, {"SLURM_RESTART_COUNT": "2"}, True),
        ({"slurm-test-6"}, {"SLURM_RESTART_COUNT": "1"}, False),  # it was requeued before it had claimed anything
        ({"slurm-test-7"}, {}, False),  # given once more, in an interactive allocation
    ],
)
def test_a_take_over_counts_once(owners: set[str], environment: dict[str, str], used: bool) -> None:
    """It stands in the batch script, and every requeue says it again."""
    assert took_over_before(owners, "slurm-test-7", environment) is used


PLACE = Allocation(
    job_id="7",
    cluster="test",
    hosts=(),
    host_list="n1",
    address="n1",
    settings=parse_settings(CONFIG),
    array_task="7_1",
)


def test_a_full_home_does_not_end_the_job_with_its_first_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = JobConfig(job="gpt", store=str(tmp_path), command=("true",), scheduler="slurm")
    job = SlurmJob(settings, PLACE, job_url=str(tmp_path / "gpt"), commands=SlurmCommands(), take_over=False)
    job.supervisor = SimpleNamespace(job=None)  # type: ignore[assignment]
    monkeypatch.setattr(slurm_job, "save_on_notice_seconds", lambda _: 12.5)
    committed = EventRecord(wall_seconds=0.0, monotonic_seconds=0.0, job="gpt", kind="committed", reason="")
    job.state.make()
    job._on_event(committed)
    assert job.state.save_seconds() == 12.5

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    job._on_event(committed)


def requeue(fruitless: int = 0) -> None:
    """As after a save."""
    _requeue(PLACE, SlurmCommands(), Talk(as_json=False), fruitless=fruitless, fruitless_max=3)


def test_a_controller_that_is_away_when_the_job_is_to_be_requeued_is_waited_for(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ending now would be its end for good: Slurm requeues nothing that ends by itself."""
    monkeypatch.setattr(slurm_verb, "REQUEUE_AGAIN_SECONDS", 0.01)
    (slurm / "job").write_text("JobId=7 JobState=RUNNING Requeue=1\n")
    (slurm / "scontrol.answer").write_text(
        f"[ $(wc -l < {slurm}/scontrol.asked) -gt 3 ] || exit 1\n[ $2 != job ] || cat {slurm}/job\n"
    )
    requeue()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("not requeued yet, trying on: scontrol show job 7_1")
    assert said[1:] == ["requeued: it goes on in another allocation"]
    assert (slurm / "scontrol.asked").read_text().splitlines()[-1] == "requeue 7_1"


def test_a_state_that_passes_is_waited_for(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a signal is on its way the controller says SIGNALING of a job that runs."""
    (slurm / "scontrol.answer").write_text(
        f"[ $2 != job ] || if [ $(wc -l < {slurm}/scontrol.asked) -gt 1 ]; "
        "then echo JobId=7 JobState=RUNNING Requeue=1; "
        "else echo JobId=7 JobState=SIGNALING Requeue=1; fi\n"
    )
    requeue()
    assert capsys.readouterr().err == "requeued: it goes on in another allocation\n"


@pytest.mark.parametrize(
    ("state", "fruitless", "said"),
    [
        ("CANCELLED", 0, "not requeued: the job is CANCELLED already"),
        ("RUNNING", 4, "not requeued: 4 runs in a row have committed nothing"),
    ],
)
def test_what_is_not_requeued(
    slurm: Path, capsys: pytest.CaptureFixture[str], state: str, fruitless: int, said: str
) -> None:
    (slurm / "job").write_text(f"JobId=7 JobState={state} Requeue=1\n")
    (slurm / "scontrol.answer").write_text(f"cat {slurm}/job\n")
    requeue(fruitless)
    assert capsys.readouterr().err == said + "\n"
    assert "requeue" not in (slurm / "scontrol.asked").read_text()


@pytest.mark.parametrize(
    ("record", "refused"),
    [
        ("JobId=7 JobState=RUNNING EndTime={soon}", True),
        ("JobId=7 JobState=RUNNING EndTime={late}", False),
        ("JobId=7 JobState=RUNNING EndTime=Unknown", False),
        ("JobId=7 JobState=RUNNING EndTime={soon} PreemptTime={soon}", False),
        ("", False),
    ],
)
def test_an_allocation_that_is_too_short_is_not_begun(slurm: Path, record: str, refused: bool) -> None:
    """It would be left at once, and requeued, again and again. One that is preempted already has its own end."""
    now = datetime.now().replace(microsecond=0)
    soon, late = (now + timedelta(seconds=seconds) for seconds in (80, 3600))
    (slurm / "job").write_text(record.format(soon=soon.isoformat(), late=late.isoformat()) + "\n")
    (slurm / "scontrol.answer").write_text(f"cat {slurm}/job\n")
    settings = JobConfig(job="gpt", store="/jobs", command=("true",), scheduler="slurm")
    try:
        _check_limit(settings, PLACE, SlurmCommands())
        was_refused = False
    except ConfigError as error:
        was_refused = "leave no time to train: the job saves and leaves 90 s before" in str(error)
    assert was_refused is refused


def test_the_tasks_of_an_array_are_jobs_of_their_own() -> None:
    settings = JobConfig(job="gpt", store="/jobs", command=("true",), scheduler="slurm")
    assert _of_array(settings, {}).job == "gpt"
    assert _of_array(settings, {"SLURM_ARRAY_TASK_ID": "3"}).job == "gpt-3"
    assert job_url("/jobs", "gpt-3") == "/jobs/gpt-3"

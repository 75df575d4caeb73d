"""Jobs on a real Slurm: submitted, preempted, requeued, shrunk in place, cancelled; the end is the same to the bit.

Several nodes on this host (`tests.slurm_cluster`), a partition that is preempted with a grace, and one that preempts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.schedulers.slurm.commands import SlurmCommands
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from tests.processes.harness import TRAINING, check_store, final_digests
from tests.slurm_cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 90.0
JOB = "small"


class Submitted:
    """A job that was submitted with `orchestrator run --scheduler slurm`, as its user sees it."""

    def __init__(self, cluster: SlurmCluster, folder: Path, staging: str, **variables: object) -> None:
        self.cluster = cluster
        self.folder = folder
        self.staging = staging
        self.home = folder / "home"
        self.environment = {
            **os.environ,
            **cluster.variables,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "XDG_STATE_HOME": str(self.home),
            "PYTHONWARNINGS": "ignore",
            "STEP_SECONDS": "0.05",
            **{name: str(value) for name, value in variables.items()},
        }
        self.job_id = ""

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A verb on the host where the job was submitted."""
        command = (sys.executable, "-m", "orchestrator", *words)
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )

    def submit(self, *flags: str, nodes: str = "2", save_every: int = 10, partition: str = "low") -> None:
        """Submit it; from then on it has a job id."""
        done = self.verb(
            *("run", "--scheduler=slurm", f"--job={JOB}", f"--store={self.folder / 'store'}", f"--nodes={nodes}"),
            *(f"--save-every={save_every}", "--notices=none", f"--staging={self.staging}"),
            *(f"--sbatch=--partition={partition}", "--sbatch=--mincpus=2", *flags),
            *("--", sys.executable, str(TRAINING)),
        )
        assert done.returncode == 0, done.stderr
        self.job_id = done.stderr.partition("Slurm's job ")[2].partition(":")[0]

    @property
    def store(self) -> ObjectStore:
        """The job's folder."""
        return open_store(str(self.folder / "store" / JOB))

    def output(self) -> str:
        """Everything that its batch steps have printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.home.rglob("slurm-*.log")))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind, of all its runs."""
        lines = (line for path in self.home.rglob("events.jsonl") for line in path.read_text().splitlines())
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def state(self) -> str:
        """What Slurm says."""
        record = SlurmCommands(self.environment).job(self.job_id)
        return "gone" if record is None else record.state

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"not within {WAIT_SECONDS:.0f} s: {what}\n{self.output()}"
            time.sleep(0.1)

    def until_running(self, runs: int = 1) -> None:
        """Wait until its workers train, the given number of times."""
        self.until(lambda: len(self.events("running")) >= runs, f"running {runs} times")

    def until_committed(self, count: int = 1) -> None:
        """Wait for checkpoints."""
        self.until(lambda: len(self.events("committed")) >= count, f"{count} commits")

    def await_end(self) -> str:
        """Wait until Slurm has ended it for good; the state."""
        self.until(lambda: self.state() not in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING"), "the end")
        self.until(lambda: not self.processes(), "no process is left")
        return self.state()

    def processes(self) -> list[int]:
        """Workers that still run."""
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if self._is_worker(path)]

    def _is_worker(self, path: Path) -> bool:
        try:
            return f"ORCHESTRATOR_LAUNCH={self.staging}".encode() in path.read_bytes()
        except OSError:
            return False


@pytest.fixture
def submitted(slurm: SlurmCluster, tmp_path: Path, staging: str) -> Iterator[Submitted]:
    """A job that is to be submitted; cancelled in the end."""
    job = Submitted(slurm, tmp_path, staging)
    yield job
    if job.job_id:
        slurm.run("scancel", job.job_id, check=False)
        job.until(lambda: job.state() not in ("RUNNING", "PENDING", "COMPLETING"), "cancelled")
    slurm.run("scancel", "--user=root", check=False)


@pytest.mark.parametrize("flags", [(), ("--sbatch=--signal=B:USR1@20",)], ids=["steps-signalled", "batch-signalled"])
def test_a_preempted_job_is_saved_requeued_and_goes_on_to_the_bit(
    submitted: Submitted, reference: dict[str, str], flags: tuple[str, ...]
) -> None:
    """F77, F79, F82: nothing is saved in a signal's handler, and nothing is requeued before the commit."""
    submitted.submit(*flags, save_every=1000)
    submitted.until_running()
    began = time.time()
    submitted.cluster.run(
        "sbatch", "--partition=high", "--nodes=3", "--mincpus=2", "--output=/dev/null", "--wrap=sleep 2"
    )
    submitted.until_committed()
    saved = time.time()
    submitted.until_running(2)
    print(f"from preemption to the commit {saved - began:.1f} s, to the next gang {time.time() - began:.1f} s")
    assert submitted.await_end() == "COMPLETED"
    assert final_digests(submitted.store) == reference
    check_store(submitted.store)
    assert "requeued: it goes on in another allocation" in submitted.output()
    left = submitted.events("committed")[0]
    assert left["facts"]["mode"] == "leave"
    assert [event["step"] for event in submitted.events("generation opened")] == [0, left["step"]]
    assert not submitted.events("failure judged")


@pytest.mark.extended
def test_a_requeued_job_starts_on_fewer_hosts(submitted: Submitted) -> None:
    """Two of the three hosts stay taken: it goes on with one."""
    submitted.environment["STEPS"] = "400"
    submitted.submit(nodes="1:2")
    submitted.until_running()
    urgent = ("--partition=high", "--mincpus=2", "--output=/dev/null", "--parsable")
    first = submitted.cluster.run("sbatch", *urgent, "--nodes=3", "--wrap=sleep 1").strip()
    submitted.cluster.run("sbatch", *urgent, "--nodes=2", f"--dependency=afterany:{first}", "--wrap=sleep 60")
    submitted.until_running(2)
    assert [event["facts"]["world_size"] for event in submitted.events("generation opened")] == [2, 1]
    assert submitted.verb("drain", JOB, "--wait").returncode == 0
    check_store(submitted.store)


def test_a_script_of_ones_own(submitted: Submitted, reference: dict[str, str]) -> None:
    """The one in deploy/, fitted to this cluster."""
    text = (ROOT / "deploy" / "slurm" / "train.sbatch").read_text()
    for old, new in (
        ("--partition=gpu", "--partition=low"),
        ("--nodes=2-4", "--nodes=2"),
        ("--gres=gpu:8", "--mincpus=2"),
        ("--output=%x-%j.log", f"--output={submitted.home}/slurm-%j.log"),
        ("source .venv/bin/activate", f"cd {submitted.folder}"),
        ("exec orchestrator", f"exec {sys.executable} -m orchestrator"),
        ("--job gpt", f"--job {JOB} --notices none --staging {submitted.staging}"),
        ("s3://bucket/jobs", str(submitted.folder / "store")),
        ("--nodes 2:4 --workers-per-node 8 --save-every 500", "--nodes 2 --save-every 10"),
        ("python train.py", f"{sys.executable} {TRAINING}"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    submitted.home.mkdir()
    submitted.job_id = SlurmCommands(submitted.environment).submit(text)
    assert submitted.await_end() == "COMPLETED"
    assert final_digests(submitted.store) == reference


@pytest.mark.extended
def test_a_host_that_is_drained_is_left_and_the_job_goes_on_in_place(submitted: Submitted) -> None:
    """`drain` sends the job nothing: who does not ask learns of it at the end."""
    submitted.environment["STEPS"] = "2000"
    submitted.submit(nodes="1:2")
    submitted.until_running()
    hosts = [record["node"] for record in submitted.events("node joined")]
    victim = next(host for host in hosts if host != batch_host(submitted))
    began = time.time()
    submitted.cluster.run("scontrol", "update", f"nodename={victim}", "state=drain", "reason=a fan is broken")
    try:
        submitted.until_running(2)
        print(f"from the drain to the next gang {time.time() - began:.1f} s")
        assert submitted.verb("drain", JOB, "--wait").returncode == 0
    finally:
        submitted.cluster.run("scontrol", "update", f"nodename={victim}", "state=resume")
    (notice, *_) = submitted.events("notice received")
    assert notice["node"] == victim
    assert [event["facts"]["world_size"] for event in submitted.events("generation opened")] == [2, 1]
    assert "requeued" not in submitted.output()
    check_store(submitted.store)


@pytest.mark.extended
def test_the_end_of_an_arrays_task_leaves_the_other_one_alone(submitted: Submitted) -> None:
    """One of them has the array's own id, by which Slurm's commands mean them all."""
    submitted.environment["STEPS"] = "5000"
    submitted.submit("--sbatch=--array=0-1", nodes="1")
    submitted.until_running(2)
    assert submitted.verb("drain", f"{JOB}-0", "--wait").returncode == 0
    shown = ("squeue", "--noheader", "--array", "--format=%K %T")
    submitted.until(lambda: submitted.cluster.run(*shown).split() == ["1", "RUNNING"], "one task is left")
    assert submitted.verb("drain", f"{JOB}-1", "--wait").returncode == 0
    ends = [event["reason"] for event in submitted.events("ended")]
    assert ends == ["drained by root", "drained by root"]


def batch_host(submitted: Submitted) -> str:
    """Where its supervisor runs."""
    shown = submitted.cluster.run("scontrol", "show", "job", submitted.job_id)
    return shown.partition("BatchHost=")[2].split()[0]


@pytest.mark.extended
def test_a_step_that_is_killed_is_started_again_on_its_host(submitted: Submitted, reference: dict[str, str]) -> None:
    """An agent that dies takes its node along; the host is well, and gets another one."""
    submitted.submit()
    submitted.until_committed()
    commands = SlurmCommands(submitted.environment)
    victim = next(record["node"] for record in submitted.events("node joined"))
    commands.end_step(submitted.job_id, f"agent-{victim}")
    assert submitted.await_end() == "COMPLETED"
    assert [event["node"] for event in submitted.events("node joined")][2:] == [f"{victim}~2"]
    assert len(submitted.events("node lost")) == 1
    assert final_digests(submitted.store) == reference


@pytest.mark.extended
def test_a_host_whose_daemon_dies_is_done_without_and_its_twins_end(submitted: Submitted) -> None:
    """F83, F85: the node is DOWN after a while, what ran there runs on, and srun ends with 0."""
    submitted.environment["STEPS"] = "2000"
    submitted.submit(nodes="1:2")
    submitted.until_committed()
    hosts = [record["node"] for record in submitted.events("node joined")]
    victim = next(host for host in hosts if host != batch_host(submitted))
    before = submitted.processes()
    submitted.cluster.kill(f"slurmd-{victim}")
    try:
        submitted.until_running(2)
        assert [event["facts"]["world_size"] for event in submitted.events("generation opened")] == [2, 1]
        submitted.until(lambda: len(set(before) & set(submitted.processes())) == 0, "the old ranks are gone")
        assert submitted.verb("drain", JOB, "--wait").returncode == 0
    finally:
        submitted.cluster.start_node(victim)
    submitted.await_end()
    check_store(submitted.store)


@pytest.mark.extended
def test_a_controller_that_is_away_disturbs_nobody(submitted: Submitted, reference: dict[str, str]) -> None:
    """Every command of Slurm's has a limit; none of them is waited for by training."""
    submitted.submit()
    submitted.until_running()
    submitted.cluster.kill("slurmctld")
    try:
        submitted.until(lambda: bool(submitted.events("ended")), "the end")
    finally:
        submitted.cluster.start_controller()
    assert submitted.await_end() == "COMPLETED"
    assert final_digests(submitted.store) == reference
    assert not submitted.events("node lost")
    assert not submitted.events("notice received")


def test_scancel_cancels(submitted: Submitted) -> None:
    """What can be saved within KillWait is saved; nothing comes back to life."""
    submitted.environment["STEPS"] = "5000"
    submitted.submit(save_every=1000)
    submitted.until_running()
    submitted.cluster.run("scancel", submitted.job_id)
    assert submitted.await_end() == "CANCELLED"
    assert "requeued: it goes on" not in submitted.output()
    assert not [entry for entry in survey(submitted.store).entries if entry.standing is Standing.DAMAGED]
    check_store(submitted.store)


def test_verbs_reach_it_from_the_host_where_it_was_submitted(submitted: Submitted) -> None:
    """Over TLS, with what stands in the shared state folder."""
    submitted.environment["STEPS"] = "5000"
    submitted.submit()
    submitted.until_committed()
    status = submitted.verb("status", JOB, "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["phase"] == "running"
    drained = submitted.verb("drain", JOB, "--wait")
    assert drained.returncode == 0, drained.stderr
    assert submitted.await_end() == "FAILED"  # status 75: a person's own script can tell it from the end
    assert "requeued" not in submitted.output()
    check_store(submitted.store)


@pytest.mark.extended
def test_another_submission_goes_on_with_one_that_slurm_has_ended(submitted: Submitted) -> None:
    """F80: chains of jobs; the one before was killed without a word, and Slurm knows that it has ended."""
    submitted.environment["STEPS"] = "5000"
    submitted.submit()
    submitted.until_committed()
    (address,) = submitted.home.rglob("supervisor.json")
    os.kill(json.loads(address.read_text())["pid"], signal.SIGKILL)
    assert submitted.await_end() == "FAILED"
    submitted.environment["STEPS"] = "60"
    submitted.submit()
    assert submitted.await_end() == "COMPLETED"
    assert "has ended without a word" in submitted.output()
    assert submitted.events("generation opened")[-1]["step"] > 0
    check_store(submitted.store)


@pytest.mark.extended
def test_a_copy_of_a_job_that_runs_is_fenced(submitted: Submitted) -> None:
    """F93: the second submission ends with 3 and leaves the first one alone."""
    submitted.environment["STEPS"] = "5000"
    submitted.submit(nodes="1")
    submitted.until_running()
    first = submitted.job_id
    submitted.submit(nodes="1")
    submitted.until(lambda: submitted.state() == "FAILED", "the copy's end")
    assert "belongs to owner slurm-test-" in submitted.output()
    submitted.job_id = first
    assert submitted.state() == "RUNNING"
    assert submitted.verb("drain", JOB, "--wait").returncode == 0
    check_store(submitted.store)

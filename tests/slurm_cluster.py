"""A real Slurm of several nodes on this host: munged, slurmctld and one slurmd for each node, on free ports.

For tests only. Needs root and Debian's `slurm-wlm` and `munge`; where they are missing the tests are skipped, with the
reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
READY_SECONDS = 30.0
COMMAND_SECONDS = 20.0


def why_not() -> str | None:
    """What is missing here for a Slurm; None: nothing."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} here (apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "Slurm's daemons need root here"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@dataclass(kw_only=True)
class SlurmCluster:
    """A running cluster; its commands work with `variables` in the environment."""

    folder: Path
    nodes: tuple[str, ...]
    grace_seconds: int = 12
    kill_wait_seconds: int = 8
    controller_parameters: str = "preempt_send_user_signal"
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str, check: bool = True) -> str:
        """One of Slurm's commands; its output."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(words)}: {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    # -- starting and stopping ---------------------------------------------------------------------------

    def start(self) -> None:
        """Write the configuration, start the daemons, wait until all nodes are idle."""
        for name in ("state", "spool", "logs", "munge"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(self._configuration(free_ports(1 + len(self.nodes))))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munge = self.folder / "munge"
        self._spawn(
            "munged",
            *("munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={key}"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        until = time.monotonic() + READY_SECONDS
        while not (munge / "socket").exists():
            self._wait_a_moment(until, "munged opened no socket")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        idle = ["idle", str(len(self.nodes))]
        while self.run("sinfo", "-h", "-o", "%t %D", "-p", "low", check=False).split() != idle:
            self._wait_a_moment(until, "the nodes did not become idle")

    def _wait_a_moment(self, until: float, problem: str) -> None:
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self.log(name)}"
        assert time.monotonic() < until, f"{problem}: {self.log('slurmctld')}"
        time.sleep(0.05)

    def start_controller(self) -> None:
        """Start the controller; it goes on from what it has written down."""
        self._spawn("slurmctld", "slurmctld", "-D", "-f", self.variables["SLURM_CONF"])

    def all_well(self) -> bool:
        """Whether every daemon still runs."""
        return all(process.poll() is None for process in self.processes.values())

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._spawn(f"slurmd-{node}", "slurmd", "-D", "-N", node, "-f", self.variables["SLURM_CONF"])

    def _spawn(self, name: str, *words: str) -> None:
        with (self.folder / "logs" / f"{name}.out").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words, env={**os.environ, **self.variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """End a daemon at once: `slurmctld`, or `slurmd-NODE`. What runs on the node goes on running."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Cancel all jobs, then end every daemon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run("scancel", "--user=root", "--signal=KILL", check=False)
            self.run("scancel", "--user=root", check=False)
            until = time.monotonic() + self.kill_wait_seconds + 5
            while self.run("squeue", "-h", check=False).strip() and time.monotonic() < until:
                time.sleep(0.1)
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log(self, name: str) -> str:
        """The last words of a daemon."""
        return (self.folder / "logs" / f"{name}.out").read_text(errors="replace")[-2000:]

    # -- the configuration -------------------------------------------------------------------------------

    def _configuration(self, ports: list[int]) -> str:
        host, folder = socket.gethostname(), self.folder
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/socket,cred_expire=5",
            "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "JobCompType=jobcomp/filetxt",
            f"JobCompLoc={folder}/completed",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            f"SlurmctldParameters={self.controller_parameters}",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2",
            f"KillWait={self.kill_wait_seconds}",
            "SlurmdTimeout=15",
            "SlurmctldTimeout=30",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",
            "MailProg=/bin/true",
            "SlurmctldDebug=info",
            "SlurmdDebug=info",
        ]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        names = ",".join(self.nodes)
        lines += [
            f"PartitionName=low Nodes={names} Default=YES PriorityTier=1 PreemptMode=REQUEUE "
            f"GraceTime={self.grace_seconds} MaxTime=INFINITE State=UP",
            f"PartitionName=high Nodes={names} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP",
        ]
        return "\n".join(lines) + "\n"


class CannotStartError(Exception):
    """Slurm is installed, and its daemons do not come up on this machine: why."""


@contextmanager
def running_cluster(folder: Path, nodes: int, **settings: object) -> Iterator[SlurmCluster]:
    """A cluster for as long as the block lasts. Raises CannotStartError."""
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    cluster = SlurmCluster(folder=folder, nodes=names, **settings)  # type: ignore[arg-type]
    try:
        try:
            cluster.start()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            raise CannotStartError(str(error)) from error
        yield cluster
    finally:
        cluster.stop()


def environment(cluster: SlurmCluster) -> Mapping[str, str]:
    """This process's, with the cluster's."""
    return {**os.environ, **cluster.variables}

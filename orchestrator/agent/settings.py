"""What a node's agent is told when it starts: JSON on standard input or in a private file, since it holds the token."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from orchestrator.certificates import Identity


class AgentSettings(BaseModel):
    """One node's part of a job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    node: str
    workers: int
    command: tuple[str, ...]
    store: str
    """URL of the job's folder."""
    owner: str
    claimant: str
    take_over: bool = False
    supervisor_url: str
    token: str
    supervisor_file: Path | None = None
    """Where the supervisor that runs writes its address, token and pid (JSON); it takes the place of the URL above."""
    identity: Identity | None = None
    """Certificate and key of this run, where its ports are on more hosts than this one; None: all is on loopback."""
    supervisor_certificate: str | None = None
    """What the supervisor's port is known by (PEM), where that is not the run's own certificate."""
    address: str = "127.0.0.1"
    """Where other nodes reach this one; workers rendezvous there."""
    staging: Path
    """Folder in memory for this node's control blocks and slots; made with mode 0700, removed at the end."""
    sweep_staging: str | None = None
    """Names (as of a shell) of this job's folders beside this run's one: what dead agents left there is removed."""
    logs: Path
    """Folder for the workers' output."""
    echo_output: bool = True
    """Copy the workers' output to the agent's standard output, with the rank in front."""
    grace_seconds: float | None = 30.0
    """Time that a signal, or a notice without a time, leaves; None: somebody else says so (Slurm's controller)."""
    notices: str = "none"
    """What is watched beside signals, as in the job's configuration."""
    notice_look_seconds: float | None = None
    """Between two looks at a source; None: what is right for each."""
    acknowledge_notices: bool = False
    """Once the supervisor lets this node go, its cloud may take the machine: nothing else of the job runs on it."""
    device_check_seconds: float = 60.0
    """How long each NVIDIA device may take for the test before the first worker; 0: none is tested."""
    attach_folder: Path | None = None
    """Attached mode: where workers that somebody else started announce themselves."""
    lost_after_seconds: float = 600.0
    """Without supervisor and without a worker that trains for that long, the agent ends."""

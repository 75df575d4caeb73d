"""What an agent tells a worker at its start: one small JSON file (0600), named by ORCHESTRATOR_LAUNCH.

Written by `agent.gang`, read by `training.session`. No torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from orchestrator.core.messages import CheckpointId

LAUNCH_VARIABLE = "ORCHESTRATOR_LAUNCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One rank's shard of a checkpoint of an older generation, in a slot file of this node."""

    checkpoint: CheckpointId
    rank: int
    path: Path
    size_bytes: int


class Launch(BaseModel):
    """One worker's place in the generation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    generation: int
    rank: int
    world_size: int
    local_world_size: int
    base: CheckpointId | None
    control_path: Path
    slot_paths: tuple[Path, Path]
    objects_url: str
    token: str
    certificate: str | None = None
    """Of the agent's port (PEM), where that is not on loopback."""
    store_folder: Path | None = None
    """Where the job's objects are, if it is a folder: the worker reads it itself."""
    held: tuple[HeldShard, ...] = ()
    """Shards of the base in this node's memory, until the first save of this generation is proposed."""
    held_elsewhere: bool = False
    """Whether other nodes may have some, too."""
    attached: bool
    agent_pid: int
    decision_wait_seconds: float = 10.0
    """How long a worker waits at a proposed step for the decision before it goes on without staging."""
    slot_wait_seconds: float = 60.0
    """How long a worker waits at a decided step for a free slot."""

    def write(self, path: Path) -> None:
        """Write the file in one go: temporary name, then rename."""
        draft = path.with_suffix(".draft")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(self.model_dump_json())
        draft.rename(path)

    @classmethod
    def read(cls, path: Path) -> Launch:
        """Read the file."""
        return cls.model_validate_json(path.read_text())

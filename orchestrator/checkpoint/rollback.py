"""Which checkpoint a rollback goes back to. Pure; the record that makes it so is `generations`' affair."""

from __future__ import annotations

from orchestrator.checkpoint.catalog import Catalog, Standing
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import RollbackError

STEPS_TOLD_MAX = 12
"""Steps that are named to a person who has named another one."""


def rollback_target(catalog: Catalog, step: int) -> CheckpointId:
    """The checkpoint that is the newest once no generation counts beyond `step`. Raises RollbackError.

    It must be one of that very step: after a restart from an older checkpoint, a step of the course that was left is
    not the newest even then.
    """
    usable = [entry.id for entry in catalog.entries if entry.standing is Standing.COMMITTED]
    if not usable:
        raise RollbackError("there is no committed checkpoint to go back to")
    target = next((one for one in usable if one.step <= step), None)
    if target is not None and target.step == step:
        return target
    raise RollbackError(f"step {step} cannot be gone back to; {_instead(usable)}")


def left_behind(catalog: Catalog, step: int) -> tuple[CheckpointId, ...]:
    """Committed checkpoints, newest first, that do not count any more after a rollback to `step`."""
    return tuple(entry.id for entry in catalog.entries if entry.standing is Standing.COMMITTED and entry.id.step > step)


def _instead(usable: list[CheckpointId]) -> str:
    """Steps that would do: going through the checkpoints from the newest, each that is lower than all before it."""
    steps: list[int] = []
    for one in usable:
        if not steps or one.step < steps[-1]:
            steps.append(one.step)
    more = f" and {len(steps) - STEPS_TOLD_MAX} older ones" if len(steps) > STEPS_TOLD_MAX else ""
    return f"these steps can: {', '.join(map(str, steps[:STEPS_TOLD_MAX]))}{more}"

"""Keeps a training job going on machines that may be taken away at any time.

    run = orchestrator.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)
    for step in run.steps(until=100_000):
        train_one(step)

Importing this package loads no torch; the names below load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchestratorError, Preempted

if TYPE_CHECKING:
    from orchestrator.checkpoint.opened import OpenedCheckpoint, open_checkpoint
    from orchestrator.training.sampler import ResumableSampler
    from orchestrator.training.session import Run, attach

__version__ = "0.1.0"
__all__ = [
    "OpenedCheckpoint",
    "OrchestratorError",
    "Preempted",
    "ResumableSampler",
    "Run",
    "attach",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "ResumableSampler":
        from orchestrator.training.sampler import ResumableSampler

        return ResumableSampler
    if name in ("Run", "attach"):
        from orchestrator.training import session

        return getattr(session, name)
    if name in ("OpenedCheckpoint", "open_checkpoint"):
        from orchestrator.checkpoint import opened

        return getattr(opened, name)
    raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")

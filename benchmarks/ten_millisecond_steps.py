"""A worker for `boundary.py`: `python -m benchmarks.ten_millisecond_steps FOLDER STEP_SECONDS`, until it is ended.

It names its process in FOLDER/worker when it has trained a little.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import orchestrator

STEPS_MAX = 1 << 40
READY_STEPS = 100


def main() -> None:
    """Steps that wait, so that nothing of this process disturbs the measurement."""
    folder, step_seconds = Path(sys.argv[1]), float(sys.argv[2])
    run = orchestrator.attach(model=torch.nn.Linear(8, 8))
    for step in run.steps(until=STEPS_MAX):
        time.sleep(step_seconds)
        if step == READY_STEPS:
            (folder / "draft").write_text(str(os.getpid()))
            (folder / "draft").rename(folder / "worker")


if __name__ == "__main__":
    main()

"""The examples do what they say, started as a person starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import orchestrator
from orchestrator.checkpoint.opened import OpenedCheckpoint
from orchestrator.checkpoint.reader import read_committed
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.opening import open_store
from tests.commands import RUN

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_GPT = ("--layers", "1", "--width", "32", "--text-mebibytes", "0.1")
LIMIT_SECONDS = 120


def train(folder: Path, staging: str, example: str, *options: str) -> OpenedCheckpoint:
    """Two workers to the end; the last checkpoint."""
    script = EXAMPLES / example / "train.py"
    done = subprocess.run(
        [
            *RUN,
            *("--job", "example", "--store", str(folder / "store")),
            *("--workers-per-node", "2", "--save-every", "20", "--staging", staging),
            *("--", sys.executable, str(script), *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
        timeout=LIMIT_SECONDS,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return orchestrator.open_checkpoint(str(folder / "store" / "example"))


def test_gpt(tmp_path: Path, staging: str) -> None:
    found = train(tmp_path, staging, "gpt", "--steps", "5", *SMALL_GPT)
    assert (found.step, found.world_size) == (5, 2)
    assert torch.isfinite(found.tensor("model.bytes.weight")).all()


def test_fully_shard(tmp_path: Path, staging: str) -> None:
    """Both ranks hold a part of the model and of the optimizer, and each has saved its own."""
    found = train(tmp_path, staging, "fully_shard", "--steps", "40")
    assert (found.step, found.world_size) == (40, 2)
    assert found.tensor("optimizer.state.2.weight.step") == 40
    index = read_committed(open_store(str(tmp_path / "store" / "example")), CheckpointId(generation=1, step=40))
    for name in ("model.2.weight", "optimizer.state.2.weight.exp_avg"):
        assert found.shapes[name] == (64, 64)
        assert found.tensor(name).count_nonzero() > 0
        assert [(one.rank, one.start, one.stop) for one in index.chunks(name)] == [(0, 0, 2048), (1, 2048, 4096)]

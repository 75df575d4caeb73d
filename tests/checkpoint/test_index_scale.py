"""The benchmark of the index measures what it says: its receipts make a checkpoint, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.index_scale import CHECKPOINT, LAYOUTS, STEPS, Scene, measure, measure_upload
from orchestrator.checkpoint.reader import read_committed
from orchestrator.storage.filesystem import FolderStore


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_measured(tmp_path: Path, layout: str) -> None:
    scene = Scene(ranks=8, tensors=5, layout=layout)
    scene.write(tmp_path)
    rows = [measure(scene, step, str(tmp_path)) for step in STEPS]
    assert [row.objects_read for row in rows] == [8, 1, 2, 1, 1]
    index = read_committed(FolderStore(tmp_path), CHECKPOINT)
    chunks = [len(index.chunks(name)) for name in index.tensors if name.startswith("model.")]
    series = [len(index.tensors[name].series.split()) for name in index.tensors if name.startswith("model.")]
    assert chunks == ([8] * 5 if layout != "replicated" else chunks)
    assert series == {"even": [1] * 5, "uneven": [8] * 5}.get(layout, series)


def test_an_upload_is_measured() -> None:
    row = measure_upload(20, 1)
    assert 0 < row.receipt_cpu_seconds <= row.upload_cpu_seconds

"""Which process groups are used at a restore, and what is done without one. Real ones: `processes/test_sharing`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.training.sharing import Gang, together
from tests.checkpoint.sharded import process_group
from tests.training.states import launch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def pretend(monkeypatch: pytest.MonkeyPatch, backends: str, *, world_size: int = 2, cuda: bool = True) -> None:
    """A process group over these backends, and CUDA devices of which the script has chosen number 3."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


@pytest.mark.parametrize(
    ("backends", "model", "words", "buckets"),
    [
        ("cpu:gloo,cuda:gloo", CPU, "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", CUDA, "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", CUDA, "cpu", "cuda:1"),
        ("cpu:gloo,cuda:nccl", CPU, "cpu", "cpu"),
        ("cpu:gloo", CPU, "cpu", "cpu"),
        ("cuda:nccl", CUDA, "cuda:1", "cuda:1"),
        ("cuda:nccl", CPU, "cuda:3", "cuda:3"),
    ],
)
def test_buckets_lie_where_the_group_moves_them_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, backends: str, model: torch.device, words: str, buckets: str
) -> None:
    """And what ranks say to each other where all of them have it, whatever their model is."""
    pretend(monkeypatch, backends)
    gang = Gang.of(launch(tmp_path, world_size=2), model)
    assert gang is not None
    assert (str(gang.words_device), str(gang.bucket_device)) == (words, buckets)


@pytest.mark.parametrize("backends", ["cpu:mpi,cuda:mpi", "cpu:fake,cuda:fake,hpu:fake", "xpu:xccl"])
def test_other_backends_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backends: str) -> None:
    pretend(monkeypatch, backends)
    assert Gang.of(launch(tmp_path, world_size=2), CPU) is None


def test_a_group_of_other_ranks_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cpu:gloo", world_size=4)
    assert Gang.of(launch(tmp_path, world_size=2), CPU) is None


def test_on_one_node_with_a_folder_each_rank_reads_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is quicker than a message; not so from another store, or between nodes."""
    pretend(monkeypatch, "cpu:gloo")
    assert Gang.of(launch(tmp_path, world_size=2, local_world_size=2, store_folder=tmp_path), CPU) is None
    assert Gang.of(launch(tmp_path, world_size=2, local_world_size=2), CPU) is not None
    assert Gang.of(launch(tmp_path, world_size=2, local_world_size=1, store_folder=tmp_path), CPU) is not None


def test_without_a_group_each_rank_is_on_its_own(tmp_path: Path) -> None:
    """Also in a group that never communicates, and alone in a job."""
    assert Gang.of(launch(tmp_path, world_size=2), CPU) is None
    with process_group(0, 2):
        assert Gang.of(launch(tmp_path, world_size=2), CPU) is None
        assert Gang.of(launch(tmp_path, world_size=1), CPU) is None
    assert together(None, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        together(None, lambda: 1 // 0)

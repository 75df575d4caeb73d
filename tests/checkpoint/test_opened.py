"""A checkpoint opened without a job: any tensor, any rows of it, only the blocks that they need, or a clear error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import orchestrator
from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.opened import OpenedCheckpoint, open_in
from orchestrator.checkpoint.save import abandon
from orchestrator.errors import ConfigError, DigestError, NotFoundError
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import bits, checkpoint_id, random_tensors, save, upload_all
from tests.checkpoint.stores import CountingStore, change_byte


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def saved(store: MemoryStore, folder: Path) -> tuple[OpenedCheckpoint, torch.Tensor]:
    matrix = torch.arange(70.0).reshape(10, 7)
    save(store, folder, {"w": matrix, "model.bias": torch.ones(3, dtype=torch.bfloat16)}, world_size=3)
    return open_in(store), matrix


def test_says_what_is_there(store: MemoryStore, tmp_path: Path) -> None:
    opened, _ = saved(store, tmp_path)
    assert opened.names == ("model.bias", "w")
    assert opened.shapes == {"model.bias": (3,), "w": (10, 7)}
    assert opened.dtypes == {"model.bias": torch.bfloat16, "w": torch.float32}
    assert (opened.step, opened.generation, opened.world_size) == (2, 1, 3)
    assert opened.name == "g00000001-s0000000002"
    assert repr(opened) == "<checkpoint g00000001-s0000000002 of job: 2 tensors>"


def test_every_tensor_comes_back_to_the_bit(store: MemoryStore, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tensors = random_tensors(draw, 25)
    save(store, tmp_path, tensors, world_size=4)
    opened = open_in(store)
    for name, tensor in tensors.items():
        found = opened.tensor(name)
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor)), name
        if tensor.dim() == 0:
            continue
        for _ in range(4):
            start = draw.randrange(len(tensor) + 1)
            stop = draw.randrange(start, len(tensor) + 1)
            found, part = opened.tensor(name, slice(start, stop)), tensor[start:stop]
            assert (found.dtype, found.shape, bits(found)) == (part.dtype, part.shape, bits(part)), (name, start, stop)


@pytest.mark.parametrize("rows", [slice(None), slice(3), slice(2, None), slice(-4, -1), slice(10, 10), slice(0, 10, 1)])
def test_rows_are_a_slice(store: MemoryStore, tmp_path: Path, rows: slice) -> None:
    opened, matrix = saved(store, tmp_path)
    found = opened.tensor("w", rows)
    assert torch.equal(found, matrix[rows])
    found += 1  # memory of its own


def test_only_the_blocks_that_are_needed_are_read(store: MemoryStore, tmp_path: Path) -> None:
    table = torch.arange(6 << 18, dtype=torch.int32).reshape(-1, 256)  # 6 MiB, rows of 1 KiB
    index = save(store, tmp_path, {"table": table, "other": torch.zeros(1 << 20)}, world_size=2)
    counting = CountingStore(store)
    opened = open_in(counting)
    counting.reads.clear()
    assert torch.equal(opened.tensor("table", slice(5000, 5003)), table[5000:5003])
    (chunk,) = [one for one in index.chunks("table") if one.start <= 5000 * 256 < one.stop]
    first = (chunk.first_byte + (5000 * 256 - chunk.start) * 4) >> 20
    assert [key for key, _, _ in counting.reads] == [
        fmt.receipt_key(index.id, chunk.rank, 2),
        fmt.shard_key(index.id, chunk.rank, 2),
    ]
    assert counting.reads[1][1:] == (first << 20, (first + 1) << 20)


def test_what_is_read_is_verified(store: MemoryStore, tmp_path: Path) -> None:
    index = save(store, tmp_path, {"x": torch.arange(100.0)}, world_size=2)
    change_byte(store, fmt.shard_key(index.id, 1, 2), 0)
    opened = open_in(store)
    for rows in (None, slice(90, 91)):
        with pytest.raises(DigestError, match=r"shard-00001-of-00002\.safetensors: block 0"):
            opened.tensor("x", rows)
    assert torch.equal(opened.tensor("x", slice(5)), torch.arange(5.0))  # of the good shard alone


def test_a_tensor_that_is_not_there(store: MemoryStore, tmp_path: Path) -> None:
    opened, _ = saved(store, tmp_path)
    with pytest.raises(NotFoundError, match=r"^model\.bais: the checkpoint g.* no tensor of this name; .*model\.bias$"):
        opened.tensor("model.bais")
    with pytest.raises(NotFoundError, match=r"no tensor of this name$"):
        opened.tensor("")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (slice(0, 11), "w: rows 0:11 are asked for, it has 10"),
        (slice(-11, None), "w: rows -11: are asked for, it has 10"),
        (slice(5, 4), "w: rows 5:4 are asked for, it has 10"),
        (slice(0, 4, 2), "w: rows 0:4:2 are asked for; only those that follow each other are read"),
    ],
)
def test_rows_that_are_not_there(store: MemoryStore, tmp_path: Path, rows: slice, message: str) -> None:
    opened, _ = saved(store, tmp_path)
    with pytest.raises(ConfigError) as caught:
        opened.tensor("w", rows)
    assert str(caught.value) == message


def test_rows_that_are_no_slice_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    opened, _ = saved(store, tmp_path)
    with pytest.raises(ConfigError, match="w: rows=3 are asked for; they are a slice"):
        opened.tensor("w", 3)  # type: ignore[arg-type]


def test_a_store_with_jobs_in_it_is_no_job(store: MemoryStore) -> None:
    """What is there is named: the folder above a job's is easily given."""
    for job in ("a", "b"):
        store.create(f"{job}/generations/00000001.json", [b"{}"])
    with pytest.raises(NotFoundError, match=rf"it holds folders of jobs: open {store.url}/a, {store.url}/b$"):
        open_in(store)


def test_one_number_has_no_rows(store: MemoryStore, tmp_path: Path) -> None:
    save(store, tmp_path, {"count": torch.tensor(7)})
    opened = open_in(store)
    assert opened.tensor("count") == 7
    with pytest.raises(ConfigError, match="count: is one number"):
        opened.tensor("count", slice(1))


def test_the_newest_committed_one_or_one_by_name(store: MemoryStore, tmp_path: Path) -> None:
    for step in (10, 20):
        save(store, tmp_path, {"x": torch.tensor(step)}, checkpoint=checkpoint_id(1, step))
    abandon(store, checkpoint_id(1, 30), "a rank went on")
    upload_all(store, tmp_path, {"x": torch.tensor(40)}, checkpoint=checkpoint_id(1, 40))
    assert open_in(store).step == 20
    assert open_in(store, "g00000001-s0000000010").tensor("x") == 10
    with pytest.raises(NotFoundError, match="s0000000030: is no committed checkpoint, it is abandoned: a rank went on"):
        open_in(store, "g00000001-s0000000030")
    with pytest.raises(NotFoundError, match="s0000000040: is no committed checkpoint, it is undecided"):
        open_in(store, "g00000001-s0000000040")
    for wrong in ("newest", "g00000001-s0000000099", ""):
        with pytest.raises(NotFoundError, match="no such checkpoint; the newest are: g00000001-s0000000040, g"):
            open_in(store, wrong)


def test_no_committed_checkpoint(store: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"there is no committed checkpoint$"):
        open_in(store)
    upload_all(store, tmp_path, {"x": torch.tensor(1)})
    with pytest.raises(NotFoundError, match=r"only g00000001-s0000000002 \(undecided\)"):
        open_in(store)


def test_by_url(tmp_path: Path) -> None:
    """The public name, which loads torch only when it is used."""
    save(FolderStore(tmp_path / "job"), tmp_path, {"x": torch.arange(5)}, world_size=2)
    for url in (str(tmp_path / "job"), f"file://{tmp_path}/job"):
        assert torch.equal(orchestrator.open_checkpoint(url).tensor("x", slice(1, 3)), torch.tensor([1, 2]))
    with pytest.raises(NotFoundError, match="no committed checkpoint"):
        orchestrator.open_checkpoint(str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="not supported"):
        orchestrator.open_checkpoint("ftp://host/job")

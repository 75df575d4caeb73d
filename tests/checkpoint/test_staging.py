"""A staged slot is the safetensors file it will become: bit-equal for any reader, in space reserved beforehand."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from orchestrator.checkpoint import copying, staging
from orchestrator.checkpoint.layout import HEADER_SLACK_BYTES, Scope
from orchestrator.checkpoint.save import METADATA_KEY, shard_metadata
from orchestrator.checkpoint.staging import Fixed, Metadata, SlotFile
from orchestrator.errors import ProtocolError, RefusedError
from tests.checkpoint.shards import (
    ALL_DTYPES,
    bits,
    metadata,
    place,
    plan_of,
    random_tensor,
    random_tensors,
    stage,
)


def read_by_others(folder: Path, data: bytes) -> dict[str, torch.Tensor]:
    """What the safetensors library makes of a shard."""
    path = folder / "shard.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5,), (3, 4)], ids=str)
def test_safetensors_reads_every_dtype_and_shape_bit_equal(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, seed: int
) -> None:
    tensor = random_tensor(random.Random(seed), dtype, shape)
    read = read_by_others(tmp_path, stage(tmp_path, {"x": tensor}))["x"]
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    assert bits(read) == bits(tensor)


def test_safetensors_reads_mixed_files_bit_equal(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for count in (0, 1, 5, 40):
        tensors = random_tensors(draw, count)
        read = read_by_others(tmp_path, stage(tmp_path, tensors))
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            assert read[name].shape == tensor.shape
            assert bits(read[name]) == bits(tensor), name


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[::2, 1::3],
        lambda base: base[1:, :].transpose(0, 1),
        lambda base: base[0].expand(4, -1),
        lambda base: base.flip(1),
        lambda base: torch.complex(base, base + 1).conj(),
        lambda base: torch.complex(base, base + 1).conj().imag,  # its negation is not carried out yet
        lambda base: base.reshape(2, 3, 4, 1).to(memory_format=torch.channels_last),
        torch.nn.Parameter,
    ],
)
def test_views_of_all_kinds_are_stored_as_what_they_show(
    make: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    tensor = make(torch.arange(24, dtype=torch.float32).reshape(4, 6))
    read = read_by_others(tmp_path, stage(tmp_path, {"x": tensor}))["x"]
    assert torch.equal(read, tensor.detach().resolve_conj().resolve_neg())


def test_parts_of_all_ranks_put_together_are_the_tensor(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tensors = random_tensors(draw, 20)
    for world_size, absent in ((2, ()), (3, (0,)), (5, (1, 4))):
        found: dict[str, list[tuple[int, bytes]]] = {}
        for rank in range(world_size):
            where = place(rank, world_size, absent)
            data = stage(tmp_path, tensors, where)
            for chunk in plan_of(tensors, where).chunks:
                read = read_by_others(tmp_path, data)[chunk.spec.name]
                found.setdefault(chunk.spec.name, []).append((chunk.start, bits(read)))
        for name, tensor in tensors.items():
            assert b"".join(part for _, part in sorted(found[name])) == bits(tensor), name


def test_the_values_travel_in_the_header(tmp_path: Path) -> None:
    meta = metadata({"scheduler": {"lr": 0.1, "text": 'é\n"😀'}}, {"rng": {"python": "[]"}})
    data = stage(tmp_path, {"x": torch.ones(3)}, meta=meta)
    found, header_bytes, header = shard_metadata("shard", memoryview(data))
    assert found["values"] == {"objects": {"scheduler": {"lr": 0.1, "text": 'é\n"😀'}}}
    assert found["rank_values"] == {"rng": {"python": "[]"}}
    assert found["gate"] == meta.gate
    assert found["parts"] == {}
    assert set(header) == {"__metadata__", "x"}
    assert set(header["__metadata__"]) == {METADATA_KEY}
    assert header_bytes % 4096 == 0
    assert data[8:header_bytes].rstrip(b" ").endswith(b"}")


def test_a_header_that_outgrows_its_room_has_to_be_planned_anew(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(5)}
    small, large = metadata({"a": ""}), metadata({"a": '"' * (HEADER_SLACK_BYTES + 8192)})
    plan = plan_of(tensors, place(), meta=small)
    slot = SlotFile(tmp_path / "slot")
    slot.stage(plan, tensors, small)
    before = slot.path.read_bytes()
    with pytest.raises(ProtocolError, match="are reserved"):
        slot.stage(plan, tensors, large)
    assert slot.path.read_bytes() == before  # nothing was written over what is there
    again = plan_of(tensors, place(), meta=large)
    slot.stage(again, tensors, large)
    found, _, _ = shard_metadata("slot", memoryview(slot.path.read_bytes()))
    assert found["values"]["objects"]["a"] == large.values["objects"]["a"]


def test_numbers_may_grow_within_the_slack(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(5)}
    plan = plan_of(tensors, place(), meta=metadata({"losses": []}))
    SlotFile(tmp_path / "slot").stage(plan, tensors, metadata({"losses": [0.1234567890123456] * 300}))


def test_room_for_the_header_is_always_enough(tmp_path: Path, seed: int) -> None:
    """Names and values full of characters that JSON escapes, twice over for the values."""
    draw = random.Random(seed)
    for _ in range(20):
        names = ["".join(draw.choice('"\\é😀/\n') for _ in range(draw.randrange(1, 300))) for _ in range(40)]
        tensors = {f"{number}{name}": torch.ones(2) for number, name in enumerate(names)}
        meta = metadata({"text": "".join(names)}, {"text": names})
        data = stage(tmp_path, tensors, meta=meta)
        assert set(read_by_others(tmp_path, data)) == set(tensors)


def test_a_slot_grows_when_it_must_and_stays_when_it_can(tmp_path: Path) -> None:
    slot = SlotFile(tmp_path / "slot")
    assert slot.capacity_bytes == 0
    slot.reserve(10_000)
    slot.reserve(5000)
    assert slot.capacity_bytes == 10_000
    tensors = {"x": torch.arange(100_000)}
    plan = plan_of(tensors, place())
    slot.stage(plan, tensors, metadata())
    assert slot.capacity_bytes == plan.size_bytes
    assert torch.equal(read_by_others(tmp_path, slot.path.read_bytes())["x"], tensors["x"])


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_said_to_be_there_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """From the beginning on, and for good: whoever follows the staging reads what will be the shard."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)
    tensors = {"x": torch.arange(30_000), "y": torch.rand(200, 3).t(), "z": torch.zeros(0), "w": torch.ones(1)}
    slot, plan = SlotFile(tmp_path / "slot", threads), plan_of(tensors, place())
    slot.reserve(plan.size_bytes)
    said: list[int] = []
    seen: list[bytes] = []

    def there(size_bytes: int) -> None:
        said.append(size_bytes)
        seen.append(slot.path.read_bytes()[:size_bytes])

    slot.stage(plan, tensors, metadata(), there)
    whole = slot.path.read_bytes()[: plan.size_bytes]
    assert said == sorted(said)
    assert (said[0], said[-1]) == (plan.header_bytes, plan.size_bytes)
    assert len(said) > 20
    assert all(whole.startswith(part) for part in seen)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_that_fails_in_any_thread_is_raised(tmp_path: Path, threads: int) -> None:
    class Broken:
        def move(self, piece: copying.Piece) -> None:
            if "b" in piece.names:
                raise RuntimeError("the device is gone")

    pieces = [copying.Piece(names=[name], targets=[], sources=[]) for name in "abcd"]
    counts: list[int] = []
    with pytest.raises(RuntimeError, match="device is gone"):
        copying.copy_now(Broken(), pieces, threads, counts.append)
    assert max(counts) == 1, "what follows a hole is not there"

    def nobody_listens(count: int) -> None:
        raise RuntimeError("the block is closed")

    with pytest.raises(RuntimeError, match="block is closed"):
        copying.copy_now(copying.HostMover(), pieces, threads, nobody_listens)


def test_a_smaller_shard_in_a_large_slot_is_whole_by_its_own_size(tmp_path: Path) -> None:
    slot = SlotFile(tmp_path / "slot")
    large, small = {"x": torch.arange(5000)}, {"y": torch.arange(3)}
    slot.stage(plan_of(large, place()), large, metadata())
    plan = plan_of(small, place())
    slot.stage(plan, small, metadata())
    read = read_by_others(tmp_path, slot.path.read_bytes()[: plan.size_bytes])
    assert torch.equal(read["y"], small["y"])


def test_the_slot_survives_its_mapping_and_is_the_owners_alone(tmp_path: Path) -> None:
    """The file belongs to the agent: a worker that starts again, or another process, finds what was staged."""
    tensors = {"x": torch.arange(7)}
    data = stage(tmp_path, tensors)
    (path,) = tmp_path.glob("slot-*")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_too_little_memory_is_said_with_numbers(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before training starts, not at the first save: how much is missing, where, and what to do about it."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RefusedError) as caught:
        SlotFile(tmp_path / "slot").reserve(3 << 30)
    message = str(caught.value)
    assert re.search(r"has \d+ MiB left, a staging slot needs 3072 MiB", message)
    assert str(tmp_path) in message
    assert "--staging" in message


def test_other_errors_of_the_file_system_are_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output"):
        SlotFile(tmp_path / "slot").reserve(4096)


def test_a_slot_that_could_not_grow_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = SlotFile(tmp_path / "slot")
    slot.reserve(4096)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(RefusedError):
            slot.reserve(1 << 20)
    slot.reserve(1 << 20)
    assert slot.capacity_bytes == 1 << 20


def test_values_that_are_not_json_never_reach_a_header(tmp_path: Path) -> None:
    meta = Metadata(values={"objects": {"x": float("nan")}}, rank_values={}, gate={})
    with pytest.raises(ValueError, match="JSON"):
        stage(tmp_path, {"x": torch.ones(1)}, meta=meta)


def test_staging_takes_no_part_in_autograd(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    version = parameter._version
    stage(tmp_path, {"x": parameter, "y": (parameter * 2)}, scopes={"y": Scope.RANK})
    assert parameter._version == version
    assert parameter.grad is None


def test_the_metadata_size_is_an_upper_bound(seed: int) -> None:
    """`size_bytes` reserves room before the text is written; tests of random values must never need more."""
    draw = random.Random(seed)
    for _ in range(50):
        text = "".join(draw.choice('"\\é😀a') for _ in range(draw.randrange(2000)))
        meta = metadata({"text": [text, {"k": text}]}, {"text": text})
        plan = plan_of({}, place(), meta=meta)
        assert sum(map(len, meta.inside(Fixed(plan.parts())))) <= meta.size_bytes() + HEADER_SLACK_BYTES

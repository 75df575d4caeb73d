"""A job's folder made by hand, without torch: claims, shards, receipts and indexes by the package's own functions."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.save import METADATA_KEY, ShardPlace, commit, upload_shard
from orchestrator.checkpoint.slots import build_header, header_size
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.base import ObjectStore

TENSOR = "model.weight"
JOB = "small"


def claim(store: ObjectStore, generation: int) -> None:
    """A generation of the job."""
    record = fmt.GenerationRecord(
        version=fmt.FORMAT_VERSION,
        job=JOB,
        generation=generation,
        owner="a test",
        claimant="a test",
        wall_seconds=1.0,
    )
    store.create(fmt.generation_key(generation), [fmt.dump(record)])


OTHER_NAME = "model.tied"
"""The same tensor's second name."""


def shard(rank: int, world_size: int, elements: int, step: int) -> bytes:
    """One rank's even part of a vector of 32-bit floats, as a shard file."""
    start, stop = rank * elements // world_size, (rank + 1) * elements // world_size
    stored = {"$": "tensor", "name": TENSOR}
    text = json.dumps(
        {
            "parts": {TENSOR: {"shape": [elements], "start": start}},
            "values": {"step": step, "objects": {"model": {name: stored for name in ("tied", "weight")}}},
            "rank_values": {},
            "gate": {"step": step, "lr": "0.1", "data": None, "rng": f"of rank {rank}"},
        }
    )
    size_bytes = 4 * (stop - start)
    entries = {TENSOR: {"dtype": "F32", "shape": [stop - start], "data_offsets": [0, size_bytes]}}
    header = build_header(entries, {METADATA_KEY: text}, header_size(2 * len(text) + 512))
    return header + struct.pack("<f", step + rank) * (stop - start)


def upload(store: ObjectStore, generation: int, step: int, *, world_size: int = 2, elements: int = 100) -> CheckpointId:
    """All shards and receipts of a checkpoint, which stays undecided."""
    checkpoint = CheckpointId(generation=generation, step=step)
    for rank in range(world_size):
        place = ShardPlace(job=JOB, checkpoint=checkpoint, rank=rank, world_size=world_size, absent=())
        upload_shard(store, place, memoryview(shard(rank, world_size, elements, step)))
    return checkpoint


def save(store: ObjectStore, generation: int, step: int, *, world_size: int = 2, elements: int = 100) -> CheckpointId:
    """A committed checkpoint."""
    checkpoint = upload(store, generation, step, world_size=world_size, elements=elements)
    assert commit(store, checkpoint)
    return checkpoint


def path_of(store: ObjectStore, key: str) -> Path:
    """The file of an object in a folder store, to damage it."""
    return Path(store.url) / key

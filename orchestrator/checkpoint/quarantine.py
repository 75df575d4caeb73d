"""A checkpoint that one node could not read is read by another one; if that finds it bad as well, it is set aside.

One node's bad memory, cable or disk cache condemns nothing: only what a second node reads differently from what was
committed, too. Only sizes and digests count: what a user changed, or what is of a newer format, is no damage. No torch.

Used by `agent.actions`, on a node other than the first one.
"""

from __future__ import annotations

import contextlib

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.reader import read_committed, shard_mismatch
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import AlreadyExistsError
from orchestrator.storage.base import ObjectStore


def second_reading(store: ObjectStore, checkpoint: CheckpointId, first: str) -> str | None:
    """What differs from what was committed as read here, None if nothing does.

    `first` is what the other node said. Only the shards that it names are read; all, if it names none. Raises
    NotFoundError, FormatError, StoreError if that cannot be found out.
    """
    index = read_committed(store, checkpoint)
    keys = {shard.rank: fmt.shard_key(index.id, shard.rank, index.world_size) for shard in index.shards}
    named = [shard for shard in index.shards if keys[shard.rank].removesuffix(".safetensors") in first]
    findings = (shard_mismatch(store, index, shard) for shard in named or index.shards)
    return next((finding for finding in findings if finding is not None), None)


def set_aside(store: ObjectStore, checkpoint: CheckpointId, by_generation: int, reason: str) -> None:
    """From now on nobody chooses it; its bytes stay. Raises StoreError."""
    marker = fmt.Marker.on(checkpoint, by_generation, reason)
    with contextlib.suppress(AlreadyExistsError):
        store.create(fmt.quarantine_key(checkpoint), [fmt.dump(marker)])

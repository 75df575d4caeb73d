"""What all ranks do together at a restore: state that every rank needs is read once for all of them, and broadcast.

Only where the script has made a process group of all ranks before `attach`; otherwise each rank reads everything that
it needs. So it does, too, where all ranks are on one node and the store is a folder: then everything is in files that
the kernel brings into memory once for all of them, and a copy is quicker than a message. Between nodes it is always
shared, also what lies in their memories: at the world size that saved it, each rank's portion is what it staged itself
(`training.portions`).
Sharded tensors are not shared: each rank reads its own part.

No rank may go another way than the others, or they wait for each other. So whatever is done by each rank alone is
followed by all telling each other how it went; where one failed, all fail: that one with its own error, the others with
PeerError. Called by `training.saved_state`. No generator is touched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.restore import Part, copy_alike, read_parts
from orchestrator.errors import BrokenOffError, PeerError, PeerLostError
from orchestrator.storage.base import ObjectStore
from orchestrator.training.portions import Bucket, Needed, bucket_bytes, buckets_by_rank

BUCKET_BYTES = 32 << 20
"""At most under way at a time: memory that each rank needs beside the tensors."""
WORD_BYTES = 512
"""What a rank tells the others: nothing if all is well, else what went wrong."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """All ranks of the generation, joined by the script's process group."""

    launch: Launch
    words_device: torch.device
    """Where that lies which ranks tell each other: the same kind on all of them."""
    bucket_device: torch.device
    """Where a bucket lies."""

    @classmethod
    def of(cls, launch: Launch, model_device: torch.device) -> Gang | None:
        """The gang, or None where each rank is to read for itself: without a group of as many ranks over gloo or NCCL,
        or where all is in files of one node. All ranks find the same.
        """
        if launch.local_world_size == launch.world_size and (launch.world_size == 1 or launch.store_folder is not None):
            return None
        if not dist.is_available() or not dist.is_initialized():
            return None
        if dist.get_world_size() != launch.world_size:
            return None
        backends = dict(entry.partition(":")[::2] for entry in dist.get_backend_config().split(","))
        nccl = backends.get("cuda") == "nccl" and torch.cuda.is_available()
        on_model = nccl and model_device.type == "cuda"
        if backends.get("cpu") == "gloo":
            cpu = torch.device("cpu")
            return cls(launch=launch, words_device=cpu, bucket_device=model_device if on_model else cpu)
        if not nccl:
            return None
        device = model_device if on_model else torch.device("cuda", torch.cuda.current_device())
        return cls(launch=launch, words_device=device, bucket_device=device)

    def tell(self, word: bytes) -> list[bytes]:
        """What each rank says, this one `word` (at most WORD_BYTES, no zero at its end). Raises PeerLostError."""
        mine = torch.frombuffer(bytearray(word.ljust(WORD_BYTES, b"\0")), dtype=torch.uint8).to(self.words_device)
        heard = torch.empty(self.launch.world_size, WORD_BYTES, dtype=torch.uint8, device=self.words_device)
        _collective(lambda: dist.all_gather(list(heard), mine))
        return [row.tobytes().rstrip(b"\0") for row in heard.cpu().numpy()]

    def alike(self, word: bytes) -> bool:
        """Whether all ranks say the same. Raises PeerLostError."""
        return len(set(self.tell(word))) == 1

    def broadcast(self, memory: torch.Tensor, source: int) -> None:
        """Bring what one rank has in this memory to all of them. Raises PeerLostError."""
        _collective(lambda: dist.broadcast(memory, src=source))


def _collective(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")[:300]
        raise PeerLostError(f"another rank went away, or did not answer, while all restored: {reason}") from error


def together(gang: Gang | None, work: Callable[[], T]) -> T:
    """What `work` gives on this rank, once it is done on all.

    Raises what it raised here, else PeerError if it failed on another rank; PeerLostError.
    """
    if gang is None:
        return work()
    try:
        result = work()
    except Exception as error:
        with suppress(PeerLostError):  # its own error counts
            gang.tell(f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:WORD_BYTES].rstrip(b"\0"))
        raise
    for rank, word in enumerate(gang.tell(b"")):
        if word:
            raise PeerError(f"rank {rank} could not restore: {word.decode('utf-8', 'replace')}", rank)
    return result


def read_together(
    gang: Gang | None, store: ObjectStore, index: fmt.Index, parts: Sequence[Part], everyones: Collection[str]
) -> None:
    """Fill the parts. What is in `everyones` (by name; every rank has all of it) each rank reads a portion of.

    If not all ranks need the same of that, each reads for itself. Raises as `read_parts` and `together`.
    """
    whole = {name: tensor for name, tensor, _ in parts if name in everyones}
    if gang is None or not gang.alike(_digest(gang, index, whole)):
        together(gang, lambda: read_parts(store, index, parts))
        return

    def read() -> tuple[list[list[Bucket]], torch.Tensor]:
        needed = [Needed(name, tensor.element_size(), tuple(tensor.shape)) for name, tensor in whole.items()]
        plan = buckets_by_rank(needed, ranks=gang.launch.world_size, bytes_max=BUCKET_BYTES)
        mine = [part for bucket in plan[gang.launch.rank] for part in _parts(bucket, whole)]
        read_parts(store, index, [*(part for part in parts if part[0] not in whole), *mine])
        size_bytes = max((bucket_bytes(bucket) for buckets in plan for bucket in buckets), default=0)
        return plan, torch.empty(size_bytes, dtype=torch.uint8, device=gang.bucket_device)

    plan, memory = together(gang, read)
    try:
        for source, buckets in enumerate(plan):
            for bucket in buckets:
                _broadcast(gang, source, bucket, whole, memory[: bucket_bytes(bucket)])
    except PeerLostError:
        raise
    except Exception as error:  # the others are in the middle of it and cannot be told: they lose this rank
        raise BrokenOffError(f"this rank failed while all restored together: {error}") from error


def _digest(gang: Gang, index: fmt.Index, whole: dict[str, torch.Tensor]) -> bytes:
    """Alike on two ranks only if they can read together."""
    tensors = sorted((name, str(tensor.dtype), list(tensor.shape)) for name, tensor in whole.items())
    launch, rank = gang.launch, dist.get_rank()
    elsewhere = None if launch.rank == rank else launch.rank
    text = json.dumps([str(index.id), launch.generation, elsewhere, gang.bucket_device.type, tensors])
    return hashlib.sha256(text.encode()).hexdigest().encode()


def _parts(bucket: Bucket, whole: dict[str, torch.Tensor]) -> Iterator[Part]:
    """The tensors' own memory in each piece's box."""
    for name, box, _, _ in bucket:
        tensor = whole[name]
        if box.lengths == tensor.shape:  # most of them, where there are many
            yield name, tensor, None
        else:
            box_slices = tuple(slice(offset, offset + length) for offset, length in zip(*box, strict=True))
            yield name, tensor[box_slices], box


@torch.no_grad()
def _broadcast(gang: Gang, source: int, bucket: Bucket, whole: dict[str, torch.Tensor], memory: torch.Tensor) -> None:
    """Bring a bucket from the rank that has read it into the tensors of all others."""
    parts = [part for _, part, _ in _parts(bucket, whole)]
    places = _places(bucket, parts, memory)
    if source == gang.launch.rank:
        torch._foreach_copy_(places, parts)
    gang.broadcast(memory, source)
    if source != gang.launch.rank:
        for place, part in zip(places, parts, strict=True):
            copy_alike(place, part)


def _places(bucket: Bucket, parts: list[torch.Tensor], memory: torch.Tensor) -> list[torch.Tensor]:
    """For each piece of a bucket, the memory in it as a tensor like its part. One view of many: they cost more to make
    than to fill where they are small."""
    places: list[torch.Tensor] = []
    for dtype, pairs in groupby(zip(bucket, parts, strict=True), key=lambda pair: pair[1].dtype):
        run = list(pairs)
        elements = memory[run[0][0].first_byte : run[-1][0].last_byte].view(dtype)
        flat = torch.split(elements, [piece.box.elements for piece, _ in run])
        places += [one.view(part.shape) for one, (_, part) in zip(flat, run, strict=True)]
    return places

"""The checkpoint format: keys, receipts, indexes, generation records. Written down in docs/checkpoint-format.md.

No I/O and no torch here. Writers: `checkpoint.save` and `checkpoint.generations`; readers: `checkpoint.reader`,
`checkpoint.restore`. JSON is canonical (sorted keys, no spaces), so that an index is the same bytes whoever writes it.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import crc32c
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.core.messages import CheckpointId, Outcome
from orchestrator.errors import DigestError, FormatError, VersionError

FORMAT_VERSION = 1
BLOCK_BYTES = 1 << 20
"""Digests are kept for blocks of this size, so that a range read can be verified in whole blocks."""
DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "C64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes per element of the safetensors dtypes that this format version stores."""

Count = Annotated[int, Field(ge=0)]
_CHECKPOINT = re.compile(r"checkpoints/g(\d{8,})-s(\d{10,})/(.+)\Z")
_GENERATION = re.compile(r"generations/(\d{8,})\.json\Z")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Chunk(_Record):
    """Elements [start, stop) of the box (offsets, lengths) of one tensor, row-major, at bytes of one shard."""

    rank: Count
    offsets: tuple[Count, ...]
    lengths: tuple[Count, ...]
    start: Count
    stop: Count
    first_byte: Count
    """Absolute position in the shard file."""
    last_byte: Count
    """One past the chunk's last byte."""


class TensorRecord(_Record):
    """One tensor of the checkpoint; its chunks cover every element exactly once."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]


class ShardTensor(_Record):
    """What one shard holds of one tensor."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]


class ShardRecord(_Record):
    """One shard file: size, crc32c of the file and (base64, little-endian uint32) of each 1 MiB block."""

    rank: Count
    size_bytes: Count
    crc32c: Count
    blocks: str


class Gate(_Record):
    """What the resume gate compares after restoring."""

    step: Count
    lr: str
    data: str | None
    rng: str


class Receipt(_Record):
    """Written once beside a durable shard."""

    version: int
    job: str
    generation: Count
    step: Count
    world_size: Count
    absent: tuple[Count, ...]
    shard: ShardRecord
    tensors: dict[str, ShardTensor]
    values: dict[str, Any]
    """Job-scoped values that are not tensors, as every rank has them."""
    rank_values: dict[str, Any]
    """Values of this rank alone (its RNG)."""
    gate: Gate


class Index(_Record):
    """Decides a checkpoint as committed. A deterministic function of the receipts."""

    version: int
    state: Literal["committed"] = "committed"
    job: str
    generation: Count
    step: Count
    world_size: Count
    absent: tuple[Count, ...]
    shards: tuple[ShardRecord, ...]
    tensors: dict[str, TensorRecord]
    values: dict[str, Any]
    rank_values: dict[str, dict[str, Any]]
    gates: dict[str, Gate]
    digest: Count = 0
    """crc32c of the canonical JSON of all other fields: an edited index is found out."""

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's identity."""
        return CheckpointId(generation=self.generation, step=self.step)


class AbandonedIndex(_Record):
    """Decides a checkpoint as never to be used."""

    version: int
    state: Literal["abandoned"] = "abandoned"
    generation: Count
    step: Count
    reason: str


class GenerationRecord(_Record):
    """A claim: who forms this generation. `claimant` names the supervisor process, `owner` what may start it again."""

    version: int
    job: str
    generation: Count
    owner: str
    claimant: str
    wall_seconds: float
    rollback_to: int | None = None


class BaseRecord(_Record):
    """The checkpoint that every rank of the generation loads; None: a fresh start."""

    version: int
    generation: Count
    checkpoint_generation: Count | None
    checkpoint_step: Count | None

    @property
    def id(self) -> CheckpointId | None:
        """The checkpoint, if any."""
        if self.checkpoint_generation is None or self.checkpoint_step is None:
            return None
        return CheckpointId(generation=self.checkpoint_generation, step=self.checkpoint_step)


class EndRecord(_Record):
    """How the job ended in this generation."""

    version: int
    generation: Count
    outcome: Annotated[Outcome, Field(strict=False)]
    reason: str
    wall_seconds: float


# -------------------------------------------------------------------------------------------------- keys


def generation_key(generation: int) -> str:
    """The claim of a generation."""
    return f"generations/{generation:08d}.json"


def base_key(generation: int) -> str:
    """The base record of a generation."""
    return f"generations/{generation:08d}.base.json"


def end_key(generation: int) -> str:
    """The end record of a generation."""
    return f"generations/{generation:08d}.end.json"


def folder_key(checkpoint: CheckpointId) -> str:
    """The folder of a checkpoint."""
    return f"checkpoints/{checkpoint}"


def index_key(checkpoint: CheckpointId) -> str:
    """The index of a checkpoint."""
    return f"{folder_key(checkpoint)}/index.json"


def shard_key(checkpoint: CheckpointId, rank: int, world_size: int) -> str:
    """The shard of a rank."""
    return f"{folder_key(checkpoint)}/shard-{rank:05d}-of-{world_size:05d}.safetensors"


def receipt_key(checkpoint: CheckpointId, rank: int, world_size: int) -> str:
    """The receipt of a rank."""
    return f"{folder_key(checkpoint)}/shard-{rank:05d}-of-{world_size:05d}.json"


def parse_checkpoint_key(key: str) -> tuple[CheckpointId, str] | None:
    """(checkpoint, file name) of a key under checkpoints/, None for any other key."""
    match = _CHECKPOINT.match(key)
    if match is None:
        return None
    return CheckpointId(generation=int(match[1]), step=int(match[2])), match[3]


def parse_generation_key(key: str) -> int | None:
    """The number of a claim's key, None for any other key."""
    match = _GENERATION.match(key)
    return None if match is None else int(match[1])


# ----------------------------------------------------------------------------------------------- records

RecordT = TypeVar("RecordT", bound=_Record)


def dump(record: BaseModel) -> bytes:
    """Canonical JSON of a record."""
    return canonical_json(record.model_dump(mode="json"))


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces; NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()


def load(record_type: type[RecordT], key: str, data: bytes) -> RecordT:
    """Parse and validate a record read from `key`.

    Raises VersionError for a version that this release does not know, FormatError for anything else.
    """
    load_fields(key, data)
    try:
        return record_type.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the record"
        raise FormatError(key, f"not a valid {record_type.__name__}: {where}: {first['msg']}") from error


def load_fields(key: str, data: bytes) -> dict[str, Any]:
    """The fields of a record of a known version."""
    try:
        fields = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(key, f"is not JSON ({len(data)} bytes): truncated or edited") from error
    if not isinstance(fields, dict):
        raise FormatError(key, "is not a JSON object")
    version = fields.get("version")
    if version != FORMAT_VERSION:
        raise VersionError(
            key, f"is of format version {version!r}; this release reads version {FORMAT_VERSION}: use a newer release"
        )
    return fields


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def load_index(key: str, data: bytes) -> Index | AbandonedIndex:
    """Parse an index, committed or abandoned. What a committed one says of its shards and tensors fits together."""
    fields = load_fields(key, data)
    if fields.get("state") == "abandoned":
        return load(AbandonedIndex, key, data)
    digest = fields.pop("digest", None)
    if digest != crc32c.crc32c(canonical_json(fields)):
        raise DigestError(key, "its content does not match its own digest: truncated or edited")
    index = load(Index, key, data)
    check_index(key, index)
    return index


def pack_blocks(digests: Iterable[int]) -> str:
    """Block digests as text."""
    values = list(digests)
    return base64.b64encode(struct.pack(f"<{len(values)}I", *values)).decode()


def unpack_blocks(key: str, text: str, size_bytes: int) -> tuple[int, ...]:
    """Block digests from text; there must be one for each block of the file."""
    expected = -(-size_bytes // BLOCK_BYTES)
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise FormatError(key, f"has block digests that are not base64: {error}") from error
    if len(raw) != 4 * expected:
        raise FormatError(key, f"has {len(raw) // 4} block digests where {size_bytes} bytes need {expected}")
    return struct.unpack(f"<{expected}I", raw)


def build_index(receipts: Iterable[Receipt]) -> Index:
    """The index of a checkpoint: the same bytes whoever builds it from the same receipts.

    Raises FormatError if the receipts do not belong together or do not cover every tensor exactly.
    """
    ordered = sorted(receipts, key=lambda receipt: receipt.shard.rank)
    first = ordered[0]
    key = index_key(CheckpointId(generation=first.generation, step=first.step))
    for receipt in ordered:
        same = ("job", "generation", "step", "world_size", "absent")
        differing = [name for name in same if getattr(receipt, name) != getattr(first, name)]
        if differing:
            raise FormatError(
                key, f"rank {receipt.shard.rank}'s receipt differs from rank {first.shard.rank}'s in {differing}"
            )
    objects = _objects(first)
    alike = _alike([_objects(receipt) for receipt in ordered])
    index = Index(
        version=FORMAT_VERSION,
        job=first.job,
        generation=first.generation,
        step=first.step,
        world_size=first.world_size,
        absent=first.absent,
        shards=tuple(receipt.shard for receipt in ordered),
        tensors=_merge_tensors(key, ordered),
        values={**first.values, "objects": {name: objects[name] for name in alike}},
        rank_values={
            str(receipt.shard.rank): receipt.rank_values
            | {"objects": {name: tree for name, tree in _objects(receipt).items() if name not in alike}}
            for receipt in ordered
        },
        gates={str(receipt.shard.rank): receipt.gate for receipt in ordered},
    )
    check_index(key, index)
    fields = index.model_dump(mode="json", exclude={"digest"})
    return index.model_copy(update={"digest": int(crc32c.crc32c(canonical_json(fields)))})


def _objects(receipt: Receipt) -> dict[str, Any]:
    """The state of each object given to attach. What differs between ranks is kept for each rank."""
    objects: dict[str, Any] = receipt.values.get("objects", {})
    return objects


def _alike(of_ranks: list[dict[str, Any]]) -> set[str]:
    """The names of the objects that all ranks have alike, as JSON: 1, 1.0 and true are not alike."""
    texts = [{name: canonical_json(tree) for name, tree in objects.items()} for objects in of_ranks]
    return {name for name, text in texts[0].items() if all(other.get(name) == text for other in texts)}


def _merge_tensors(key: str, receipts: list[Receipt]) -> dict[str, TensorRecord]:
    found: dict[str, list[ShardTensor]] = {}
    for receipt in receipts:
        for name, tensor in receipt.tensors.items():
            found.setdefault(name, []).append(tensor)
    merged: dict[str, TensorRecord] = {}
    for name, parts in found.items():
        if any((part.dtype, part.shape) != (parts[0].dtype, parts[0].shape) for part in parts):
            raise FormatError(key, f"{name}: the ranks disagree on its dtype or shape")
        chunks = tuple(sorted((chunk for part in parts for chunk in part.chunks), key=_chunk_order))
        merged[name] = TensorRecord(dtype=parts[0].dtype, shape=parts[0].shape, chunks=chunks)
    return merged


def _chunk_order(chunk: Chunk) -> tuple[tuple[int, ...], int]:
    return chunk.offsets, chunk.start


def check_index(key: str, index: Index) -> None:
    """Every element of every tensor lies in exactly one place of a shard that is there. Raises FormatError.

    Readers rest on it: they allocate by the shapes and fill by the chunks.
    """
    sizes = {shard.rank: shard.size_bytes for shard in index.shards}
    if len(sizes) != len(index.shards) or any(rank >= index.world_size for rank in sizes):
        raise FormatError(
            key, f"its shards are of ranks {[shard.rank for shard in index.shards]} of {index.world_size}"
        )
    for name, tensor in index.tensors.items():
        width = DTYPE_BYTES.get(tensor.dtype)
        if width is None:
            raise FormatError(key, f"{name}: its dtype {tensor.dtype!r} is unknown to this release")
        check_cover(key, name, tensor.shape, tensor.chunks)
        for chunk in tensor.chunks:
            if not chunk.first_byte <= chunk.last_byte <= sizes.get(chunk.rank, -1):
                raise FormatError(key, f"{name}: a chunk lies outside the shard of rank {chunk.rank}")
            if chunk.last_byte - chunk.first_byte != (chunk.stop - chunk.start) * width:
                raise FormatError(key, f"{name}: a chunk's bytes do not match its elements")


def check_cover(key: str, name: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """Every element of the tensor is in exactly one chunk.

    This format version writes whole-tensor boxes only, so the chunks' ranges must follow each other without a gap.
    """
    total = element_count(shape)
    position = 0
    for chunk in chunks:
        if chunk.lengths != shape or any(chunk.offsets):
            raise FormatError(key, f"{name}: a chunk's box is not the whole tensor; this release cannot read that")
        if chunk.start != position or chunk.stop < chunk.start:
            raise FormatError(key, f"{name}: elements {position} to {chunk.start} are missing or written twice")
        position = chunk.stop
    if position != total or not chunks:
        raise FormatError(key, f"{name}: {position} of {total} elements are there")


def element_count(shape: Iterable[int]) -> int:
    """Number of elements of a shape."""
    count = 1
    for length in shape:
        count *= length
    return count

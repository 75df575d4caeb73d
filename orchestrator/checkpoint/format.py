"""The checkpoint format: keys, receipts, indexes, generation records. Written down in docs/checkpoint-format.md.

No I/O and no torch here. Writers: `checkpoint.save` and `checkpoint.generations`; readers: `checkpoint.reader`,
`checkpoint.restore`. JSON is canonical (sorted keys, no spaces), so that an index is the same bytes whoever writes it;
how one is made from receipts is in `checkpoint.indexing`.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal, Self, TypeVar

import crc32c
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from orchestrator.checkpoint.chunks import POSITION_MAX, Chunk, all_chunks
from orchestrator.checkpoint.values import tensor_places
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

Count = Annotated[int, Field(ge=0, le=POSITION_MAX)]
WorldSize = Annotated[int, Field(ge=1, le=1 << 20)]
_CHECKPOINT = re.compile(r"checkpoints/g(\d{8,})-s(\d{10,})/(.+)\Z")
_GENERATION = re.compile(r"generations/(\d{8,})\.json\Z")
_BASE = re.compile(r"generations/(\d{8}|[1-9]\d{8,})\.base\.json\Z")
_RECEIPT = re.compile(r"shard-(\d{5,})-of-(\d{5,})\.json\Z")
_SHARD = re.compile(r"shard-(\d{5,})-of-(\d{5,})\.safetensors\Z")
_ODD_KEYS = re.compile(rb'"[ \t\r\n]+:|\\\\":')
"""Keys that do not simply end in `":`: with a space there, or with a backslash of their own."""
_DIGEST_FIELD = re.compile(rb'\{"digest":"([0-9a-f]{8})",')


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ShardTable(_Record):
    """What a shard holds: one chunk of each of its tensors, column by column, in the order of the file, without holes.

    So a chunk's place is the sum of those before it: a table can neither overlap nor point outside its shard.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[Count, ...], ...]
    """Shapes of the whole tensors."""
    starts: tuple[Count, ...]
    """First element of the tensor, in row-major order, that is in this shard; of a box, the box's first."""
    lengths: tuple[Count, ...]
    """Number of elements from there on; of a box, those of its elements that are in this shard."""
    boxes: tuple[tuple[Count, ...], ...]
    """Where it is elements of a box: the box's lengths, and how many of its elements come before; else empty."""


TABLE_COLUMNS = ("names", "dtypes", "shapes", "starts", "lengths", "boxes")


class Gate(_Record):
    """What the resume gate compares after restoring."""

    step: Count
    lr: str
    data: str | None
    rng: str


class ReceiptHead(_Record):
    """What readers of a shard need of its receipt: not the table, which is large and stands in the index, too."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    version: int
    job: str
    generation: Count
    step: Count
    world_size: WorldSize
    absent: tuple[Count, ...]
    rank: Count
    size_bytes: Count
    """Of the shard file."""
    header_bytes: Count
    """Before its first tensor."""
    crc32c: Count
    """Of the shard file."""
    blocks: str
    """crc32c of each 1 MiB block of the shard file: little-endian uint32, base64."""
    gate: Gate


class Receipt(ReceiptHead):
    """Written once beside a durable shard."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tensors: ShardTable
    objects: dict[str, Count]
    """crc32c of the canonical JSON of the state of each object given to attach."""
    values: dict[str, Any] | None
    """Job-scoped values beside tensors, in the first present rank's receipt only; every shard's header has them."""


class ShardRecord(_Record):
    """One shard of a committed checkpoint, and the receipt that has its block digests."""

    rank: Count
    size_bytes: Count
    header_bytes: Count
    crc32c: Count
    receipt_bytes: Count
    receipt_crc32c: Count


class TensorRecord(_Record):
    """One tensor of a committed checkpoint. Where its elements are: `Index.chunks`."""

    dtype: str
    shape: tuple[Count, ...]
    series: str


class Index(_Record):
    """Decides a checkpoint as committed. A deterministic function of the receipts."""

    digest: str
    """crc32c of all bytes of the file after this field, 8 hex digits: an edited index is found out."""
    version: int
    state: Literal["committed"]
    job: str
    generation: Count
    step: Count
    world_size: WorldSize
    absent: tuple[Count, ...]
    shards: tuple[ShardRecord, ...]
    tensors: dict[str, TensorRecord]
    values: dict[str, Any]
    """Job-scoped values that are not tensors; `objects` has the state of what all ranks have alike."""
    rank_objects: tuple[str, ...]
    """The objects whose state differs between ranks: it is in the header of each rank's shard."""

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's identity."""
        return CheckpointId(generation=self.generation, step=self.step)

    @cached_property
    def by_rank(self) -> Mapping[int, ShardRecord]:
        """The shards; an absent rank may have none."""
        return {shard.rank: shard for shard in self.shards}

    @cached_property
    def second_names(self) -> Mapping[str, str]:
        """Other name → the name under which a tensor is stored, for those that stand in several places (tied weights).

        By `values`; objects whose state differs between ranks are not looked into.
        """
        found = tensor_places(self.values.get("objects"), "")
        names = ((path.removeprefix("."), name) for path, name in found)
        return {path: name for path, name in names if path not in self.tensors and name in self.tensors}

    def chunks(self, name: str) -> list[Chunk]:
        """Where the elements of a tensor are, in their order: every element once, all of it within its shard.

        Raises KeyError if there is no such tensor, FormatError if the index does not fit together there.
        """
        record = self.tensors[name]
        width, total = DTYPE_BYTES[record.dtype], element_count(record.shape)
        try:
            found = all_chunks(record.series, record.shape, total, width, self._places)
        except ValueError as error:
            raise FormatError(index_key(self.id), f"{name}: {error}") from error
        return sorted(found, key=_place if found[0].box else _start)

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, int]]:
        """(bytes of header, bytes of tensors) of each rank's shard."""
        return {shard.rank: (shard.header_bytes, shard.size_bytes - shard.header_bytes) for shard in self.shards}


def _start(chunk: Chunk) -> int:
    return chunk.start


def _place(chunk: Chunk) -> tuple[tuple[int, ...], int]:
    assert chunk.box is not None
    return chunk.box.offsets, chunk.start


class AbandonedIndex(_Record):
    """Decides a checkpoint as never to be used."""

    version: int
    state: Literal["abandoned"] = "abandoned"
    generation: Count
    step: Count
    reason: str


class GenerationRecord(_Record):
    """A claim: who forms this generation. `claimant` names the supervisor process, `owner` what may start it again.

    `rollback_to`: of generations up to `rollback_through` (None: of all earlier ones) nothing above that step counts.
    """

    version: int
    job: str
    generation: Count
    owner: str
    claimant: str
    wall_seconds: float
    rollback_to: int | None = None
    rollback_through: Count | None = None


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


class Marker(_Record):
    """Beside an index: the checkpoint is being deleted (`retired.json`), or was found bad (`quarantine.json`).

    That it is there decides, whatever it holds, but for a base that was retired by an older generation than the one
    that chose it (`checkpoint.catalog`). The reason is for people.
    """

    version: int
    generation: Count
    step: Count
    by_generation: Count
    """The generation that was at work."""
    reason: str

    @classmethod
    def on(cls, checkpoint: CheckpointId, by_generation: int, reason: str) -> Self:
        """The marker of a checkpoint."""
        return cls(
            version=FORMAT_VERSION,
            generation=checkpoint.generation,
            step=checkpoint.step,
            by_generation=by_generation,
            reason=reason,
        )


# -------------------------------------------------------------------------------------------------- keys

INDEX = "index.json"
RETIRED = "retired.json"
QUARANTINE = "quarantine.json"


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
    return f"{folder_key(checkpoint)}/{INDEX}"


def retired_key(checkpoint: CheckpointId) -> str:
    """Says that a checkpoint is being deleted, or was."""
    return f"{folder_key(checkpoint)}/{RETIRED}"


def quarantine_key(checkpoint: CheckpointId) -> str:
    """Says that a checkpoint was found bad."""
    return f"{folder_key(checkpoint)}/{QUARANTINE}"


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


def parse_receipt_name(name: str) -> tuple[int, int] | None:
    """(rank, world size) of a receipt's file name within its folder, None for any other name."""
    match = _RECEIPT.match(name)
    return None if match is None else (int(match[1]), int(match[2]))


def parse_shard_key(key: str) -> tuple[CheckpointId, int] | None:
    """(checkpoint, rank) of a shard's key, None for any other key."""
    parsed = parse_checkpoint_key(key)
    named = None if parsed is None else _SHARD.match(parsed[1])
    return None if parsed is None or named is None else (parsed[0], int(named[1]))


def parse_generation_key(key: str) -> int | None:
    """The number of a claim's key, None for any other key."""
    match = _GENERATION.match(key)
    return None if match is None else int(match[1])


def parse_base_key(key: str) -> int | None:
    """The generation of a base record's key, None for any other key."""
    match = _BASE.match(key)
    return None if match is None else int(match[1])


# ----------------------------------------------------------------------------------------------- records

RecordT = TypeVar("RecordT", bound=_Record)
ReceiptT = TypeVar("ReceiptT", bound=ReceiptHead)


def dump(record: BaseModel) -> bytes:
    """Canonical JSON of a record."""
    return canonical_json(record)


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, of values and records; NaN and infinity are refused."""
    return _ENCODER.encode(value).encode()


def _fields(value: object) -> dict[str, Any]:
    """What a record is in JSON."""
    if not isinstance(value, BaseModel):
        raise TypeError(f"a {type(value).__qualname__} is not JSON")
    return {name: getattr(value, name) for name in type(value).model_fields}


_ENCODER = json.JSONEncoder(
    check_circular=False, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True, default=_fields
)  # made once: an index has thousands of entries


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


def load_receipt(key: str, data: bytes, kind: type[ReceiptT]) -> ReceiptT:
    """`load` of a receipt, parsed once, as thousands are read for one index. NaN in its values is refused later."""
    try:
        receipt = kind.model_validate_json(data)
    except ValidationError:
        return load(kind, key, data)  # says what is wrong
    if receipt.version != FORMAT_VERSION:
        return load(kind, key, data)
    return receipt


def load_fields(key: str, data: bytes) -> dict[str, Any]:
    """The fields of a record of a known version."""
    try:
        fields = json.loads(data, parse_constant=refuse_constant)
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


def refuse_constant(text: str) -> None:
    """For `json.loads(parse_constant=…)`: NaN and infinity are no JSON."""
    raise ValueError(f"{text} is not JSON")


def parse_header(text: bytes) -> Any:
    """JSON of a shard's header: UTF-8, no key twice, and nothing that records could not hold. Raises ValueError."""
    found = from_json(text, allow_inf_nan=False)  # as records are parsed: so deep and no deeper, no half characters
    if not _as_many_keys(text, found):
        json.loads(text.decode(), object_pairs_hook=_each_key_once)
    return found


def _as_many_keys(text: bytes, found: Any) -> bool:
    """Whether it is certain that no key is there twice; quick for what we write ourselves.

    Each key ends in `":`, as does nothing else but a quotation within a string, which has a backslash before it.
    """
    if _ODD_KEYS.search(text):
        return False
    keys, trees = 0, [found]
    while trees:
        tree = trees.pop()
        if type(tree) is dict:
            keys += len(tree)
            trees += tree.values()
        elif type(tree) is list:
            trees += tree
    return keys == text.count(b'":') - text.count(b'\\":')


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=…)`: of a key that is there twice, readers would take one or the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"has the key {max(keys, key=keys.count)!r:.80} twice")
    return found


def load_index(key: str, data: bytes) -> Index | AbandonedIndex:
    """Parse an index, committed or abandoned. A committed one has its own digest, and its sizes fit together.

    That all elements of a tensor are there is found out when its chunks are asked for. Raises FormatError.
    """
    match = _DIGEST_FIELD.match(data)
    whole = match is not None and int(match[1], 16) == crc32c.crc32c(memoryview(data)[match.end() :])
    index = _parse_once(data) if whole else None
    if index is None:
        if load_fields(key, data).get("state") == "abandoned":  # the fields are not kept: an index can be large
            return load(AbandonedIndex, key, data)
        if not whole:
            raise DigestError(key, "its content does not match its own digest: truncated or edited")
        index = load(Index, key, data)
    _check_sizes(key, index)
    return index


def _parse_once(data: bytes) -> Index | None:
    """An index of this format version; None if something about it is to be looked at more closely."""
    if b"NaN" in data or b"Infinity" in data:  # which is no JSON, but pydantic takes it
        return None
    try:
        index = Index.model_validate_json(data)
    except ValidationError:
        return None
    return index if index.version == FORMAT_VERSION else None


def seal(pieces: Iterable[bytes]) -> bytes:
    """The beginning of an index file: the digest of all that comes after it."""
    digest = 0
    for piece in pieces:
        digest = crc32c.crc32c(piece, digest)
    return b'{"digest":"%08x",' % digest


def _check_sizes(key: str, index: Index) -> None:
    """Shards are of different ranks, and the tensors fill them exactly: nobody allocates more than is there."""
    ranks = [shard.rank for shard in index.shards]
    if not ranks or any(low >= high for low, high in pairwise([*ranks, index.world_size])):
        raise FormatError(key, f"its shards are of ranks {ranks} of {index.world_size}")
    if any(shard.header_bytes > shard.size_bytes for shard in index.shards):
        raise FormatError(key, "a shard's header is larger than the shard")
    there = sum(shard.size_bytes - shard.header_bytes for shard in index.shards)
    needed = 0
    for name, tensor in index.tensors.items():
        needed += tensor_elements(key, name, tensor.shape) * dtype_width(key, name, tensor.dtype)
    if needed != there:
        raise FormatError(key, f"its tensors take {needed} bytes, its shards hold {there}")


def dtype_width(key: str, name: str, dtype: str) -> int:
    """Bytes per element. Raises FormatError for a dtype that is not of this format version."""
    width = DTYPE_BYTES.get(dtype)
    if width is None:
        raise FormatError(key, f"{name}: its dtype {dtype!r:.80} is unknown to this release")
    return width


def tensor_elements(key: str, name: str, shape: Iterable[int]) -> int:
    """Number of elements of a shape that was read. Raises FormatError for one that no tensor has."""
    elements = extent = 1
    for length in shape:
        elements *= length
        extent *= length or 1  # torch refuses strides beyond 64 bits even where there are no elements
        if extent > POSITION_MAX:
            raise FormatError(key, f"{name}: no tensor is so large: its shape is {list(shape)!r:.80}")
    return elements


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


def tensor_bytes(record: TensorRecord) -> int:
    """Bytes of a whole tensor."""
    return element_count(record.shape) * DTYPE_BYTES[record.dtype]


def element_count(shape: Iterable[int]) -> int:
    """Number of elements of a shape."""
    return prod(shape)

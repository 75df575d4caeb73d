"""The records on the store: canonical bytes, strict reading, and what an index must say to be believed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import crc32c
import pytest
from pydantic import BaseModel

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.values import DEPTH_MAX, INT_BITS_MAX
from orchestrator.core.messages import CheckpointId, Outcome
from orchestrator.errors import DigestError, FormatError, VersionError

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
KEY = "checkpoints/g00000001-s0000000002/index.json"


def receipt(
    rank: int = 0, world_size: int = 2, *, elements: tuple[int, int] = (0, 4), objects: Any = None, **fields: Any
) -> fmt.Receipt:
    """A receipt of a shard that holds a part of the tensor `t`, 8 elements of F32."""
    start, stop = elements
    chunk = fmt.Chunk(
        rank=rank,
        offsets=(0,),
        lengths=(8,),
        start=start,
        stop=stop,
        first_byte=4096,
        last_byte=4096 + 4 * (stop - start),
    )
    values: dict[str, Any] = {
        "version": fmt.FORMAT_VERSION,
        "job": "job",
        "generation": 1,
        "step": 2,
        "world_size": world_size,
        "absent": (),
        "shard": fmt.ShardRecord(rank=rank, size_bytes=4112, crc32c=7, blocks=fmt.pack_blocks([7])),
        "tensors": {"t": fmt.ShardTensor(dtype="F32", shape=(8,), chunks=(chunk,))},
        "values": {"objects": objects or {}},
        "rank_values": {"rng": {"python": "[]"}},
        "gate": fmt.Gate(step=2, lr="lr", data=None, rng="rng"),
    }
    return fmt.Receipt(**{**values, **fields})


def two(**fields: Any) -> list[fmt.Receipt]:
    """Receipts of both ranks of a checkpoint."""
    return [receipt(0, elements=(0, 4), **fields), receipt(1, elements=(4, 8), **fields)]


def resealed(index: fmt.Index, change: Any) -> bytes:
    """The index after an edit by someone who knows the digest's rule."""
    fields = json.loads(fmt.dump(index))
    del fields["digest"]
    change(fields)
    return fmt.canonical_json({**fields, "digest": crc32c.crc32c(fmt.canonical_json(fields))})


# ------------------------------------------------------------------------------------------------------- keys


def test_keys_of_a_checkpoint() -> None:
    checkpoint = CheckpointId(generation=6, step=1200)
    assert fmt.index_key(checkpoint) == "checkpoints/g00000006-s0000001200/index.json"
    assert fmt.shard_key(checkpoint, 3, 8) == "checkpoints/g00000006-s0000001200/shard-00003-of-00008.safetensors"
    assert fmt.receipt_key(checkpoint, 3, 8) == "checkpoints/g00000006-s0000001200/shard-00003-of-00008.json"
    assert fmt.generation_key(6) == "generations/00000006.json"
    assert fmt.base_key(6) == "generations/00000006.base.json"
    assert fmt.end_key(6) == "generations/00000006.end.json"


@pytest.mark.parametrize(("generation", "step"), [(0, 0), (1, 2), (99_999_999, 9_999_999_999), (1 << 30, 1 << 41)])
def test_keys_are_read_back(generation: int, step: int) -> None:
    checkpoint = CheckpointId(generation=generation, step=step)
    assert fmt.parse_checkpoint_key(fmt.index_key(checkpoint)) == (checkpoint, "index.json")
    assert fmt.parse_generation_key(fmt.generation_key(generation)) == generation


@pytest.mark.parametrize(
    "key",
    [
        "checkpoints/g1-s2/index.json",
        "checkpoints/g00000001-s0000000002",
        "checkpoints/g00000001-s0000000002/",
        "checkpoints/step-100/model.safetensors",
        "other/checkpoints/g00000001-s0000000002/index.json",
        "generations/00000001.base.json",
        "generations/00000001.end.json",
        "generations/1.json",
        "events/00000001-node-000001.jsonl",
    ],
)
def test_other_keys_are_none_of_ours(key: str) -> None:
    """F20: an integer-named folder is no checkpoint."""
    assert fmt.parse_checkpoint_key(key) is None
    assert fmt.parse_generation_key(key) is None


def test_the_order_of_checkpoints_is_by_generation_then_step() -> None:
    ids = [CheckpointId(generation=generation, step=step) for generation, step in ((1, 0), (1, 900), (2, 5), (10, 0))]
    assert sorted(ids, key=str) == sorted(ids) == ids


# ----------------------------------------------------------------------------------------------- index building


def test_the_index_is_the_same_bytes_whatever_the_order_of_the_receipts(seed: int) -> None:
    """W12: any agent may write the index; all write the same."""
    draw = random.Random(seed)
    receipts = [
        receipt(rank, 8, elements=(rank, rank + 1), objects={"b": 1, "a": {"z": 1, "y": [2]}}) for rank in range(8)
    ]
    whole = fmt.dump(fmt.build_index(receipts))
    for _ in range(10):
        shuffled = draw.sample(receipts, len(receipts))
        read = [fmt.load(fmt.Receipt, "receipt", fmt.dump(one)) for one in shuffled]
        assert fmt.dump(fmt.build_index(read)) == whole
    assert json.dumps(json.loads(whole), sort_keys=True, separators=(",", ":")).encode() == whole


@pytest.mark.parametrize(
    ("field", "value"), [("job", "other"), ("generation", 2), ("step", 3), ("world_size", 4), ("absent", (1,))]
)
def test_receipts_that_do_not_belong_together_are_refused(field: str, value: Any) -> None:
    """W2, W8: what another attempt left is never counted."""
    with pytest.raises(FormatError, match=f"rank 1's receipt differs from rank 0's in .*{field}"):
        fmt.build_index([receipt(0), receipt(1, elements=(4, 8), **{field: value})])


@pytest.mark.parametrize("tensor", [{"dtype": "I32"}, {"shape": (9,)}, {"shape": (8, 1)}])
def test_ranks_that_disagree_on_a_tensor_are_refused(tensor: dict[str, Any]) -> None:
    one, other = two()
    changed = other.tensors["t"].model_copy(update=tensor)
    with pytest.raises(FormatError, match="t: the ranks disagree"):
        fmt.build_index([one, other.model_copy(update={"tensors": {"t": changed}})])


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([(0, 4), (5, 8)], "missing or written twice"),
        ([(0, 4), (3, 8)], "missing or written twice"),
        ([(0, 4), (0, 4)], "missing or written twice"),
        ([(0, 4), (4, 7)], "7 of 8"),
        ([(0, 4), (4, 9)], "9 of 8"),
        ([(1, 4), (4, 8)], "missing or written twice"),
    ],
)
def test_every_element_must_be_there_once(parts: list[tuple[int, int]], word: str) -> None:
    """W2, F116: a shard of another attempt, or one that is lost, never makes a tensor of the wrong size."""
    with pytest.raises(FormatError, match=word):
        fmt.build_index([receipt(rank, elements=elements) for rank, elements in enumerate(parts)])


def test_two_receipts_of_one_rank_are_refused() -> None:
    with pytest.raises(FormatError, match=r"ranks \[0, 0\] of 2"):
        fmt.build_index([receipt(0, elements=(0, 4)), receipt(0, elements=(4, 8))])


def test_values_that_are_alike_stand_once_and_others_for_each_rank() -> None:
    """F48: the state of an object that differs by rank is kept for each rank, not the first one's for all."""
    ranks = [
        receipt(rank, elements=(4 * rank, 4 * rank + 4), objects={"scheduler": {"lr": 1}, "data": {"at": rank}})
        for rank in range(2)
    ]
    index = fmt.build_index(ranks)
    assert index.values == {"objects": {"scheduler": {"lr": 1}}}
    assert index.rank_values["0"] == {"rng": {"python": "[]"}, "objects": {"data": {"at": 0}}}
    assert index.rank_values["1"]["objects"] == {"data": {"at": 1}}


def test_an_object_that_only_some_ranks_have_belongs_to_them() -> None:
    index = fmt.build_index([receipt(0), receipt(1, elements=(4, 8), objects={"extra": {"x": 1}})])
    assert index.values == {"objects": {}}
    assert index.rank_values["1"]["objects"] == {"extra": {"x": 1}}
    assert index.rank_values["0"]["objects"] == {}


def test_true_is_not_one_where_values_are_compared() -> None:
    """JSON tells them apart, Python's == does not."""
    ranks = [
        receipt(rank, elements=(4 * rank, 4 * rank + 4), objects={"part": {"x": value}})
        for rank, value in enumerate((True, 1))
    ]
    index = fmt.build_index(ranks)
    assert index.rank_values["0"]["objects"]["part"]["x"] is True
    assert index.rank_values["1"]["objects"]["part"]["x"] == 1


# --------------------------------------------------------------------------------------------- index reading


def test_an_index_is_read_back() -> None:
    index = fmt.build_index(two())
    assert fmt.load_index(KEY, fmt.dump(index)) == index
    assert index.id == CheckpointId(generation=1, step=2)


def test_an_abandoned_index_is_read_back() -> None:
    record = fmt.AbandonedIndex(version=1, generation=1, step=2, reason="because")
    assert fmt.load_index(KEY, fmt.dump(record)) == record


def test_every_truncation_is_found_out() -> None:
    """F22, F6: half an index is none."""
    data = fmt.dump(fmt.build_index(two()))
    for length in range(0, len(data), 7):
        with pytest.raises(FormatError):
            fmt.load_index(KEY, data[:length])


def test_every_edit_is_found_out(seed: int) -> None:
    """F35: digests are inside the index, and cover it."""
    draw = random.Random(seed)
    data = fmt.dump(fmt.build_index(two()))
    for _ in range(300):
        position = draw.randrange(len(data))
        edited = bytearray(data)
        edited[position] ^= 1 << draw.randrange(8)
        with pytest.raises(FormatError):
            fmt.load_index(KEY, bytes(edited))


def test_a_changed_field_is_found_out_by_its_digest() -> None:
    data = fmt.dump(fmt.build_index(two())).replace(b'"step":2', b'"step":3', 1)
    with pytest.raises(DigestError, match="own digest"):
        fmt.load_index(KEY, data)


@pytest.mark.parametrize("version", [0, 2, 99, None, "1", 1.5, [1]])
def test_a_version_that_is_not_known_is_named(version: Any) -> None:
    index = fmt.build_index(two())
    with pytest.raises(VersionError, match="newer release") as caught:
        fmt.load_index(KEY, resealed(index, lambda fields: fields.update(version=version)))
    assert repr(version) in str(caught.value)
    with pytest.raises(VersionError):
        fmt.load_index(KEY, json.dumps({"version": version, "state": "abandoned"}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"\0" * 100,
        b'{"version":1}',
        b'{"version":1,"state":"committed"}',
        b'{"version":1,"state":"abandoned"}',
        b'{"version":1,"state":"deleted"}',
        b'{"version":1,"state":NaN}',
        b'{"version":1,"step":Infinity}',
        b'{"version":true}',
        b'{"version":1,"digest":' + b"9" * 5000 + b"}",
        b'{"version":' + b"[" * 100_000,
        b'{"version":1,"x":' + b"[" * 500 + b"]" * 500 + b"}",
    ],
    ids=lambda data: f"{data[:30]!r}",
)
def test_rubbish_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        fmt.load_index(KEY, data)
    with pytest.raises(FormatError):
        fmt.load(fmt.Receipt, KEY, data)


def set_chunk(fields: dict[str, Any], **values: Any) -> None:
    fields["tensors"]["t"]["chunks"][1].update(values)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda fields: set_chunk(fields, rank=5), "outside the shard of rank 5"),
        (lambda fields: set_chunk(fields, last_byte=1 << 40), "outside the shard of rank 1"),
        (lambda fields: set_chunk(fields, first_byte=4111, last_byte=4100), "outside the shard"),
        (lambda fields: set_chunk(fields, last_byte=4108), "do not match its elements"),
        (lambda fields: set_chunk(fields, start=5), "missing or written twice"),
        (lambda fields: set_chunk(fields, start=4, stop=1 << 40), "1099511627776 of 8"),
        (lambda fields: set_chunk(fields, lengths=[4]), "not the whole tensor"),
        (lambda fields: set_chunk(fields, offsets=[4]), "not the whole tensor"),
        (lambda fields: set_chunk(fields, first_byte=-4), "greater than or equal to 0"),
        (lambda fields: fields["tensors"]["t"].update(shape=[1 << 40]), "not the whole tensor"),
        (lambda fields: fields["tensors"]["t"].update(dtype="F4"), "dtype 'F4' is unknown"),
        (lambda fields: fields["tensors"]["t"].update(chunks=[]), "0 of 8"),
        (lambda fields: fields["shards"].pop(), "outside the shard of rank 1"),
        (lambda fields: fields["shards"].append(fields["shards"][0]), "its shards are of ranks"),
        (lambda fields: fields["shards"][1].update(rank=7), "its shards are of ranks"),
        (lambda fields: fields["shards"][1].update(size_bytes=4100), "outside the shard of rank 1"),
        (lambda fields: fields.update(more=1), "not permitted"),
        (lambda fields: fields.pop("gates"), "gates"),
        (lambda fields: fields.update(step="2"), "step"),
    ],
)
def test_an_index_that_does_not_fit_together_is_refused(change: Any, word: str) -> None:
    """Readers allocate by an index and fill by it: one that would leave holes, or make them read elsewhere, is none."""
    with pytest.raises(FormatError, match=word):
        fmt.load_index(KEY, resealed(fmt.build_index(two()), change))


# ---------------------------------------------------------------------------------------------- block digests


def test_block_digests_come_back() -> None:
    digests = (0, 1, 0xFFFFFFFF)
    text = fmt.pack_blocks(digests)
    for size_bytes in (2 * fmt.BLOCK_BYTES + 1, 3 * fmt.BLOCK_BYTES):
        assert fmt.unpack_blocks("shard", text, size_bytes) == digests


@pytest.mark.parametrize("size_bytes", [0, 1, 2 * fmt.BLOCK_BYTES, 3 * fmt.BLOCK_BYTES + 1, 1 << 62])
def test_block_digests_must_be_as_many_as_the_blocks(size_bytes: int) -> None:
    with pytest.raises(FormatError, match="3 block digests"):
        fmt.unpack_blocks("shard", fmt.pack_blocks([1, 2, 3]), size_bytes)


@pytest.mark.parametrize("text", ["!!!!", "AAA", "é", "AAAA AAAA", "=", "AAAA\n"])
def test_block_digests_that_are_no_base64_are_a_format_error(text: str) -> None:
    with pytest.raises(FormatError):
        fmt.unpack_blocks("shard", text, fmt.BLOCK_BYTES)


# ------------------------------------------------------------------------------------------ generation records


@pytest.mark.parametrize("outcome", list(Outcome))
def test_end_records_come_back(outcome: Outcome) -> None:
    record = fmt.EndRecord(version=1, generation=3, outcome=outcome, reason="é", wall_seconds=1.5)
    assert fmt.load(fmt.EndRecord, "end", fmt.dump(record)) == record


@pytest.mark.parametrize(
    ("generation", "step", "expected"), [(None, None, None), (1, 0, CheckpointId(generation=1, step=0))]
)
def test_base_records_come_back(generation: int | None, step: int | None, expected: CheckpointId | None) -> None:
    """Step 0 counts: it is a checkpoint, not the absence of one."""
    record = fmt.BaseRecord(version=1, generation=4, checkpoint_generation=generation, checkpoint_step=step)
    assert fmt.load(fmt.BaseRecord, "base", fmt.dump(record)).id == expected


# -------------------------------------------------------------------------------------------------- the document


RECORDS = (
    fmt.Chunk,
    fmt.ShardTensor,
    fmt.TensorRecord,
    fmt.ShardRecord,
    fmt.Gate,
    fmt.Receipt,
    fmt.Index,
    fmt.AbandonedIndex,
    fmt.GenerationRecord,
    fmt.BaseRecord,
    fmt.EndRecord,
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_is_written_down(record: type[BaseModel]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in record.model_fields if f"`{name}`" not in text] == []


def test_what_is_written_down_is_true() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"version {fmt.FORMAT_VERSION}" in text.splitlines()[0]
    checkpoint = CheckpointId(generation=6, step=1200)
    for key in (fmt.generation_key(6), fmt.base_key(6), fmt.end_key(6), f"checkpoints/{checkpoint}/"):
        assert key in text
    for key in (fmt.shard_key(checkpoint, 3, 8), fmt.receipt_key(checkpoint, 3, 8), fmt.index_key(checkpoint)):
        assert key.rpartition("/")[2] in text
    dtypes = text.partition("Dtypes: ")[2].partition(".")[0].replace("\n", " ")
    assert set(dtypes.split(", ")) == set(fmt.DTYPE_BYTES)
    assert f"more than {DEPTH_MAX} deep" in text
    assert f"above {INT_BITS_MAX} bits" in text

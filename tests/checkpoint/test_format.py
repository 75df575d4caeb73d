"""The records on the store: canonical bytes, strict reading, and what an index must say to be believed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import crc32c
import pytest
from pydantic import BaseModel

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.chunks import Chunk, Series, parse_series
from orchestrator.checkpoint.indexing import object_digests
from orchestrator.checkpoint.save import METADATA_KEY, shard_table
from orchestrator.checkpoint.values import DEPTH_MAX, INT_BITS_MAX
from orchestrator.core.messages import CheckpointId, Outcome
from orchestrator.errors import DigestError, FormatError, VersionError
from tests.checkpoint.receipts import index_of, two

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
EXAMPLE = CheckpointId(generation=1, step=20)
"""Of which the document shows everything."""
KEY = "checkpoints/g00000001-s0000000002/index.json"


def index_bytes() -> bytes:
    """The index of two ranks."""
    return index_of(two())


def resealed(data: bytes, change: Any) -> bytes:
    """The index after an edit by someone who knows the digest's rule."""
    fields = json.loads(data)
    del fields["digest"]
    change(fields)
    body = fmt.canonical_json(fields)[1:]
    return fmt.seal([body]) + body


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


# --------------------------------------------------------------------------------------------- index reading


def test_an_index_is_read_back() -> None:
    index = fmt.load_index(KEY, index_bytes())
    assert isinstance(index, fmt.Index)
    assert index.id == CheckpointId(generation=1, step=2)
    assert (index.world_size, index.absent, [shard.rank for shard in index.shards]) == (2, (), [0, 1])
    assert index.chunks("t") == [Chunk(0, 0, 4, 4096, 4112), Chunk(1, 4, 8, 4096, 4112)]
    with pytest.raises(KeyError):
        index.chunks("u")


def test_an_index_is_json_in_its_canonical_form_after_its_digest() -> None:
    data = index_bytes()
    fields = json.loads(data)
    assert list(fields) == ["digest", *sorted(set(fields) - {"digest"})]
    assert resealed(data, lambda same: None) == data
    assert fields["digest"] == f"{crc32c.crc32c(data[data.index(b',') + 1 :]):08x}"


def test_an_abandoned_index_is_read_back() -> None:
    record = fmt.AbandonedIndex(version=1, generation=1, step=2, reason="because")
    assert fmt.load_index(KEY, fmt.dump(record)) == record


def test_every_truncation_is_found_out() -> None:
    """F22, F6: half an index is none."""
    data = index_bytes()
    for length in range(0, len(data), 7):
        with pytest.raises(FormatError):
            fmt.load_index(KEY, data[:length])


def test_every_edit_is_found_out(seed: int) -> None:
    """F35: digests are inside the index, and cover it."""
    draw = random.Random(seed)
    data = index_bytes()
    for _ in range(300):
        position = draw.randrange(len(data))
        edited = bytearray(data)
        edited[position] ^= 1 << draw.randrange(8)
        with pytest.raises(FormatError):
            fmt.load_index(KEY, bytes(edited))


def test_a_changed_field_is_found_out_by_its_digest() -> None:
    data = index_bytes().replace(b'"step":2', b'"step":3', 1)
    with pytest.raises(DigestError, match="own digest"):
        fmt.load_index(KEY, data)


@pytest.mark.parametrize("version", [0, 2, 99, None, "1", 1.5, [1]])
def test_a_version_that_is_not_known_is_named(version: Any) -> None:
    with pytest.raises(VersionError, match="newer release") as caught:
        fmt.load_index(KEY, resealed(index_bytes(), lambda fields: fields.update(version=version)))
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
    with pytest.raises(FormatError):
        fmt.load_receipt(KEY, data, fmt.Receipt)


def tensor(**values: Any) -> Any:
    """A change of the one tensor's entry."""
    return lambda fields: fields["tensors"]["t"].update(values)


def shard(place: int, **values: Any) -> Any:
    """A change of one shard's entry."""
    return lambda fields: fields["shards"][place].update(values)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (tensor(shape=[1 << 40]), "its tensors take 4398046511104 bytes, its shards hold 32"),
        (tensor(shape=[1 << 61, 1 << 61, 1 << 61]), "t: no tensor is so large"),
        (tensor(shape=[0, 1 << 61, 1 << 61]), "t: no tensor is so large"),
        (tensor(shape=[1 << 62]), "less than or equal to"),
        (tensor(shape=[-8]), "greater than or equal to 0"),
        (tensor(dtype="F64"), "its tensors take 64 bytes"),
        (tensor(dtype="F4"), "dtype 'F4' is unknown"),
        (tensor(boxes=[]), "not permitted"),
        (lambda fields: fields["tensors"].update(u={"dtype": "F32", "shape": [8], "series": "0*2:0+4@0"}), "take 64 b"),
        (lambda fields: fields["tensors"].clear(), "its tensors take 0 bytes"),
        (lambda fields: fields["shards"].pop(), "its shards hold 16"),
        (lambda fields: fields["shards"].clear(), "its shards are of ranks"),
        (lambda fields: fields["shards"].append(fields["shards"][0]), "its shards are of ranks"),
        (lambda fields: fields["shards"].reverse(), "its shards are of ranks"),
        (shard(1, rank=7), "its shards are of ranks"),
        (shard(1, size_bytes=4100), "its shards hold 20"),
        (shard(1, header_bytes=4200), "header is larger than the shard"),
        (shard(1, receipt_crc32c=-1), "greater than or equal to 0"),
        (lambda fields: fields.update(more=1), "not permitted"),
        (lambda fields: fields.pop("rank_objects"), "rank_objects"),
        (lambda fields: fields.update(step="2"), "step"),
        (lambda fields: fields.update(world_size=1 << 40), "world_size"),
        (lambda fields: fields.update(world_size=1), "its shards are of ranks"),
    ],
)
def test_an_index_that_does_not_fit_together_is_refused(change: Any, word: str) -> None:
    """Readers allocate by an index: one whose sizes are not those of its shards is none."""
    with pytest.raises(FormatError, match=word):
        fmt.load_index(KEY, resealed(index_bytes(), change))


@pytest.mark.parametrize(
    ("series", "word"),
    [
        ("", "is not of the form"),
        ("0*2:0+4", "is not of the form"),
        ("0*2:0+4@0 ", "is not of the form"),
        ("0*2:0+4@-4", "is not of the form"),
        ("00*2:0+4@0", "is not of the form"),
        ("0*2:0+4@0\n", "is not of the form"),
        ("\u0660*2:0+4@0", "is not of the form"),
        ("0*2:0+" + "9" * 30 + "@0", "is not of the form"),
        ("0*1:0+4@0", "elements 4 to 8 of 8 are missing"),
        ("1*1:4+4@0", "elements 0 to 4 of 8 are missing"),
        ("0*1:0+3@0 1*1:4+4@0", "elements 3 to 4 of 8 are missing"),
        ("0*1:0+4@0 1*1:3+4@0", "elements 3 to 4 are written twice"),
        ("0*2:0+4@0 0*2:0+4@0", "elements 0 to 8 are written twice"),
        ("0*2:0+5@0", "ends at element 10 of 8"),
        ("0*2:4+4@0", "ends at element 12 of 8"),
        ("0*9223372036854775807:0+0@0", "has an empty chunk"),
        ("0*4:0+2@0", "4 ranks are said"),
        ("1*2:0+4@0", "outside the shard of rank 2"),
        ("0*2:0+4@4", "outside the shard of rank 0"),
        ("0*2:0+4@9223372036854775807", "outside the shard of rank 0"),
        ("0*1:0+8@0", "outside the shard of rank 0"),
        ("0*1x2:0+4~4@0", "elements 0 to 4 are written twice"),
        ("0*2x0:0+4~4~4@0", "a series of 2 × 0 ranks"),
        ("0*0:0+4@0", "a series of 0 × 1 ranks"),
        ("0*2x2/1:0+2~2~4@0", "a series of 2 × 2 ranks, every 1"),
        ("0*1x2/9:0+4~4~4@0", "outside the shard of rank 9"),
        ("0*1x9/1:0+1~1~1@0", "ends at element 9 of 8"),
        ("0*1x8:0+1~1~1@0", "8 ranks are said"),
        ("0*2:0+4~5@0", "ends at element 9 of 8"),
        ("0*2:0+4~3@0", "elements 3 to 4 are written twice"),
        ("0*2:0+4~4@0#", "is not of the form"),
        ("0*2:0+4~4@0#4", "has a box of 0 dimensions"),
        ("0*2:0+4~4@0#4,", "is not of the form"),
        ("0*2:0+4~4@0#4,1", "ends at element 5 of a box"),
        ("0*2:0+4~3@0#4,0", "no grid: places 4 and 3 of 8"),
        ("0*1:0+4@0 1*1:4+4@0#4,0", "rank 1 has a box of it"),
        ("0*1:0+4@0#4,0 1*1:5+4@0#4,0", "lies outside its shape"),
    ],
)
def test_chunks_that_do_not_fit_are_refused_where_they_are_asked_for(series: str, word: str) -> None:
    """Readers fill by the chunks: ones that would leave holes, or make them read elsewhere, are none."""
    index = fmt.load_index(KEY, resealed(index_bytes(), tensor(series=series)))
    assert isinstance(index, fmt.Index)
    with pytest.raises(FormatError, match=word) as caught:
        index.chunks("t")
    assert str(caught.value).startswith(f"{KEY}: t: ")


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
    fmt.ShardTable,
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
    for key in (fmt.generation_key(1), fmt.base_key(1), fmt.end_key(1), f"checkpoints/{EXAMPLE}/"):
        assert f"`{key}`" in text
    for key in (fmt.shard_key(EXAMPLE, 1, 2), fmt.receipt_key(EXAMPLE, 1, 2), fmt.index_key(EXAMPLE)):
        assert f"`{key.rpartition('/')[2]}`" in text
    dtypes = text.partition("Dtypes: ")[2].partition(".")[0].replace("\n", " ")
    assert set(dtypes.split(", ")) == set(fmt.DTYPE_BYTES)
    assert f"more than {DEPTH_MAX} deep" in text
    assert f"above {INT_BITS_MAX} bits" in text


def test_it_says_what_is_there_then_how_it_is_written_read_and_deleted() -> None:
    headings = re.findall(r"^## (.+)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [
        "Words",
        "Keys",
        "Shard",
        "Index",
        "Receipt",
        "Claims, bases, ends",
        "Write order",
        "Read order",
        "Delete order",
        "What is trusted, and what not",
        "Version log",
    ]


def block(beginning: str) -> str:
    """The block on the page that begins so."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (found,) = [one for one in text.split("```") if one.startswith(f"\n{beginning}")]
    return found


def example(beginning: str) -> bytes:
    """The example on the page that begins so; its line breaks are the page's."""
    return "".join(block(beginning).split("\n")).encode()


def example_index() -> fmt.Index:
    """The index on the page."""
    index = fmt.load_index(fmt.index_key(EXAMPLE), example('{"digest"'))
    assert isinstance(index, fmt.Index)
    return index


def test_the_example_of_an_index_is_one() -> None:
    index = example_index()
    assert index.id == EXAMPLE
    found = index.chunks("model.embed.weight")
    assert [(chunk.rank, chunk.start, chunk.stop) for chunk in found] == [(0, 0, 32000), (1, 32000, 64000)]
    assert {name for name in index.tensors if index.chunks(name)} == set(index.tensors)
    assert index.second_names == {"model.head.weight": "model.embed.weight"}


def test_the_example_of_a_receipt_is_the_one_that_the_index_names() -> None:
    data = example('{"absent"')
    receipt = fmt.load_receipt(fmt.receipt_key(EXAMPLE, 1, 2), data, fmt.Receipt)
    shard = example_index().by_rank[receipt.rank]
    assert (shard.receipt_bytes, shard.receipt_crc32c) == (len(data), crc32c.crc32c(data))
    assert fmt.dump(receipt) == data


def test_the_example_of_a_header_is_that_of_the_shard_of_the_receipt() -> None:
    header = fmt.parse_header(example('{"__metadata__"'))
    metadata = fmt.parse_header(example('{"parts"'))
    assert header["__metadata__"] == {METADATA_KEY: "…"}
    receipt = fmt.load_receipt("receipt", example('{"absent"'), fmt.Receipt)
    data_bytes = receipt.size_bytes - receipt.header_bytes
    assert shard_table("shard", header, metadata["parts"], data_bytes) == receipt.tensors
    assert metadata["gate"] == receipt.gate.model_dump()
    assert object_digests("shard", metadata["values"]["objects"]) == receipt.objects
    assert metadata["values"] == example_index().values
    assert set(metadata) == {"parts", "values", "rank_values", "gate"}


def test_the_example_of_a_folder_has_the_sizes_that_the_index_says() -> None:
    _, _, listing = block("small\n").partition(str(EXAMPLE))
    sizes = {name: int(size) for size, name in re.findall(r"\[ *(\d+)\]  (\S+)", listing)}
    index = example_index()
    expected = {"index.json": len(example('{"digest"'))}
    for shard in index.shards:
        for key, size_bytes in (
            (fmt.shard_key(EXAMPLE, shard.rank, 2), shard.size_bytes),
            (fmt.receipt_key(EXAMPLE, shard.rank, 2), shard.receipt_bytes),
        ):
            expected[key.rpartition("/")[2]] = size_bytes
    assert {name: sizes[name] for name in expected} == expected


def test_the_examples_of_series_are_what_would_be_written() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    found = [one for written in re.findall(r"`([0-9*x/:+~@#, ]+@[0-9#, ]+)`", text) for one in written.split(" ")]
    assert len(found) == 6
    for written in found:
        (series,) = parse_series(written)
        assert series.text() == written
    unsaid = next(parse_series("4*3x2:5+7@0"))  # nobody writes it so, but that is what it would mean
    assert unsaid == Series(rank=4, ranks=3, start=5, length=7, offset=0, step=7, repeats=2, every=3, jump=0)


def random_json(draw: random.Random, depth: int = 0) -> tuple[str, bool]:
    """JSON text, written in odd ways, and whether a key is there twice in it."""
    quoted = json.dumps("".join(draw.choice('ab":\\ {}é\n') for _ in range(draw.randrange(4))))
    if depth == 3 or draw.random() < 0.3:
        return draw.choice([quoted, "1", "null", "[]", "{}"]), False
    parts = [random_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    space = draw.choice(["", "", "", " ", "\n\t"])
    if draw.random() < 0.3:
        return "[" + ",".join(text for text, _ in parts) + "]", any(twice for _, twice in parts)
    keys = [draw.choice([quoted, json.dumps(draw.choice("abcdef")), r'"\\"', r'"\":"']) for _ in parts]
    members = [f"{key}{space}:{text}" for key, (text, _) in zip(keys, parts, strict=True)]
    twice = len({json.loads(key) for key in keys}) < len(keys)
    return "{" + ",".join(members) + "}", twice or any(inner for _, inner in parts)


def test_a_key_that_is_there_twice_is_always_found(seed: int) -> None:
    """Also where counting is not enough: keys with quotes or backslashes, spaces before colons, JSON within strings."""
    draw = random.Random(seed)
    found = set()
    for _ in range(3000):
        text, twice = random_json(draw)
        if draw.random() < 0.3:
            text = json.dumps({"inside": text})
            twice = False
        found.add(twice)
        if twice:
            with pytest.raises(ValueError, match="twice"):
                fmt.parse_header(text.encode())
        else:
            assert fmt.parse_header(text.encode()) == json.loads(text)
    assert found == {True, False}

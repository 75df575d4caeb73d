"""Files made by hand to mislead a reader: whoever reads them names what is wrong, and takes no memory by what they say.

Every kind goes through all doors: commit, `checkpoints list | show | verify`, `open_checkpoint`, and restoring. Digests
are right unless they are the point: whoever may write to the store can compute them.
"""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint import reader
from orchestrator.checkpoint.digest import block_digests, combine
from orchestrator.checkpoint.layout import Scope
from orchestrator.checkpoint.opened import open_in
from orchestrator.checkpoint.reader import read_committed, read_rank_state
from orchestrator.checkpoint.restore import read_tensors
from orchestrator.checkpoint.save import METADATA_KEY, commit, read_index
from orchestrator.errors import DigestError, FormatError, NotFoundError, OrchestratorError, StoreError
from orchestrator.storage.filesystem import FolderStore
from tests.checkpoint.shards import GATE, checkpoint_id, place, stage, upload, upload_all
from tests.checkpoint.stores import CountingStore, replace
from tests.checkpoint.test_format import resealed
from tests.cli.conftest import Command

RANKS = 2  # each has half of w; the first one has all of u, too
TENSORS = {"u": torch.arange(12, dtype=torch.uint8), "w": torch.arange(8.0)}
CHECKPOINT = checkpoint_id()
NAME = str(CHECKPOINT)
INDEX = fmt.index_key(CHECKPOINT)
SHARD = fmt.shard_key(CHECKPOINT, RANKS - 1, RANKS)
RECEIPT = fmt.receipt_key(CHECKPOINT, RANKS - 1, RANKS)
SHARD_NAME, RECEIPT_NAME = SHARD.rpartition("/")[2], RECEIPT.rpartition("/")[2]
FOLDER = fmt.folder_key(CHECKPOINT)
MEMORY_BYTES_MAX = 16 << 20
"""A reader's buffers take some; what the files ask for is far more."""


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """Both shards and receipts of a checkpoint that is still undecided."""
    found = FolderStore(tmp_path / "job")
    upload_all(found, tmp_path, TENSORS, world_size=RANKS, scopes={"u": Scope.FIRST})
    return found


@pytest.fixture
def committed(store: FolderStore) -> FolderStore:
    """The same, committed."""
    assert commit(store, CHECKPOINT)
    return store


@pytest.fixture(autouse=True)
def no_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the size that a file names is never asked for."""
    empty = torch.empty

    def checked(shape: Any, **options: Any) -> torch.Tensor:
        assert fmt.element_count(shape) <= 64, f"memory for {list(shape)} was asked for"
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", checked)


@contextmanager
def refused(kind: type[OrchestratorError], key: str, word: str) -> Iterator[None]:
    """What is done raises that error, which names the file and what is wrong; little memory is taken until then."""
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=word) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES_MAX
    finally:
        tracemalloc.stop()
    assert key in str(caught.value)


def restoring(store: FolderStore) -> None:
    """As a restarted worker reads: the index, its own shard's header, then the tensors."""
    index = read_committed(store, CHECKPOINT)
    read_rank_state(store, index, index.by_rank[RANKS - 1])
    read_tensors(store, index, {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()})


def opening(store: FolderStore) -> None:
    """As a person reads tensors."""
    opened = open_in(store, NAME)
    for name in opened.names:
        opened.tensor(name)


def standing(command: Command, store: FolderStore) -> tuple[str, str]:
    """What `checkpoints list` says."""
    (row,) = json.loads(command("checkpoints", "list", store.url, "--json").stdout)
    return row["standing"], str(row["problem"])


def verdict(command: Command, store: FolderStore) -> str:
    """What `checkpoints verify` says of a checkpoint that is not whole."""
    result = command("checkpoints", "verify", store.url, NAME)
    assert result.exit_code == 1, result.stdout
    return str(result.stdout)


def test_nothing_is_wrong_with_what_is_changed_below(command: Command, committed: FolderStore) -> None:
    restoring(committed)
    opening(committed)
    assert standing(command, committed) == ("committed", "None")
    assert command("checkpoints", "verify", committed.url).exit_code == 0
    assert command("checkpoints", "show", committed.url, "--tensors").exit_code == 0


# ----------------------------------------------------------------------------------------- the header of a shard


def header_of(entries: str, metadata: str | None = None) -> bytes:
    """A header's text with these entries."""
    plain = {"parts": {}, "values": {}, "rank_values": {}, "gate": GATE}
    text = json.dumps(json.dumps(plain) if metadata is None else metadata)
    return f'{{"__metadata__":{{"{METADATA_KEY}":{text}}},{entries}}}'.encode()


def framed(text: bytes, length: int | None = None, data_bytes: int = 8) -> bytes:
    """A shard file with that header and so many bytes of tensors."""
    padded = text + b" " * (-(len(text) + 8) % 4096)
    return (len(padded) if length is None else length).to_bytes(8, "little") + padded + bytes(data_bytes)


def entry(name: str = "a", **changes: Any) -> str:
    """One entry: two numbers of 4 bytes, 8 in all."""
    return f"{json.dumps(name)}:" + json.dumps({"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes})


DEEP = "[" * 100_000
TOO_DEEP = "[" * 300 + "]" * 300
LISTED = '{"parts":{},"values":{"objects":[]},"rank_values":{},"gate":{}}'
UNREADABLE = {
    "length of 2**63": (framed(header_of(entry()), 1 << 63), "header of 9223372036854775808 bytes in a file of 4104"),
    "longer than the file": (framed(header_of(entry()), 4097), "header of 4097 bytes in a file of 4104"),
    "shorter than its text": (framed(header_of(entry()), 20), "header is not JSON"),
    "no length": (b"\x10\0\0", "shorter than a safetensors length word"),
    "no object": (framed(b"[]"), "header is not an object"),
    "not UTF-8": (framed(header_of(entry()).replace(b'"a"', b'"\xff"')), "header is not JSON"),
    "UTF-16": (framed(header_of(entry()).decode().encode("utf-16")), "header is not JSON"),
    "half a character": (framed(header_of(entry()).replace(b'"a"', b'"\\ud800"')), "header is not JSON"),
    "deep": (framed(header_of(f'"a":{DEEP}')), "header is not JSON.*recursion"),
    "deep metadata": (framed(header_of(entry(), '{"parts":' + DEEP)), "recursion"),
    "deep values": (framed(header_of(entry(), f'{{"parts":{TOO_DEEP}}}')), "recursion"),
    "a name twice": (framed(header_of(f"{entry()},{entry(dtype='U8', shape=[8])}")), "has the key 'a' twice"),
    "a field twice": (framed(header_of('"a":{"dtype":"U8","dtype":"F32"}')), "has the key 'dtype' twice"),
    "a value twice": (framed(header_of(entry(), '{"parts":{},"parts":{}}')), "has the key 'parts' twice"),
    "no metadata": (framed(b"{" + entry().encode() + b"}"), "not a shard of this project: '__metadata__'"),
    "no objects": (framed(header_of(entry(), LISTED)), "its metadata is of another form"),
}
"""Headers that nobody can read."""
MISPLACED = {
    "unknown dtype": (framed(header_of(entry(dtype="F4"))), "a: 'F4'"),
    "no dtype": (framed(header_of(entry(dtype=[]))), "a: "),
    "wider dtype": (framed(header_of(entry(dtype="F64"))), "a is not where its shape puts it"),
    "narrower dtype": (framed(header_of(entry(dtype="U8"))), "a is not where its shape puts it"),
    "overlapping": (framed(header_of(f"{entry()},{entry('b', data_offsets=[4, 12])}"), None, 12), "b is not where"),
    "with a hole": (framed(header_of(entry(data_offsets=[4, 12])), None, 12), "a is not where its shape puts it"),
    "beyond the file": (framed(header_of(entry(shape=[1 << 60], data_offsets=[0, 1 << 62]))), "bytes of tensors in 8"),
    "far too large": (framed(header_of(entry(shape=[1 << 58], data_offsets=[0, 1 << 60]))), "bytes of tensors in 8"),
    "backwards": (framed(header_of(entry(data_offsets=[8, 0]))), "a is not where its shape puts it"),
    "negative": (framed(header_of(entry(data_offsets=[-8, 0]))), "a is not where its shape puts it"),
    "offsets of text": (framed(header_of(entry(data_offsets=["0", "8"]))), "a: unsupported operand"),
    "a shape of text": (framed(header_of(entry(shape=["x", 1 << 40]))), "a: .* is no shape"),
    "a shape of lists": (framed(header_of(entry(shape=[[1], 1 << 40]))), "a: .* is no shape"),
    "a shape that is none": (framed(header_of(entry(shape=[1 << 61, 1 << 61]))), "a: no tensor is so large"),
    "an empty one that is none": (framed(header_of(entry(shape=[0, 1 << 61, 1 << 61]))), "a: no tensor is so large"),
}
"""Headers whose tensors cannot be where they say."""
HEADERS = UNREADABLE | MISPLACED


@pytest.mark.parametrize("kind", HEADERS)
def test_a_shard_with_such_a_header_gets_no_receipt(store: FolderStore, tmp_path: Path, kind: str) -> None:
    data, word = HEADERS[kind]
    target = FolderStore(tmp_path / "other")
    with refused(FormatError, SHARD, word):
        upload(target, place(RANKS - 1, RANKS), data)
    assert not any(entry.key.endswith(".json") for entry in target.entries(""))


def forge(store: FolderStore, shard: bytes) -> None:
    """Another shard under a receipt that is right about its size and digests; committed."""
    honest = fmt.load_receipt(RECEIPT, store.read(RECEIPT), fmt.Receipt)
    digests = block_digests(memoryview(shard))
    fields = {"crc32c": combine(digests, len(shard)), "blocks": fmt.pack_blocks(digests)}
    replace(store, SHARD, shard)
    replace(store, RECEIPT, fmt.dump(honest.model_copy(update=fields)))
    assert commit(store, CHECKPOINT)


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_of_that_kind_in_a_committed_checkpoint_is_found(
    command: Command, store: FolderStore, kind: str
) -> None:
    """Tensors are read by the index; other readers of safetensors go by the header, and must not be misled."""
    text = HEADERS[kind][0]
    honest = store.read(SHARD)
    shard = (text + bytes(len(honest)))[: len(honest)] if len(text) <= len(honest) else honest[:8] + b"[" * 10_000
    forge(store, (shard + bytes(len(honest)))[: len(honest)])
    if kind in UNREADABLE:  # a rank's own state is in there
        with refused(FormatError, SHARD, "is not a shard of this project"):
            restoring(store)
    assert re.search(rf"{SHARD_NAME} DAMAGED: (is not a shard of this project|a: no tensor)", verdict(command, store))


def renamed(entries: Any) -> None:
    """Another tensor's name."""
    entries["v"] = entries.pop("w")
    metadata = json.loads(entries["__metadata__"][METADATA_KEY])
    metadata["parts"]["v"] = metadata["parts"].pop("w")
    entries["__metadata__"][METADATA_KEY] = json.dumps(metadata)


def exchanged(entries: Any) -> None:
    """Another dtype of the same width."""
    entries["w"]["dtype"] = "I32"


def moved(entries: Any) -> None:
    """Another place in the tensor."""
    metadata = json.loads(entries["__metadata__"][METADATA_KEY])
    metadata["parts"]["w"]["start"] = 0
    entries["__metadata__"][METADATA_KEY] = json.dumps(metadata)


@pytest.mark.parametrize("change", [renamed, exchanged, moved])
def test_a_header_that_contradicts_its_receipt_is_found(
    command: Command, store: FolderStore, change: Callable[[Any], None]
) -> None:
    shard = store.read(SHARD)
    length = int.from_bytes(shard[:8], "little")
    entries = json.loads(shard[8 : 8 + length])
    change(entries)
    forge(store, shard[:8] + json.dumps(entries).encode().ljust(length) + shard[8 + length :])
    assert "DAMAGED: its header and its receipt say different things" in verdict(command, store)


@pytest.mark.parametrize("position", [0, 7, 8, 4000, -1])
def test_a_byte_of_a_shard_that_was_changed_later_is_found(
    command: Command, committed: FolderStore, position: int
) -> None:
    data = bytearray(committed.read(SHARD))
    data[position] ^= 0x80
    replace(committed, SHARD, bytes(data))
    for door in (restoring, opening):
        with refused(DigestError, SHARD, "block 0 "):
            door(committed)
    assert "DAMAGED: block 0 " in verdict(command, committed)


# ------------------------------------------------------------------------------------------------------ receipts


def changed_receipt(**fields: Any) -> Callable[[bytes], bytes]:
    """The receipt with other values of some fields, or of columns of its table."""

    def change(data: bytes) -> bytes:
        record = json.loads(data)
        for name, value in fields.items():
            (record["tensors"] if name in fmt.TABLE_COLUMNS else record)[name] = value
        return fmt.canonical_json(record)

    return change


def twice(data: bytes) -> bytes:
    """Two rows for one tensor, each half as long."""
    columns = {name: column * 2 for name, column in json.loads(data)["tensors"].items()}
    return changed_receipt(**(columns | {"lengths": [2, 2]}))(data)


RECEIPTS: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "cut": (lambda data: data[:-1], RECEIPT, "truncated or edited"),
    "empty": (lambda data: b"", RECEIPT, "truncated or edited"),
    "not UTF-8": (lambda data: data.replace(b'"job":"job"', b'"job":"j\xffb"'), RECEIPT, "not JSON|not a valid"),
    "UTF-16": (lambda data: data.decode().encode("utf-16"), RECEIPT, "not a valid Receipt"),
    "deep": (lambda data: data[:-1] + b',"x":' + DEEP.encode(), RECEIPT, "truncated or edited"),
    "deep values": (changed_receipt(values=json.loads(TOO_DEEP)), RECEIPT, "recursion"),
    "another version": (changed_receipt(version=2), RECEIPT, "format version 2"),
    "another rank": (changed_receipt(rank=0), RECEIPT, "is the receipt of rank 0 of 2"),
    "an absurd world": (changed_receipt(world_size=1 << 40), RECEIPT, "world_size"),
    "unknown dtype": (changed_receipt(dtypes=["F4"]), RECEIPT, "its dtype 'F4' is unknown"),
    "wider dtype": (changed_receipt(dtypes=["F64"]), RECEIPT, "its tensors take"),
    "2**60 elements here": (changed_receipt(lengths=[1 << 60]), RECEIPT, "its tensors take 4611686018427387904"),
    "2**60 elements": (changed_receipt(shapes=[[1 << 60]]), INDEX, "w: the ranks disagree"),
    "a negative length": (changed_receipt(lengths=[-4]), RECEIPT, "lengths"),
    "beyond its tensor": (changed_receipt(starts=[6]), INDEX, "w: a chunk ends at element 10 of 8"),
    "of elements of another": (changed_receipt(starts=[2]), INDEX, "w: elements 2 to 4 are written twice"),
    "a name twice": (twice, RECEIPT, "names a tensor twice"),
    "short columns": (changed_receipt(names=[]), RECEIPT, "the columns of its table"),
    "too few digests": (changed_receipt(blocks=""), RECEIPT, "has 0 block digests"),
    "too many digests": (changed_receipt(blocks=fmt.pack_blocks([1, 2])), RECEIPT, "has 2 block digests"),
    "digests of another kind": (changed_receipt(blocks="?"), RECEIPT, "not base64"),
}


@pytest.mark.parametrize("kind", RECEIPTS)
def test_such_a_receipt_makes_no_index(command: Command, store: FolderStore, kind: str) -> None:
    change, key, word = RECEIPTS[kind]
    replace(store, RECEIPT, change(store.read(RECEIPT)))
    with refused(FormatError, key, word):
        commit(store, CHECKPOINT)
    assert read_index(store, CHECKPOINT) is None
    with refused(NotFoundError, NAME, "is no committed checkpoint, it is undecided"):
        opening(store)
    assert standing(command, store)[0] == "undecided"
    assert "not verified, it is undecided" in verdict(command, store)


@pytest.mark.parametrize("kind", RECEIPTS)
def test_such_a_receipt_after_the_commit_is_not_the_one_that_was_committed(
    command: Command, committed: FolderStore, kind: str
) -> None:
    replace(committed, RECEIPT, RECEIPTS[kind][0](committed.read(RECEIPT)))
    with refused(DigestError, RECEIPT, "is not the receipt that was committed"):
        restoring(committed)
    found, problem = standing(command, committed)
    if found == "damaged":  # seen by its size alone
        assert RECEIPT_NAME in problem
    with refused(OrchestratorError, RECEIPT_NAME, "the index says|is not the receipt"):
        opening(committed)
    assert RECEIPT_NAME in verdict(command, committed)


@pytest.mark.parametrize("key", [SHARD, RECEIPT])
def test_the_last_shard_or_its_receipt_is_missing(command: Command, store: FolderStore, key: str) -> None:
    data = store.read(key)
    store.delete(key)
    with refused(StoreError, FOLDER, r"ranks \[1\] are missing|has 0 bytes, its receipt says"):
        commit(store, CHECKPOINT)
    store.create(key, [data])
    assert commit(store, CHECKPOINT)
    store.delete(key)
    with refused(NotFoundError, key, "no such object"):
        restoring(store)
    name = key.rpartition("/")[2]
    with refused(NotFoundError, name, "it is damaged: .* is missing"):
        opening(store)
    assert standing(command, store) == ("damaged", f"{name} is missing, the index says {len(data)} bytes")
    assert "is missing" in verdict(command, store)


@pytest.mark.parametrize("with_receipt", [False, True])
def test_a_stale_shard_of_another_world_size_disturbs_nobody(
    command: Command, store: FolderStore, tmp_path: Path, with_receipt: bool
) -> None:
    """Of an undecided checkpoint a stale receipt stops the commit (test_save): it may be the other that is stale."""
    stale = fmt.shard_key(CHECKPOINT, 7, 8)
    store.create(stale, [stage(tmp_path, TENSORS, place(7, 8), {"u": Scope.FIRST})])
    assert commit(store, CHECKPOINT)
    if with_receipt:
        store.create(fmt.receipt_key(CHECKPOINT, 7, 8), [b"{}"])
    counting = CountingStore(store)
    index = read_committed(counting, CHECKPOINT)
    assert set(index.by_rank) == {0, 1}
    targets = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_tensors(counting, index, targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in TENSORS.items())
    assert not [key for key, _, _ in counting.reads if "-of-00008" in key]
    opening(store)
    assert standing(command, store) == ("committed", "None")
    verified = command("checkpoints", "verify", store.url, NAME)
    assert verified.exit_code == 0
    assert "of-00008" not in verified.stdout


# --------------------------------------------------------------------------------------------------------- index


def tensor(name: str, **values: Any) -> Callable[[Any], None]:
    """A change of a tensor's entry."""
    return lambda fields: fields["tensors"][name].update(values)


INDEXES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: data[:-1], "truncated"),
    "empty": (lambda data: b"", "truncated"),
    "edited": (lambda data: data.replace(b'"step":2', b'"step":3'), "its content does not match its own digest"),
    "digest edited": (lambda data: data[:11] + b"00000000" + data[19:], "its content does not match its own digest"),
    "not UTF-8": (lambda data: data.replace(b'"job":"job"', b'"job":"j\xffb"'), "is not JSON"),
    "UTF-16": (lambda data: data.decode().encode("utf-16"), "does not match its own digest"),
    "deep": (lambda data: b'{"version":1,"values":' + DEEP.encode(), "is not JSON"),
    "deep, sealed": (
        lambda data: resealed(data, lambda f: f.update(values=json.loads(TOO_DEEP))),
        "recurs",
    ),
    "2**60 elements": (lambda data: resealed(data, tensor("w", shape=[1 << 60])), "tensors take 4611686018427387916 b"),
    "2**183 elements": (lambda data: resealed(data, tensor("w", shape=[1 << 61] * 3)), "w: no tensor is so large"),
    "none of 2**122": (
        lambda data: resealed(data, tensor("w", shape=[0, 1 << 61, 1 << 61])),
        "w: no tensor is so large",
    ),
    "too many dimensions": (lambda data: resealed(data, tensor("w", shape=[1 << 61] * 10**4)), "w: no tensor is so l"),
    "wider dtype": (lambda data: resealed(data, tensor("w", dtype="F64")), "its tensors take 76 bytes"),
    "unknown dtype": (lambda data: resealed(data, tensor("w", dtype="F4")), "w: its dtype 'F4' is unknown"),
    "a shard less": (lambda data: resealed(data, lambda fields: fields["shards"].pop()), "its shards hold 28"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_such_an_index_is_refused_through_every_door(command: Command, committed: FolderStore, kind: str) -> None:
    change, word = INDEXES[kind]
    replace(committed, INDEX, change(committed.read(INDEX)))
    for door in (restoring, lambda store: commit(store, CHECKPOINT), lambda store: read_index(store, CHECKPOINT)):
        with refused(FormatError, INDEX, word):
            door(committed)
    with refused(NotFoundError, INDEX, f"is no committed checkpoint, it is damaged: .*({word})"):
        opening(committed)
    found, problem = standing(command, committed)
    assert found == "damaged"
    assert INDEX in problem
    assert f"DAMAGED: {INDEX}: " in verdict(command, committed)
    shown = command("checkpoints", "show", committed.url, NAME)
    assert "no: " in shown.stdout


def test_an_index_that_says_more_of_its_shards_than_is_there(command: Command, committed: FolderStore) -> None:
    """What is in it fits together; the listing is what it must be compared with before anybody allocates by it."""

    def change(fields: Any) -> None:
        fields["tensors"]["w"] |= {"shape": [1 << 58], "series": f"0*1:0+4@0 1*1:4+{(1 << 58) - 4}@0"}
        fields["shards"][1]["size_bytes"] += 4 * ((1 << 58) - 8)

    replace(committed, INDEX, resealed(committed.read(INDEX), change))
    with refused(NotFoundError, SHARD_NAME, "has 12304 bytes, the index says 11529215046068"):
        opening(committed)
    assert standing(command, committed)[0] == "damaged"
    assert SHARD_NAME in verdict(command, committed)
    with refused(FormatError, RECEIPT, "has other sizes than"):
        restoring(committed)


@pytest.mark.parametrize(
    ("series", "word"),
    [
        ("", "is not of the form"),
        ("0*2:0+4@0 ", "is not of the form"),
        ("0*2:0+4", "is not of the form"),
        ("0*2:0+4@0#", "is not of the form"),
        ("0*2:0+" + "9" * 40 + "@0", "is not of the form"),
        ("0*1:0+4@0", "elements 4 to 8 of 8 are missing"),
        ("1*1:4+4@0", "elements 0 to 4 of 8 are missing"),
        ("0*2:0+4@0 1*1:4+4@0", "elements 4 to 8 are written twice"),
        ("0*1:0+4@0 1*1:3+4@0", "elements 3 to 4 are written twice"),
        ("0*2:0+4@8", "outside the shard of rank 1"),
        ("1*2:0+4@0", "outside the shard of rank 2"),
        (f"0*{1 << 61}:0+0@0", "has an empty chunk"),
        (f"0*{1 << 40}:0+4~0@0", f"{1 << 40} ranks are said"),
        (f"0*1x{1 << 61}:0+4~0~0@0", f"{1 << 61} ranks are said"),
        ("0*2:0+4~4@0#4", "has a box of 0 dimensions"),
        (f"0*2:0+4~4@0#{1 << 60},0", "a box of .* lies outside its shape"),
        ("0*2:0+4~3@0#4,0", "no grid"),
    ],
)
def test_series_that_are_none_are_refused_through_every_door(
    command: Command, committed: FolderStore, series: str, word: str
) -> None:
    """`list` looks at sizes alone; everyone who would read a tensor by them, and `verify`, finds it out."""
    replace(committed, INDEX, resealed(committed.read(INDEX), tensor("w", series=series)))
    for door in (restoring, opening):
        with refused(FormatError, f"{INDEX}: w", word):
            door(committed)
    assert f"DAMAGED: {INDEX}: w: " in verdict(command, committed)
    for options in (["--tensors"], ["--tensor", "w"]):
        shown = command("checkpoints", "show", committed.url, NAME, *options)
        assert shown.exit_code == 1
        assert f"{INDEX}: w: " in shown.stderr


@pytest.mark.parametrize("what", ["receipt_bytes", "header_bytes"])
def test_more_than_any_file_of_its_kind_has_is_not_read(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A file with a hole of a terabyte costs whoever makes it nothing."""
    assert commit(store, CHECKPOINT)
    index = read_committed(store, CHECKPOINT)
    limit = index.shards[1].receipt_bytes - 1 if what == "receipt_bytes" else index.shards[1].header_bytes - 1
    monkeypatch.setattr(reader, "LARGE_BYTES_MAX", limit)
    counting = CountingStore(store)
    key = RECEIPT if what == "receipt_bytes" else SHARD
    with refused(FormatError, key, "no record of its kind is larger"):
        read_rank_state(counting, index, index.shards[1])
    assert key not in [read for read, _, _ in counting.reads]

"""`orchestrator checkpoints`: what is on the store, and every kind of damage in plain words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.opened import open_checkpoint
from orchestrator.checkpoint.save import abandon
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import NotFoundError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from tests.cli.conftest import Command
from tests.cli.small_job import OTHER_NAME, TENSOR, claim, path_of, save, upload
from tests.s3_servers import S3Servers

OLD, NEW = CheckpointId(generation=1, step=20), CheckpointId(generation=2, step=40)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Two committed checkpoints, an abandoned and an undecided one between them."""
    found = open_store(str(tmp_path / "jobs" / "small"))
    claim(found, 1)
    claim(found, 2)
    save(found, 1, 20)
    abandon(found, upload(found, 1, 30), "a test gave it up\x1b[31m")
    upload(found, 2, 35)
    save(found, 2, 40, world_size=3, elements=1_000_000)  # more than one block per shard
    return found


def index_path(store: ObjectStore, checkpoint: CheckpointId) -> Path:
    """The file of an index."""
    return path_of(store, fmt.index_key(checkpoint))


def shard_path(store: ObjectStore, checkpoint: CheckpointId, rank: int, world_size: int) -> Path:
    """The file of a shard."""
    return path_of(store, fmt.shard_key(checkpoint, rank, world_size))


# ------------------------------------------------------------------------------------------------ all is well


def test_list(command: Command, store: ObjectStore) -> None:
    result = command("checkpoints", "list", store.url)
    assert result.exit_code == 0
    rows = [line.split("│") for line in result.stdout.splitlines() if "g0000" in line]
    assert [(row[1].strip(), row[2].strip(), row[3].strip()) for row in rows] == [
        ("g00000002-s0000000040", "40", "committed"),
        ("g00000002-s0000000035", "35", "undecided"),
        ("g00000001-s0000000030", "30", "abandoned"),
        ("g00000001-s0000000020", "20", "committed"),
    ]
    assert "a test gave it up" in result.stdout
    assert "\x1b" not in result.stdout


def test_list_as_json(command: Command, store: ObjectStore) -> None:
    rows = json.loads(command("checkpoints", "list", str(Path(store.url).parent), "--job", "small", "--json").stdout)
    assert [(row["id"], row["usable"]) for row in rows] == [
        (str(NEW), True),
        ("g00000002-s0000000035", False),
        ("g00000001-s0000000030", False),
        (str(OLD), True),
    ]
    assert rows[0]["world_size"] == 3
    assert rows[0]["size_bytes"] > 4_000_000


def test_show_the_newest(command: Command, store: ObjectStore) -> None:
    result = command("checkpoints", "show", store.url, "--json")
    shown = json.loads(result.stdout)
    assert (shown["id"], shown["standing"], shown["element_count"], len(shown["shards"])) == (
        str(NEW),
        "committed",
        1_000_000,
        3,
    )
    assert "tensors" not in shown
    assert command("checkpoints", "show", store.url, "newest").stdout.startswith(f"checkpoint    {NEW}")


def test_show_one_with_its_tensors(command: Command, store: ObjectStore) -> None:
    shown = json.loads(command("checkpoints", "show", store.url, str(OLD), "--tensors", "--json").stdout)
    entry = {"dtype": "F32", "shape": [100], "size_bytes": 400, "shards": [0, 1], "chunks": 2}
    assert shown["tensors"] == {TENSOR: entry, OTHER_NAME: entry | {"same_as": TENSOR}}
    assert (shown["tensor_count"], shown["element_count"]) == (1, 100)
    table = command("checkpoints", "show", store.url, str(OLD), "--tensors").stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "F32" in line]
    assert rows == [[OTHER_NAME, "F32", "100", f"as {TENSOR}", "2"], [TENSOR, "F32", "100", "400 B", "2"]]


def test_show_where_one_tensor_is(command: Command, store: ObjectStore) -> None:
    """The bytes that it names are the elements that it says."""
    shown = json.loads(command("checkpoints", "show", store.url, "newest", "--tensor", TENSOR, "--json").stdout)
    assert (shown["checkpoint"], shown["name"], shown["dtype"], shown["shape"]) == (
        str(NEW),
        TENSOR,
        "F32",
        [1_000_000],
    )
    assert (shown["size_bytes"], shown["shards"]) == (4_000_000, [0, 1, 2])
    folder, position = index_path(store, NEW).parent, 0
    for place in shown["places"]:
        assert place["first_element"] == position
        assert (folder / place["file"]).stat().st_size == place["first_byte"] + place["size_bytes"]
        assert place["size_bytes"] == 4 * place["elements"]
        position += place["elements"]
    assert position == 1_000_000
    text = command("checkpoints", "show", store.url, "newest", "--tensor", TENSOR).stdout
    assert text.startswith(f"tensor      {TENSOR}")
    assert "shard-00002-of-00003.safetensors" in text
    assert "3.8 MiB" in text


def test_show_where_a_tied_tensor_is(command: Command, store: ObjectStore) -> None:
    """Under its second name, too; the bytes are those of the first."""
    both = [
        json.loads(command("checkpoints", "show", store.url, "newest", "--tensor", name, "--json").stdout)
        for name in (TENSOR, OTHER_NAME)
    ]
    assert both[1] == both[0] | {"name": OTHER_NAME, "same_as": TENSOR}
    text = command("checkpoints", "show", store.url, "newest", "--tensor", OTHER_NAME).stdout
    assert text.splitlines()[:2] == [f"tensor      {OTHER_NAME}", f"stored as   {TENSOR}"]


def test_show_a_tensor_that_is_not_there(command: Command, store: ObjectStore) -> None:
    result = command("checkpoints", "show", store.url, "newest", "--tensor", "model.wait")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: model.wait: {NEW} has no tensor of this name; --tensors shows all\n"
    result = command("checkpoints", "show", store.url, "g00000001-s0000000030", "--tensor", TENSOR)
    assert result.exit_code == 1
    assert "it is abandoned: there is no index that names tensors" in result.stderr


def test_show_says_that_an_abandoned_one_is_not_usable(command: Command, store: ObjectStore) -> None:
    result = command("checkpoints", "show", store.url, "g00000001-s0000000030")
    assert result.exit_code == 0
    assert "abandoned" in result.stdout
    assert "no: a test gave it up" in result.stdout


def test_verify(command: Command, store: ObjectStore) -> None:
    result = command("checkpoints", "verify", store.url)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{NEW} shard-0000{rank}-of-00003.safetensors ok, 1.3 MiB" for rank in range(3)
    ]
    assert "every digest matches" in result.stderr


def test_verify_all(command: Command, store: ObjectStore) -> None:
    result = command("checkpoints", "verify", store.url, "--all")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 3 + 1 + 1 + 2
    assert lines[3] == "g00000002-s0000000035 not verified, it is undecided"
    assert lines[4].startswith("g00000001-s0000000030 not verified, it is abandoned: a test gave it up")
    assert "2 checkpoints are whole" in result.stderr


def test_verify_one_that_is_not_committed(command: Command, store: ObjectStore) -> None:
    result = command("checkpoints", "verify", store.url, "g00000002-s0000000035")
    assert result.exit_code == 1
    assert result.stderr == "g00000002-s0000000035 is not committed\n"


# ---------------------------------------------------------------------------------------------------- damage


def truncate_shard(store: ObjectStore) -> None:
    """The end of a shard is gone."""
    path = shard_path(store, NEW, 1, 3)
    path.write_bytes(path.read_bytes()[:-1000])


def edit_shard(store: ObjectStore) -> None:
    """One bit of a shard's second block is another."""
    path = shard_path(store, NEW, 1, 3)
    data = bytearray(path.read_bytes())
    data[fmt.BLOCK_BYTES + 17] ^= 1
    path.write_bytes(data)


def lengthen_shard(store: ObjectStore) -> None:
    """A shard has more bytes than were committed."""
    with shard_path(store, NEW, 1, 3).open("ab") as file:
        file.write(b"more")


def remove_shard(store: ObjectStore) -> None:
    """A shard is gone."""
    shard_path(store, NEW, 1, 3).unlink()


def edit_receipt(store: ObjectStore) -> None:
    """A receipt with the same size, but not the one that was committed."""
    path = path_of(store, fmt.receipt_key(NEW, 1, 3))
    path.write_bytes(path.read_bytes().replace(b'"step":40', b'"step":41', 1))


def truncate_index(store: ObjectStore) -> None:
    """Half an index."""
    path = index_path(store, NEW)
    path.write_bytes(path.read_bytes()[:300])


def edit_index(store: ObjectStore) -> None:
    """An index that is valid JSON, but not the one that was written."""
    path = index_path(store, NEW)
    path.write_bytes(path.read_bytes().replace(b'"step":40', b'"step":41', 1))


DAMAGES = [
    (truncate_shard, "shard-00001-of-00003.safetensors DAMAGED: has", True),
    (edit_shard, "shard-00001-of-00003.safetensors DAMAGED: block 1 (bytes from 1048576) does not match", False),
    (lengthen_shard, "shard-00001-of-00003.safetensors DAMAGED: has", True),
    (remove_shard, "shard-00001-of-00003.safetensors DAMAGED: is missing", True),
    (edit_receipt, "shard-00001-of-00003.json: is not the receipt that was committed: truncated, edited", False),
    (truncate_index, f"{NEW} DAMAGED: checkpoints/{NEW}/index.json: is not JSON (300 bytes): truncated", True),
    (edit_index, f"{NEW} DAMAGED: checkpoints/{NEW}/index.json: its content does not match its own digest", True),
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [[], ["newest"], [str(NEW)], ["--all"]])
def test_damage(
    command: Command,
    store: ObjectStore,
    damage: tuple[Callable[[ObjectStore], None], str, bool],
    which: list[str],
) -> None:
    do_damage, says, seen_by_list = damage
    do_damage(store)
    result = command("checkpoints", "verify", store.url, *which)
    assert result.exit_code == 1
    assert says in result.stdout
    assert result.stdout.count("DAMAGED") == 1
    assert f"damaged: {NEW}" in result.stderr
    rows = json.loads(command("checkpoints", "list", store.url, "--json").stdout)
    assert rows[0]["standing"] == ("damaged" if seen_by_list else "committed")
    assert rows[0]["usable"] is not seen_by_list
    as_json = json.loads(command("checkpoints", "verify", store.url, *which, "--json").stdout)
    assert as_json[0]["ok"] is False


def test_the_newest_usable_one_is_shown_and_the_damaged_one_named(command: Command, store: ObjectStore) -> None:
    truncate_shard(store)
    result = command("checkpoints", "show", store.url)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"checkpoint    {OLD}")
    assert f"passed over, because it is damaged: {NEW}: shard-00001-of-00003" in result.stderr


def test_an_index_of_a_newer_release(command: Command, store: ObjectStore) -> None:
    """The read verbs still show the others; what was written by a newer release is named and never used."""
    path = index_path(store, NEW)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":99'))
    rows = json.loads(command("checkpoints", "list", store.url, "--json").stdout)
    assert (rows[0]["standing"], rows[0]["usable"]) == ("of a newer format", False)
    shown = command("checkpoints", "show", store.url)
    assert shown.stdout.startswith(f"checkpoint    {OLD}")
    assert f"passed over, because it is of a newer format: {NEW}" in shown.stderr
    verified = command("checkpoints", "verify", store.url)
    assert verified.exit_code == 1
    assert "is of format version 99; this release reads version 1: use a newer release" in verified.stdout


# -------------------------------------------------------------------------------------------- nothing there


@pytest.mark.parametrize("verb", ["list", "show", "verify"])
def test_a_folder_that_is_not_there(command: Command, tmp_path: Path, verb: str) -> None:
    result = command("checkpoints", verb, str(tmp_path / "nosuch"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {tmp_path}/nosuch: there is no such folder\n"
    assert not (tmp_path / "nosuch").exists()


@pytest.mark.parametrize("verb", ["list", "show", "verify"])
def test_a_job_without_checkpoints(command: Command, tmp_path: Path, verb: str) -> None:
    claim(open_store(str(tmp_path / "small")), 1)
    result = command("checkpoints", verb, str(tmp_path / "small"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "there is no" in result.stderr
    assert "checkpoint" in result.stderr


def test_a_folder_of_another_kind(command: Command, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    result = command("checkpoints", "list", str(tmp_path / "photos"))
    assert result.exit_code == 1
    assert "is not the folder of a job" in result.stderr


def test_the_folder_of_several_jobs(command: Command, store: ObjectStore) -> None:
    folder = Path(store.url).parent
    claim(open_store(str(folder / "other")), 1)
    result = command("checkpoints", "list", str(folder))
    assert result.exit_code == 2
    assert "give --job and one of: other, small" in result.stderr


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_ids(command: Command, store: ObjectStore, verb: str) -> None:
    unknown = command("checkpoints", verb, store.url, "g00000009-s0000000001")
    assert unknown.exit_code == 1
    assert "g00000009-s0000000001: there is no such checkpoint" in unknown.stderr
    nonsense = command("checkpoints", verb, store.url, "../../etc/passwd")
    assert nonsense.exit_code == 2
    assert f"for instance {NEW}" in nonsense.stderr


def test_a_checkpoint_and_all(command: Command, store: ObjectStore) -> None:
    assert command("checkpoints", "verify", store.url, str(NEW), "--all").exit_code == 2


def test_a_store_that_is_not_supported(command: Command) -> None:
    result = command("checkpoints", "list", "az://container/job")
    assert result.exit_code == 2
    assert "az:// is not supported" in result.stderr


def test_a_bucket(command: Command, s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_servers.shared("seaweedfs")
    for variable, value in server.variables().items():
        monkeypatch.setenv(variable, value)
    jobs = server.bucket().url
    bucket = open_store(f"{jobs}/small")
    claim(bucket, 1)
    save(bucket, 1, 20)
    listed = command("checkpoints", "list", jobs, "--job", "small")
    assert listed.exit_code == 0
    assert "g00000001-s0000000020" in listed.stdout
    assert command("checkpoints", "verify", f"{jobs}/small", "newest").exit_code == 0
    other = command("checkpoints", "list", jobs)
    assert other.exit_code == 2
    assert "give --job and one of: small" in other.stderr
    missing = command("checkpoints", "list", f"{jobs}/small/er")
    assert missing.exit_code == 1
    assert "is not the folder of a job" in missing.stderr


def test_a_bucket_whose_url_says_where_the_server_is(
    command: Command, s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_servers.shared("seaweedfs")
    for variable, value in server.variables().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    jobs, settings = server.bucket().url, f"?endpoint={server.url}"
    bucket = open_store(f"{jobs}/small{settings}")
    claim(bucket, 1)
    save(bucket, 1, 20)
    assert command("checkpoints", "list", f"{jobs}{settings}", "--job", "small").exit_code == 0
    assert command("checkpoints", "verify", f"{jobs}/small{settings}", "newest").exit_code == 0
    with pytest.raises(NotFoundError, match=re.escape(f"open '{jobs}/small{settings}'")):
        open_checkpoint(jobs + settings)
    missing = command("checkpoints", "list", f"{jobs}/small/er{settings}")
    assert missing.exit_code == 1
    assert "is not the folder of a job" in missing.stderr


# ------------------------------------------------------------------------------------------------- old ones go


@pytest.fixture
def grown(store: ObjectStore) -> ObjectStore:
    """The same with two more committed ones; generation 2 began with nothing."""
    save(store, 2, 50)
    save(store, 2, 60)
    base = fmt.BaseRecord(version=1, generation=2, checkpoint_generation=None, checkpoint_step=None)
    store.create(fmt.base_key(2), [fmt.dump(base)])
    return store


def test_prune_says_what_goes_and_why_without_doing_it(command: Command, grown: ObjectStore) -> None:
    before = list(grown.entries(""))
    result = command("checkpoints", "prune", grown.url, "--keep-last", "2", "--keep-every", "40", "--dry-run")
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in result.stdout.splitlines() if "g0000" in line]
    assert [(row[1], row[2], row[4]) for row in rows] == [
        ("g00000002-s0000000060", "keep", "one of the newest 2"),
        ("g00000002-s0000000050", "keep", "one of the newest 2"),
        ("g00000002-s0000000040", "keep", "the first of steps 40 to 79"),
        ("g00000001-s0000000020", "keep", "the first of steps 0 to 39"),
    ]
    assert result.stderr.endswith("0 of 4 checkpoints, 0 B, would be deleted\n")
    result = command("checkpoints", "prune", grown.url, "--keep-last", "2", "--dry-run")
    assert "2 of 4 checkpoints" in result.stderr
    assert list(grown.entries("")) == before


def test_prune(command: Command, grown: ObjectStore) -> None:
    result = command("checkpoints", "prune", grown.url, "--keep-last", "1", "--json")
    assert result.exit_code == 0
    assert {row["id"]: row["keep"] for row in json.loads(result.stdout)} == {
        "g00000002-s0000000060": True,
        "g00000002-s0000000050": False,
        "g00000002-s0000000040": False,
        "g00000001-s0000000020": False,
    }
    listed = json.loads(command("checkpoints", "list", grown.url, "--json").stdout)
    assert [(row["step"], row["standing"], row["size_bytes"] > 0) for row in listed] == [
        (60, "committed", True),
        (50, "retired", False),
        (40, "retired", False),
        (35, "undecided", True),
        (30, "abandoned", True),
        (20, "retired", False),
    ]
    assert command("checkpoints", "verify", grown.url).exit_code == 0
    assert "0 of 1 checkpoints" in command("checkpoints", "prune", grown.url, "--keep-last", "1").stderr


def test_prune_goes_on_where_one_was_killed(command: Command, grown: ObjectStore) -> None:
    marker = fmt.Marker(version=1, generation=1, step=20, by_generation=2, reason="older")
    grown.create(fmt.retired_key(OLD), [fmt.dump(marker)])
    assert command("checkpoints", "prune", grown.url, "--keep-last", "9").exit_code == 0
    assert [entry.key for entry in grown.entries(fmt.folder_key(OLD) + "/")] == [
        fmt.index_key(OLD),
        fmt.retired_key(OLD),
    ]


def test_prune_deletes_nothing_while_something_is_damaged(command: Command, grown: ObjectStore) -> None:
    shard_path(grown, NEW, 1, 3).unlink()
    before = list(grown.entries(""))
    result = command("checkpoints", "prune", grown.url, "--keep-last", "1")
    assert result.exit_code == 1
    assert f"nothing is deleted while something cannot be read: {NEW} is damaged" in result.stderr
    assert list(grown.entries("")) == before


def test_prune_has_to_know_how_many_to_keep(command: Command, grown: ObjectStore) -> None:
    assert command("checkpoints", "prune", grown.url).exit_code == 2
    assert command("checkpoints", "prune", grown.url, "--keep-last", "0").exit_code == 2


def test_a_folder_whose_name_is_too_long_is_not_there(command: Command, tmp_path: Path) -> None:
    result = command("checkpoints", "list", str(tmp_path / ("x" * 300)))
    assert result.exit_code == 1
    assert "there is no such folder" in result.stderr


def test_errors_send_a_terminal_no_control_characters(command: Command, tmp_path: Path) -> None:
    """Names of others' files stand in them."""
    (tmp_path / "a\x1b[31mz" / "generations").mkdir(parents=True)
    (tmp_path / "a\x1b[31mz" / "generations" / "1").touch()
    result = command("checkpoints", "list", str(tmp_path))
    assert "a\N{REPLACEMENT CHARACTER}[31mz" in result.stderr
    assert "\x1b" not in result.stderr

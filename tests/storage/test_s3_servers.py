"""The store in a bucket on real servers: uploads in parts, refusals, races between processes, a server that is killed.

What every store guarantees is tested in tests/contracts, on the same servers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreDeniedError, StoreError, StoreUnavailableError
from orchestrator.storage.opening import open_store
from orchestrator.storage.retrying import Patience, RetryingStore
from orchestrator.storage.s3 import bucket as bucket_module
from orchestrator.storage.s3 import parts as parts_module
from orchestrator.storage.s3.bucket import Bucket
from orchestrator.storage.s3.store import S3Store
from tests.s3_servers import BUCKET, READ_ONLY_KEY, READ_ONLY_SECRET, S3Server, S3Servers
from tests.storage.races import exactly_one_wins

PART_BYTES = 5 << 20
"""The least that S3 takes."""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", PART_BYTES)


@pytest.fixture(params=["seaweedfs", "localbucket"])
def server(request: pytest.FixtureRequest, s3_servers: S3Servers) -> S3Server:
    return s3_servers.shared(request.param)


@pytest.fixture
def seaweedfs(s3_servers: S3Servers) -> S3Server:
    return s3_servers.shared("seaweedfs")


def pieces_of(content: bytes, piece_bytes: int) -> Iterator[memoryview]:
    for start in range(0, len(content), piece_bytes):
        yield memoryview(content)[start : start + piece_bytes]


def unfinished(server: S3Server, prefix: str) -> list[str]:
    """Keys of uploads in parts that are neither completed nor aborted."""
    with server.client() as client:
        uploads = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
        return [upload["Key"] for upload in uploads]


# ---------------------------------------------------------------------------------------------- in parts


@pytest.mark.usefixtures("small_parts")
def test_a_shard_in_parts(server: S3Server, seed: int) -> None:
    content = numpy.random.default_rng(seed).bytes(2 * PART_BYTES + 1_234_567)
    store = S3Store(server.bucket())
    store.create("shard", pieces_of(content, 1_000_000))
    assert store.size("shard") == len(content)
    found = memoryview(bytearray(len(content)))
    assert store.read_into("shard", 0, [found[:3], found[3:PART_BYTES], found[PART_BYTES:]]) == len(content)
    assert found == content
    with pytest.raises(AlreadyExistsError):
        store.create("shard", pieces_of(content, 1_000_000))


@pytest.mark.usefixtures("small_parts")
def test_an_upload_in_parts_shows_nothing_before_its_end_and_nothing_if_it_fails(seaweedfs: S3Server) -> None:
    bucket = seaweedfs.bucket()
    store = S3Store(bucket)

    def pieces() -> Iterator[bytes]:
        yield bytes(2 * PART_BYTES)
        yield bytes(1)
        assert list(store.entries("")) == []
        with pytest.raises(NotFoundError):
            store.size("shard")
        assert unfinished(seaweedfs, bucket.full_key("")) == [bucket.full_key("shard")]
        raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"):
        store.create("shard", pieces())
    assert list(store.entries("")) == []
    assert unfinished(seaweedfs, bucket.full_key("")) == []


@pytest.mark.usefixtures("small_parts")
def test_of_two_uploads_in_parts_one_wins(seaweedfs: S3Server) -> None:
    store = S3Store(seaweedfs.bucket())

    def overtaken() -> Iterator[bytes]:
        yield bytes(PART_BYTES + 1)
        store.create("shard", iter([b"x" * (PART_BYTES + 1)]))

    with pytest.raises(AlreadyExistsError):
        store.create("shard", overtaken())
    assert store.read("shard") == b"x" * (PART_BYTES + 1)


# ---------------------------------------------------------------------------------------------- listings


def test_a_listing_of_several_pages(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "LISTED_AT_ONCE", 3)
    store = S3Store(server.bucket())
    keys = [f"{folder}{name}" for folder in ("", "a/", "a-b/", "a/c/") for name in ("x", "y z", "é", "10", "2")]
    for key in keys:
        store.create(key, [b"1"])
    assert [entry.key for entry in store.entries("")] == sorted(keys)
    assert [entry.key for entry in store.entries("a/")] == sorted(key for key in keys if key.startswith("a/"))


def test_what_tools_leave_behind_is_no_object(seaweedfs: S3Server) -> None:
    bucket = seaweedfs.bucket()
    store = S3Store(bucket)
    store.create("folder/key", [b"1"])
    with seaweedfs.client() as client:
        client.put_object(Bucket=BUCKET, Key=bucket.full_key("folder/"), Body=b"")
    assert [entry.key for entry in store.entries("")] == ["folder/key"]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["nanio", "rclone"])
def test_a_server_that_ignores_the_condition_is_refused_by_name(name: str, s3_servers: S3Servers) -> None:
    server = s3_servers.shared(name)
    store = S3Store(server.bucket())
    with pytest.raises(StoreError, match=f"{server.url} silently ignores If-None-Match") as caught:
        store.create("generations/00000001.json", [b"mine"])
    assert type(caught.value) is StoreError
    assert list(store.entries("")) == []


@pytest.mark.parametrize("name", ["nanio", "rclone"])
@pytest.mark.usefixtures("small_parts")
def test_a_server_that_ignores_the_condition_may_be_accepted(
    name: str, s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = s3_servers.shared(name)
    for variable, value in server.variables().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    store = open_store(f"{server.bucket().url}?endpoint={server.url}&without_conditional_writes=accept")
    shard = bytes(range(256)) * (PART_BYTES // 200)
    store.create("generations/00000001.json", [b"mine"])
    store.create("shard", iter([shard]))
    (record,) = caplog.records
    assert f"{server.url} silently ignores If-None-Match" in record.getMessage()
    for key, other in (("generations/00000001.json", [b"other"]), ("shard", iter([shard]))):
        with pytest.raises(AlreadyExistsError):
            store.create(key, other)
    assert store.read("generations/00000001.json") == b"mine"
    assert store.read("shard") == shard
    assert [entry.key for entry in store.entries("")] == ["generations/00000001.json", "shard"]


def test_credentials_that_do_not_do(seaweedfs: S3Server) -> None:
    for access_key, secret_key, words in (
        ("nobody", "hunter2", "does not know the access key that was given"),
        (seaweedfs.settings()["aws_access_key_id"], "hunter2", "the secret key is not that of the access key"),
        (READ_ONLY_KEY, READ_ONLY_SECRET, "these credentials do not allow PutObject on s3://bucket"),
    ):
        bucket = seaweedfs.bucket(aws_access_key_id=access_key, aws_secret_access_key=secret_key)
        store = S3Store(bucket)
        with pytest.raises(StoreDeniedError, match=words) as caught:
            store.create("key", [b"1"])
        assert secret_key not in str(caught.value)
        store.close()


def test_read_only_credentials_read(seaweedfs: S3Server) -> None:
    bucket = seaweedfs.bucket()
    S3Store(bucket).create("key", [b"content"])
    settings = seaweedfs.settings(READ_ONLY_KEY, READ_ONLY_SECRET)
    reader = S3Store(Bucket(BUCKET, bucket.full_key("").rstrip("/"), settings=settings))
    assert reader.read("key") == b"content"
    assert [entry.key for entry in reader.entries("")] == ["key"]
    with pytest.raises(StoreDeniedError):
        reader.create("another", [b"1"])
    reader.close()


def test_a_bucket_that_is_not_there(server: S3Server) -> None:
    store = S3Store(Bucket("no-such-bucket", "", settings=server.settings()))
    for action in (lambda: store.create("key", [b"1"]), lambda: list(store.entries(""))):
        with pytest.raises(StoreError, match=f"there is no bucket 'no-such-bucket' at {server.url}"):
            action()
    store.close()


# ---------------------------------------------------------------------------------------------- races


@pytest.mark.processes
def test_of_16_writers_in_4_processes_exactly_one_wins(server: S3Server) -> None:
    bucket = server.bucket()
    store, prefix = S3Store(bucket), bucket.full_key("").rstrip("/")
    exactly_one_wins("s3", store, prefix, server.variables(), turns=3)


# ---------------------------------------------------------------------------------------------- a killed server


@pytest.mark.processes
@pytest.mark.usefixtures("small_parts")
def test_a_server_killed_in_the_middle_of_an_upload(s3_servers: S3Servers) -> None:
    """What was acknowledged is there afterwards; what was not is there whole or not at all."""
    server = s3_servers.fresh("seaweedfs")
    bucket = server.bucket()
    store = S3Store(bucket)
    acknowledged: list[int] = []
    asked: list[int] = []
    begun = threading.Event()

    def write_records() -> None:
        for number in range(100_000):
            asked.append(number)
            try:
                store.create(f"records/{number}", [b"%d" % number] * 1000)
            except StoreUnavailableError:
                return
            acknowledged.append(number)
            if number == 20:
                begun.set()

    def shard() -> Iterator[bytes]:
        assert begun.wait(20)
        yield b"x" * (2 * PART_BYTES + 1)
        server.kill()
        yield b"y" * PART_BYTES

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write_records)
        with pytest.raises(StoreUnavailableError):
            store.create("shard", shard())
        writing.result(20)
    server.start()
    server.wait_until_it_reads(bucket.full_key("records/0"))
    patient = RetryingStore(store, Patience(deadline_seconds=20))  # some volumes come later than others

    assert len(acknowledged) > 20
    for number in acknowledged:
        assert patient.read(f"records/{number}") == b"%d" % number * 1000
    listed = [entry.key for entry in patient.entries("")]
    assert "shard" not in listed
    for key in listed:
        number = int(key.removeprefix("records/"))
        assert number in asked
        assert patient.read(key) == b"%d" % number * 1000
    with pytest.raises(NotFoundError):
        patient.size("shard")
    patient.create("shard", iter([b"z" * (PART_BYTES + 1)]))
    assert patient.read("shard") == b"z" * (PART_BYTES + 1)
    server.kill()


@pytest.mark.processes
@pytest.mark.usefixtures("small_parts")
def test_an_upload_outlives_its_server(s3_servers: S3Servers) -> None:
    """The server is killed while parts are on their way, and comes back: the same create goes on and succeeds."""
    server = s3_servers.fresh("seaweedfs")
    patience = Patience(deadline_seconds=40, first_wait_seconds=0.1, wait_seconds_max=1)
    store = RetryingStore(S3Store(server.bucket(), patience.call), patience)
    store.create("record", [b"1"])
    over = threading.Event()
    content = [b"a" * PART_BYTES, b"b" * PART_BYTES, b"c"]

    def restart() -> None:
        server.start()
        assert over.wait(60)

    with ThreadPoolExecutor(1) as threads:

        def shard() -> Iterator[bytes]:
            yield content[0]
            server.kill()
            threads.submit(restart)
            yield from content[1:]

        store.create("shard", shard())
        assert store.read("shard") == b"".join(content)
        assert store.read("record") == b"1"
        over.set()
    server.kill()

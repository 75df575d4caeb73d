"""What the store in a bucket asks of a server, and how it does without what a server lacks. No server: see
test_s3_servers for real ones."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError

from orchestrator.errors import AlreadyExistsError, ConfigError, StoreDeniedError, StoreError, StoreUnavailableError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.retrying import Patience, RetryingStore
from orchestrator.storage.s3 import parts as parts_module
from orchestrator.storage.s3 import upload as upload_module
from orchestrator.storage.s3.bucket import Bucket, make_client
from orchestrator.storage.s3.store import S3Store

LOST = ("PreconditionFailed", 412)
MISSING = ("404", 404)


def client_error(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "x")


class ObjectClient:
    """Stands in for boto3's client: keeps whole objects, and fails as it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail: Callable[[str, dict[str, Any]], tuple[str, int] | None] = lambda operation, arguments: None
        self.objects: dict[str, bytes] = {}
        self._parts: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self.meta = type("Meta", (), {"endpoint_url": "https://s3.test"})

    def __getattr__(self, operation: str) -> Callable[..., dict[str, Any]]:
        if operation.startswith("_"):
            raise AttributeError(operation)

        def call(**arguments: Any) -> dict[str, Any]:
            with self._lock:
                self.calls.append((operation, arguments))
                failure = self.fail(operation, arguments)
                if failure is not None:
                    raise client_error(*failure)
                return self._done(operation, **arguments)

        return call

    def _done(self, operation: str, Key: str, **arguments: Any) -> dict[str, Any]:
        match operation:
            case "put_object" | "complete_multipart_upload":
                if Key in self.objects and arguments.get("IfNoneMatch") == "*":
                    raise client_error(*LOST)
                parts = [self._parts[number] for number in sorted(self._parts)]
                self.objects[Key] = _content(arguments) if operation == "put_object" else b"".join(parts)
            case "head_object":
                if Key not in self.objects:
                    raise client_error(*MISSING)
                return {"ContentLength": len(self.objects[Key])}
            case "get_object":
                content, wanted = self.objects[Key], arguments.get("Range", "")
                if not wanted or not content:
                    return {"ContentLength": len(content), "Body": _Stream(content)}
                start, stop = (int(text) if text else None for text in wanted.removeprefix("bytes=").split("-"))
                part = content[start : None if stop is None else stop + 1]
                place = f"bytes {start}-{(start or 0) + len(part) - 1}/{len(content)}"
                return {"ContentLength": len(part), "ContentRange": place, "Body": _Stream(part)}
            case "create_multipart_upload":
                self._parts.clear()
                return {"UploadId": "upload"}
            case "upload_part":
                self._parts[arguments["PartNumber"]] = _content(arguments)
                return {"ETag": f"etag-{arguments['PartNumber']}"}
            case "delete_object":
                self.objects.pop(Key, None)
        return {}

    def named(self, operation: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.calls if name == operation]

    def operations(self) -> list[str]:
        return [name for name, _ in self.calls]


def _content(arguments: dict[str, Any]) -> bytes:
    data = b"".join(bytes(piece) for piece in iter(lambda: arguments["Body"].read(1 << 16), b""))
    assert arguments["ContentLength"] == len(arguments["Body"]) == len(data)
    return data


class _Stream:
    """The body of an answer, as far as it is used."""

    def __init__(self, content: bytes) -> None:
        self._raw_stream = self
        self._content = content
        self.closed = True

    def read(self, size: int = -1) -> bytes:
        return self._content

    def release_conn(self) -> None:
        pass


@pytest.fixture
def client() -> ObjectClient:
    return ObjectClient()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 10 bytes."""
    monkeypatch.setattr(parts_module, "PART_BYTES", 10)


def probed_store(client: ObjectClient) -> S3Store:
    """A store that has probed its server; what that took is forgotten."""
    store = S3Store(Bucket("bucket", "some/where", client=client))
    store.probe()
    store._probed = True
    client.calls.clear()
    return store


# ---------------------------------------------------------------------------------------------- one request


def test_a_small_object_is_one_conditional_request_with_its_checksum(client: ObjectClient) -> None:
    probed_store(client).create("a/key", [b"1234", b"56789"])
    ((operation, arguments),) = client.calls
    assert operation == "put_object"
    assert (arguments["Bucket"], arguments["Key"], arguments["IfNoneMatch"]) == ("bucket", "some/where/a/key", "*")
    assert arguments["ChecksumCRC32C"] == "4waSgw=="
    assert client.objects["some/where/a/key"] == b"123456789"


@pytest.mark.usefixtures("small_parts")
def test_what_is_known_whole_is_one_request_however_long(client: ObjectClient) -> None:
    store = probed_store(client)
    store.create("index", [b"x" * 25, b"y" * 25])
    store.create("short", iter([b"x" * 4, b"y" * 5]))
    assert client.operations() == ["put_object", "put_object"]


def test_over_tls_the_body_is_not_hashed_for_the_signature() -> None:
    sent: list[Any] = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        sent.append(request)
        return AWSResponse(request.url, 200, {}, _Nothing())

    for endpoint in ("https://s3.test", "http://s3.test"):
        client = make_client(endpoint_url=endpoint, region_name="x", aws_access_key_id="a", aws_secret_access_key="b")
        client.meta.events.register("before-send.s3", answer)
        S3Store(Bucket("bucket", "", client=client))._put("key", parts_module.whole([b"123456789"]))
    tls, plain = (request.headers for request in sent)
    assert tls["x-amz-checksum-crc32c"] == plain["x-amz-checksum-crc32c"] == b"4waSgw=="
    assert tls["X-Amz-Content-SHA256"] == b"UNSIGNED-PAYLOAD"
    assert len(plain["X-Amz-Content-SHA256"]) == 64
    for headers in (tls, plain):
        assert headers["Content-Length"] == b"9"
        assert headers["If-None-Match"] == b"*"
        assert "x-amz-trailer" not in headers


class _Nothing:
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        return iter([b""])


def test_an_endpoint_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="holds a user or password") as caught:
        make_client(
            endpoint_url="http://user:hunter2@127.0.0.1:1",
            region_name="x",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("localhost:9000", "the SDK gave up: Invalid endpoint: localhost:9000; see that its endpoint is the right one"),
        (
            "user:hunter2@host",
            "the endpoint's address holds a user or password; see that its endpoint is the right one",
        ),
    ],
)
def test_an_endpoint_that_is_no_address_is_one_sentence(endpoint: str, problem: str) -> None:
    """For every verb: it comes from the environment, too."""
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        make_client(endpoint_url=endpoint, region_name="x", aws_access_key_id="a", aws_secret_access_key="b")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


# ---------------------------------------------------------------------------------------------- the probe


def test_the_first_create_probes_the_server_once(client: ObjectClient) -> None:
    store = S3Store(Bucket("bucket", "", client=client))
    store.create("a", [b"1"])
    store.create("b", [b"2"])
    assert client.operations() == [
        "put_object",
        "put_object",
        "get_object",
        "delete_object",
        "put_object",
        "put_object",
    ]
    assert sorted(client.objects) == ["a", "b"]


def test_a_server_that_ignores_the_condition_is_refused_by_name(client: ObjectClient) -> None:
    client._done = lambda operation, **arguments: {}  # type: ignore[method-assign]
    store = S3Store(Bucket("bucket", "", client=client))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"s3.test silently ignores If-None-Match"):
            store.create("a", [b"1"])
    assert {arguments["Key"] for arguments in client.named("put_object")}.isdisjoint({"a"})


def ignoring(client: ObjectClient) -> S3Store:
    """A store whose server ignores the condition, and which accepts that; it was probed."""

    def drop_the_condition(operation: str, arguments: dict[str, Any]) -> None:
        arguments.pop("IfNoneMatch", None)

    client.fail = drop_the_condition
    store = S3Store(Bucket("bucket", "", client=client), without_conditional_writes=True)
    store.probe()
    store._probed = True
    client.calls.clear()
    return store


def test_an_accepted_server_gets_one_warning(client: ObjectClient, caplog: pytest.LogCaptureFixture) -> None:
    store = ignoring(client)
    store.probe()
    store.create("a", [b"1"])
    (record,) = caplog.records
    assert "two supervisors could both claim one generation, and both believe that they won" in record.getMessage()
    assert "https://s3.test silently ignores If-None-Match" in record.getMessage()


def test_on_an_accepted_server_a_create_looks_first_and_reads_back(client: ObjectClient) -> None:
    store = ignoring(client)
    store.create("a", [b"12", b"3"])
    assert client.operations() == ["head_object", "put_object", "head_object", "get_object"]
    client.calls.clear()
    with pytest.raises(AlreadyExistsError):
        store.create("a", [b"456"])
    assert client.operations() == ["head_object"]
    assert client.objects["a"] == b"123"


@pytest.mark.parametrize("other", [b"456", b"4567", b""])
def test_whose_bytes_stay_on_an_accepted_server_has_won(other: bytes, client: ObjectClient) -> None:
    store = ignoring(client)

    def overtake(operation: str, arguments: dict[str, Any]) -> None:
        if operation == "head_object" and client.named("put_object"):
            client.objects["a"] = other

    client.fail = overtake
    with pytest.raises(AlreadyExistsError, match="somebody else wrote it at the same time"):
        store.create("a", [b"123"])


def test_a_reading_back_that_fails_may_have_been_a_success(client: ObjectClient) -> None:
    """Else the next try would take our own bytes for somebody else's."""
    store = ignoring(client)
    client.fail = lambda operation, _: (
        ("SlowDown", 503) if operation == "head_object" and client.named("put_object") else None
    )
    with pytest.raises(StoreUnavailableError) as caught:
        store.create("a", [b"123"])
    assert caught.value.maybe_done


def test_an_accepted_server_that_does_honour_the_condition_is_used_as_ever(
    client: ObjectClient, caplog: pytest.LogCaptureFixture
) -> None:
    store = S3Store(Bucket("bucket", "", client=client), without_conditional_writes=True)
    store.probe()
    client.calls.clear()
    store._probed = True
    store.create("a", [b"1"])
    assert client.operations() == ["put_object"]
    assert not caplog.records


def test_what_is_written_is_encrypted_with_the_key_that_was_given(client: ObjectClient) -> None:
    """In the requests that make an object; parts and the completion must not say it again."""
    store = S3Store(Bucket("bucket", "", client=client, kms_key="arn:aws:kms:eu-1:1:key/2"))
    store.create("a", [b"1"])
    plan = parts_module.plan_parts(None)
    store._upload("b", parts_module.cut(pieces_of(TEXT), plan), plan)
    for operation, arguments in client.calls:
        encrypted = operation in ("put_object", "create_multipart_upload")
        assert arguments.get("SSEKMSKeyId") == ("arn:aws:kms:eu-1:1:key/2" if encrypted else None)
        assert arguments.get("ServerSideEncryption") == ("aws:kms" if encrypted else None)


def test_a_server_that_changes_what_it_is_given_is_refused(client: ObjectClient) -> None:
    store = S3Store(Bucket("bucket", "", client=client))

    def add_a_frame(operation: str, arguments: dict[str, Any]) -> None:
        if operation == "get_object":
            client.objects[arguments["Key"]] += b"\r\n0"

    client.fail = add_a_frame
    with pytest.raises(StoreError, match="gave back other bytes than were written"):
        store.create("a", [b"1"])


@pytest.mark.parametrize("failure", [("NotImplemented", 501), ("MissingContentLength", 411), ("BadDigest", 400)])
def test_a_server_without_checksums_is_used_without(failure: tuple[str, int], client: ObjectClient) -> None:
    client.fail = lambda operation, arguments: failure if "ChecksumCRC32C" in arguments else None
    store = S3Store(Bucket("bucket", "", client=client))
    store.create("a", [b"1"])
    store.create("b", [b"1"])
    assert ["ChecksumCRC32C" in put for put in client.named("put_object")] == [True, False, False, False, False]


def test_a_writer_that_may_not_delete_leaves_its_probe(client: ObjectClient) -> None:
    client.fail = lambda operation, arguments: ("AccessDenied", 403) if operation == "delete_object" else None
    S3Store(Bucket("bucket", "", client=client)).create("a", [b"1"])
    assert "a" in client.objects


@pytest.mark.parametrize(
    ("checksum", "right"), [("4waSgw==", True), ("4waSgw==-3", True), ("AAAAAA==", False), ("", True)]
)
def test_a_whole_object_is_compared_with_its_checksum(
    checksum: str, right: bool, client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the server keeps one of the whole; a part of an object is for its reader to check."""
    store = probed_store(client)
    done = client._done
    monkeypatch.setattr(
        client, "_done", lambda *words, **arguments: {**done(*words, **arguments), "ChecksumCRC32C": checksum}
    )
    client.objects["some/where/a"] = b"123456789"
    with contextlib.nullcontext() if right else pytest.raises(StoreUnavailableError, match="another checksum"):
        assert store.read("a") == b"123456789"
    assert store.read("a", 2, 4) == b"34"
    assert [get.get("ChecksumMode") for get in client.named("get_object")] == ["ENABLED", None]


# ---------------------------------------------------------------------------------------------- in parts


def pieces_of(text: bytes) -> Iterator[bytes]:
    for start in range(0, len(text), 3):
        yield text[start : start + 3]


TEXT = bytes(range(65, 91))


@pytest.mark.usefixtures("small_parts")
def test_a_large_object_goes_in_parts(client: ObjectClient) -> None:
    probed_store(client).create("key", pieces_of(TEXT))
    operations = client.operations()
    assert operations[:2] == ["head_object", "create_multipart_upload"]
    assert operations[2:5] == ["upload_part"] * 3
    assert operations[5:] == ["complete_multipart_upload", "head_object"]
    (complete,) = client.named("complete_multipart_upload")
    assert complete["IfNoneMatch"] == "*"
    told = complete["MultipartUpload"]["Parts"]
    assert [(part["PartNumber"], part["ETag"]) for part in told] == [(1, "etag-1"), (2, "etag-2"), (3, "etag-3")]
    assert all(len(part["ChecksumCRC32C"]) == 8 for part in told)
    assert client.objects["some/where/key"] == TEXT


class Bounded:
    """Pieces that say how many bytes they have at most."""

    def __init__(self, text: bytes, size_bytes_max: int) -> None:
        self._text = text
        self.size_bytes_max = size_bytes_max

    def __iter__(self) -> Iterator[bytes]:
        return pieces_of(self._text)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_size_of_parts_goes_by_what_the_pieces_say(
    wrapped: bool, client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "SMALLER", ((1 << 30, 5),))
    store: ObjectStore = probed_store(client)
    if wrapped:
        store = RetryingStore(store, Patience())
    store.create("key", Bounded(TEXT, 30))
    assert [part["ContentLength"] for part in client.named("upload_part")] == [5, 5, 5, 5, 5, 1]
    assert client.objects["some/where/key"] == TEXT


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        (("AccessDenied", 403), "key: part 2 of at most 6, 5 bytes: these credentials do not allow UploadPart"),
        (("SlowDown", 503), "key: part 2 of at most 6, 5 bytes: https://s3.test could not do it now: SlowDown"),
        (("BadDigest", 400), "key: part 2 of at most 6, 5 bytes: https://s3.test found another checksum than was sent"),
    ],
)
def test_an_error_names_the_part(
    failure: tuple[str, int], problem: str, client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "SMALLER", ((1 << 30, 5),))
    store = probed_store(client)
    client.fail = lambda _, arguments: failure if arguments.get("PartNumber") == 2 else None
    with pytest.raises(StoreError, match=problem):
        store.create("key", Bounded(TEXT, 30))


@pytest.mark.usefixtures("small_parts")
def test_parts_leave_while_later_pieces_are_still_being_made(client: ObjectClient) -> None:
    first_left = threading.Event()
    client.fail = lambda operation, arguments: first_left.set() if operation == "upload_part" else None

    def pieces() -> Iterator[bytes]:
        yield b"x" * 10
        assert first_left.wait(10)
        yield b"y" * 5

    probed_store(client).create("key", pieces())
    assert client.objects["some/where/key"] == b"x" * 10 + b"y" * 5


@pytest.mark.usefixtures("small_parts")
def test_what_is_there_already_is_not_sent(client: ObjectClient) -> None:
    store = probed_store(client)
    client.objects["some/where/key"] = b"first"
    with pytest.raises(AlreadyExistsError):
        store.create("key", pieces_of(TEXT))
    assert client.operations() == ["head_object"]


@pytest.mark.usefixtures("small_parts")
def test_what_came_meanwhile_stays(client: ObjectClient) -> None:
    store = probed_store(client)

    def overtaken() -> Iterator[bytes]:
        yield from pieces_of(TEXT)
        client.objects["some/where/key"] = b"first"

    with pytest.raises(AlreadyExistsError):
        store.create("key", overtaken())
    assert client.operations()[-1] == "abort_multipart_upload"
    assert client.objects["some/where/key"] == b"first"


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("error", [OSError("the source broke"), KeyboardInterrupt()])
def test_pieces_that_fail_end_the_upload(error: BaseException, client: ObjectClient) -> None:
    def pieces() -> Iterator[bytes]:
        yield TEXT
        raise error

    with pytest.raises(type(error)) as caught:
        probed_store(client).create("key", pieces())
    assert caught.value is error
    assert client.operations()[-1] == "abort_multipart_upload"
    assert "complete_multipart_upload" not in client.operations()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("number", [1, 2, 30])
def test_a_part_that_fails_ends_the_upload(number: int, client: ObjectClient) -> None:
    store = probed_store(client)
    client.fail = lambda _, arguments: ("AccessDenied", 403) if arguments.get("PartNumber") == number else None
    with pytest.raises(StoreError, match="do not allow UploadPart"):
        store.create("key", pieces_of(TEXT * 12))
    assert client.operations()[-1] == "abort_multipart_upload"
    assert len(client.named("upload_part")) <= number + 2 * 4


@pytest.mark.usefixtures("small_parts")
def test_only_the_part_that_failed_is_sent_again(client: ObjectClient) -> None:
    failures = [("SlowDown", 503), ("InternalError", 500)]

    def again(action: Callable[[], Any], **_: Any) -> Any:
        while True:
            try:
                return action()
            except StoreUnavailableError:
                continue

    store = S3Store(Bucket("bucket", "", client=client), again)
    store.probe()
    client.fail = lambda _, arguments: failures.pop() if arguments.get("PartNumber") == 2 and failures else None
    store.create("key", pieces_of(TEXT))
    assert sorted(part["PartNumber"] for part in client.named("upload_part")) == [1, 2, 2, 2, 3]
    assert client.objects["key"] == TEXT


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_may_not_be_sent_ends_the_others_patience(client: ObjectClient) -> None:
    """Or an upload that cannot succeed would go on for a minute, for the sake of the others."""
    patience = Patience(deadline_seconds=1000.0, first_wait_seconds=0.001, wait_seconds_max=0.01)
    store = S3Store(Bucket("bucket", "", client=client), patience.call)
    store.probe()
    slowed = threading.Event()

    def failure(_: str, arguments: dict[str, Any]) -> tuple[str, int] | None:
        number = arguments.get("PartNumber")
        if number == 1:
            slowed.set()
        if number == 2 and slowed.is_set():
            return ("AccessDenied", 403)
        return ("SlowDown", 503) if number in (1, 2) else None

    client.fail = failure
    with pytest.raises(StoreDeniedError, match=r"^key: part 2, 10 bytes: these credentials do not allow UploadPart"):
        store.create("key", pieces_of(TEXT))
    assert client.operations()[-1] == "abort_multipart_upload"


@pytest.mark.usefixtures("small_parts")
def test_waiting_for_a_turn_does_not_use_up_a_parts_patience(
    client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants = count()
    monkeypatch.setattr(upload_module, "time", SimpleNamespace(monotonic=lambda: float(next(instants))))
    excused = []

    def again(action: Callable[[], Any], *, excused_seconds: Callable[[], float] = lambda: 0.0) -> Any:
        answer = action()
        excused.append(excused_seconds())
        return answer

    store = S3Store(Bucket("bucket", "", client=client), again)
    store.create("key", pieces_of(TEXT))
    assert sum(seconds >= 1.0 for seconds in excused) == 3, "each look at this clock is one second later"


def twice(action: Callable[[], Any], **_: Any) -> Any:
    """Tries once more."""
    try:
        return action()
    except StoreUnavailableError:
        return action()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("second", [LOST, ("NoSuchUpload", 404)])
def test_a_completion_whose_answer_was_lost_may_have_been_ours(second: tuple[str, int], client: ObjectClient) -> None:
    """The next try is refused because of the first one; whether it is our object is for the caller to look at."""
    store = S3Store(Bucket("bucket", "", client=client), twice)
    store.probe()
    failures = [second, ("InternalError", 500)]
    client.fail = lambda operation, _: failures.pop() if operation == "complete_multipart_upload" else None
    with pytest.raises(StoreUnavailableError, match="it may be there") as caught:
        store.create("key", pieces_of(TEXT))
    assert caught.value.maybe_done


@pytest.mark.usefixtures("small_parts")
def test_a_completion_that_was_refused_is_tried_again_on_its_own(client: ObjectClient) -> None:
    store = S3Store(Bucket("bucket", "", client=client), twice)
    store.probe()
    failures = [("SlowDown", 503)]
    client.fail = lambda operation, _: failures.pop() if operation == "complete_multipart_upload" and failures else None
    store.create("key", pieces_of(TEXT))
    assert client.objects["key"] == TEXT
    assert len(client.named("upload_part")) == 3


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("failure", [("InternalError", 500), ("NoSuchUpload", 404)])
@pytest.mark.parametrize("operation", ["head_object", "create_multipart_upload", "upload_part"])
def test_what_fails_before_the_completion_made_nothing(
    operation: str, failure: tuple[str, int], client: ObjectClient
) -> None:
    store = probed_store(client)
    client.fail = lambda name, _: failure if name == operation else None
    with pytest.raises(StoreUnavailableError) as caught:
        store.create("key", pieces_of(TEXT))
    assert not caught.value.maybe_done


def test_a_proof_that_fails_made_nothing(client: ObjectClient) -> None:
    client.fail = lambda *_: ("InternalError", 500)
    with pytest.raises(StoreUnavailableError) as caught:
        S3Store(Bucket("bucket", "", client=client)).create("key", [b"1"])
    assert not caught.value.maybe_done


@pytest.mark.usefixtures("small_parts")
def test_a_server_without_conditional_completion_is_asked_once(client: ObjectClient) -> None:
    store = probed_store(client)
    client.fail = lambda operation, arguments: (
        ("NotImplemented", 501) if operation == "complete_multipart_upload" and "IfNoneMatch" in arguments else None
    )
    store.create("a", pieces_of(TEXT))
    store.create("b", pieces_of(TEXT))
    assert ["IfNoneMatch" in one for one in client.named("complete_multipart_upload")] == [True, False, False]


@pytest.mark.usefixtures("small_parts")
def test_a_server_without_checksums_of_parts_gets_none_the_next_time(client: ObjectClient) -> None:
    store = probed_store(client)
    client.fail = lambda operation, arguments: (
        ("NotImplemented", 501) if operation == "upload_part" and "ChecksumCRC32C" in arguments else None
    )
    with pytest.raises(StoreUnavailableError, match="from now on without checksums") as caught:
        store.create("a", pieces_of(TEXT))
    assert not caught.value.maybe_done
    store.create("a", pieces_of(TEXT))
    assert client.objects["some/where/a"] == TEXT


@pytest.mark.usefixtures("small_parts")
def test_a_server_that_says_so_at_the_beginning_gets_none_at_all(client: ObjectClient) -> None:
    store = probed_store(client)
    client.fail = lambda operation, arguments: ("InvalidArgument", 400) if "ChecksumAlgorithm" in arguments else None
    store.create("a", pieces_of(TEXT))
    assert not any("ChecksumCRC32C" in part for part in client.named("upload_part"))
    assert client.objects["some/where/a"] == TEXT


@pytest.mark.usefixtures("small_parts")
def test_the_size_is_read_back(client: ObjectClient) -> None:
    store = probed_store(client)

    def lose_a_part(operation: str, arguments: dict[str, Any]) -> None:
        if operation == "complete_multipart_upload":
            client._parts.pop(2)

    client.fail = lose_a_part
    with pytest.raises(StoreError, match="16 bytes are there of 26 that were sent"):
        store.create("key", pieces_of(TEXT))


@pytest.mark.usefixtures("small_parts")
def test_an_object_whose_size_could_not_be_read_back_may_be_there(client: ObjectClient) -> None:
    store = probed_store(client)
    client.fail = lambda operation, _: (
        ("SlowDown", 503) if operation == "head_object" and client.named("complete_multipart_upload") else None
    )
    with pytest.raises(StoreUnavailableError) as caught:
        store.create("key", pieces_of(TEXT))
    assert caught.value.maybe_done


@pytest.mark.usefixtures("small_parts")
def test_what_has_too_many_parts_is_refused(client: ObjectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.storage.s3.upload.PARTS_MAX", 2)
    with pytest.raises(StoreError, match="more than 2 parts; 20 bytes were sent"):
        probed_store(client).create("key", pieces_of(TEXT))
    assert client.operations()[-1] == "abort_multipart_upload"


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("operation", "field"),
    [("create_multipart_upload", "UploadId"), ("upload_part", "ETag"), ("head_object", "ContentLength")],
)
def test_an_answer_that_was_cut_is_an_error_of_the_store(
    client: ObjectClient, monkeypatch: pytest.MonkeyPatch, operation: str, field: str
) -> None:
    """A document that is cut short is read as far as it goes: what is missing must not be a KeyError."""
    store = probed_store(client)
    store.create("there", [b"1"])
    whole = getattr(client, operation)
    monkeypatch.setattr(
        client, operation, lambda **arguments: {k: v for k, v in whole(**arguments).items() if k != field}
    )
    with pytest.raises(StoreUnavailableError, match=f"answer to {operation} says no {field}"):
        store.size("there") if operation == "head_object" else store.create("a/key", iter([b"x" * 25]))

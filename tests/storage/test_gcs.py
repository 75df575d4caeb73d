"""What the store in a bucket of GCS asks of a server, and what it makes of its answers: above all of uploads that
break in the middle, for which fake-gcs-server is no model. See test_gcs_server for that one."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import pytest
import requests
from crc32c import crc32c
from google.auth.credentials import Credentials
from google.auth.transport.requests import AuthorizedSession

from orchestrator.errors import AlreadyExistsError, ConfigError, StoreDeniedError, StoreError, StoreUnavailableError
from orchestrator.storage.gcs import bucket as bucket_module
from orchestrator.storage.gcs import content as content_module
from orchestrator.storage.gcs.bucket import Bucket, Connection, connect
from orchestrator.storage.gcs.content import Content, cut, whole
from orchestrator.storage.gcs.store import GCSStore
from orchestrator.storage.gcs.upload import Again
from orchestrator.storage.retrying import Patience, RetryingStore, once

ENDPOINT = "https://gcs.test"
SESSION = f"{ENDPOINT}/upload/session?upload_id=secret"
LOST = requests.ConnectionError("the answer was lost, upload_id=secret")


def answer(status: int, body: Any = b"", headers: dict[str, str] | None = None) -> requests.Response:
    response = requests.Response()
    response.status_code = status
    response._content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response.headers.update(headers or {})
    return response


class GCS:
    """Stands in for a session with GCS: keeps objects and one resumable upload as GCS does, and fails as it is told."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        """What for, with which headers and body."""
        self.before: Callable[[str], requests.Response | Exception | None] = lambda what: None
        """Answers instead of doing it."""
        self.after: Callable[[str], Exception | None] = lambda what: None
        """Loses the answer."""
        self.persists_max = 1 << 30
        """Of one chunk."""
        self.says: dict[str, str] = {}
        """Wrong things about an object that was just made."""
        self.received: bytes | None = None
        self._name = ""
        self._ended: requests.Response | None = None

    def request(self, method: str, url: str, *, data: Any, headers: dict[str, str], **others: Any) -> requests.Response:
        assert others["allow_redirects"] is False
        assert len(others["timeout"]) == 2
        body = b"".join(bytes(part) for part in data) if isinstance(data, Content) else data or b""
        parameters = others["params"] or {}
        what = self._what(method, url, parameters, headers)
        self.asked.append((what, headers, body))
        found = self.before(what)
        if found is None:
            found = self._done(what, url, parameters, headers, body)
            found = self.after(what) or found
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        pass

    def whats(self) -> list[str]:
        return [what for what, _, _ in self.asked]

    def _what(self, method: str, url: str, parameters: dict[str, str], headers: dict[str, str]) -> str:
        if url == SESSION:
            return "cancel" if method == "DELETE" else headers["Content-Range"].removeprefix("bytes ")
        kind = parameters.get("uploadType") or parameters.get("alt") or ("list" if url.endswith("/o") else "")
        return f"{method} {kind}".strip()

    def _done(
        self, what: str, url: str, parameters: dict[str, str], headers: dict[str, str], body: bytes
    ) -> requests.Response:
        key = unquote(url.partition("/o/")[2])
        match what:
            case "POST multipart":
                if parameters["name"] in self.objects and parameters["ifGenerationMatch"] == "0":
                    return answer(412)
                about, content = _parts(headers, body)
                assert about["name"] == parameters["name"]
                assert about["crc32c"] == _checksum(content)
                return self._made(parameters["name"], content)
            case "POST resumable":
                assert parameters["ifGenerationMatch"] == "0"
                self._name, self.received, self._ended = parameters["name"], b"", None
                return answer(200, headers={"Location": SESSION})
            case "GET media":
                return self._media(key, headers.get("Range", "bytes=0-"))
            case "GET":
                return answer(200, {"size": str(len(self.objects[key]))}) if key in self.objects else answer(404)
            case "DELETE":
                return answer(204) if self.objects.pop(key, None) is not None else answer(404)
            case "cancel":
                self.received = None
                return answer(499)
        return self._chunk(what, headers, body)

    def _media(self, key: str, wanted: str) -> requests.Response:
        if key not in self.objects:
            return answer(404)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()  # type: ignore[union-attr]
        whole_size = len(self.objects[key])
        content = self.objects[key][int(first) : int(last) + 1 if last else None]
        about = f"bytes {first}-{int(first) + len(content) - 1}/{whole_size}"
        found = answer(206, headers={"Content-Length": str(len(content)), "Content-Range": about})
        found.raw = _Raw(content)
        return found

    def _chunk(self, content_range: str, headers: dict[str, str], body: bytes) -> requests.Response:
        if self.received is None:
            return answer(404)
        if self._ended is not None:
            return self._ended
        match = re.fullmatch(r"(?:(\d+)-(\d+)|\*)/(\d+|\*)", content_range)
        assert match is not None
        first, last, total = match.groups()
        if first is not None:
            assert int(first) == len(self.received), "GCS takes only what follows what it has"
            assert int(last) - int(first) + 1 == len(body)
            self.received += body[: self.persists_max]
        if total != "*" and int(total) == len(self.received):
            assert headers.get("x-goog-hash", _hash(self.received)) == _hash(self.received)
            self._ended = answer(412) if self._name in self.objects else self._made(self._name, self.received)
            return self._ended
        return answer(308, headers={"Range": f"bytes=0-{len(self.received) - 1}"} if self.received else {})

    def _made(self, name: str, content: bytes) -> requests.Response:
        self.objects[name] = content
        about = {"size": str(len(content)), "crc32c": _checksum(content), "generation": "17"}
        return answer(200, {**about, **self.says})


class _Raw:
    """The body of an answer, as far as it is used."""

    closed = True

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, size: int = -1) -> bytes:
        return self._content

    def release_conn(self) -> None:
        pass


def _parts(headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
    boundary = headers["Content-Type"].removeprefix("multipart/related; boundary=").encode()
    nothing, about, content, end = body.split(b"--" + boundary)
    assert (nothing, end) == (b"", b"--\r\n")
    return json.loads(about.partition(b"\r\n\r\n")[2]), content.partition(b"\r\n\r\n")[2][:-2]


def _checksum(content: bytes) -> str:
    return base64.b64encode(crc32c(content).to_bytes(4, "big")).decode()


def _hash(content: bytes) -> str:
    return f"crc32c={_checksum(content)}"


@pytest.fixture
def gcs() -> GCS:
    return GCS()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 10 bytes."""
    monkeypatch.setattr(content_module, "CHUNK_BYTES", 10)


def bucket_of(gcs: GCS) -> Bucket:
    return Bucket("bucket", "some/where", connection=Connection(ENDPOINT, gcs))  # type: ignore[arg-type]


def probed_store(gcs: GCS, again: Again = once) -> GCSStore:
    """A store that has probed its server; what that took is forgotten."""
    store = GCSStore(bucket_of(gcs), again)
    store.probe()
    store._probed = True
    gcs.asked.clear()
    return store


def thrice(action: Callable[[], Any]) -> Any:
    """Tries twice more."""
    for _ in range(2):
        try:
            return action()
        except StoreUnavailableError:
            continue
    return action()


def first_time(what: str, failure: Any) -> Callable[[str], Any]:
    """Fails when it is asked for that the first time."""
    failures = [failure]
    return lambda asked: failures.pop() if asked == what and failures else None


TEXT = bytes(range(65, 91))
KEY = "some/where/key"


def pieces_of(text: bytes) -> Iterator[bytes]:
    for start in range(0, len(text), 3):
        yield text[start : start + 3]


# ---------------------------------------------------------------------------------------------- bodies


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 26])
@pytest.mark.parametrize("piece", [1, 3, 10, 25])
def test_chunks(size: int, piece: int) -> None:
    """All but the last one are full, and only what is empty has an empty one."""
    pieces = [TEXT[:size][start : start + piece] for start in range(0, size, piece)]
    chunks = list(cut([b"", *pieces, memoryview(b"")]))
    assert [last for _, last in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(chunk) == 10 for chunk, _ in chunks[:-1])
    assert len(chunks[-1][0]) > 0 or size == 0
    assert b"".join(b"".join(chunk) for chunk, _ in chunks) == TEXT[:size]


def test_the_rest_of_a_body() -> None:
    body = whole([b"abc", b"", b"defg"])
    for position in range(8):
        assert b"".join(body.after(position)) == b"abcdefg"[position:]
        assert len(body.after(position)) == 7 - position
    assert body.after(3).digest(crc32c(b"abc")) == body.digest() == crc32c(b"abcdefg")


def test_a_body_is_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_module, "SLICE_BYTES", 4)
    memory = bytearray(b"0123456789")
    body = whole([memory])
    memory[:] = b"abcdefghij"
    assert list(body) == [b"abcd", b"efgh", b"ij"]
    assert list(body) == [b"abcd", b"efgh", b"ij"]


# ---------------------------------------------------------------------------------------------- one request


def test_a_small_object_is_one_conditional_request_with_its_checksum(gcs: GCS) -> None:
    probed_store(gcs).create("key", [b"1234", b"56789"])
    assert gcs.whats() == ["POST multipart"]
    assert gcs.objects == {KEY: b"123456789"}
    assert b'"crc32c": "4waSgw=="' in gcs.asked[0][2]


@pytest.mark.usefixtures("small_chunks")
def test_what_is_known_whole_is_one_request_however_long(gcs: GCS) -> None:
    store = probed_store(gcs)
    store.create("index", [b"x" * 25, b"y" * 25])
    store.create("short", iter([b"x" * 4, b"y" * 6]))
    assert gcs.whats() == ["POST multipart", "POST multipart"]


def test_what_is_stored_otherwise_than_it_was_sent_is_removed(gcs: GCS) -> None:
    store = probed_store(gcs)
    for wrong in ({"crc32c": "AAAAAA=="}, {"size": "8"}):
        gcs.says = wrong
        with pytest.raises(StoreError, match="but 9 bytes with 4waSgw== were sent; it was removed") as caught:
            store.create("key", [b"123456789"])
        assert type(caught.value) is StoreError
        assert gcs.objects == {}


def test_what_is_not_certainly_ours_is_not_removed(gcs: GCS) -> None:
    store = probed_store(gcs)
    gcs.says = {"crc32c": "AAAAAA==", "generation": ""}
    with pytest.raises(StoreError, match="were sent; it is still there"):
        store.create("key", [b"123456789"])
    assert gcs.objects == {KEY: b"123456789"}


# ---------------------------------------------------------------------------------------------- the probe


def test_the_first_create_probes_the_server_once(gcs: GCS) -> None:
    store = GCSStore(bucket_of(gcs))
    store.create("a", [b"1"])
    store.create("b", [b"2"])
    assert gcs.whats() == [*["POST multipart"] * 2, "GET media", "DELETE", *["POST multipart"] * 2]
    assert sorted(gcs.objects) == ["some/where/a", "some/where/b"]


def test_a_server_that_ignores_the_condition_is_refused_by_name(gcs: GCS) -> None:
    gcs.before = lambda what: gcs.objects.clear() if what == "POST multipart" else None
    store = GCSStore(bucket_of(gcs))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"gcs.test silently ignores ifGenerationMatch"):
            store.create("a", [b"1"])
    assert gcs.objects == {}


def test_a_server_that_changes_what_it_is_given_is_refused(gcs: GCS) -> None:
    def add(what: str) -> None:
        if what == "GET media":
            gcs.objects = {key: content + b"0" for key, content in gcs.objects.items()}

    gcs.before = add
    with pytest.raises(StoreError, match="gave back other bytes than were written"):
        GCSStore(bucket_of(gcs)).create("a", [b"1"])


def test_a_writer_that_may_not_delete_leaves_its_probe(gcs: GCS) -> None:
    gcs.before = lambda what: answer(403) if what == "DELETE" else None
    GCSStore(bucket_of(gcs)).create("a", [b"1"])
    assert "some/where/a" in gcs.objects


def test_a_proof_that_fails_made_nothing(gcs: GCS) -> None:
    gcs.before = lambda what: answer(500)
    with pytest.raises(StoreUnavailableError) as caught:
        GCSStore(bucket_of(gcs)).create("key", [b"1"])
    assert not caught.value.maybe_done


# ---------------------------------------------------------------------------------------------- in chunks


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [11, 20, 26])
def test_a_large_object_goes_in_chunks(size: int, gcs: GCS) -> None:
    probed_store(gcs).create("key", pieces_of(TEXT[:size]))
    first, *chunks = gcs.whats()[1:]
    assert gcs.whats()[0] == "GET"
    assert first == "POST resumable"
    assert chunks == {11: ["0-9/*", "10-10/11"], 20: ["0-9/*", "10-19/20"], 26: ["0-9/*", "10-19/*", "20-25/26"]}[size]
    assert [headers.get("x-goog-hash") for _, headers, _ in gcs.asked][-2:] == [None, _hash(TEXT[:size])]
    assert gcs.objects == {KEY: TEXT[:size]}


@pytest.mark.usefixtures("small_chunks")
def test_chunks_leave_while_later_pieces_are_still_being_made(gcs: GCS) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 11
        yield b"y"
        assert gcs.received == b"x" * 10
        yield b"z"

    probed_store(gcs).create("key", pieces())


@pytest.mark.usefixtures("small_chunks")
def test_what_is_there_already_is_not_sent(gcs: GCS) -> None:
    store = probed_store(gcs)
    gcs.objects[KEY] = b"first"
    with pytest.raises(AlreadyExistsError):
        store.create("key", pieces_of(TEXT))
    assert gcs.whats() == ["GET"]


@pytest.mark.usefixtures("small_chunks")
def test_what_came_meanwhile_stays(gcs: GCS) -> None:
    def overtaken() -> Iterator[bytes]:
        yield from pieces_of(TEXT)
        gcs.objects[KEY] = b"first"

    with pytest.raises(AlreadyExistsError):
        probed_store(gcs).create("key", overtaken())
    assert gcs.objects == {KEY: b"first"}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("error", [OSError("the source broke"), KeyboardInterrupt()])
def test_pieces_that_fail_cancel_the_upload(error: BaseException, gcs: GCS) -> None:
    def pieces() -> Iterator[bytes]:
        yield TEXT
        raise error

    with pytest.raises(type(error)) as caught:
        probed_store(gcs).create("key", pieces())
    assert caught.value is error
    assert gcs.whats()[-1] == "cancel"
    assert gcs.objects == {}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("what", ["0-9/*", "10-19/*", "20-25/26"])
def test_a_chunk_that_is_refused_ends_the_upload(what: str, gcs: GCS) -> None:
    store = probed_store(gcs)
    gcs.before = first_time(what, answer(403))
    with pytest.raises(StoreDeniedError, match=r"do not allow storage\.objects\.create") as caught:
        store.create("key", pieces_of(TEXT))
    assert gcs.whats()[-1] == "cancel"
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("wrong", [{"crc32c": "AAAAAA=="}, {"size": "25"}])
def test_an_upload_that_is_stored_otherwise_is_removed(wrong: dict[str, str], gcs: GCS) -> None:
    store = probed_store(gcs)
    gcs.says = wrong
    with pytest.raises(StoreError, match=r"but 26 bytes with .* were sent; it was removed") as caught:
        store.create("key", pieces_of(TEXT))
    assert type(caught.value) is StoreError
    assert gcs.objects == {}


# ---------------------------------------------------------------------------------------------- broken in the middle


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("failure", [LOST, answer(503), answer(429)])
@pytest.mark.parametrize("what", ["0-9/*", "10-19/*", "20-25/26"])
def test_a_chunk_that_did_not_arrive_is_sent_again(what: str, failure: Any, gcs: GCS) -> None:
    store = probed_store(gcs, thrice)
    gcs.before = first_time(what, failure)
    store.create("key", pieces_of(TEXT))
    place = gcs.whats().index(what)
    assert gcs.whats()[place : place + 3] == [what, f"*/{what.partition('/')[2]}", what]
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("what", ["0-9/*", "10-19/*", "20-25/26"])
def test_a_chunk_that_arrived_is_not_sent_again(what: str, gcs: GCS) -> None:
    """Only the answer was lost: the server is asked, and has it."""
    store = probed_store(gcs, thrice)
    gcs.after = first_time(what, LOST)
    store.create("key", pieces_of(TEXT))
    assert gcs.whats().count(what) == 1
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_of_which_a_part_arrived_goes_on_from_there(gcs: GCS) -> None:
    store = probed_store(gcs, thrice)
    lose = first_time("10-19/*", LOST)

    def after(what: str) -> Any:
        gcs.persists_max = 4 if what == "0-9/*" else 1 << 30  # of the chunk that follows
        return lose(what)

    gcs.after = after
    store.create("key", pieces_of(TEXT))
    assert gcs.whats()[2:] == ["0-9/*", "10-19/*", "*/*", "14-19/*", "20-25/26"]
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
def test_a_server_that_takes_less_than_a_chunk_gets_the_rest(gcs: GCS) -> None:
    store = probed_store(gcs)
    gcs.persists_max = 7
    store.create("key", pieces_of(TEXT))
    assert gcs.whats()[2:] == ["0-9/*", "7-9/*", "10-19/*", "17-19/*", "20-25/26"]
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
def test_a_server_that_takes_nothing_is_not_asked_for_ever(gcs: GCS) -> None:
    store = probed_store(gcs)
    gcs.persists_max = 0
    with pytest.raises(StoreUnavailableError, match=r"gcs.test takes no more") as caught:
        store.create("key", pieces_of(TEXT))
    assert not caught.value.maybe_done


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("what", ["0-9/*", "10-19/*", "20-25/26"])
def test_an_upload_that_the_server_forgot_begins_again(what: str, gcs: GCS) -> None:
    patience = Patience(sleep=lambda seconds: None)
    store = RetryingStore(probed_store(gcs, patience.call), patience)
    gcs.before = first_time(what, answer(410))
    store.create("key", pieces_of(TEXT))
    assert gcs.whats().count("POST resumable") == 2
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
def test_a_server_that_lost_what_it_had_begins_again(gcs: GCS) -> None:
    patience = Patience(sleep=lambda seconds: None)
    store = RetryingStore(probed_store(gcs, patience.call), patience)
    gcs.before = first_time("10-19/*", answer(308, headers={"Range": "bytes=0-3"}))
    store.create("key", pieces_of(TEXT))
    assert gcs.whats().count("POST resumable") == 2
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("second", [answer(412), answer(404)])
def test_an_end_whose_answer_was_lost_may_have_been_ours(second: requests.Response, gcs: GCS) -> None:
    """The next try is refused because of the first one; whether it is our object is for the caller to look at."""
    store = probed_store(gcs, thrice)
    gcs.after = first_time("20-25/26", LOST)
    gcs.before = lambda what: second if what == "*/26" else None
    with pytest.raises(StoreUnavailableError, match="it may be there") as caught:
        store.create("key", pieces_of(TEXT))
    assert caught.value.maybe_done
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
def test_our_own_object_is_found_again(gcs: GCS) -> None:
    patience = Patience(sleep=lambda seconds: None)
    store = RetryingStore(probed_store(gcs), patience)
    gcs.after = first_time("20-25/26", LOST)
    store.create("key", pieces_of(TEXT))
    assert gcs.objects == {KEY: TEXT}


@pytest.mark.usefixtures("small_chunks")
def test_an_end_of_which_nothing_is_known_stays_unknown(gcs: GCS) -> None:
    """The last try certainly did nothing, but an earlier one may have."""
    store = probed_store(gcs, thrice)
    gcs.after = first_time("20-25/26", LOST)
    gcs.before = lambda what: answer(429) if what == "*/26" else None
    with pytest.raises(StoreUnavailableError) as caught:
        store.create("key", pieces_of(TEXT))
    assert caught.value.maybe_done


@pytest.mark.usefixtures("small_chunks")
def test_a_server_that_ends_the_upload_when_it_is_asked_how_far_it_is(gcs: GCS) -> None:
    """So does fake-gcs-server 1.54: then part of the object is there, and must go again."""
    store = probed_store(gcs, thrice)
    gcs.before = first_time("10-19/*", LOST)
    done = gcs._chunk
    gcs._chunk = (  # type: ignore[method-assign]
        lambda what, *rest: gcs._made(KEY, gcs.received or b"") if what == "*/*" else done(what, *rest)
    )
    with pytest.raises(StoreError, match="ended the upload before all was sent; it was removed"):
        store.create("key", pieces_of(TEXT))
    assert gcs.objects == {}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("what", ["GET", "POST resumable", "0-9/*", "10-19/*"])
def test_what_fails_before_the_end_made_nothing(what: str, gcs: GCS) -> None:
    store = probed_store(gcs)
    gcs.before = first_time(what, LOST)
    with pytest.raises(StoreUnavailableError) as caught:
        store.create("key", pieces_of(TEXT))
    assert not caught.value.maybe_done
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- listings


def test_a_listing_goes_through_all_pages(gcs: GCS) -> None:
    pages = [
        answer(200, {"items": [{"name": "some/where/b", "size": "2"}], "nextPageToken": "next"}),
        answer(200, {"nextPageToken": "last"}),
        answer(200, {"items": [{"name": "some/where/a", "size": "1"}, {"name": "some/where/c/", "size": "0"}]}),
    ]
    gcs.before = lambda what: pages.pop(0) if what == "GET list" else None
    store = GCSStore(bucket_of(gcs))
    assert [(entry.key, entry.size_bytes) for entry in store.entries("")] == [("a", 1), ("b", 2)]
    assert pages == []


@pytest.mark.parametrize("body", [b"<html>", b"[]"])
def test_a_page_of_something_between_is_no_answer(body: bytes, gcs: GCS) -> None:
    gcs.before = lambda what: answer(200, body)
    with pytest.raises(StoreUnavailableError, match="the answer is no JSON"):
        GCSStore(bucket_of(gcs)).size("key")


# ---------------------------------------------------------------------------------------------- whom to ask


def test_the_endpoint_is_the_sdks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1/")
    connection = connect()
    assert connection.endpoint == "http://127.0.0.1:1"
    adapter: Any = connection.session.adapters["http://"]
    assert adapter._pool_maxsize == bucket_module.CONNECTIONS_MAX
    assert adapter.max_retries.total == 0
    connection.session.close()


@pytest.mark.parametrize(
    ("address", "problem"),
    [("http://user:hunter2@127.0.0.1:1", "holds a user or password"), ("127.0.0.1:1", "write http://host:port")],
)
def test_endpoints_that_will_not_do(address: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    with pytest.raises(ConfigError, match=problem) as caught:
        GCSStore(Bucket("bucket", "")).size("key")
    assert "hunter2" not in str(caught.value)


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    with pytest.raises(StoreDeniedError, match="no usable credentials for gs://bucket") as caught:
        GCSStore(Bucket("bucket", "")).size("key")
    assert "gcloud auth application-default login" in caught.value.problem


class _Token(Credentials):
    """Credentials whose first token is no longer accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.token = "old-secret"

    def refresh(self, request: Any) -> None:
        self.token = "new-secret"


class _Accepts(requests.adapters.BaseAdapter):
    """A server that reads all of a body, and then looks at the token."""

    def __init__(self, gcs: GCS, token: str) -> None:
        super().__init__()
        self._gcs = gcs
        self._token = token
        self.bodies: list[bytes] = []

    def send(self, request: Any, *_: Any, **__: Any) -> requests.Response:
        self.bodies.append(b"".join(bytes(part) for part in request.body))
        assert request.headers["Content-Length"] == str(len(self.bodies[-1]))
        if request.headers["authorization"] != f"Bearer {self._token}":
            return answer(401)
        return self._gcs._made("key", _parts(request.headers, self.bodies[-1])[1])

    def close(self) -> None:
        pass


@pytest.mark.parametrize("accepted", ["new-secret", "another"])
def test_a_body_is_sent_whole_again_with_new_credentials(accepted: str, gcs: GCS) -> None:
    session = AuthorizedSession(_Token())
    server = _Accepts(gcs, accepted)
    session.mount("https://", server)
    store = GCSStore(Bucket("bucket", "", connection=Connection(ENDPOINT, session)))
    if accepted == "another":
        with pytest.raises(StoreDeniedError, match="does not accept the credentials for gs://bucket") as caught:
            store._put("key", whole([b"123", b"456789"]))
        assert "secret" not in str(caught.value)
    else:
        store._put("key", whole([b"123", b"456789"]))
        assert gcs.objects == {"key": b"123456789"}
    assert len(set(server.bodies)) == 1 < len(server.bodies)


def test_a_key_that_encrypts_goes_with_every_write(monkeypatch: pytest.MonkeyPatch) -> None:
    gcs = GCS()
    sent: list[dict[str, str]] = []

    def request(method: str, url: str, **others: Any) -> requests.Response:
        if method == "POST":
            sent.append(dict(others["params"]))
        return GCS.request(gcs, method, url, **others)

    monkeypatch.setattr(gcs, "request", request)
    connection = Connection(ENDPOINT, gcs)  # type: ignore[arg-type]
    bucket = Bucket("bucket", "jobs", kms_key="projects/p/cryptoKeys/k", connection=connection)
    store = GCSStore(bucket)
    assert store.url == "gs://bucket/jobs?kms_key=projects/p/cryptoKeys/k"
    store.create("small", [b"x"])
    assert {one["kmsKeyName"] for one in sent} == {"projects/p/cryptoKeys/k"}


def test_a_wrong_bit_on_the_way_here_is_asked_for_again() -> None:
    """Of whole objects: a receipt with a wrong bit must not get into an index."""
    gcs = GCS()
    bucket = Bucket("bucket", "", connection=Connection(ENDPOINT, gcs))  # type: ignore[arg-type]
    store = RetryingStore(GCSStore(bucket), Patience(sleep=lambda seconds: None))
    gcs.objects["key"] = b"content"
    wrong = [b"cOntent"]

    def instead(what: str) -> requests.Response | None:
        if what != "GET media" or not wrong:
            return None
        content = wrong.pop()
        hashes = f"crc32c={_checksum(b'content')},md5=x"
        found = answer(200, headers={"Content-Length": str(len(content)), "x-goog-hash": hashes})
        found.raw = _Raw(content)
        return found

    gcs.before = instead
    assert store.read("key") == b"content"
    assert wrong == []

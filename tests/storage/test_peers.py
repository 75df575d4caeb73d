"""What only the peer store does: tokens, broken connections, and peers that lie."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.agent import objects
from orchestrator.agent.objects import token_middleware
from orchestrator.errors import ConfigError, NotFoundError, StoreDeniedError, StoreError, StoreFullError
from orchestrator.storage import peers
from orchestrator.storage.base import Entry
from orchestrator.storage.memory import MemoryStore
from orchestrator.storage.peers import PeerStore
from tests.contracts.test_object_store import TOKEN, served


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives the n-th connection the n-th answer and hangs up; gives its address and what it was asked.

    An empty answer hangs up at once.
    """
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        finally:
            thread.join(10)


def http(status: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


GOOD = http("206 Partial Content", "Content-Range: bytes 0-3/4", "Content-Length: 4", body=b"good")


# ---------------------------------------------------------------------------------------------- who may read


@pytest.mark.parametrize("token", ["wrong", "", TOKEN + "x", "tökén"])
def test_a_wrong_token_is_denied(token: str) -> None:
    store = MemoryStore()
    store.create("key", [b"x"])
    with served(store) as base_url, PeerStore(base_url, token) as reader:
        for action in (lambda: reader.read("key"), lambda: reader.size("key"), lambda: reader.entries("")):
            with pytest.raises(StoreDeniedError) as caught:
                action()
            assert TOKEN not in str(caught.value)


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ConfigError):
        token_middleware("")


def test_is_read_only() -> None:
    reader = PeerStore("http://127.0.0.1:1", TOKEN)
    with pytest.raises(StoreDeniedError, match="read only"):
        reader.create("key", [b"x"])
    with pytest.raises(StoreDeniedError, match="read only"):
        reader.delete("key")


@pytest.mark.parametrize(
    "address", ["", "host:80", "ftp://host", "http://", "http://user:secret@host", "http://host:port", "http://h/?q"]
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PeerStore(address, TOKEN)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8080", "https://node-3:9000/agents/3", "http://[::1]:80", "http://node"]
)
def test_the_url_is_the_address(address: str) -> None:
    assert PeerStore(f"{address}/", TOKEN, tls=ssl.create_default_context()).url == address


# ---------------------------------------------------------------------------------------------- long reads


def test_long_reads_are_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RANGE_BYTES_MAX", 1000)
    content = bytes(range(256)) * 20
    store = MemoryStore()
    store.create("key", [content])
    with served(store) as base_url, PeerStore(base_url, TOKEN) as reader:
        for start, stop in ((0, None), (0, 1000), (1, 1001), (1, 1002), (500, 99_999), (4120, 5120)):
            assert reader.read("key", start, stop) == content[start:stop]


def test_a_server_may_send_less_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES_MAX", 1000)
    monkeypatch.setattr(objects, "_PIECE_BYTES_MAX", 300)
    content = bytes(range(256)) * 20
    store = MemoryStore()
    store.create("key", [content])
    with served(store) as base_url, PeerStore(base_url, TOKEN) as reader:
        assert reader.read("key") == content
        assert reader.read("key", 7, 4007) == content[7:4007]
        buffers = [memoryview(bytearray(size)) for size in (999, 1, 0, 1500, 400, 1100, 99_999)]
        assert reader.read_into("key", 7, buffers) == len(content) - 7
        assert b"".join(buffers)[: len(content) - 7] == content[7:]


# ---------------------------------------------------------------------------------------------- broken connections


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(StoreError, match="does not answer") as caught:
        PeerStore(address, TOKEN).read("key")
    assert type(caught.value) is StoreError
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_lost_connection_is_tried_again_twice() -> None:
    with answering(b"", b"", GOOD) as (address, asked), PeerStore(address, TOKEN) as reader:
        assert reader.read("key") == b"good"
    assert len(asked) == 3


def test_after_three_lost_connections_it_gives_up() -> None:
    with answering(b"", b"", b"") as (address, asked), pytest.raises(StoreError, match="does not answer"):
        PeerStore(address, TOKEN).read("key")
    assert len(asked) == 3


def test_a_peer_that_restarted_is_found_again() -> None:
    with answering(GOOD, GOOD) as (address, asked), PeerStore(address, TOKEN) as reader:
        assert reader.read("key") == b"good"
        assert reader.read("key") == b"good"  # the kept connection is dead by now
    assert len(asked) == 2


def test_a_silent_peer_is_left_after_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = PeerStore(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN, timeout_seconds=0.05)
        with pytest.raises(StoreError, match="timed out"):
            reader.read("key")


def test_the_connection_is_kept() -> None:
    body = http("200 OK", "Content-Length: 4")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = PeerStore(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                for answer in (body, GOOD, http("404 Not Found", "Content-Length: 2", body=b"no"), GOOD):
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with reader:
            assert reader.size("key") == 4
            assert reader.read("key") == b"good"
            with pytest.raises(NotFoundError):
                reader.read("other")
            assert reader.read("key") == b"good"
        thread.join(10)


class Shrinking(MemoryStore):
    """A store whose objects break off after 500 bytes, or fail there."""

    def __init__(self, failure: StoreError | None) -> None:
        super().__init__()
        self._failure = failure

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if start >= 500 and self._failure is not None:
            raise self._failure
        return super().read(key, start, stop)[: max(0, 500 - start)]


@pytest.mark.parametrize("failure", [None, NotFoundError("key", "swept"), StoreError("key", "broken disk")])
def test_a_read_that_fails_halfway_is_no_short_read(
    monkeypatch: pytest.MonkeyPatch, failure: StoreError | None
) -> None:
    monkeypatch.setattr(objects, "_PIECE_BYTES_MAX", 250)
    store = Shrinking(failure)
    store.create("key", [bytes(2000)])
    with served(store) as base_url, PeerStore(base_url, TOKEN) as reader:
        with pytest.raises(StoreError, match="broke off in the middle"):
            reader.read("key")
        with pytest.raises(StoreError, match="broke off"):
            reader.read_into("key", 0, [memoryview(bytearray(400)), memoryview(bytearray(400))])
        assert reader.read("key", 0, 500) == bytes(500)


# ---------------------------------------------------------------------------------------------- errors and lies


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("401 Unauthorized", StoreDeniedError),
        ("403 Forbidden", StoreDeniedError),
        ("404 Not Found", NotFoundError),
        ("507 Insufficient Storage", StoreFullError),
        ("500 Internal Server Error", StoreError),
        ("302 Found", StoreError),
        ("200 OK", StoreError),
    ],
)
def test_statuses(status: str, kind: type[StoreError]) -> None:
    with answering(http(status, "Content-Length: 7", "Location: /", body=b"because")) as (address, _):
        with PeerStore(address, TOKEN) as reader, pytest.raises(StoreError, match="because") as caught:
            reader.read("key")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "headers",
    [
        ["Content-Length: 4"],
        ["Content-Range: bytes 0-3/4"],
        ["Content-Range: bytes 0-3/4", "Content-Length: 5"],
        ["Content-Range: bytes 0-3/4", "Content-Length: -4"],
        ["Content-Range: bytes 0-3/4", "Transfer-Encoding: chunked"],
        ["Content-Range: bytes 1-4/9", "Content-Length: 4"],
        ["Content-Range: bytes 0-3/3", "Content-Length: 4"],
        ["Content-Range: bytes 0-99/200", "Content-Length: 100"],
        ["Content-Range: bytes 0-99999999999999999/999999999999999999", "Content-Length: 100000000000000000"],
        ["Content-Range: bytes 3-0/4", "Content-Length: -2"],
        ["Content-Range: bytes */4", "Content-Length: 4"],
    ],
)
def test_lies_about_ranges(headers: list[str]) -> None:
    with answering(http("206 Partial Content", *headers, body=b"good")) as (address, _):
        with PeerStore(address, TOKEN) as reader, pytest.raises(StoreError) as caught:
            reader.read("key", 0, 10)
    assert type(caught.value) is StoreError
    with answering(http("206 Partial Content", *headers, body=b"good")) as (address, _):
        with PeerStore(address, TOKEN) as reader, pytest.raises(StoreError):
            reader.read_into("key", 0, [memoryview(bytearray(4)), memoryview(bytearray(6))])


def test_an_object_that_ends_before_its_size() -> None:
    first = http("206 Partial Content", "Content-Range: bytes 0-3/8", "Content-Length: 4", body=b"good")
    second = http("416 Range Not Satisfiable", "Content-Range: bytes */4", "Content-Length: 0")
    with answering(first, second) as (address, _):
        with PeerStore(address, TOKEN) as reader, pytest.raises(StoreError, match="ended at 4 bytes"):
            reader.read("key")
    with answering(first, second) as (address, _):
        with PeerStore(address, TOKEN) as reader, pytest.raises(StoreError, match="ended at 4 bytes"):
            reader.read_into("key", 0, [memoryview(bytearray(8))])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[",
        b'["key"]',
        b'[["key"]]',
        b'[["key", -1]]',
        b'[["key", "1"]]',
        b'[["elsewhere", 1]]',
        b"[[1, 1]]",
        b"\xff\xfe",
    ],
)
def test_listings_that_are_none(body: bytes) -> None:
    with answering(http("200 OK", f"Content-Length: {len(body)}", body=body)) as (address, _):
        with PeerStore(address, TOKEN) as reader, pytest.raises(StoreError):
            reader.entries("key")


def test_a_listing_too_long_to_read() -> None:
    with answering(http("200 OK", "Content-Length: 999999999999")) as (address, _):
        with PeerStore(address, TOKEN) as reader, pytest.raises(StoreError, match="at most"):
            reader.entries("")


def test_what_is_asked() -> None:
    listing = b'[["a b/c", 3]]'
    with answering(http("200 OK", f"Content-Length: {len(listing)}", body=listing), GOOD) as (address, asked):
        with PeerStore(f"{address}/agents/3/", "t0ken") as reader:
            assert list(reader.entries("a b/")) == [Entry(key="a b/c", size_bytes=3)]
            assert reader.read("a b/c", 0, 4) == b"good"
    assert asked[0].startswith(b"GET /agents/3/entries?prefix=a+b%2F HTTP/1.1\r\n")
    assert asked[1].startswith(b"GET /agents/3/objects/a%20b/c HTTP/1.1\r\n")
    for request in asked:
        assert b"\r\nAuthorization: Bearer t0ken\r\n" in request
    assert b"\r\nRange: bytes=0-3\r\n" in asked[1]

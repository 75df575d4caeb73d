"""What both bucket stores make of connections that break, answers that are none, and servers that are not there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import requests

from orchestrator.errors import StoreError, StoreUnavailableError
from orchestrator.storage.gcs import content
from orchestrator.storage.gcs.bucket import Bucket as GCSBucket
from orchestrator.storage.gcs.bucket import Connection
from orchestrator.storage.gcs.store import GCSStore
from orchestrator.storage.s3 import parts
from orchestrator.storage.s3.bucket import Bucket as S3Bucket
from orchestrator.storage.s3.store import S3Store

Store = S3Store | GCSStore


def s3_at(endpoint: str) -> S3Store:
    settings = {
        "endpoint_url": endpoint,
        "region_name": "us-east-1",
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
    }
    return S3Store(S3Bucket("bucket", "", connect_seconds=0.3, silence_seconds=0.3, settings=settings))


def gcs_at(endpoint: str) -> GCSStore:
    connection = Connection(endpoint, requests.Session())
    return GCSStore(GCSBucket("bucket", "", connect_seconds=0.3, silence_seconds=0.3, connection=connection))


@pytest.fixture(params=[s3_at, gcs_at])
def store_at(request: pytest.FixtureRequest) -> Callable[[str], Store]:
    found: Callable[[str], Store] = request.param
    return found


def put(store: Store, size_bytes: int) -> None:
    """One request, without a probe before it."""
    if isinstance(store, S3Store):
        store._put("key", parts.whole([bytes(size_bytes)]))
    else:
        store._put("key", content.whole([bytes(size_bytes)]))


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """A server that answers everything with these bytes and hangs up; None: it takes connections and reads nothing."""
    done = threading.Event()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            kept = []
            while True:
                connection, _ = server.accept()
                if done.is_set():
                    connection.close()
                    break
                kept.append(connection)
                if answer is not None:
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                    connection.close()
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            socket.create_connection(server.getsockname()).close()
            thread.join(10)


HALF = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\n12345"


def test_an_answer_that_breaks_off_is_no_object(store_at: Callable[[str], Store]) -> None:
    with listening(HALF) as endpoint:
        store = store_at(endpoint)
        with pytest.raises(StoreUnavailableError, match="ended after 5 of 10 bytes"):
            store.read("key", 0, 10)
        with pytest.raises(StoreUnavailableError, match="ended after 5 of 10 bytes"):
            store.read_into("key", 0, [memoryview(bytearray(10))])
        store.close()


@pytest.mark.parametrize(
    ("head", "start", "stop"),
    [
        (b"206 Partial Content\r\nContent-Range: bytes 3-5/10", 0, 3),
        (b"206 Partial Content\r\nContent-Range: bytes 0-2/3", 0, 2),
        (b"206 Partial Content\r\nContent-Range: bytes 0-2/10", 0, 10),
        (b"200 OK", 3, 6),
        (b"200 OK", 0, 2),
    ],
)
def test_other_bytes_than_were_asked_for_are_no_answer(
    head: bytes, start: int, stop: int, store_at: Callable[[str], Store]
) -> None:
    with listening(b"HTTP/1.1 " + head + b"\r\nContent-Length: 3\r\n\r\nabc") as endpoint:
        store = store_at(endpoint)
        with pytest.raises(StoreError, match=rf"asked for bytes \[{start}, {stop}\)"):
            store.read("key", start, stop)
        store.close()


def test_an_upload_that_stands_still_is_given_up(store_at: Callable[[str], Store]) -> None:
    """F27: a part that does not leave fails within its time-out, and says at which server."""
    with listening(None) as endpoint:
        store = store_at(endpoint)
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=f"{endpoint} broke off, or was silent for too long"):
            put(store, 64 << 20)
        assert time.monotonic() - began < 30  # and not for ever
        store.close()


def test_a_server_that_is_not_there(store_at: Callable[[str], Store]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    store = store_at(endpoint)
    with pytest.raises(StoreUnavailableError, match=f"{endpoint} cannot be reached") as caught:
        store.size("key")
    assert not caught.value.maybe_done


def test_an_answer_of_gcs_without_a_length_is_none() -> None:
    with listening(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc") as endpoint:
        store = gcs_at(endpoint)
        with pytest.raises(StoreError, match="does not say how long it is"):
            store.read("key")
        store.close()


def test_a_server_that_hangs_up_after_a_refused_range_is_asked_on_a_new_connection() -> None:
    """fake-gcs-server 1.54 says that its 416 has no body, sends one, and resets the connection a moment later."""
    first = b"HTTP/1.1 416 Requested Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n"
    body = b'{"size": "0"}'
    second = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(4)

        def serve() -> None:
            kept, _ = server.accept()
            with kept:
                kept.recv(65536)
                kept.sendall(first)
                connection, _ = server.accept()  # never comes if the next request is sent on the first one
                with connection:
                    connection.recv(65536)
                    connection.sendall(second)

        server.settimeout(10)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = gcs_at(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert store.read("empty", 0, 10) == b""
        assert store.size("empty") == 0
        store.close()
        thread.join(10)

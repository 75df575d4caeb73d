"""The proxy that makes an S3 server fail: which request meets which fault, and what passes unchanged."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from orchestrator.testing.faulty_http import (
    SLOW_DOWN,
    CorruptAnswer,
    CorruptRequest,
    Delay,
    Fault,
    FaultyProxy,
    LoseAnswer,
    Refuse,
    Request,
    Rule,
    Stall,
    StallAnswer,
    Truncate,
    decide,
    parse_request,
)

PART = Request(method="PUT", operation="UploadPart", key="a/shard", part=3)
RECORD = Request(method="PUT", operation="PutObject", key="a/record")


@pytest.mark.parametrize(
    ("method", "path", "operation", "key", "part"),
    [
        ("PUT", "/bucket/a/b%20c", "PutObject", "a/b c", None),
        ("PUT", "/bucket/key?partNumber=12&uploadId=x", "UploadPart", "key", 12),
        ("POST", "/bucket/key?uploads", "CreateMultipartUpload", "key", None),
        ("POST", "/bucket/key?uploadId=x", "CompleteMultipartUpload", "key", None),
        ("DELETE", "/bucket/key?uploadId=x", "AbortMultipartUpload", "key", None),
        ("DELETE", "/bucket/key", "DeleteObject", "key", None),
        ("GET", "/bucket/key", "GetObject", "key", None),
        ("GET", "/bucket/key?uploadId=x", "ListParts", "key", None),
        ("HEAD", "/bucket/key", "HeadObject", "key", None),
        ("GET", "/bucket?list-type=2&prefix=a", "ListObjectsV2", "", None),
        ("GET", "/bucket/?uploads", "ListMultipartUploads", "", None),
        ("HEAD", "/bucket", "HeadBucket", "", None),
        ("POST", "/bucket?delete", "DeleteObjects", "", None),
        ("PATCH", "/bucket/key", "PATCH", "key", None),
    ],
)
def test_what_is_asked(method: str, path: str, operation: str, key: str, part: int | None) -> None:
    assert parse_request(method, path) == Request(method=method, operation=operation, key=key, part=part)


@pytest.mark.parametrize(
    ("rule", "request_", "matches"),
    [
        (Rule(fault=SLOW_DOWN), RECORD, True),
        (Rule(fault=SLOW_DOWN, operation="UploadPart"), PART, True),
        (Rule(fault=SLOW_DOWN, operation="UploadPart"), RECORD, False),
        (Rule(fault=SLOW_DOWN, operation="PUT"), RECORD, True),
        (Rule(fault=SLOW_DOWN, part=3), PART, True),
        (Rule(fault=SLOW_DOWN, part=2), PART, False),
        (Rule(fault=SLOW_DOWN, part=3), RECORD, False),
        (Rule(fault=SLOW_DOWN, key="rec"), RECORD, True),
        (Rule(fault=SLOW_DOWN, key="rec"), PART, False),
        (Rule(fault=SLOW_DOWN, above=1), PART, True),
        (Rule(fault=SLOW_DOWN, above=2), PART, False),
    ],
)
def test_what_a_rule_is_about(rule: Rule, request_: Request, matches: bool) -> None:
    assert rule.matches(request_, 2) is matches


def test_rules_count_what_they_match_and_the_first_whose_turn_it_is_acts() -> None:
    rules = [
        Rule(fault=SLOW_DOWN, operation="UploadPart", after=1, times=2),
        Rule(fault=LoseAnswer(), key="shard", times=3),
        Rule(fault=Delay(seconds=1), operation="PutObject"),
    ]
    counts: tuple[int, ...] = (0, 0, 0)
    met: list[Fault | None] = []
    for request in (PART, PART, RECORD, PART, PART, RECORD):
        fault, counts = decide(rules, counts, request, 1)
        met.append(fault)
    assert met == [LoseAnswer(), SLOW_DOWN, Delay(seconds=1), SLOW_DOWN, None, Delay(seconds=1)]
    assert counts == (4, 4, 2)


# ---------------------------------------------------------------------------------------------- on a server


class Echo(BaseHTTPRequestHandler):
    """Answers with what it got, and remembers it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, dict(self.headers.items()), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("X-Kept", "yes")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def echo() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.got = []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def put(proxy: FaultyProxy, body: bytes = b"0123456789") -> tuple[int, dict[str, str], bytes]:
    address = proxy.url.removeprefix("http://")
    client = http.client.HTTPConnection(address, timeout=1.0)
    try:
        client.request("PUT", "/bucket/a%20key?x=%2F", body, {"Host": "signed.test:1", "X-Amz-Date": "now"})
        answer = client.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        client.close()


def proxy_of(echo: Any, *rules: Rule) -> FaultyProxy:
    return FaultyProxy(f"http://127.0.0.1:{echo.server_address[1]}", rules)


def test_what_no_rule_is_about_passes_unchanged(echo: Any) -> None:
    with proxy_of(echo, Rule(fault=LoseAnswer(), operation="GET")) as proxy:
        status, headers, body = put(proxy)
    assert (status, headers["X-Kept"], body) == (200, "yes", b"0123456789")
    ((path, got, sent),) = echo.got
    assert (path, got["Host"], got["X-Amz-Date"], sent) == ("/bucket/a%20key?x=%2F", "signed.test:1", "now", body)
    (exchange,) = proxy.exchanges
    assert (exchange.request.key, exchange.fault, exchange.under_way) == ("a key", None, 1)


def test_a_refusal_is_an_answer_and_the_server_sees_nothing(echo: Any) -> None:
    with proxy_of(echo, Rule(fault=Refuse(code="SlowDown", status=503, retry_after_seconds=7), times=1)) as proxy:
        status, headers, body = put(proxy)
        assert (status, headers["Retry-After"]) == (503, "7")
        assert b"<Code>SlowDown</Code>" in body
        assert echo.got == []
        assert put(proxy)[0] == 200


def test_wrong_bits(echo: Any) -> None:
    with proxy_of(echo, Rule(fault=CorruptAnswer(position=13), times=1), Rule(fault=CorruptRequest())) as proxy:
        assert put(proxy)[2] == b"0122456789"
        assert put(proxy)[2] == b"1123456789"
    assert [sent for *_, sent in echo.got] == [b"0123456789", b"1123456789"]


@pytest.mark.parametrize(
    ("fault", "error", "seen"),
    [
        (Truncate(after_bytes=4), http.client.IncompleteRead, 1),
        (LoseAnswer(), http.client.RemoteDisconnected, 1),
        (StallAnswer(after_bytes=4), TimeoutError, 1),
        (StallAnswer(after_bytes=None), TimeoutError, 1),
        (Stall(), TimeoutError, 0),
        (Stall(body_bytes=3), TimeoutError, 0),
    ],
)
def test_answers_that_do_not_come(fault: Fault, error: type[Exception], seen: int, echo: Any) -> None:
    with proxy_of(echo, Rule(fault=fault)) as proxy:
        with pytest.raises(error):
            put(proxy)
        proxy.set_rules()
        assert put(proxy)[2] == b"0123456789"
    assert len(echo.got) == seen + 1


def test_a_server_that_is_gone_is_a_connection_that_closes(echo: Any) -> None:
    with FaultyProxy("http://127.0.0.1:1") as proxy:
        with pytest.raises(http.client.RemoteDisconnected):
            put(proxy)


def test_only_a_plain_server() -> None:
    with pytest.raises(ValueError, match="is not http://host:port"):
        FaultyProxy("https://host")

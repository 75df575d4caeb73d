"""A proxy on loopback between a client and a real S3 server that refuses, stalls, truncates, corrupts and loses.

Rules say which requests meet which fault; every other one passes unchanged, with its path and its Host header, so that
signatures made for the proxy's address stay valid. For tests, also those of users:

    rules = [Rule(fault=SLOW_DOWN, operation="UploadPart", part=3, times=2)]
    with FaultyProxy("http://127.0.0.1:9000", rules) as proxy:
        store = open_store(f"s3://bucket/prefix?endpoint={proxy.url}")

Plain HTTP only. Requests and answers are held in memory whole.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, assert_never
from urllib.parse import parse_qs, unquote, urlsplit

SERVER_SECONDS_MAX = 60.0
"""How long the server behind the proxy may be silent."""
_HOP_HEADERS = ("connection", "expect", "keep-alive", "proxy-connection", "transfer-encoding")


# -------------------------------------------------------------------------------------------------- the faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The proxy answers with an error, and the server never sees the request."""

    code: str
    status: int
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """So many bytes of the request's body are taken (None: all), the server never sees it, and no answer comes."""

    body_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StallAnswer:
    """The server carries it out; the answer's head and so many bytes of its body come (None: not even the head), and
    then nothing."""

    after_bytes: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """The server carries it out; the connection closes after so many bytes of the answer's body."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptAnswer:
    """One bit of the answer's body is wrong, in the byte at `position` (counted around)."""

    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptRequest:
    """One bit of the request's body is wrong when the server gets it."""

    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseAnswer:
    """The server carries it out, and the connection closes without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The server sees it only after that time."""

    seconds: float


Fault = Refuse | Stall | StallAnswer | Truncate | CorruptAnswer | CorruptRequest | LoseAnswer | Delay

SLOW_DOWN = Refuse(code="SlowDown", status=503)
TOO_MANY_REQUESTS = Refuse(code="TooManyRequests", status=429)
INTERNAL_ERROR = Refuse(code="InternalError", status=500)
EXPIRED_TOKEN = Refuse(code="ExpiredToken", status=400)
UNKNOWN_ACCESS_KEY = Refuse(code="InvalidAccessKeyId", status=403)
CLOCK_SKEW = Refuse(code="RequestTimeTooSkewed", status=403)


# --------------------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a rule looks at."""

    method: str
    operation: str
    """As S3 calls it, such as UploadPart; the method, where that is not known."""
    key: str
    """The object's, without the bucket."""
    part: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which requests meet a fault. What is not said matches any."""

    fault: Fault
    operation: str = ""
    """As S3 calls it, or a method."""
    part: int | None = None
    """Number of the part, of UploadPart."""
    key: str = ""
    """Somewhere in the object's key."""
    after: int = 0
    """So many that match pass first."""
    times: int | None = None
    """So many then meet it; None: all."""
    above: int = 0
    """Only while more than so many requests of one operation are under way, this one included."""

    def matches(self, request: Request, under_way: int) -> bool:
        """Whether it is about that request."""
        return (
            self.operation in ("", request.operation, request.method)
            and self.part in (None, request.part)
            and self.key in request.key
            and under_way > self.above
        )


def decide(
    rules: Sequence[Rule], counts: Sequence[int], request: Request, under_way: int
) -> tuple[Fault | None, tuple[int, ...]]:
    """(the fault that the request meets, how many requests each rule has matched now).

    Every rule counts what it matches; the first whose turn it is acts.
    """
    found: Fault | None = None
    now = list(counts)
    for place, rule in enumerate(rules):
        if rule.matches(request, under_way):
            turn = now[place] - rule.after
            now[place] += 1
            if found is None and turn >= 0 and (rule.times is None or turn < rule.times):
                found = rule.fault
    return found, tuple(now)


def parse_request(method: str, path: str) -> Request:
    """What is asked, from an address with the bucket in its path."""
    address = urlsplit(path)
    query = parse_qs(address.query, keep_blank_values=True)
    key = unquote(address.path).lstrip("/").partition("/")[2]
    number = query.get("partNumber", [""])[0]
    return Request(
        method=method,
        operation=_operation(method, bool(key), set(query)),
        key=key,
        part=int(number) if number.isascii() and number.isdigit() else None,
    )


def _operation(method: str, of_object: bool, query: set[str]) -> str:
    if of_object:
        for wanted, name in _WITH_QUERY.items():
            if wanted[0] == method and set(wanted[1:]) <= query:
                return name
        return _OF_OBJECTS.get(method, method)
    if method == "GET":
        return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
    return _OF_BUCKETS.get(method, method)


_WITH_QUERY = {
    ("PUT", "partNumber", "uploadId"): "UploadPart",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "uploadId"): "ListParts",
}
_OF_OBJECTS = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
_OF_BUCKETS = {"HEAD": "HeadBucket", "POST": "DeleteObjects"}


# --------------------------------------------------------------------------------------------------- the proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request that came, and what it met."""

    request: Request
    fault: Fault | None
    under_way: int
    """Requests of that operation at that moment, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: int
    reason: str
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class FaultyProxy:
    """Listens on a port of its own from the beginning of its block to the end."""

    def __init__(self, server_url: str, rules: Sequence[Rule] = ()) -> None:
        """`server_url`: http://host:port of the real server."""
        address = urlsplit(server_url)
        if address.scheme != "http" or address.hostname is None:
            raise ValueError(f"{server_url!r} is not http://host:port")
        self._server_address = (address.hostname, address.port or 80)
        self._lock = threading.Lock()
        self._rules = tuple(rules)
        self._counts: tuple[int, ...] = (0,) * len(rules)
        self._under_way: dict[str, int] = {}
        self._exchanges: list[Exchange] = []
        self._ended = threading.Event()
        self._listener = _Listener(self)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,), name="faulty proxy")

    @property
    def url(self) -> str:
        """Where it listens: the endpoint for the client."""
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    @property
    def exchanges(self) -> list[Exchange]:
        """All so far, in the order in which they came."""
        with self._lock:
            return list(self._exchanges)

    def set_rules(self, *rules: Rule) -> None:
        """From now on these, counted from the beginning. What is under way stays as it is."""
        with self._lock:
            self._rules, self._counts = rules, (0,) * len(rules)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._listener.shutdown()
        self._listener.hang_up()
        self._listener.server_close()
        self._thread.join()

    @contextlib.contextmanager
    def met(self, request: Request) -> Iterator[Fault | None]:
        """For the block that makes the answer: the fault that the request meets."""
        with self._lock:
            under_way = self._under_way[request.operation] = self._under_way.get(request.operation, 0) + 1
            fault, self._counts = decide(self._rules, self._counts, request, under_way)
            self._exchanges.append(Exchange(request=request, fault=fault, under_way=under_way))
        try:
            yield fault
        finally:
            with self._lock:
                self._under_way[request.operation] -= 1

    def wait(self, seconds: float | None = None) -> None:
        """For that time, or until the proxy ends."""
        self._ended.wait(seconds)

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> _Answer:
        """What the server answers. Raises OSError, HTTPException."""
        server = http.client.HTTPConnection(*self._server_address, timeout=SERVER_SECONDS_MAX)
        try:
            server.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() not in _HOP_HEADERS:
                    server.putheader(name, value)
            server.endheaders(body or None)
            answer = server.getresponse()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_HEADERS]
            return _Answer(status=answer.status, reason=answer.reason, headers=kept, body=answer.read())
        finally:
            server.close()


class _Listener(ThreadingHTTPServer):
    """One thread per connection, all of them ended with the proxy."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, proxy: FaultyProxy) -> None:
        self.proxy = proxy
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Ends what is being waited for on any connection."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # whoever asked has hung up
            super().handle()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._answer_one
        raise AttributeError(name)

    def _answer_one(self) -> None:
        request = parse_request(self.command, self.path)
        try:
            with self.server.proxy.met(request) as fault:
                answer = self._answer_to(fault)
            self._send(answer, fault)
        except (OSError, http.client.HTTPException):
            self.close_connection = True

    def _answer_to(self, fault: Fault | None) -> _Answer | None:
        """None: there is none."""
        match fault:
            case StallAnswer(after_bytes=None):
                self._carried_out()
                self.server.proxy.wait()
                return None
            case None | StallAnswer() | Truncate():
                return self._carried_out()
            case Refuse():
                self._body()
                return self._refusal(fault)
            case Stall():
                self._body(fault.body_bytes)
                self.server.proxy.wait()
                return None
            case CorruptAnswer():
                answer = self._carried_out()
                return replace(answer, body=_with_wrong_bit(answer.body, fault.position))
            case CorruptRequest():
                return self._carried_out(wrong_at=fault.position)
            case LoseAnswer():
                self._carried_out()
                return None
            case Delay():
                self.server.proxy.wait(fault.seconds)
                return self._carried_out()
            case _:
                assert_never(fault)

    def _body(self, bytes_max: int | None = None) -> bytes:
        length = int(self.headers.get("Content-Length", 0))
        return self.rfile.read(length if bytes_max is None else min(length, bytes_max))

    def _carried_out(self, wrong_at: int | None = None) -> _Answer:
        body = self._body()
        if wrong_at is not None:
            body = _with_wrong_bit(body, wrong_at)
        return self.server.proxy.forward(self.command, self.path, list(self.headers.items()), body)

    def _refusal(self, refuse: Refuse) -> _Answer:
        text = f"<Error><Code>{refuse.code}</Code><Message>a fault was asked for</Message></Error>"
        body = b"" if self.command == "HEAD" else f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
        headers = [("Content-Type", "application/xml")]
        if refuse.retry_after_seconds is not None:
            headers.append(("Retry-After", str(refuse.retry_after_seconds)))
        return _Answer(status=refuse.status, reason=refuse.code, headers=headers, body=body)

    def _send(self, answer: _Answer | None, fault: Fault | None) -> None:
        """The head says the whole length, whatever is sent of the body."""
        if answer is None:
            self.close_connection = True
            return
        self.send_response_only(answer.status, answer.reason)
        bare = self.command == "HEAD" or answer.status in (204, 304)
        for name, value in answer.headers:
            if bare or name.lower() != "content-length":
                self.send_header(name, value)
        if not bare:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        cut = fault.after_bytes if isinstance(fault, StallAnswer | Truncate) else None
        if not bare:
            self.wfile.write(answer.body[:cut])
        if isinstance(fault, StallAnswer):
            self.server.proxy.wait()  # the client has to give up by itself
        if cut is not None:
            self.close_connection = True


def _with_wrong_bit(body: bytes, position: int) -> bytes:
    if not body:
        return body
    changed = bytearray(body)
    changed[position % len(body)] ^= 1
    return bytes(changed)

"""A bucket that discards what it is sent: `python -m benchmarks.s3_sink [--keep]`, until its input ends.

As much of S3 over HTTP/1.1 as uploads need, each connection in a thread of its own. The kernel drops large bodies when
they are asked for (MSG_TRUNC), so that the sink takes next to nothing of processors that it would not share with its
clients elsewhere; sizes and small bodies are kept, and `If-None-Match: *` is honoured. Signatures and checksums are not
looked at. With `--keep` all bodies stay, and can be read back.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

BUFFER_BYTES = 1 << 20
SMALL_BYTES_MAX = 256 << 10
"""Bodies of that size are always kept: proofs, receipts, indexes of a few tensors."""
HEAD_BYTES_MAX = 64 << 10
REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


@dataclass(slots=True)
class Stored:
    """An object, or a part of one: its size, and its bytes where they were kept."""

    size_bytes: int
    body: bytes | None


@dataclass(slots=True)
class Request:
    """One request's head."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass(slots=True)
class Answer:
    """What is said to it."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    """Of the body that a HEAD does not get."""


class Sink:
    """What has arrived, and the answers."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, dict[int, Stored]] = {}
        self._numbers = itertools.count(1)

    def kept(self, size_bytes: int) -> bool:
        """Whether a body of this size shall be kept."""
        return self._keep or size_bytes <= SMALL_BYTES_MAX

    def answer(self, request: Request, arrived: Stored) -> Answer:
        """What S3 would say."""
        with self._lock:
            match request.method:
                case "PUT" if "partNumber" in request.query:
                    self._uploads[request.query["uploadId"]][int(request.query["partNumber"])] = arrived
                    return self._stored(request)
                case "PUT":
                    return self._create(request, arrived)
                case "POST" if "uploads" in request.query:
                    upload = f"upload-{next(self._numbers)}"
                    self._uploads[upload] = {}
                    return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
                case "POST":
                    return self._complete(request)
                case "DELETE":
                    self._uploads.pop(request.query.get("uploadId", ""), None)
                    self._objects.pop(request.key, None)
                    return Answer(204)
                case "GET" if "list-type" in request.query:
                    return self._listing(request.query.get("prefix", ""))
        return self._read(request)

    def _create(self, request: Request, arrived: Stored) -> Answer:
        if request.headers.get("if-none-match") == "*" and request.key in self._objects:
            return _error(412, "PreconditionFailed")
        self._objects[request.key] = arrived
        return self._stored(request)

    def _stored(self, request: Request) -> Answer:
        checksums = {name: value for name, value in request.headers.items() if name.startswith("x-amz-checksum-")}
        return Answer(200, headers={"ETag": f'"{next(self._numbers):032x}"', **checksums})

    def _complete(self, request: Request) -> Answer:
        parts = self._uploads.get(request.query["uploadId"])
        if parts is None:
            return _error(404, "NoSuchUpload")
        bodies = [parts[number].body for number in sorted(parts)]
        whole = None if None in bodies or not self._keep else b"".join(body for body in bodies if body is not None)
        made = self._create(request, Stored(sum(part.size_bytes for part in parts.values()), whole))
        if made.status != 200:
            return made
        del self._uploads[request.query["uploadId"]]
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.headers['ETag'])}</ETag>")

    def _listing(self, prefix: str) -> Answer:
        found = [(key, stored.size_bytes) for key, stored in sorted(self._objects.items()) if key.startswith(prefix)]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size_bytes}</Size></Contents>" for key, size_bytes in found
        )
        return _xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{entries}")

    def _read(self, request: Request) -> Answer:
        stored = self._objects.get(request.key)
        if stored is None:
            return _error(404, "NoSuchKey")
        headers = {"ETag": '"0"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if request.method == "HEAD":
            return Answer(200, headers=headers, length=stored.size_bytes)
        if stored.body is None:
            return _error(404, "NoSuchKey")  # it was there, and was discarded
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if wanted is None:
            return Answer(200, stored.body, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or stored.size_bytes), stored.size_bytes - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{stored.size_bytes}"
        return Answer(206, bytes(memoryview(stored.body)[first : last + 1]), headers)


class Connection:
    """One client, for as long as it stays."""

    def __init__(self, sink: Sink, client: socket.socket) -> None:
        self._sink = sink
        self._socket = client
        self._memory = memoryview(bytearray(BUFFER_BYTES))
        self._ahead = b""
        """Came with a head, and belongs to what follows it."""

    def serve(self) -> None:
        """Until the client leaves."""
        with self._socket:
            try:
                while (request := self._head()) is not None:
                    arrived = self._body(request)
                    self._send(request, self._sink.answer(request, arrived))
            except ConnectionError:  # it was killed, or had enough
                return

    def _head(self) -> Request | None:
        data = self._ahead
        while (end := data.find(b"\r\n\r\n")) < 0:
            more = self._socket.recv(HEAD_BYTES_MAX)
            if not more or len(data) > HEAD_BYTES_MAX:
                return None
            data += more
        self._ahead = data[end + 4 :]
        first, *rest = data[:end].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        url = urlsplit(target)
        _, _, key = unquote(url.path).lstrip("/").partition("/")  # the bucket's name comes first
        return Request(method, key, dict(parse_qsl(url.query, keep_blank_values=True)), headers)

    def _body(self, request: Request) -> Stored:
        left = int(request.headers.get("content-length", 0))
        size_bytes = int(request.headers.get("x-amz-decoded-content-length", left))
        if "100-continue" in request.headers.get("expect", ""):
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray() if self._sink.kept(left) else None
        begun, self._ahead = self._ahead[:left], self._ahead[left:]
        left -= len(begun)
        if body is not None:
            body += begun
        flags = socket.MSG_TRUNC if body is None else 0  # Linux
        while left:
            count = self._socket.recv_into(self._memory, min(left, BUFFER_BYTES), flags)
            if not count:
                raise ConnectionError("the body has ended early")
            left -= count
            if body is not None:
                body += self._memory[:count]
        return Stored(size_bytes, None if body is None else bytes(body))

    def _send(self, request: Request, answer: Answer) -> None:
        length = len(answer.body) if answer.length is None else answer.length
        lines = [f"HTTP/1.1 {answer.status} {REASONS[answer.status]}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        body = b"" if request.method == "HEAD" else answer.body
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)


def _xml(name: str, inner: str, status: int = 200) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Answer:
    return _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)


def main() -> None:
    """Prints its address first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep all bodies")
    sink = Sink(parser.parse_args().keep)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has started it ends it
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)

    def accept() -> None:
        while True:
            client, _ = listening.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=Connection(sink, client).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    sys.stdin.read()
    os._exit(0)  # its threads wait for clients that may never leave


if __name__ == "__main__":
    main()

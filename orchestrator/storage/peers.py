"""Another agent's objects as a store: range reads over HTTP. The reader of a checkpoint needs no second code path.

The other end is `agent/objects`. The protocol:

    HEAD {base}/objects/{key}            200 and Content-Length
    GET  {base}/objects/{key}            with `Range: bytes=a-b`: 206, Content-Range, maybe fewer bytes than asked;
                                         416 when the object ends at or before a
    GET  {base}/entries?prefix={prefix}  200 and a JSON list of [key, size in bytes], in key order

Every request carries `Authorization: Bearer {token}`. Errors: 401 and 403 denied, 404 no such object, 507 full.
A peer may be broken or not the one that was meant, so nothing is allocated before its headers make sense.

Not here: choosing the peer, and checking digests (`checkpoint/restore`). Called by agents and restoring workers.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlencode, urlsplit

from orchestrator.errors import ConfigError, NotFoundError, StoreDeniedError, StoreError, StoreFullError
from orchestrator.storage.arguments import byte_views, bytes_wanted, check_range, key_parts, prefix_parts
from orchestrator.storage.base import Entry, Piece

RANGE_BYTES_MAX = 64 << 20
"""The most that one request moves; longer reads are several requests."""

_LISTING_BYTES_MAX = 64 << 20
_ERROR_BYTES_MAX = 4096
_RETRIES_MAX = 2
_IDLE_CONNECTIONS_MAX = 16

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_ERRORS: dict[int, type[StoreError]] = {
    HTTPStatus.UNAUTHORIZED: StoreDeniedError,
    HTTPStatus.FORBIDDEN: StoreDeniedError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.INSUFFICIENT_STORAGE: StoreFullError,
}


class PeerStore:
    """What the agent at `base_url` (`http://host:port`, maybe with a path) holds. Reads only.

    Each thread has a connection to itself while it reads; idle ones are kept for the next. `close` closes those.
    `tls` is for `https://`; without it the system's authorities are trusted. `timeout_seconds` is the longest
    silence, not the longest answer.
    """

    def __init__(
        self, base_url: str, token: str, *, tls: ssl.SSLContext | None = None, timeout_seconds: float = 30.0
    ) -> None:
        self._address = _Address.parsed(base_url)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._idle: deque[http.client.HTTPConnection] = deque()

    @property
    def url(self) -> str:
        """The agent's address, without the token."""
        return self._address.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """Always StoreDeniedError: an agent alone writes what it holds."""
        raise StoreDeniedError(key, f"{self.url} is read only")

    def delete(self, key: str) -> None:
        """Always StoreDeniedError: an agent alone deletes what it holds."""
        raise StoreDeniedError(key, f"{self.url} is read only")

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port. Reads longer than RANGE_BYTES_MAX are several requests, one after another."""
        check_range(key, start, stop)
        path = _object_path(key)
        if start == stop:
            self.size(key)  # there is no empty range in HTTP; this finds out whether the object is there
            return b""
        pieces: list[bytes] = []
        while stop is None or start < stop:
            limit = start + RANGE_BYTES_MAX
            piece, size_bytes = self._read_range(key, path, start, limit if stop is None else min(stop, limit))
            if pieces and not piece:
                raise StoreError(key, _cut_short(start))
            pieces.append(piece)
            start += len(piece)
            stop = size_bytes if stop is None else min(stop, size_bytes)
        return b"".join(pieces)  # no copy if it is one piece

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port. From the socket into the buffers."""
        check_range(key, start, None)
        path, rest = _object_path(key), deque(byte_views(buffers))
        if not rest:
            self.size(key)
        position, stop = start, start + bytes_wanted(rest)
        while position < stop:
            with self._range(key, path, position, min(stop, position + RANGE_BYTES_MAX)) as (
                answer,
                length,
                size_bytes,
            ):
                if length == 0 and position > start:
                    raise StoreError(key, _cut_short(position))
                _fill(key, answer, length, rest)
            position += length
            stop = min(stop, size_bytes)
        return position - start

    def size(self, key: str) -> int:
        """See the port."""
        with self._answer(key, "HEAD", _object_path(key)) as answer:
            _expect(key, answer, HTTPStatus.OK)
            answer.read()  # nothing, but it frees the connection
            return _announced_length(key, answer)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port. The whole listing is read before the first entry comes."""
        prefix_parts(prefix)
        with self._answer(prefix, "GET", f"/entries?{urlencode({'prefix': prefix})}") as answer:
            _expect(prefix, answer, HTTPStatus.OK)
            return iter(_parsed_listing(prefix, _body(prefix, answer, _LISTING_BYTES_MAX)))

    def close(self) -> None:
        """Closes the idle connections. The store stays usable."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ one request

    def _read_range(self, key: str, path: str, start: int, stop: int) -> tuple[bytes, int]:
        """Some bytes from `start` on, at most up to `stop`, and the object's size; no bytes only at its end."""
        with self._range(key, path, start, stop) as (answer, _, size_bytes):
            return answer.read(), size_bytes

    @contextmanager
    def _range(self, key: str, path: str, start: int, stop: int) -> Iterator[tuple[http.client.HTTPResponse, int, int]]:
        """(answer, bytes of its body, the object's size) to a request for bytes from `start` on, at most up to `stop`.

        The body is empty only at the object's end; then the size is `start`.
        """
        with self._answer(key, "GET", path, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                answer.read(_ERROR_BYTES_MAX)
                yield answer, 0, start
                return
            _expect(key, answer, HTTPStatus.PARTIAL_CONTENT)
            match = _CONTENT_RANGE.fullmatch(answer.getheader("Content-Range", ""))
            length = _announced_length(key, answer)
            if match is None:
                raise StoreError(key, "the peer sent no Content-Range")
            first, last, size_bytes = (int(number) for number in match.groups())
            if first != start or not first <= last < min(stop, size_bytes) or length != last - first + 1:
                problem = f"asked for bytes [{start}, {stop}), the peer sent {match.group()} in {length} bytes"
                raise StoreError(key, problem)
            yield answer, length, size_bytes

    @contextmanager
    def _answer(
        self, key: str, method: str, path: str, headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The peer's answer, for as long as the block lasts; the connection is kept if the block read all of it."""
        connection, answer = self._asked(key, method, path, self._headers | (headers or {}))
        try:
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise StoreError(key, f"{self.url} broke off in the middle of its answer: {_reason(error)}") from error
        finally:
            if answer.isclosed() and not answer.will_close and len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
            else:
                answer.close()
                connection.close()

    def _asked(
        self, key: str, method: str, path: str, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request and reads the answer's head, on a new connection if an idle one turns out to be dead.

        A time-out is not tried again: the caller has other sources, and less time than before.
        """
        failure: Exception | None = None
        for _ in range(1 + _RETRIES_MAX):
            connection = self._connection(fresh=failure is not None)
            try:
                connection.request(method, self._address.path + path, headers=headers)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                failure = error
                if isinstance(error, TimeoutError):
                    break
        raise StoreError(key, f"{self.url} does not answer: {_reason(failure)}") from failure

    def _connection(self, *, fresh: bool) -> http.client.HTTPConnection:
        if not fresh:
            try:
                return self._idle.pop()
            except IndexError:
                pass
        host, port = self._address.host, self._address.port
        if self._address.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_seconds, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    scheme: str
    host: str
    port: int | None
    path: str

    @classmethod
    def parsed(cls, base_url: str) -> Self:
        """Raises ConfigError. The address is not repeated in full, as it might hold a password."""
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"a peer's address has a port that is no number: {parts.hostname}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("a peer's address is http://host:port or https://host:port")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"a peer's address holds no user, query or fragment: {parts.hostname}")
        return cls(scheme=parts.scheme, host=parts.hostname, port=port, path=parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


def _object_path(key: str) -> str:
    key_parts(key)
    return f"/objects/{quote(key)}"


def _expect(key: str, answer: http.client.HTTPResponse, status: HTTPStatus) -> None:
    """Raises the error that the answer's status stands for, unless it is `status`."""
    if answer.status == status:
        return
    text = answer.read(_ERROR_BYTES_MAX).decode("utf-8", "replace").strip()
    kind = _ERRORS.get(answer.status, StoreError)
    raise kind(key, text or f"the peer answered {answer.status} {answer.reason}")


def _announced_length(key: str, answer: http.client.HTTPResponse) -> int:
    text = answer.getheader("Content-Length", "")
    if not re.fullmatch("[0-9]{1,18}", text):
        raise StoreError(key, f"the peer announced a length of {text!r}")
    return int(text)


def _fill(key: str, answer: http.client.HTTPResponse, length: int, buffers: deque[memoryview]) -> None:
    """Moves a body of that length into the first buffers; what is not filled stays in the queue."""
    while length:
        view = buffers.popleft()
        count = answer.readinto(view[:length])
        if count == 0:
            raise StoreError(key, f"the peer broke off {length} bytes before the end of its answer")
        length -= count
        if count < len(view):
            buffers.appendleft(view[count:])


def _cut_short(position: int) -> str:
    return f"ended at {position} bytes, before the size that the peer had announced"


def _body(key: str, answer: http.client.HTTPResponse, bytes_max: int) -> bytes:
    """The whole body. Raises StoreError before reading if it is longer than `bytes_max` or of unknown length."""
    length = _announced_length(key, answer)
    if length > bytes_max:
        raise StoreError(key, f"the peer announced {length} bytes where at most {bytes_max} make sense")
    return answer.read()


def _parsed_listing(prefix: str, body: bytes) -> list[Entry]:
    try:
        rows = json.loads(body)
    except ValueError as error:
        raise StoreError(prefix, "the peer's listing is no JSON") from error
    if not isinstance(rows, list):
        raise StoreError(prefix, "the peer's listing is no list")
    return [_parsed_entry(prefix, row) for row in rows]


def _parsed_entry(prefix: str, row: object) -> Entry:
    match row:
        case [str(key), int(size_bytes)] if key.startswith(prefix) and size_bytes >= 0:
            return Entry(key=key, size_bytes=size_bytes)
        case _:
            raise StoreError(prefix, f"the peer's listing has an entry that is none: {row!r:.200}")


def _reason(error: Exception | None) -> str:
    return str(error) or type(error).__name__

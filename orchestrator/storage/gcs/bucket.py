"""One bucket of GCS: requests of its JSON API with keys in, our errors out. The only module that uses the SDK.

Endpoint and credentials come from the SDK's client: application default credentials, or STORAGE_EMULATOR_HOST. The
requests go over its session themselves: its uploads and downloads copy, want a file, and check digests of `bytes`
only. Nothing is tried again here (`storage/retrying` has that).

Called by `store` and `upload`.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import requests
from google.auth.exceptions import GoogleAuthError
from google.cloud import storage
from urllib3.exceptions import HTTPError

from orchestrator.errors import ConfigError, StoreError, StoreUnavailableError
from orchestrator.storage.answers import Body
from orchestrator.storage.bucket_urls import BucketUrl
from orchestrator.storage.gcs.content import Content
from orchestrator.storage.gcs.errors import raised, refused

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 20.0
"""The longest that a server may take to begin its answer, or to go on with it, or to take a slice of a body."""
CONNECTIONS_MAX = 64
_CRC32C = re.compile(r"(?:^|[, ])crc32c=([A-Za-z0-9+/]{6}==)")
LISTED_AT_ONCE = 1000
"""Objects in one answer to a listing; GCS gives no more."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A server, and the session that asks it; threads and buckets may share it."""

    endpoint: str
    session: requests.Session


class Bucket:
    """The objects of `name` whose keys start with `prefix` and a slash. Touches nothing before the first request."""

    def __init__(
        self,
        name: str,
        prefix: str,
        *,
        kms_key: str = "",
        connect_seconds: float = CONNECT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        connection: Connection | None = None,
    ) -> None:
        """Without a `connection` the SDK finds out whom to ask, and with which credentials.

        What is written is encrypted with the `kms_key`; without one, with the bucket's own.
        """
        self.name = name
        self._kms_key = kms_key
        self._prefix = f"{prefix}/" if prefix else ""
        self._timeouts = (connect_seconds, silence_seconds)
        self._lock = threading.Lock()
        self._connection = connection

    @property
    def url(self) -> str:
        """gs://bucket/prefix, and the settings."""
        settings = {"kms_key": self._kms_key} if self._kms_key else {}
        return BucketUrl(scheme="gs", bucket=self.name, prefix=self._prefix.rstrip("/"), settings=settings).text

    @property
    def endpoint(self) -> str:
        """The server's address, for messages."""
        return "the endpoint" if self._connection is None else self._connection.endpoint

    def full_key(self, key: str) -> str:
        """The key as the bucket has it."""
        return self._prefix + key

    def about(self, key: str, action: str, method: str, **arguments: Any) -> requests.Response:
        """One request about the object, and its answer. Arguments as those of `ask`."""
        return self.ask(key, action, method, f"/storage/v1/b/{quote(self.name)}/o/{self._quoted(key)}", **arguments)

    def ask(
        self,
        key: str,
        action: str,
        method: str,
        path: str,
        *,
        wanted: Sequence[int] = (200,),
        parameters: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        content: Content | bytes | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """One request and its answer, whose status is a wanted one. `path`: below the endpoint, or a whole address.

        Raises StoreError's subtree.
        """
        with self._translated(key):
            connection = self._connected()
            address = path if "://" in path else connection.endpoint + path
            data: Any = content
            answer = connection.session.request(
                method,
                address,
                params=parameters,
                headers={"Accept-Encoding": "identity", **(headers or {})},
                data=data,
                timeout=self._timeouts,
                allow_redirects=False,
                stream=stream,
            )
            if answer.status_code in wanted:
                return answer
            if answer.status_code == 416:  # fake-gcs-server ends the connection after it, and does not say so
                answer.close()
                body = b""
            else:
                body = answer.content
        raise refused(
            key, self.name, self.endpoint, action, status=answer.status_code, headers=answer.headers, body=body
        )

    def upload(self, key: str, kind: str, **arguments: Any) -> requests.Response:
        """The request that begins an upload, or is all of it, for a key that is still free."""
        path = f"/upload/storage/v1/b/{quote(self.name)}/o"
        parameters = {"uploadType": kind, "name": self.full_key(key), "ifGenerationMatch": "0"}
        if self._kms_key:
            parameters["kmsKeyName"] = self._kms_key
        return self.ask(key, "create", "POST", path, parameters=parameters, **arguments)

    def objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes of the objects whose keys start with `prefix`. Raises StoreError."""
        parameters = {
            "prefix": self.full_key(prefix),
            "maxResults": str(LISTED_AT_ONCE),
            "fields": "items(name,size),nextPageToken",
        }
        while True:
            path = f"/storage/v1/b/{quote(self.name)}/o"
            page = json_of(prefix, self.ask(prefix, "list", "GET", path, parameters=parameters))
            for found in page.get("items", ()):
                yield found["name"].removeprefix(self._prefix), int(found["size"])
            if not page.get("nextPageToken"):
                return
            parameters["pageToken"] = page["nextPageToken"]

    @contextmanager
    def opened(self, key: str, headers: Mapping[str, str]) -> Iterator[tuple[requests.Response, Body]]:
        """A download and its body, for as long as the block lasts; its connection is kept if all of it was read."""
        path = f"/download/storage/v1/b/{quote(self.name)}/o/{self._quoted(key)}"
        arguments: dict[str, Any] = {"parameters": {"alt": "media"}, "headers": headers, "stream": True}
        answer = self.ask(key, "get", "GET", path, wanted=(200, 206), **arguments)
        body = _body(key, answer)
        with self._translated(key):
            try:
                yield answer, body
            finally:
                body.close()

    def close(self) -> None:
        """Closes the idle connections. The next request opens new ones."""
        with self._lock:
            if self._connection is not None:
                self._connection.session.close()

    def _quoted(self, key: str) -> str:
        return quote(self.full_key(key), safe="")

    def _connected(self) -> Connection:
        with self._lock:
            if self._connection is None:
                self._connection = connect()
            return self._connection

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (
            GoogleAuthError,
            requests.exceptions.RequestException,
            HTTPError,
            http.client.HTTPException,
            OSError,
        ) as error:
            raise raised(key, self.name, self.endpoint, error) from error


def connect() -> Connection:
    """To GCS as the SDK's own client does it. Raises ConfigError, GoogleAuthError."""
    try:
        client = storage.Client(project=None)
    except GoogleAuthError:
        raise
    except ValueError as error:
        raise ConfigError(f"store: the settings for GCS do not fit each other: {error}") from error
    endpoint = client.api_endpoint.rstrip("/")
    address = urlsplit(endpoint)
    if address.username is not None or address.password is not None:
        raise ConfigError("store: STORAGE_EMULATOR_HOST holds a user or password")
    if address.scheme not in ("http", "https"):
        raise ConfigError(f"store: STORAGE_EMULATOR_HOST is {endpoint!r}; write http://host:port")
    session: requests.Session = client._http
    if not getattr(session, "is_mtls", False):
        session.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS_MAX))
        session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS_MAX))
    return Connection(endpoint, session)


def json_of(key: str, answer: requests.Response) -> dict[str, Any]:
    """What the answer says. Raises StoreUnavailableError if that is no JSON object: a proxy's page, say."""
    try:
        found = answer.json()
    except ValueError as error:
        raise StoreUnavailableError(key, "the answer is no JSON") from error
    if not isinstance(found, dict):
        raise StoreUnavailableError(key, "the answer is no JSON object")
    return found


def _body(key: str, answer: requests.Response) -> Body:
    text = answer.headers.get("Content-Length", "")
    if not text.isdecimal():
        answer.close()
        raise StoreError(key, "the answer does not say how long it is")
    hashes = answer.headers.get("x-goog-hash", "") if answer.status_code == 200 else ""  # of a range there is none
    found = _CRC32C.search(hashes)
    return Body(key, answer.raw, int(text), found[1] if found else "")

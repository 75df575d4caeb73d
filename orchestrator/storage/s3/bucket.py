"""One bucket through boto3: calls with keys in, our errors out. The only module that makes an SDK client.

Credentials, and what the store's URL does not say, come from the SDK's usual places: AWS_* variables, profiles, roles.
Its retries are off (`storage/retrying` has them), and so are its trailing checksums: old servers store these as data.

Called by `store` and `upload`.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from orchestrator.errors import ConfigError, StoreUnavailableError
from orchestrator.storage.answers import Body
from orchestrator.storage.s3.errors import ENDPOINT_ADVICE, store_error
from orchestrator.storage.s3.location import S3Location

CONNECT_SECONDS = 10.0
"""Also the longest that one slice of a part may take to leave."""
SILENCE_SECONDS = 20.0
"""The longest that a server may take to begin its answer, or to go on with it. A third of a job's patience: a request
that stands still is given up while there is time to send it again."""
CONNECTIONS_MAX = 64
LISTED_AT_ONCE = 1000
"""Keys in one answer to a listing; S3 gives no more."""
_WRITES = ("put_object", "create_multipart_upload")
"""What says how an object is to be encrypted."""


class Bucket:
    """The objects of `name` whose keys start with `prefix` and a slash. Touches nothing before the first call."""

    def __init__(
        self,
        name: str,
        prefix: str,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        settings: Mapping[str, Any] | None = None,
        client: Any = None,
        url: str = "",
        kms_key: str = "",
    ) -> None:
        """`settings` are arguments of boto3's `client`, such as `endpoint_url`, and `profile_name`; what is not given,
        the SDK finds. A `client` that was made by `make_client` may be shared by several.

        `url` names the bucket in messages, and for whoever opens it anew. Objects are encrypted with `kms_key`.
        """
        self.name = name
        self._prefix = f"{prefix}/" if prefix else ""
        self._settings = dict(settings or {})
        self._timeouts = (connect_seconds, silence_seconds)
        self._lock = threading.Lock()
        self._client = client
        self._encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
        self.url = url or f"s3://{name}/{self._prefix}".rstrip("/")
        """s3://bucket/prefix, and the settings that were given in it."""

    @property
    def endpoint(self) -> str:
        """The server's address, for messages."""
        return "the endpoint" if self._client is None else str(self._client.meta.endpoint_url)

    def full_key(self, key: str) -> str:
        """The key as the bucket has it."""
        return self._prefix + key

    def call(self, operation: str, key: str, **arguments: Any) -> dict[str, Any]:
        """One request about `key`, as boto3 names it, and its answer. Raises StoreError's subtree, UnsupportedError."""
        if operation in _WRITES:
            arguments = {**self._encryption, **arguments}
        with self._translated(operation, key):
            request = getattr(self._made_client(), operation)
            answer: dict[str, Any] = request(Bucket=self.name, Key=self.full_key(key), **arguments)
        return _whole(operation, key, answer)

    def objects(self, prefix: str) -> Iterator[dict[str, Any]]:
        """The objects whose keys start with `prefix`, as S3 describes them, with our keys. Raises StoreError."""
        return self._listed("list_objects_v2", "Contents", prefix)

    def uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        """The uploads in parts whose keys do, which nobody has completed. Raises StoreError, UnsupportedError."""
        return self._listed("list_multipart_uploads", "Uploads", prefix)

    def _listed(self, operation: str, what: str, prefix: str) -> Iterator[dict[str, Any]]:
        with self._translated(operation, prefix):
            size = {"PageSize": LISTED_AT_ONCE}
            pages = self._made_client().get_paginator(operation)
            for page in pages.paginate(Bucket=self.name, Prefix=self.full_key(prefix), PaginationConfig=size):
                for found in page.get(what, ()):
                    whole = _whole(operation, prefix, found)
                    yield {**whole, "Key": whole["Key"].removeprefix(self._prefix)}

    @contextmanager
    def opened(self, key: str, **arguments: Any) -> Iterator[tuple[dict[str, Any], Body]]:
        """A GET's answer and its body, for as long as the block lasts; its connection is kept if all of it was read."""
        answer = self.call("get_object", key, **arguments)
        checksum = answer.get("ChecksumCRC32C", "") if "ChecksumMode" in arguments else ""
        whole = "" if "-" in checksum else checksum  # that of an upload in parts is none of all bytes
        body = Body(key, answer["Body"]._raw_stream, answer["ContentLength"], whole)
        with self._translated("get_object", key):
            try:
                yield answer, body
            finally:
                body.close()

    def close(self) -> None:
        """Closes the idle connections. The next call opens new ones."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _made_client(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = make_client(*self._timeouts, **self._settings)
            return self._client

    @contextmanager
    def _translated(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except (
            ClientError,
            BotoCoreError,
            HTTPError,
            http.client.HTTPException,
            OSError,
            RecursionError,
        ) as error:
            raise store_error(key, self.name, self.endpoint, _operation_name(operation), error) from error


def bucket_at(location: S3Location) -> Bucket:
    """The bucket that a store's URL names, with the URL's settings."""
    settings = {"endpoint_url": location.endpoint, "region_name": location.region, "profile_name": location.profile}
    given = {name: value for name, value in settings.items() if value}
    return Bucket(location.bucket, location.prefix, settings=given, url=location.url, kms_key=location.kms_key)


def make_client(
    connect_seconds: float = CONNECT_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    *,
    profile_name: str | None = None,
    **settings: Any,
) -> Any:
    """boto3's client, as it is used here; threads may share it. Raises ConfigError.

    Over TLS bodies are not hashed for the signature: their crc32c goes with them.
    """
    config = Config(
        connect_timeout=connect_seconds,
        read_timeout=silence_seconds,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=CONNECTIONS_MAX,
        tcp_keepalive=True,
    )
    try:
        client = boto3.session.Session(profile_name=profile_name).client("s3", config=config, **settings)
    except ValueError as error:  # an address that is none
        words = str(error).partition("\n")[0][:200]
        problem = "the endpoint's address holds a user or password" if "@" in words else f"the SDK gave up: {words}"
        raise ConfigError(f"store: {problem}; {ENDPOINT_ADVICE}") from None  # its text may hold a password
    address = urlsplit(client.meta.endpoint_url)
    if address.username is not None or address.password is not None:
        raise ConfigError("store: the S3 endpoint's address holds a user or password; credentials have variables")
    if address.scheme == "https":
        client.meta.config.s3 = {**(client.meta.config.s3 or {}), "payload_signing_enabled": False}
    return client


def _operation_name(operation: str) -> str:
    """As S3 names it: put_object is PutObject."""
    return operation.title().replace("_", "")


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "create_multipart_upload": ("UploadId",),
    "upload_part": ("ETag",),
    "head_object": ("ContentLength",),
    "get_object": ("ContentLength", "Body"),
    "list_objects_v2": ("Key", "Size"),
    "list_multipart_uploads": ("Key", "UploadId"),
}


def _whole(operation: str, key: str, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer, or one entry of a listing, with all that is needed of it: a cut one is read as far as it goes."""
    missing = [name for name in _NEEDED.get(operation, ()) if name not in answer]
    if missing:
        raise StoreUnavailableError(key, f"the server's answer to {operation} says no {' and no '.join(missing)}")
    return answer

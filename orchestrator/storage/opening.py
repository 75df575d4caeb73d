"""From the store that a user names to a store: the only place that knows which back ends there are.

An SDK is imported only when a store needs it. Not here: `storage/peers`, whose address and token come from the
supervisor and never from a user.
Called by agents and by the CLI's read verbs.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from orchestrator.errors import ConfigError, StoreError
from orchestrator.storage.arguments import key_parts
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.filesystem import FolderStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
JOB_PATIENCE_SECONDS = 60.0
"""For how long a job tries again what a store cannot do just now: an outage of a minute costs no save."""
PERSON_PATIENCE_SECONDS = 10.0
"""The same where somebody waits for the answer."""
_SUPPORTED = "a folder's path, file:///path/to/folder, s3://bucket/prefix, or gs://bucket/prefix"


def open_store(url: str, patience_seconds: float = JOB_PATIENCE_SECONDS) -> ObjectStore:
    """The store at `url`: a folder's path, a file://, s3:// or gs:// URL. Touches nothing; a folder is made at the
    first `create`, a bucket never. Stores behind a network try again for that long what fails for a moment.

    Raises ConfigError, naming what is supported.
    """
    match _scheme_of(url):
        case "":
            return FolderStore(_plain_path(url))
        case "file":
            return FolderStore(_path_of_file_url(url))
        case "s3":
            return _bucket_store(url, patience_seconds)
        case "gs":
            return _gcs_store(url, patience_seconds)
        case name:
            raise ConfigError(f"store: {name}:// is not supported; supported are {_SUPPORTED}")


def job_url(store: str, job: str) -> str:
    """Where `job` lives below `store`. Raises ConfigError when `job` is no plain name."""
    if job in ("", ".", "..") or "/" in job or "\0" in job:
        raise ConfigError(f"job: {job!r} is no plain name")
    if not store:
        raise ConfigError(f"store: is empty; supported are {_SUPPORTED}")
    name = quote(job) if _scheme_of(store) == "file" else job
    return f"{store.rstrip('/')}/{name}"


def _scheme_of(url: str) -> str:
    """In lower case; empty for a plain path."""
    scheme = _SCHEME.match(url)
    return "" if scheme is None else scheme.group(1).lower()


def _bucket_store(url: str, patience_seconds: float) -> ObjectStore:
    bucket, prefix = _bucket_and_prefix(url, "AWS_ENDPOINT_URL")
    from orchestrator.storage.retrying import Patience, RetryingStore
    from orchestrator.storage.s3.bucket import Bucket
    from orchestrator.storage.s3.store import S3Store

    patience = Patience(deadline_seconds=patience_seconds)
    return RetryingStore(S3Store(Bucket(bucket, prefix), patience.call), patience)


def _gcs_store(url: str, patience_seconds: float) -> ObjectStore:
    bucket, prefix = _bucket_and_prefix(url, "STORAGE_EMULATOR_HOST")
    from orchestrator.storage.gcs.bucket import Bucket
    from orchestrator.storage.gcs.store import GCSStore
    from orchestrator.storage.retrying import Patience, RetryingStore

    patience = Patience(deadline_seconds=patience_seconds)
    return RetryingStore(GCSStore(Bucket(bucket, prefix), patience.call), patience)


def _bucket_and_prefix(url: str, endpoint_variable: str) -> tuple[str, str]:
    """What follows the scheme is taken as it stands, as by all tools for them: `%20` is three characters of a key."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"store: {url!r} names no bucket; write {scheme.lower()}://bucket/prefix")
    if "?" in url or "#" in url:
        raise ConfigError(f"store: {url!r} has a '?' or '#'; an endpoint is named by the variable {endpoint_variable}")
    try:
        if prefix:
            key_parts(prefix)
    except StoreError as error:
        raise ConfigError(f"store: {url!r} has a prefix that is none: {error.problem}") from error
    return bucket, prefix


def _plain_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ConfigError(f"store: {text!r} names no folder; supported are {_SUPPORTED}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"store: {text!r} names no home directory that is known here") from error


def _path_of_file_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"store: {url!r} names another host; write file:///path/to/folder, with three slashes")
    if parts.query or parts.fragment:
        raise ConfigError(f"store: {url!r} has a '?' or '#'; write them as %3F and %23")
    path = unquote(parts.path)
    if not path or "\0" in path:
        raise ConfigError(f"store: {url!r} names no folder; supported are {_SUPPORTED}")
    return Path(path)

"""From the store that a user names to a store: the only place that knows which back ends there are.

An SDK is imported only when a store needs it. Not here: `storage/peers`, whose address and token come from the
supervisor and never from a user.
Called by agents, by the command line, and where a checkpoint is read without a job.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from orchestrator.errors import ConfigError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.bucket_urls import anything, parse_bucket_url
from orchestrator.storage.filesystem import FolderStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
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
            return _s3_store(url, patience_seconds)
        case "gs":
            return _gcs_store(url, patience_seconds)
        case name:
            raise ConfigError(f"store: {name}:// is not supported; supported are {_SUPPORTED}")


def job_url(store: str, job: str) -> str:
    """Where `job` lives below `store`; settings behind a URL's '?' stay there.

    Raises ConfigError when `job` is no plain name.
    """
    if job in ("", ".", "..") or "/" in job or "\0" in job:
        raise ConfigError(f"job: {job!r} is no plain name")
    if not store:
        raise ConfigError(f"store: is empty; supported are {_SUPPORTED}")
    match _scheme_of(store):
        case "":
            return f"{store.rstrip('/')}/{job}"
        case "file":
            return f"{store.rstrip('/')}/{quote(job)}"
    if "?" in job or "#" in job:
        raise ConfigError(f"job: {job!r} holds a '?' or '#', which end the path of a store's URL")
    path, question, settings = store.partition("?")
    return f"{path.rstrip('/')}/{job}{question}{settings}"


def _scheme_of(url: str) -> str:
    """In lower case; empty for a plain path."""
    scheme = _SCHEME.match(url)
    return "" if scheme is None else scheme.group(1).lower()


def _s3_store(url: str, patience_seconds: float) -> ObjectStore:
    from orchestrator.storage.s3.location import parse_location

    location = parse_location(url)
    from orchestrator.storage.retrying import Patience, RetryingStore
    from orchestrator.storage.s3.bucket import bucket_at
    from orchestrator.storage.s3.store import S3Store

    patience = Patience(deadline_seconds=patience_seconds)
    accept = location.without_conditional_writes
    return RetryingStore(S3Store(bucket_at(location), patience.call, without_conditional_writes=accept), patience)


def _gcs_store(url: str, patience_seconds: float) -> ObjectStore:
    found = parse_bucket_url(url, {"kms_key": anything})
    from orchestrator.storage.gcs.bucket import Bucket
    from orchestrator.storage.gcs.store import GCSStore
    from orchestrator.storage.retrying import Patience, RetryingStore

    patience = Patience(deadline_seconds=patience_seconds)
    bucket = Bucket(found.bucket, found.prefix, kms_key=found.settings.get("kms_key", ""))
    return RetryingStore(GCSStore(bucket, patience.call), patience)


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

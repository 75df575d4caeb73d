"""From the store that a user names to a store: the only place that knows which back ends there are.

Not here: `storage/peers`, whose address and token come from the supervisor and never from a user.
Called by agents and by the CLI's read verbs.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from orchestrator.errors import ConfigError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.filesystem import FolderStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PLANNED = ("s3", "gs")
_SUPPORTED = "a folder's path, or file:///path/to/folder"


def open_store(url: str) -> ObjectStore:
    """The store at `url`: a folder's path or a file:// URL. Touches nothing; the first `create` makes the folder.

    Raises ConfigError, naming what is supported.
    """
    return FolderStore(_folder(url))


def job_url(store: str, job: str) -> str:
    """Where `job` lives below `store`. Raises ConfigError when `job` is no plain name."""
    if job in ("", ".", "..") or "/" in job or "\0" in job:
        raise ConfigError(f"job: {job!r} is no plain name")
    if not store:
        raise ConfigError(f"store: is empty; supported are {_SUPPORTED}")
    name = quote(job) if _SCHEME.match(store) else job
    return f"{store.rstrip('/')}/{name}"


def _folder(url: str) -> Path:
    scheme = _SCHEME.match(url)
    if scheme is None:
        return _plain_path(url)
    match scheme.group(1).lower():
        case "file":
            return _path_of_file_url(url)
        case name if name in _PLANNED:
            raise ConfigError(f"store: {name}:// needs a later release; this one supports folders only: {_SUPPORTED}")
        case name:
            raise ConfigError(f"store: {name}:// is not supported; supported are {_SUPPORTED}")


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

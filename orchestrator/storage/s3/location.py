"""From an s3:// URL to what it says: the bucket, the prefix, and the settings behind its '?'. Pure; no SDK.

What is not said, the SDK finds in its usual places. Credentials are never said: a URL stands in logs and process lists.
Called by `storage/opening`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from orchestrator.errors import ConfigError, StoreError
from orchestrator.storage.arguments import key_parts

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
_ACCEPT = "accept"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """What an s3:// URL says."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    """The server's address; empty: the SDK's environment, else AWS."""
    region: str = ""
    profile: str = ""
    """Of the SDK's configuration files."""
    kms_key: str = ""
    """What is written is encrypted with it (SSE-KMS)."""
    without_conditional_writes: bool = False
    """Whether a server that lets the second of two writers through is used all the same."""

    @property
    def url(self) -> str:
        """The URL in its one form: without a slash at the end, the settings in a fixed order."""
        values = {
            "endpoint": self.endpoint,
            "region": self.region,
            "profile": self.profile,
            "kms_key": self.kms_key,
            "without_conditional_writes": _ACCEPT if self.without_conditional_writes else "",
        }
        query = "&".join(f"{name}={quote(value, safe=':/[]')}" for name, value in values.items() if value)
        path = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        return f"{path}?{query}" if query else path


SETTINGS = ("endpoint", "region", "profile", "kms_key", "without_conditional_writes")
"""The names that may stand behind the '?'."""


def parse_location(url: str) -> S3Location:
    """What `url` says. Its path is taken as it stands, as by all tools for S3: `%20` is three characters of a key.

    Raises ConfigError with every problem; never repeats what may be a secret.
    """
    path, _, query = url.partition("?")
    bucket, _, prefix = path.partition("://")[2].partition("/")
    prefix = prefix.rstrip("/")
    shown = repr(path) if "@" not in path else "the URL"
    problems = []
    if not _BUCKET.fullmatch(bucket):
        problems.append(f"store: {shown} names no bucket; write s3://bucket/prefix, and no credentials")
    elif "#" in url:
        problems.append(f"store: {shown} has a '#', which no key of a job may hold; in a setting it is written %23")
    try:
        if prefix:
            key_parts(prefix)
    except StoreError as error:
        problems.append(f"store: {shown} has a prefix that is none: {error.problem}")
    given, more = _settings(query) if "?" in url else ({}, [])
    problems += more
    if problems:
        raise ConfigError(*problems)
    return S3Location(
        bucket=bucket,
        prefix=prefix,
        endpoint=given.get("endpoint", "").rstrip("/"),
        region=given.get("region", ""),
        profile=given.get("profile", ""),
        kms_key=given.get("kms_key", ""),
        without_conditional_writes="without_conditional_writes" in given,
    )


def _settings(query: str) -> tuple[dict[str, str], list[str]]:
    """(the settings by name, what is wrong with them). Values are not repeated: they may be secrets."""
    known = f"known are {', '.join(SETTINGS)}"
    found: dict[str, str] = {}
    problems = []
    for item in query.split("&"):
        name, _, text = item.partition("=")
        value = unquote(text)
        if name not in SETTINGS:
            advice = "; credentials never stand in a URL" if re.search("key|secret|token|passw", name, re.I) else ""
            problems.append(f"store: the URL's setting {name!r:.60} is not known; {known}{advice}")
        elif name in found:
            problems.append(f"store: the URL's setting {name!r} is given twice; {known}")
        elif not value:
            problems.append(f"store: the URL's setting {name!r} is empty; {known}")
        else:
            problems += _problems_of(name, value)
        found[name] = value
    return found, problems


def _problems_of(name: str, value: str) -> list[str]:
    if name == "endpoint":
        return _endpoint_problems(value)
    if name == "region" and not _REGION.fullmatch(value):
        return ["store: the URL's setting 'region' is no region's name, such as eu-central-1"]
    if name == "without_conditional_writes" and value != _ACCEPT:
        return [f"store: the URL's setting {name!r} has one value: {_ACCEPT}"]
    if not value.isprintable():
        return [f"store: the URL's setting {name!r} holds what cannot be printed"]
    return []


def _endpoint_problems(value: str) -> list[str]:
    form = "write endpoint=https://host:port"
    try:
        address = urlsplit(value)
        bare = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        return [f"store: the URL's setting 'endpoint' is no address; {form}"]
    if "@" in value:
        return ["store: the URL's setting 'endpoint' holds a user or password; credentials have variables (AWS_…)"]
    if not bare or not value.isprintable() or " " in value:
        return [f"store: the URL's setting 'endpoint' is no http:// or https:// address; {form}"]
    if address.query or address.fragment or address.path not in ("", "/"):
        return [f"store: the URL's setting 'endpoint' has more than an address; {form}"]
    return []

"""From an s3:// URL to what it says: the bucket, the prefix, and the settings behind its '?'. Pure; no SDK.

What is not said, the SDK finds in its usual places. Called by `storage/opening`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from orchestrator.storage.bucket_urls import Check, anything, parse_bucket_url

_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
_ACCEPT = "accept"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """What an s3:// URL says."""

    url: str
    """The URL in its one form."""
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


def parse_location(url: str) -> S3Location:
    """What `url` says. Raises ConfigError with every problem; never repeats what may be a secret."""
    found = parse_bucket_url(url, SETTINGS)
    given = dict(found.settings)
    if "endpoint" in given:
        given["endpoint"] = given["endpoint"].rstrip("/")
    return S3Location(
        url=replace(found, settings=given).text,
        bucket=found.bucket,
        prefix=found.prefix,
        endpoint=given.get("endpoint", ""),
        region=given.get("region", ""),
        profile=given.get("profile", ""),
        kms_key=given.get("kms_key", ""),
        without_conditional_writes="without_conditional_writes" in given,
    )


def _endpoint_problem(value: str) -> str:
    form = "write endpoint=https://host:port"
    try:
        address = urlsplit(value)
        bare = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        return f"is no address; {form}"
    if "@" in value:
        return "holds a user or password; credentials have variables (AWS_…)"
    if not bare or not value.isprintable() or " " in value:
        return f"is no http:// or https:// address; {form}"
    if address.query or address.fragment or address.path not in ("", "/"):
        return f"has more than an address; {form}"
    return ""


SETTINGS: Mapping[str, Check] = {
    "endpoint": _endpoint_problem,
    "region": lambda value: "" if _REGION.fullmatch(value) else "is no region's name, such as eu-central-1",
    "profile": anything,
    "kms_key": anything,
    "without_conditional_writes": lambda value: "" if value == _ACCEPT else f"has one value: {_ACCEPT}",
}
"""What may stand behind the '?', with what is wrong with a value."""

"""URLs of buckets: scheme, bucket, prefix, and settings behind a '?'. Pure; no SDK.

The path is taken as it stands, as by all tools for buckets: `%20` is three characters of a key. Credentials are never
said: a URL stands in logs and process lists. Called by `storage/opening` and by what reads a kind's settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from orchestrator.errors import ConfigError, StoreError
from orchestrator.storage.arguments import key_parts

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")

Check = Callable[[str], str]
"""What is wrong with a setting's value, as the end of a sentence; empty if nothing is. Never repeats the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUrl:
    """What a bucket's URL says."""

    scheme: str
    bucket: str
    prefix: str
    settings: Mapping[str, str]

    @property
    def text(self) -> str:
        """The URL in its one form: without a slash at the end, the settings in the order of the mapping."""
        query = "&".join(f"{name}={quote(value, safe=':/[]')}" for name, value in self.settings.items())
        path = f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")
        return f"{path}?{query}" if query else path


def parse_bucket_url(url: str, known: Mapping[str, Check]) -> BucketUrl:
    """What `url` says; `known` are the settings that it may have, each with its check.

    Raises ConfigError with every problem; never repeats what may be a secret.
    """
    path, question, query = url.partition("?")
    scheme, _, rest = path.partition("://")
    bucket, _, prefix = rest.partition("/")
    scheme, prefix = scheme.lower(), prefix.rstrip("/")
    shown = repr(path) if "@" not in path else "the URL"
    problems = []
    if not _BUCKET.fullmatch(bucket):
        problems.append(f"store: {shown} names no bucket; write {scheme}://bucket/prefix, and no credentials")
    elif "#" in url:
        problems.append(f"store: {shown} has a '#', which no key of a job may hold; in a setting it is written %23")
    try:
        if prefix:
            key_parts(prefix)
    except StoreError as error:
        problems.append(f"store: {shown} has a prefix that is none: {error.problem}")
    given, more = _settings(query.split("&") if question else (), known)
    if problems or more:
        raise ConfigError(*problems, *more)
    settings = {name: given[name] for name in known if name in given}
    return BucketUrl(scheme=scheme, bucket=bucket, prefix=prefix, settings=settings)


def _settings(items: Iterable[str], known: Mapping[str, Check]) -> tuple[dict[str, str], list[str]]:
    """(the settings by name, what is wrong with them)."""
    names = f"known are {', '.join(known)}"
    found: dict[str, str] = {}
    problems = []
    for item in items:
        name, _, text = item.partition("=")
        value = unquote(text)
        if name not in known:
            advice = "; credentials never stand in a URL" if re.search("key|secret|token|passw", name, re.I) else ""
            problems.append(f"store: the URL's setting {name!r:.60} is not known; {names}{advice}")
        elif name in found:
            problems.append(f"store: the URL's setting {name!r} is given twice; {names}")
        elif not value:
            problems.append(f"store: the URL's setting {name!r} is empty; {names}")
        else:
            problem = known[name](value) or ("" if value.isprintable() else "holds what cannot be printed")
            problems += [f"store: the URL's setting {name!r} {problem}"] if problem else []
        found[name] = value
    return found, problems


def anything(_value: str) -> str:
    """Of a setting whose value only the server can judge."""
    return ""

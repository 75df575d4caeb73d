"""What GCS answers and what its SDK raises, in our words: one sentence that says what happened, where, and what to
do. Never a secret: the addresses of uploads are some, so no address that was asked for is repeated.

Called by `bucket`, which alone sends requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import requests
from google.auth import exceptions as auth

from orchestrator.errors import (
    AlreadyExistsError,
    NotFoundError,
    StoreDeniedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from orchestrator.storage.bucket_errors import (
    ChecksumRefusedError,
    NoSuchRangeError,
    first_line,
    kind_of,
    retry_after_seconds,
)

_BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
_BUSY_REASONS = ("rateLimitExceeded", "userRateLimitExceeded", "backendError")
_FULL_REASONS = ("quotaExceeded", "dailyLimitExceeded", "storageQuotaExceeded")
_NO_BILLING_REASONS = ("accountDisabled", "billingDisabled", "billingNotEnabled", "userProjectAccountProblem")
_IN_BUCKET = ("create", "list")
"""Actions that ask for no object: what they do not find is the bucket."""
_ADVICE = (
    "set GOOGLE_APPLICATION_CREDENTIALS to a key file, run 'gcloud auth application-default login', "
    "or give the machine a service account"
)


def raised(key: str, bucket: str, endpoint: str, error: Exception) -> StoreError:
    """The StoreError for a request that got no answer."""
    if isinstance(error, auth.TransportError) or (isinstance(error, auth.RefreshError) and error.retryable):
        problem = f"whoever gives out the credentials for gs://{bucket} could not be asked ({kind_of(error)})"
        return StoreUnavailableError(key, problem, maybe_done=False)
    if isinstance(error, auth.GoogleAuthError):
        return StoreDeniedError(key, f"no usable credentials for gs://{bucket} ({kind_of(error)}); {_ADVICE}")
    if isinstance(error, requests.exceptions.SSLError) and "certificate" in str(error).lower():
        advice = "REQUESTS_CA_BUNDLE names a file of authorities to trust"
        return StoreError(key, f"the certificate of {endpoint} cannot be verified; {advice}")
    if isinstance(error, requests.exceptions.ConnectTimeout | requests.exceptions.ProxyError) or _is_new(error):
        return StoreUnavailableError(key, f"{endpoint} cannot be reached ({kind_of(error)})", maybe_done=False)
    if isinstance(error, ValueError) and isinstance(error, requests.exceptions.RequestException):
        return StoreError(key, f"{endpoint} is no address that can be asked ({kind_of(error)})")
    if type(error) is OSError and error.errno is None:  # such as REQUESTS_CA_BUNDLE that names no file
        return StoreError(key, f"{endpoint} cannot be asked: {first_line(error)}")
    return StoreUnavailableError(key, f"{endpoint} broke off, or was silent for too long ({kind_of(error)})")


def refused(
    key: str, bucket: str, endpoint: str, action: str, *, status: int, headers: Mapping[str, str], body: bytes
) -> StoreError:
    """The StoreError for an answer that was not wanted. `action`: as GCS's permissions name it: storage.objects.…"""
    reason, words = _reason_and_words(body)
    if status in _BUSY_STATUSES or reason in _BUSY_REASONS:
        return StoreUnavailableError(
            key,
            f"{endpoint} could not do it now: {reason or 'no reason was given'} ({status})",
            maybe_done=status not in (403, 429),
            retry_after_seconds=retry_after_seconds(headers.get("Retry-After", "")),
        )
    if status == 404 and (action in _IN_BUCKET or "bucket does not exist" in words):
        return StoreError(key, f"there is no bucket {bucket!r} at {endpoint}; make it, or correct the store's URL")
    if status == 404:
        return NotFoundError(key, "no such object")
    if status == 416:
        return NoSuchRangeError(key, "ends before the range that was asked for")
    if status == 412:
        return AlreadyExistsError(key, "is there already")
    if status == 507 or reason in _FULL_REASONS:
        return StoreFullError(key, f"no space, or no quota, is left for gs://{bucket} at {endpoint} ({reason})")
    if reason in _NO_BILLING_REASONS:
        return StoreDeniedError(key, f"the project of gs://{bucket} has no billing ({reason}); see its console")
    if status == 401:
        return StoreDeniedError(key, f"{endpoint} does not accept the credentials for gs://{bucket}; {_ADVICE}")
    if status == 403:
        problem = f"these credentials do not allow storage.objects.{action} on gs://{bucket}"
        return StoreDeniedError(key, f"{problem}: {words}")
    if status == 400 and re.search(r"(?i)(crc32c|md5|checksum|hash).*match", words):
        return ChecksumRefusedError(key, f"{endpoint} found another checksum than was sent", maybe_done=False)
    return StoreError(key, f"{endpoint} refused storage.objects.{action} with {reason} ({status}): {words}")


def _reason_and_words(body: bytes) -> tuple[str, str]:
    """Of an answer in JSON; some endpoints answer in plain text."""
    try:
        error: Any = json.loads(body)["error"]
        reasons = [one["reason"] for one in error.get("errors", [])]
        return str(reasons[0] if reasons else error.get("status", ""))[:100], str(error["message"])[:300]
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", body[:300].decode(errors="replace").strip() or "no reason was given"


def _is_new(error: Exception) -> bool:
    """Whether no connection came about. `requests` says so only in what it was raised for."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return type(reason).__name__ in ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError")

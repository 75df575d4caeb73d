"""What botocore raises, in our words: one sentence that says what happened, where, and what to do. Never a secret.

Called by `bucket`, which alone calls the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore import exceptions as sdk
from urllib3.exceptions import HTTPError

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
    UploadGoneError,
    first_line,
    kind_of,
    retry_after_seconds,
)

ENDPOINT_ADVICE = "see that its endpoint is the right one (AWS_ENDPOINT_URL, or endpoint= in the URL)"
_LOST_CODES = ("PreconditionFailed", "412")
_UNSUPPORTED_CODES = ("NotImplemented", "MissingContentLength", "InvalidRequest", "InvalidArgument")
_UNSUPPORTED_STATUSES = (411, 501)
_NO_CREDENTIALS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.ProfileNotFound,
    sdk.SSOError,
    sdk.TokenRetrievalError,
    sdk.NoAuthTokenError,
)
_NEVER_SENT = (sdk.EndpointConnectionError, sdk.ConnectTimeoutError, sdk.ProxyConnectionError)
_NEVER_DONE_CODES = ("SlowDown", "TooManyRequests", "ConditionalRequestConflict", "OperationAborted", "Throttling")
_SLOW_CODES = ("SlowDown", "TooManyRequests", "Throttling")
_BUSY_CODES = (*_NEVER_DONE_CODES, "ServiceUnavailable", "InternalError", "RequestTimeout")
_BUSY_STATUSES = (408, 409, 429, 500, 502, 503, 504)
_FULL_CODES = ("QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity", "StorageFull", "507")
_DIGEST_CODES = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
_DENIED = {
    "InvalidAccessKeyId": "{endpoint} does not know the access key that was given",
    "SignatureDoesNotMatch": "the secret key is not that of the access key (or a proxy changes what is sent)",
    "InvalidToken": "{endpoint} does not accept the session token that was given; renew the credentials",
    "ExpiredToken": "the session token has expired; renew the credentials",
    "TokenRefreshRequired": "the session token has expired; renew the credentials",
    "RequestTimeTooSkewed": "this machine's clock and that of {endpoint} differ too much; set the clock right",
    "RequestExpired": "this machine's clock and that of {endpoint} differ too much; set the clock right",
    "AccountProblem": "there is a problem with the account that owns the credentials; see its console",
    "NotSignedUp": "the account that owns the credentials has no S3",
}
_WRONG_REGION_CODES = (
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
    "301",
    "307",
)


class UnsupportedError(StoreError):
    """The server cannot do something that the request had, such as a checksum or a condition."""


class SlowDownError(StoreUnavailableError):
    """The server asks for fewer requests."""


def store_error(key: str, bucket: str, endpoint: str, operation: str, error: Exception) -> StoreError:
    """The StoreError that tells the caller what to do about it. `operation`: what was asked, as S3 calls it."""
    if isinstance(error, RecursionError):  # how the SDK follows redirections that lead in a circle
        return StoreError(key, f"the SDK gave up: it redirects without an end; {ENDPOINT_ADVICE}")
    if isinstance(error, sdk.ClientError):
        return _answered(key, bucket, endpoint, operation, error)
    if isinstance(error, _NO_CREDENTIALS):
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role"
        return StoreDeniedError(key, f"no usable credentials for s3://{bucket}: {first_line(error)}; {advice}")
    if isinstance(error, sdk.SSLError) and "certificate" in str(error).lower():
        advice = "AWS_CA_BUNDLE names a file of authorities to trust"
        return StoreError(key, f"the certificate of {endpoint} cannot be verified; {advice}")
    if isinstance(error, _NEVER_SENT):
        return StoreUnavailableError(key, f"{endpoint} cannot be reached ({kind_of(error)})", maybe_done=False)
    if isinstance(error, sdk.HTTPClientError | sdk.ReadTimeoutError | OSError | HTTPError):
        return StoreUnavailableError(key, f"{endpoint} broke off, or was silent for too long ({kind_of(error)})")
    return StoreError(key, f"{operation} on s3://{bucket} failed: {first_line(error)}")


def _answered(key: str, bucket: str, endpoint: str, operation: str, error: sdk.ClientError) -> StoreError:
    code, status = str(error.response.get("Error", {}).get("Code", "")), _status(error)
    if code == "NoSuchBucket":
        return StoreError(key, f"there is no bucket {bucket!r} at {endpoint}; make it, or correct the store's URL")
    if code in ("NoSuchKey", "NotFound", "404"):
        return NotFoundError(key, "no such object")
    if code == "NoSuchUpload":
        return UploadGoneError(key, f"{endpoint} no longer knows this upload")
    if code in ("InvalidRange", "416"):
        return NoSuchRangeError(key, "ends before the range that was asked for")
    if code in _LOST_CODES:
        return AlreadyExistsError(key, "is there already")
    if code in _WRONG_REGION_CODES:
        return StoreError(key, _wrong_region(bucket, endpoint, error))
    if code in _DENIED:
        return StoreDeniedError(key, _DENIED[code].format(endpoint=endpoint))
    if code in _FULL_CODES or status == 507:
        return StoreFullError(key, f"no space, or no quota, is left for s3://{bucket} at {endpoint} ({code})")
    if code in _DIGEST_CODES:
        return ChecksumRefusedError(key, f"{endpoint} found another checksum than was sent ({code})", maybe_done=False)
    if code in _BUSY_CODES or status in _BUSY_STATUSES:
        return _busy(key, endpoint, code, status, error)
    if status in (401, 403):
        return StoreDeniedError(key, f"these credentials do not allow {operation} on s3://{bucket} ({code})")
    kind = UnsupportedError if code in _UNSUPPORTED_CODES or status in _UNSUPPORTED_STATUSES else StoreError
    return kind(key, f"{endpoint} refused {operation} with {code} ({status}): {_server_words(error)}")


def _busy(key: str, endpoint: str, code: str, status: int, error: sdk.ClientError) -> StoreUnavailableError:
    slow = code in _SLOW_CODES or status in (429, 503)
    return (SlowDownError if slow else StoreUnavailableError)(
        key,
        f"{endpoint} could not do it now: {code} ({status})",
        maybe_done=code not in _NEVER_DONE_CODES and status != 429,
        retry_after_seconds=retry_after_seconds(_headers(error).get("retry-after", "")),
    )


def _wrong_region(bucket: str, endpoint: str, error: sdk.ClientError) -> str:
    region = error.response.get("Error", {}).get("Region") or _headers(error).get("x-amz-bucket-region")
    advice = f"set AWS_REGION={region}" if region else "set AWS_REGION to the bucket's region"
    return f"the bucket {bucket!r} is in another region than the one asked ({endpoint}); {advice}"


def _status(error: sdk.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _headers(error: sdk.ClientError) -> Mapping[str, Any]:
    headers: Mapping[str, Any] = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _server_words(error: sdk.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", "no reason was given"))[:300]

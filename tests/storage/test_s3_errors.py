"""Each thing that goes wrong with a bucket is one clear sentence of the right kind, and never holds a secret."""

from __future__ import annotations

import pytest
from botocore import exceptions as sdk
from botocore.exceptions import ClientError

from orchestrator.errors import (
    AlreadyExistsError,
    NotFoundError,
    StoreDeniedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from orchestrator.storage.bucket_errors import ChecksumRefusedError, UploadGoneError
from orchestrator.storage.s3.errors import SlowDownError, UnsupportedError, store_error

ENDPOINT = "https://s3.test"


def translated(error: Exception) -> StoreError:
    return store_error("a/key", "bucket", ENDPOINT, "PutObject", error)


def answered(code: str, status: int, headers: dict[str, str] | None = None, **others: str) -> StoreError:
    response = {
        "Error": {"Code": code, "Message": "the server's own words", **others},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers or {}},
    }
    return translated(ClientError(response, "PutObject"))


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        ("NoSuchBucket", 404, StoreError, "there is no bucket 'bucket' at https://s3.test; make it"),
        ("NoSuchKey", 404, NotFoundError, "no such object"),
        ("404", 404, NotFoundError, "no such object"),
        ("NoSuchUpload", 404, UploadGoneError, "no longer knows this upload"),
        ("PreconditionFailed", 412, AlreadyExistsError, "is there already"),
        ("412", 412, AlreadyExistsError, "is there already"),
        ("AccessDenied", 403, StoreDeniedError, "these credentials do not allow PutObject on s3://bucket"),
        ("403", 403, StoreDeniedError, "these credentials do not allow PutObject on s3://bucket"),
        ("InvalidAccessKeyId", 403, StoreDeniedError, "does not know the access key"),
        ("SignatureDoesNotMatch", 403, StoreDeniedError, "the secret key is not that of the access key"),
        ("ExpiredToken", 400, StoreDeniedError, "the session token has expired; renew the credentials"),
        ("RequestTimeTooSkewed", 403, StoreDeniedError, "this machine's clock and that of https://s3.test differ"),
        ("QuotaExceeded", 403, StoreFullError, "no space, or no quota, is left for s3://bucket"),
        ("XMinioStorageFull", 507, StoreFullError, "no space, or no quota, is left"),
        ("EntityTooLarge", 400, StoreError, "refused PutObject with EntityTooLarge (400): the server's own words"),
        ("NotImplemented", 501, UnsupportedError, "refused PutObject with NotImplemented (501)"),
        ("MissingContentLength", 411, UnsupportedError, "refused PutObject"),
    ],
)
def test_what_servers_answer(code: str, status: int, kind: type[StoreError], words: str) -> None:
    error = answered(code, status)
    assert type(error) is kind
    assert error.key == "a/key"
    assert words in error.problem


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (answered("AuthorizationHeaderMalformed", 400, Region="eu-west-3"), "set AWS_REGION=eu-west-3"),
        (answered("PermanentRedirect", 301, {"x-amz-bucket-region": "eu-west-3"}), "set AWS_REGION=eu-west-3"),
        (answered("301", 301), "set AWS_REGION to the bucket's region"),
    ],
)
def test_another_region(error: StoreError, advice: str) -> None:
    assert type(error) is StoreError
    assert "is in another region than the one asked" in error.problem
    assert error.problem.endswith(advice)


@pytest.mark.parametrize(
    ("code", "status", "maybe_done"),
    [
        ("SlowDown", 503, False),
        ("ServiceUnavailable", 503, True),
        ("TooManyRequests", 429, False),
        ("429", 429, False),
        ("InternalError", 500, True),
        ("500", 500, True),
        ("RequestTimeout", 400, True),
        ("ConditionalRequestConflict", 409, False),
        ("502", 502, True),
    ],
)
def test_what_may_work_later(code: str, status: int, maybe_done: bool) -> None:
    error = answered(code, status)
    assert type(error) is (SlowDownError if status in (429, 503) else StoreUnavailableError)
    assert error.maybe_done is maybe_done
    assert error.problem == f"https://s3.test could not do it now: {code} ({status})"


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("0.5", 0.5), ("", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None)]
)
def test_retry_after(text: str, seconds: float | None) -> None:
    error = answered("SlowDown", 503, {"retry-after": text})
    assert isinstance(error, StoreUnavailableError)
    assert error.retry_after_seconds == seconds


def test_a_damaged_body_is_sent_again() -> None:
    error = answered("BadDigest", 400)
    assert type(error) is ChecksumRefusedError
    assert isinstance(error, StoreUnavailableError)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (sdk.NoCredentialsError(), StoreDeniedError, "no usable credentials for s3://bucket: Unable to locate"),
        (sdk.ProfileNotFound(profile="x"), StoreDeniedError, "or AWS_PROFILE, or give the machine a role"),
        (
            sdk.SSLError(endpoint_url="https://u:secret@host", error="certificate verify failed"),
            StoreError,
            "the certificate of https://s3.test cannot be verified; AWS_CA_BUNDLE",
        ),
        (sdk.EndpointConnectionError(endpoint_url="x"), StoreUnavailableError, "https://s3.test cannot be reached"),
        (sdk.ConnectTimeoutError(endpoint_url="x"), StoreUnavailableError, "https://s3.test cannot be reached"),
        (sdk.ReadTimeoutError(endpoint_url="x"), StoreUnavailableError, "https://s3.test broke off, or was silent"),
        (sdk.ConnectionClosedError(endpoint_url="x"), StoreUnavailableError, "https://s3.test broke off"),
        (ConnectionResetError(104, "reset"), StoreUnavailableError, "https://s3.test broke off"),
        (sdk.ParamValidationError(report="no"), StoreError, "PutObject on s3://bucket failed: Parameter validation"),
    ],
)
def test_what_never_was_answered(error: Exception, kind: type[StoreError], words: str) -> None:
    found = translated(error)
    assert type(found) is kind
    assert words in found.problem
    assert "secret" not in str(found)


def test_what_never_was_sent_was_never_done() -> None:
    unreached = translated(sdk.EndpointConnectionError(endpoint_url="x"))
    silent = translated(sdk.ReadTimeoutError(endpoint_url="x"))
    assert isinstance(unreached, StoreUnavailableError)
    assert isinstance(silent, StoreUnavailableError)
    assert (unreached.maybe_done, silent.maybe_done) == (False, True)

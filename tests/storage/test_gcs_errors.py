"""Each thing that goes wrong with a bucket of GCS is one clear sentence of the right kind, and never holds a secret."""

from __future__ import annotations

import json

import pytest
import requests
from google.auth import exceptions as auth
from urllib3.exceptions import NewConnectionError, ProtocolError, ReadTimeoutError

from orchestrator.errors import (
    AlreadyExistsError,
    NotFoundError,
    StoreDeniedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from orchestrator.storage.bucket_errors import ChecksumRefusedError, NoSuchRangeError
from orchestrator.storage.gcs.errors import raised, refused

ENDPOINT = "https://gcs.test"
WORDS = "the server's own words"
NO_BUCKET = "The specified bucket does not exist."


def answered(
    status: int, reason: str = "", words: str = WORDS, action: str = "create", headers: dict[str, str] | None = None
) -> StoreError:
    body = json.dumps({"error": {"code": status, "message": words, "errors": [{"reason": reason, "message": words}]}})
    return refused("a/key", "bucket", ENDPOINT, action, status=status, headers=headers or {}, body=body.encode())


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (answered(404, "notFound"), StoreError, "there is no bucket 'bucket' at https://gcs.test; make it"),
        (answered(404, "notFound", action="list"), StoreError, "there is no bucket 'bucket' at https://gcs.test"),
        (answered(404, "notFound", NO_BUCKET, "get"), StoreError, "there is no bucket 'bucket' at https://gcs.test"),
        (answered(404, "notFound", action="get"), NotFoundError, "no such object"),
        (answered(404, "notFound", action="delete"), NotFoundError, "no such object"),
        (answered(412, "conditionNotMet"), AlreadyExistsError, "is there already"),
        (answered(416, "requestedRangeNotSatisfiable", action="get"), NoSuchRangeError, "ends before the range"),
        (answered(401, "authError"), StoreDeniedError, "does not accept the credentials for gs://bucket; set GOOGLE_"),
        (
            answered(403, "forbidden", "robot@x does not have storage.objects.create access"),
            StoreDeniedError,
            "these credentials do not allow storage.objects.create on gs://bucket: robot@x does not have",
        ),
        (answered(403, "accountDisabled"), StoreDeniedError, "the project of gs://bucket has no billing"),
        (answered(403, "quotaExceeded"), StoreFullError, "no space, or no quota, is left for gs://bucket"),
        (answered(507), StoreFullError, "no space, or no quota, is left for gs://bucket"),
        (answered(400, "invalid"), StoreError, f"refused storage.objects.create with invalid (400): {WORDS}"),
        (answered(400, "required", "User project specified"), StoreError, "with required (400): User project"),
        (
            answered(400, "invalid", 'Provided CRC32C "A" doesn\'t match calculated CRC32C "B".'),
            ChecksumRefusedError,
            "https://gcs.test found another checksum than was sent",
        ),
    ],
)
def test_what_servers_answer(error: StoreError, kind: type[StoreError], words: str) -> None:
    assert type(error) is kind
    assert error.key == "a/key"
    assert words in error.problem


@pytest.mark.parametrize(
    ("status", "reason", "maybe_done"),
    [
        (408, "", True),
        (429, "rateLimitExceeded", False),
        (403, "userRateLimitExceeded", False),
        (500, "backendError", True),
        (502, "", True),
        (503, "backendError", True),
        (504, "", True),
    ],
)
def test_what_may_work_later(status: int, reason: str, maybe_done: bool) -> None:
    error = answered(status, reason)
    assert type(error) is StoreUnavailableError
    assert error.maybe_done is maybe_done
    assert error.problem == f"https://gcs.test could not do it now: {reason or 'no reason was given'} ({status})"


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("0.5", 0.5), ("", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None)]
)
def test_retry_after(text: str, seconds: float | None) -> None:
    error = answered(503, headers={"Retry-After": text})
    assert isinstance(error, StoreUnavailableError)
    assert error.retry_after_seconds == seconds


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"Not so", "(400): Not so"),
        (b"", "(400): no reason was given"),
        (b"[]", "(400): []"),
        (b'{"error": "invalid_grant"}', '(400): {"error"'),
        (b'{"error": {"message": "m", "status": "FAILED_PRECONDITION"}}', "with FAILED_PRECONDITION (400): m"),
        (b"\xff" * 1000, "(400): \ufffd"),
    ],
)
def test_answers_of_other_shapes(body: bytes, words: str) -> None:
    error = refused("a/key", "bucket", ENDPOINT, "create", status=400, headers={}, body=body)
    assert type(error) is StoreError
    assert words in error.problem
    assert len(error.problem) < 500


def unconnected() -> requests.ConnectionError:
    error = ProtocolError("x")
    error.reason = NewConnectionError(None, "refused")  # type: ignore[arg-type, attr-defined]
    return requests.ConnectionError(error)


ADVICE = "; set GOOGLE_APPLICATION_CREDENTIALS to a key file, run 'gcloud auth application-default login', or give"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (auth.DefaultCredentialsError("secret"), StoreDeniedError, "no usable credentials for gs://bucket"),
        (auth.DefaultCredentialsError("secret"), StoreDeniedError, ADVICE),
        (auth.RefreshError("secret"), StoreDeniedError, "(RefreshError)" + ADVICE),
        (auth.RefreshError("secret", retryable=True), StoreUnavailableError, "the credentials for gs://bucket could"),
        (auth.TransportError("secret"), StoreUnavailableError, "could not be asked (TransportError)"),
        (
            requests.exceptions.SSLError("/upload_id=secret certificate verify failed"),
            StoreError,
            "the certificate of https://gcs.test cannot be verified; REQUESTS_CA_BUNDLE",
        ),
        (unconnected(), StoreUnavailableError, "https://gcs.test cannot be reached"),
        (requests.ConnectTimeout("secret"), StoreUnavailableError, "https://gcs.test cannot be reached"),
        (requests.exceptions.ProxyError("secret"), StoreUnavailableError, "https://gcs.test cannot be reached"),
        (requests.exceptions.InvalidURL("secret"), StoreError, "https://gcs.test is no address that can be asked"),
        (requests.ReadTimeout("secret"), StoreUnavailableError, "https://gcs.test broke off, or was silent"),
        (requests.exceptions.ChunkedEncodingError("secret"), StoreUnavailableError, "https://gcs.test broke off"),
        (requests.ConnectionError("upload_id=secret"), StoreUnavailableError, "https://gcs.test broke off"),
        (ReadTimeoutError(None, "secret", "secret"), StoreUnavailableError, "broke off"),  # type: ignore[arg-type]
        (OSError("invalid path: /x"), StoreError, "https://gcs.test cannot be asked: invalid path: /x"),
        (ConnectionResetError(104, "secret"), StoreUnavailableError, "https://gcs.test broke off"),
    ],
)
def test_what_never_was_answered(error: Exception, kind: type[StoreError], words: str) -> None:
    found = raised("a/key", "bucket", ENDPOINT, error)
    assert type(found) is kind
    assert words in found.problem
    assert "secret" not in str(found)


def test_what_never_was_sent_was_never_done() -> None:
    errors = [unconnected(), auth.TransportError("x"), requests.ReadTimeout("x"), requests.ConnectionError("x")]
    found = [raised("a/key", "bucket", ENDPOINT, error) for error in errors]
    assert [isinstance(one, StoreUnavailableError) and one.maybe_done for one in found] == [False, False, True, True]

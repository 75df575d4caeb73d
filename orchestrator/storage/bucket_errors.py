"""What can go wrong with any bucket, whoever serves it: kinds of errors beyond the port's, and the words for an SDK's.

Pure; no SDK. Called by `s3` and `gcs`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from orchestrator.errors import StoreError, StoreUnavailableError


class ChecksumRefusedError(StoreUnavailableError):
    """The server found another checksum than was sent: what arrived was damaged, or it cannot compute it."""


class UploadGoneError(StoreError):
    """The server no longer knows an upload: cancelled, forgotten, or completed by a request whose answer was lost."""


class NoSuchRangeError(StoreError):
    """The object ends before the range that was asked for begins."""


@contextlib.contextmanager
def nothing_done() -> Iterator[None]:
    """Whatever fails here, the object was not made by it."""
    try:
        yield
    except StoreUnavailableError as error:
        error.maybe_done = False
        raise
    except UploadGoneError as error:
        raise StoreUnavailableError(error.key, error.problem, maybe_done=False) from error


def retry_after_seconds(header: str) -> float | None:
    """Of the header Retry-After, where it is a number of seconds; dates are not understood."""
    return float(header) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", header) else None


def kind_of(error: Exception) -> str:
    """Only the kind: the text may hold an address with what belongs to nobody else."""
    return type(error).__name__


def first_line(error: Exception) -> str:
    """Of the error's text, at most 200 characters."""
    return str(error).partition("\n")[0][:200]

"""A large object as a resumable upload, chunk by chunk, while later pieces are still being made. All or nothing.

A chunk whose answer was lost is not sent again blindly: the server is asked how far it has got, and goes on from there.
That the key is free is a condition which GCS checks once more at the end. Some servers do not look then, and so a
decision never goes by an upload of this kind.

Called by `store`, which has made sure that the key is free.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import requests

from orchestrator.errors import AlreadyExistsError, StoreError, StoreUnavailableError
from orchestrator.storage.answers import checksum_text
from orchestrator.storage.bucket_errors import UploadGoneError, nothing_done
from orchestrator.storage.gcs.bucket import Bucket, json_of
from orchestrator.storage.gcs.content import Content

_PERSISTED = re.compile(r"bytes=0-([0-9]{1,18})")
"""What the server has of an upload, in the header Range; that is missing as long as it has nothing."""
Again = Callable[[Callable[[], Any]], Any]
"""Calls what may be tried again on its own."""
_GONE = (404, 410)
_INCOMPLETE = 308
_CANCELLED = (200, 204, 404, 410, 499)


def upload(bucket: Bucket, key: str, chunks: Iterable[tuple[Content, bool]], again: Again) -> None:
    """Send the chunks, of which the last one is marked, and make them the object. If anything fails, nothing stays.

    `again` calls what may be tried again on its own. Raises AlreadyExistsError (where the server looks), StoreError.
    """
    with nothing_done():
        running = _Upload(bucket, key, again)
    try:
        for chunk, last in chunks:
            if last:
                running.finish(chunk)
            else:
                with nothing_done():
                    running.send(chunk)
    except BaseException:
        running.cancel()
        raise


def check_stored(bucket: Bucket, key: str, stored: dict[str, Any], size_bytes: int, digest: int) -> None:
    """Raises StoreError unless the server has just what was sent; removes what it has then.

    `stored`: what it says about the object that it has made of our request.
    """
    found, sent = (str(stored.get("size")), stored.get("crc32c")), (str(size_bytes), checksum_text(digest))
    if found != sent:
        what = f"stored {found[0]} bytes with crc32c {found[1]}, but {sent[0]} bytes with {sent[1]} were sent"
        raise StoreError(key, f"{bucket.endpoint} {what}; {_removed(bucket, key, stored)}")


class _Upload:
    """One resumable upload, begun when this is made. Its address is a secret."""

    def __init__(self, bucket: Bucket, key: str, again: Again) -> None:
        self._bucket = bucket
        self._key = key
        self._again = again
        self._address: str = again(self._begin)
        self._start = self._end = 0
        """Of the chunk that is being sent."""
        self._persisted = 0
        """Bytes that the server has, as far as is known."""
        self._unsure = False
        """Whether an answer was lost, so that it must be asked how far it is."""
        self._stored: dict[str, Any] | None = None
        """What the server says about the object, once it has made it."""
        self._digest = 0

    def send(self, chunk: Content) -> None:
        """A chunk that others follow."""
        self._next(chunk)
        self._again(lambda: self._push(chunk, None))
        if self._stored is not None:
            removed = _removed(self._bucket, self._key, self._stored)
            raise StoreError(self._key, f"{self._bucket.endpoint} ended the upload before all was sent; {removed}")

    def finish(self, chunk: Content) -> None:
        """The last chunk. Raises StoreUnavailableError if only looking tells whether the object was made."""
        self._next(chunk)
        maybe_done = False

        def attempt() -> StoreError | None:
            nonlocal maybe_done
            try:
                self._push(chunk, self._end)
            except StoreUnavailableError as error:
                error.maybe_done = maybe_done = maybe_done or error.maybe_done
                raise
            except (AlreadyExistsError, UploadGoneError) as error:
                return error
            return None

        error = self._again(attempt)
        if isinstance(error, UploadGoneError) or (error is not None and maybe_done):
            there = "it may be there: " if maybe_done else ""
            raise StoreUnavailableError(self._key, f"{there}{error.problem}", maybe_done=maybe_done) from error
        if error is not None:
            raise error
        assert self._stored is not None
        check_stored(self._bucket, self._key, self._stored, self._end, self._digest)

    def cancel(self) -> None:
        """Forget what was sent. Where that cannot be said now, the server forgets it by itself, after a week."""
        if self._stored is None:
            with contextlib.suppress(StoreError):
                self._bucket.ask(self._key, "create", "DELETE", self._address, wanted=_CANCELLED)

    def _begin(self) -> str:
        answer = self._bucket.upload(self._key, "resumable", content=b"")
        if "Location" not in answer.headers:
            raise StoreError(self._key, f"{self._bucket.endpoint} does not say where to send the object")
        return answer.headers["Location"]

    def _next(self, chunk: Content) -> None:
        self._start, self._end = self._end, self._end + len(chunk)
        self._digest = chunk.digest(self._digest)

    def _push(self, chunk: Content, total: int | None) -> None:
        """Once, until the server has all of the chunk, or has made the object if the total size is given."""
        if self._unsure:
            self._put(b"", f"*/{'*' if total is None else total}")
        before = -1
        while self._stored is None and (self._persisted < self._end or total is not None):
            if self._persisted <= before:
                raise StoreUnavailableError(self._key, f"{self._bucket.endpoint} takes no more", maybe_done=False)
            before = self._persisted
            rest = chunk.after(before - self._start)
            sent = f"{before}-{self._end - 1}" if len(rest) else "*"
            self._put(rest or b"", f"{sent}/{'*' if total is None else total}", last=total is not None)

    def _put(self, content: Content | bytes, content_range: str, last: bool = False) -> None:
        headers = {"Content-Range": f"bytes {content_range}"}
        if last:
            headers["x-goog-hash"] = f"crc32c={checksum_text(self._digest)}"
        wanted = (200, 201, _INCOMPLETE, *_GONE)
        self._unsure = True
        answer = self._bucket.ask(
            self._key, "create", "PUT", self._address, wanted=wanted, headers=headers, content=content
        )
        self._take(answer)
        self._unsure = False

    def _take(self, answer: requests.Response) -> None:
        """Learn from the answer how far the server is."""
        if answer.status_code in _GONE:
            raise UploadGoneError(self._key, f"{self._bucket.endpoint} no longer knows this upload")
        if answer.status_code != _INCOMPLETE:
            self._stored = json_of(self._key, answer)
            return
        match = _PERSISTED.fullmatch(answer.headers.get("Range", ""))
        self._persisted = 0 if match is None else int(match[1]) + 1
        if not self._start <= self._persisted <= self._end:
            problem = f"has {self._persisted} bytes of this upload, which cannot be: it had {self._start}"
            raise UploadGoneError(self._key, f"{self._bucket.endpoint} {problem}")


def _removed(bucket: Bucket, key: str, stored: dict[str, Any]) -> str:
    """Removes just this version of the object, which is certainly ours; what became of that, in words."""
    generation = str(stored.get("generation", ""))
    if not generation.isdecimal():
        return "it is still there"
    try:
        parameters = {"ifGenerationMatch": generation}
        bucket.about(key, "delete", "DELETE", wanted=(200, 204, 404, 412), parameters=parameters)
    except StoreError:
        return "it could not be removed"
    return "it was removed"

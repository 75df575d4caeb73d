"""A large object in parts: a few are on their way while the next pieces are still being made. All or nothing.

Called by `store`, which has made sure that the key is free.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import AlreadyExistsError, StoreError, StoreUnavailableError
from orchestrator.storage.bucket_errors import UploadGoneError, nothing_done
from orchestrator.storage.retrying import Again
from orchestrator.storage.s3.bucket import Bucket
from orchestrator.storage.s3.errors import SlowDownError, UnsupportedError
from orchestrator.storage.s3.limit import AdaptiveLimit, RequestOutcome
from orchestrator.storage.s3.parts import PARTS_MAX, Part, PartPlan

_Answer = Future[dict[str, Any]]


@dataclass(slots=True)
class Abilities:
    """What the server was found to be able to do; what it refuses once is not asked again."""

    checksums: bool = True
    part_checksums: bool = True
    conditional_completion: bool = True


def upload(
    bucket: Bucket, key: str, parts: Iterable[Part], *, plan: PartPlan, abilities: Abilities, again: Again
) -> int:
    """Send the parts, and make them the object; its size in bytes. If anything fails, or the parts do, nothing stays.

    `again` calls what may be tried again on its own. Raises AlreadyExistsError (where the server looks), StoreError.
    """
    with nothing_done():
        running = _Upload(bucket, key, plan=plan, abilities=abilities, again=again)
    try:
        with nothing_done():
            size_bytes = running.send(parts)
        running.complete()
    except BaseException:
        running.abort()
        raise
    return size_bytes


@contextlib.contextmanager
def maybe_done() -> Iterator[None]:
    """Whatever fails here, the object may be there: it is to be looked for before it counts as somebody else's."""
    try:
        yield
    except StoreUnavailableError as error:
        error.maybe_done = True
        raise


class _Upload:
    """One upload in parts, begun when this is made."""

    def __init__(self, bucket: Bucket, key: str, *, plan: PartPlan, abilities: Abilities, again: Again) -> None:
        self._bucket = bucket
        self._key = key
        self._plan = plan
        self._gate = _Gate(plan.at_once)
        self._abilities = abilities
        self._again = again
        self._id = again(self._begin)["UploadId"]
        self._checksums = abilities.part_checksums
        self._sent: list[dict[str, Any]] = []
        """What is said about each part at the completion."""

    def send(self, parts: Iterable[Part]) -> int:
        """All parts, several at once, in threads that have this one's priority; their bytes."""
        size_bytes = 0
        answers: list[_Answer] = []
        flying: set[_Answer] = set()
        pool = ThreadPoolExecutor(self._plan.at_once, thread_name_prefix="part")
        try:
            for number, part in enumerate(parts, start=1):
                if number > PARTS_MAX:
                    raise StoreError(self._key, f"has more than {PARTS_MAX} parts; {size_bytes} bytes were sent")
                if len(part) or number == 1:
                    flying = _all_but(self._plan.at_once - 1, flying)
                    size_bytes += len(part)
                    answers.append(pool.submit(self._send_part, number, part))
                    flying.add(answers[-1])
            _all_but(0, flying)
            self._sent = [answer.result() for answer in answers]
        except UnsupportedError as error:
            raise self._without_checksums(error) from error
        finally:
            self._gate.close()
            pool.shutdown(cancel_futures=True)
        return size_bytes

    def complete(self) -> None:
        """Make the parts the object. Raises StoreUnavailableError if only looking tells whether that happened."""
        answer_lost = False

        def attempt() -> StoreError | None:
            nonlocal answer_lost
            try:
                self._complete()
            except StoreUnavailableError as error:
                answer_lost = answer_lost or error.maybe_done
                raise
            except (AlreadyExistsError, UploadGoneError) as error:
                return error
            return None

        error = self._again(attempt)
        if isinstance(error, UploadGoneError) or (error is not None and answer_lost):
            raise StoreUnavailableError(self._key, f"it may be there: {error.problem}") from error
        if error is not None:
            raise error

    def _complete(self) -> None:
        arguments = {"UploadId": self._id, "MultipartUpload": {"Parts": self._sent}}
        if self._abilities.conditional_completion:
            try:
                self._bucket.call("complete_multipart_upload", self._key, IfNoneMatch="*", **arguments)
                return
            except UnsupportedError:
                self._abilities.conditional_completion = False
        self._bucket.call("complete_multipart_upload", self._key, **arguments)

    def abort(self) -> None:
        """Forget the parts. What cannot be removed now is invisible; a sweep removes it, or a lifecycle rule."""
        with contextlib.suppress(StoreError):
            self._bucket.call("abort_multipart_upload", self._key, UploadId=self._id)

    def _begin(self) -> dict[str, Any]:
        if self._abilities.part_checksums:
            try:
                return self._bucket.call("create_multipart_upload", self._key, ChecksumAlgorithm="CRC32C")
            except UnsupportedError:
                self._abilities.part_checksums = False
        return self._bucket.call("create_multipart_upload", self._key)

    def _send_part(self, number: int, part: Part) -> dict[str, Any]:
        checksum = {"ChecksumCRC32C": part.checksum()} if self._checksums else {}
        request = {"UploadId": self._id, "PartNumber": number, "ContentLength": len(part), **checksum}

        waited_seconds = 0.0

        def attempt() -> dict[str, Any]:
            nonlocal waited_seconds
            with self._gate.passed(self._key) as waited:
                waited_seconds += waited
                part.seek(0)
                return self._bucket.call("upload_part", self._key, Body=part, **request)

        of = "" if self._plan.count_max is None else f" of at most {self._plan.count_max}"
        with _named(f"part {number}{of}, {len(part)} bytes"):
            answer = self._again(attempt, excused_seconds=lambda: waited_seconds)
        return {"PartNumber": number, "ETag": answer["ETag"], **checksum}

    def _without_checksums(self, error: UnsupportedError) -> StoreError:
        """The error, or that the next try will do without what may have caused it."""
        if not self._checksums:
            return error
        self._abilities.part_checksums = False
        return StoreUnavailableError(self._key, f"{error.problem}; from now on without checksums", maybe_done=False)


class _Gate:
    """Lets as many requests through as the server can take, and makes the others wait."""

    def __init__(self, at_once_max: int) -> None:
        self._limit = AdaptiveLimit(at_once_max=at_once_max)
        self._changed = threading.Condition()
        self._closed = False

    @contextlib.contextmanager
    def passed(self, key: str) -> Iterator[float]:
        """The block is one request; gives the seconds that it waited for its turn: at most until another ends.

        Raises StoreError when the gate was closed: then nobody wants the request any more.
        """
        began = time.monotonic()
        with self._changed:
            ticket = None
            while not self._closed and (ticket := self._limit.begin()) is None:
                self._changed.wait()
            if ticket is None:
                raise StoreError(key, "was not sent: the upload is over")
        outcome = RequestOutcome.FAILED
        try:
            yield time.monotonic() - began
            outcome = RequestOutcome.ARRIVED
        except SlowDownError:
            outcome = RequestOutcome.SLOWED
            raise
        finally:
            with self._changed:
                self._limit.end(ticket, outcome)
                self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits, or comes later, is refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Whatever fails in the block says what it was about."""
    try:
        yield
    except StoreError as error:
        error.about(what)
        raise


def _all_but(flying_max: int, flying: set[_Answer]) -> set[_Answer]:
    """Waits until at most that many are unanswered: these. Raises what another of them raised."""
    while len(flying) > flying_max:
        done, flying = wait(flying, return_when=FIRST_COMPLETED)
        for answer in done:
            answer.result()
    return flying

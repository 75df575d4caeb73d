"""An object store in an S3 bucket: AWS, or any server that honours `If-None-Match: *`.

What is small, or known whole, is one conditional PutObject: the create-if-absent that claims and commits rest on. A
shard that comes in pieces is a multipart upload: its parts leave while later pieces are still being made, and it is
completed under the same condition where the server knows it. There are servers that ignore the condition silently,
so before its first write a store finds out, by a probe, that a second one is refused. Whoever accepts such a server in
the store's URL gets a warning, and creates that look before they write and read back what they wrote: better than
nothing.

Uploads in parts that killed writers left are listed by `unfinished`. Not here: retries (`storage/retrying`). Called
through `storage/opening`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreError, StoreUnavailableError
from orchestrator.storage import answers
from orchestrator.storage.answers import Body, check_range_of
from orchestrator.storage.arguments import (
    is_key,
    key_parts,
    prefix_parts,
    probe_key,
)
from orchestrator.storage.base import Entry, Piece, Unfinished, bytes_at_most
from orchestrator.storage.bucket_errors import ChecksumRefusedError, NoSuchRangeError, UploadGoneError, nothing_done
from orchestrator.storage.retrying import Again, holds, once
from orchestrator.storage.s3.bucket import Bucket
from orchestrator.storage.s3.errors import UnsupportedError
from orchestrator.storage.s3.parts import Part, PartPlan, cut, plan_parts, whole
from orchestrator.storage.s3.upload import Abilities, maybe_done, upload

ONE_PUT_BYTES_MAX = 1 << 30
"""What is known whole and no larger is one request: receipts and indexes of any job."""
_ACCEPTING = "accept it with ?without_conditional_writes=accept in the store's URL, where only one writer ever runs"
_LOG = logging.getLogger(__name__)


class S3Store:
    """The objects of a bucket, below a prefix.

    `again` calls what may be tried again on its own: the parts of one object, so that one that fails does not cost
    those that arrived.
    """

    def __init__(self, bucket: Bucket, again: Again = once, *, without_conditional_writes: bool = False) -> None:
        """`without_conditional_writes`: a server that ignores the condition is used all the same, with a warning."""
        self._bucket = bucket
        self._accepts_unconditional = without_conditional_writes
        self._unconditional = False
        self._again = again
        self._abilities = Abilities()
        self._probing = threading.Lock()
        self._probed = False

    @property
    def url(self) -> str:
        """s3://bucket/prefix."""
        return self._bucket.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port. One request for a list of pieces, and for what is smaller than a part."""
        key_parts(key)
        self._probe_once()
        if isinstance(pieces, list | tuple):
            content = whole(pieces)
            if len(content) <= ONE_PUT_BYTES_MAX:
                self._create(key, content)
                return
        plan = plan_parts(bytes_at_most(pieces))
        parts = cut(pieces, plan)
        first = next(parts)
        if len(first) < plan.first_bytes:
            self._create(key, first)
        else:
            self._upload(key, chain([first], parts), plan)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        return answers.read(self._range, self.size, key, start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port. From the socket into the buffers."""
        return answers.read_into(self._range, self.size, key, start, buffers)

    def size(self, key: str) -> int:
        """See the port. An answer to HEAD has no body that says why not: a refusal is asked for once more by GET."""
        key_parts(key)
        try:
            return int(self._bucket.call("head_object", key)["ContentLength"])
        except (NotFoundError, StoreUnavailableError, UploadGoneError):
            raise
        except StoreError:
            with self._range(key, 0, 1):
                raise

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port. The whole listing is read before the first entry comes; not all servers sort it."""
        prefix_parts(prefix)
        found = [Entry(key=one["Key"], size_bytes=one["Size"]) for one in self._bucket.objects(prefix)]
        return iter(sorted((entry for entry in found if is_key(entry.key)), key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        """See the port."""
        key_parts(key)
        with contextlib.suppress(NotFoundError):
            self._bucket.call("delete_object", key)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """See SweepableStore: uploads in parts. None where the server cannot list them."""
        prefix_parts(prefix)
        try:
            found = [Unfinished(key=one["Key"], token=one["UploadId"]) for one in self._bucket.uploads(prefix)]
        except UnsupportedError:
            return iter(())
        return iter(sorted((write for write in found if is_key(write.key)), key=lambda write: write.key))

    def discard(self, write: Unfinished) -> None:
        """See SweepableStore."""
        key_parts(write.key)
        with contextlib.suppress(UploadGoneError):
            self._bucket.call("abort_multipart_upload", write.key, UploadId=write.token)

    def close(self) -> None:
        """Closes the idle connections. The store stays usable."""
        self._bucket.close()

    def probe(self) -> None:
        """Write a key of a random name twice: the second time must be refused. Removes it again.

        Raises StoreError, naming the server, if it does not keep the promise of `create`.
        """
        key, contents = probe_key(), [secrets.token_bytes(32), secrets.token_bytes(32)]
        try:
            self._put_adapting(key, contents[0])
            refused = self._refuses(key, contents[1])
            if not refused and not self._accepts_unconditional:
                raise StoreError(self.url, f"{self._ignores()}; use a server that honours it, or {_ACCEPTING}")
            if self.read(key) != contents[0 if refused else 1]:
                raise StoreError(self.url, f"{self._bucket.endpoint} gave back other bytes than were written")
        finally:
            with contextlib.suppress(StoreError):  # not everybody who may write may delete
                self.delete(key)
        if not refused and not self._unconditional:
            _LOG.warning("%s: %s; it is used all the same, as the store's URL says", self.url, self._ignores())
        self._unconditional = not refused

    # ------------------------------------------------------------------------------------------ writing

    def _probe_once(self) -> None:
        with self._probing, nothing_done():
            if not self._probed:
                self.probe()
                self._probed = True

    def _put_adapting(self, key: str, content: bytes) -> None:
        """The first write of all finds out whether the server takes checksums."""
        try:
            self._put(key, whole([content]))
        except (UnsupportedError, ChecksumRefusedError):
            if not self._abilities.checksums:
                raise
            self._abilities.checksums = self._abilities.part_checksums = False
            self._put(key, whole([content]))

    def _refuses(self, key: str, content: bytes) -> bool:
        try:
            self._put(key, whole([content]))
        except AlreadyExistsError:
            return True
        return False

    def _ignores(self) -> str:
        return (
            f"{self._bucket.endpoint} silently ignores If-None-Match: it let the same key be written twice, so two "
            "supervisors could both claim one generation, and both believe that they won"
        )

    def _create(self, key: str, content: Part) -> None:
        """The one request, between two looks where the server does not look itself."""
        if not self._unconditional:
            self._put(key, content)
            return
        with nothing_done():
            self._refuse_if_there(key)
        self._put(key, content)
        with maybe_done():
            if not holds(self, key, content.views):
                raise AlreadyExistsError(key, "somebody else wrote it at the same time")

    def _put(self, key: str, content: Part) -> None:
        checksum = {"ChecksumCRC32C": content.checksum()} if self._abilities.checksums else {}
        self._bucket.call("put_object", key, Body=content, ContentLength=len(content), IfNoneMatch="*", **checksum)

    def _upload(self, key: str, parts: Iterable[Part], plan: PartPlan) -> None:
        """The key is looked for first: that spares sending gigabytes in vain, and some servers look no more later."""
        with nothing_done():
            self._refuse_if_there(key)
        size_bytes = upload(self._bucket, key, parts, plan=plan, abilities=self._abilities, again=self._again)
        with maybe_done():
            stored = self._again(lambda: self.size(key))
        if stored != size_bytes:
            raise StoreError(key, f"{stored} bytes are there of {size_bytes} that were sent")

    def _refuse_if_there(self, key: str) -> None:
        with contextlib.suppress(NotFoundError):
            self.size(key)
            raise AlreadyExistsError(key, "is there already")

    # ------------------------------------------------------------------------------------------ reading

    @contextmanager
    def _range(self, key: str, start: int, stop: int | None) -> Iterator[Body | None]:
        """The bytes [start, stop), or as many of them as there are; None if the object ends at or before `start`."""
        wanted = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        if (start, stop) == (0, None):  # a whole record: nothing but its checksum would show a wrong bit in it
            wanted = {"ChecksumMode": "ENABLED"} if self._abilities.checksums else {}
        try:
            with self._bucket.opened(key, **wanted) as (answer, body):
                check_range_of(key, answer.get("ContentRange", ""), body.length, start, stop)
                yield body
        except NoSuchRangeError:
            yield None

"""An object store in a bucket of Google Cloud Storage, or of a server that speaks its JSON API.

What is small, or known whole, is one request with `ifGenerationMatch=0`: the create-if-absent that claims and commits
rest on. A shard that comes in pieces is a resumable upload under a key of its own: its chunks leave while later pieces
are still being made, and what the server says it has stored is compared with what was sent. There may be servers that
ignore the condition silently, so before its first write a store finds out, by a probe, that a second one is refused.

Not here: retries (`storage/retrying`), and the unfinished uploads of killed writers: nobody can list them, and GCS
forgets them after a week. Called through `storage/opening`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreError
from orchestrator.storage import answers
from orchestrator.storage.answers import Body, check_range_of, checksum_text
from orchestrator.storage.arguments import (
    is_key,
    key_parts,
    prefix_parts,
    probe_key,
)
from orchestrator.storage.base import Entry, Piece
from orchestrator.storage.bucket_errors import NoSuchRangeError, nothing_done
from orchestrator.storage.gcs.bucket import Bucket, json_of
from orchestrator.storage.gcs.content import Content, cut, whole
from orchestrator.storage.gcs.upload import Again, check_stored, upload
from orchestrator.storage.retrying import once

ONE_REQUEST_BYTES_MAX = 1 << 30
"""What is known whole and no larger is one request: receipts and indexes of any job."""


class GCSStore:
    """The objects of a bucket, below a prefix.

    `again` calls what may be tried again on its own: the chunks of one object, so that one that fails does not cost
    those that arrived.
    """

    def __init__(self, bucket: Bucket, again: Again = once) -> None:
        self._bucket = bucket
        self._again = again
        self._probing = threading.Lock()
        self._probed = False

    @property
    def url(self) -> str:
        """gs://bucket/prefix."""
        return self._bucket.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port. One request for a list of pieces, and for what is smaller than a chunk."""
        key_parts(key)
        self._probe_once()
        if isinstance(pieces, list | tuple):
            content = whole(pieces)
            if len(content) <= ONE_REQUEST_BYTES_MAX:
                self._put(key, content)
                return
        chunks = cut(pieces)
        first, last = next(chunks)
        if last:
            self._put(key, first)
        else:
            self._upload(key, chain([(first, last)], chunks))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        return answers.read(self._range, self.size, key, start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port. From the socket into the buffers."""
        return answers.read_into(self._range, self.size, key, start, buffers)

    def size(self, key: str) -> int:
        """See the port."""
        key_parts(key)
        answer = self._bucket.about(key, "get", "GET", parameters={"fields": "size"})
        return int(json_of(key, answer)["size"])

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port. The whole listing is read before the first entry comes."""
        prefix_parts(prefix)
        found = [Entry(key=key, size_bytes=size_bytes) for key, size_bytes in self._bucket.objects(prefix)]
        return iter(sorted((entry for entry in found if is_key(entry.key)), key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        """See the port."""
        key_parts(key)
        with contextlib.suppress(NotFoundError):
            self._bucket.about(key, "delete", "DELETE", wanted=(200, 204))

    def close(self) -> None:
        """Closes the idle connections. The store stays usable."""
        self._bucket.close()

    def probe(self) -> None:
        """Write a key of a random name twice: the second time must be refused. Removes it again.

        Raises StoreError, naming the server, if it does not keep the promise of `create`.
        """
        key, content = probe_key(), secrets.token_bytes(32)
        try:
            self._put(key, whole([content]))
            self._check_refusal(key)
            if self.read(key) != content:
                raise StoreError(self.url, f"{self._bucket.endpoint} gave back other bytes than were written")
        finally:
            with contextlib.suppress(StoreError):  # not everybody who may write may delete
                self.delete(key)

    # ------------------------------------------------------------------------------------------ writing

    def _probe_once(self) -> None:
        with self._probing, nothing_done():
            if not self._probed:
                self.probe()
                self._probed = True

    def _check_refusal(self, key: str) -> None:
        try:
            self._put(key, whole([secrets.token_bytes(32)]))
        except AlreadyExistsError:
            return
        raise StoreError(
            self.url,
            f"{self._bucket.endpoint} silently ignores ifGenerationMatch: it let the same key be written twice, so two "
            "writers could both claim one generation; use a server that honours it",
        )

    def _put(self, key: str, content: Content) -> None:
        """One request: its first part says what follows, with the digest, which GCS compares."""
        digest = content.digest()
        about = json.dumps({"name": self._bucket.full_key(key), "crc32c": checksum_text(digest)})
        line = f"--{secrets.token_hex(16)}"
        head = f"{line}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{about}\r\n{line}\r\n"
        body = whole([f"{head}Content-Type: application/octet-stream\r\n\r\n".encode()])
        body = Content([*body.views, *content.views, *whole([f"\r\n{line}--\r\n".encode()]).views])
        headers = {"Content-Type": f"multipart/related; boundary={line[2:]}"}
        stored = json_of(key, self._bucket.upload(key, "multipart", headers=headers, content=body))
        check_stored(self._bucket, key, stored, len(content), digest)

    def _upload(self, key: str, chunks: Iterable[tuple[Content, bool]]) -> None:
        """The key is looked for first: that spares sending gigabytes in vain, and some servers look no more later."""
        with nothing_done():
            if self._is_there(key):
                raise AlreadyExistsError(key, "is there already")
        upload(self._bucket, key, chunks, self._again)

    def _is_there(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFoundError:
            return False
        return True

    # ------------------------------------------------------------------------------------------ reading

    @contextmanager
    def _range(self, key: str, start: int, stop: int | None) -> Iterator[Body | None]:
        """The bytes [start, stop), or as many of them as there are; None if the object ends at or before `start`."""
        wanted = {} if (start, stop) == (0, None) else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        try:
            with self._bucket.opened(key, wanted) as (answer, body):
                check_range_of(key, answer.headers.get("Content-Range", ""), body.length, start, stop)
                yield body
        except NoSuchRangeError:
            yield None

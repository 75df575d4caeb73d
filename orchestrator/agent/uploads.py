"""A node's uploads: staged shards to the store, in threads of low priority, never two for one shard.

An upload may begin while its shard is still being staged, and then follows it; its receipt waits for the order.

While training goes on they rest as long as they work: nice leaves the processors to it, but not the memory's bandwidth.

Used by `agent.node` only. The slot is read while it is staged and is not freed before the upload has ended.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from orchestrator.checkpoint.save import ShardPlace, upload_shard
from orchestrator.clock import Clock
from orchestrator.errors import FormatError, StoreError
from orchestrator.storage.base import ObjectStore
from orchestrator.telemetry import reached

UPLOAD_NICE = 19  # uploads share the machine with training
WAIT_SECONDS = 0.002  # between two looks at a shard that is still being staged, or not ordered yet
REST_SHARE = 1.0  # of the time that a piece took
REST_SECONDS_MAX = 0.25  # after one piece: a notice that comes meanwhile is not kept waiting longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A shard that is durable, its receipt written."""

    size_bytes: int
    seconds: float
    """That it took, without rests and waiting."""


class Uploads:
    """Runs uploads and knows which slots are being read."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        threads: int,
        hurried: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`hurried` is asked, in any thread, whether uploads should take all the bandwidth that they can get."""
        self._store = store
        self._clock = clock
        self._hurried = hurried
        self._sleep = sleep
        self._closing = False
        self._reading: set[Path] = set()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload", initializer=_lower_priority)

    def reading(self, path: Path) -> bool:
        """Whether an upload still reads this slot."""
        return path in self._reading

    def start(
        self,
        place: ShardPlace,
        path: Path,
        there: Callable[[], tuple[int, bool]],
        ordered: Callable[[], bool] = lambda: True,
    ) -> asyncio.Future[Made]:
        """Begin to upload one shard and to write its receipt.

        `there` says how many bytes of it are there and whether that is all, `ordered` whether the receipt may be
        written; both are asked again and again, in any thread, and raise StoreError if it will come to nothing. From
        now until the end the slot counts as being read. The future raises StoreError, FormatError, OSError.
        """
        self._reading.add(path)
        loop = asyncio.get_running_loop()
        upload = loop.run_in_executor(self._pool, self._upload, place, path, there, ordered)
        upload.add_done_callback(lambda _: self._reading.discard(path))
        return upload

    def _upload(
        self, place: ShardPlace, path: Path, there: Callable[[], tuple[int, bool]], ordered: Callable[[], bool]
    ) -> Made:
        where = {"rank": place.rank, "step": place.checkpoint.step}
        reached("before-shard-upload", **where)
        started = since = self._clock.monotonic()
        idle_seconds = 0.0
        memory = _mapped(place, path, *there())

        def rest(seconds: float) -> None:
            nonlocal since, idle_seconds
            now = self._clock.monotonic()
            self._sleep(seconds)
            since = self._clock.monotonic()
            idle_seconds += since - now

        def wait() -> None:
            if self._closing:
                raise StoreError(place.shard_key, "its agent ended while it waited for the shard, or for the order")
            rest(WAIT_SECONDS)

        def wait_for(size_bytes: int) -> tuple[int, bool]:
            found, complete = there()
            while found < size_bytes and not complete:
                wait()
                found, complete = there()
            return found, complete

        def before_receipt() -> None:
            reached("after-shard-upload", **where)
            while not ordered():
                wait()
            there()  # its slot may have been used again while it was read: no receipt is written

        def between_pieces() -> None:
            nonlocal since
            if not self._hurried():
                rest(min(REST_SHARE * (self._clock.monotonic() - since), REST_SECONDS_MAX))
            since = self._clock.monotonic()

        # The memory is never closed by hand: after a failure the traceback still holds views of it.
        receipt = upload_shard(
            self._store,
            place,
            memoryview(memory),
            before_receipt=before_receipt,
            between_pieces=between_pieces,
            there=wait_for,
        )
        reached("after-receipt", **where)
        seconds = self._clock.monotonic() - started - idle_seconds
        return Made(size_bytes=receipt.size_bytes, seconds=seconds)

    def close(self) -> None:
        """Wait for running uploads; those that wait themselves give up."""
        self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)


def _mapped(place: ShardPlace, path: Path, there_bytes: int, complete: bool) -> mmap.mmap:
    """The memory of a slot's shard, or of all that it may become. Raises FormatError, OSError."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < there_bytes:
            raise FormatError(place.shard_key, f"its slot {path} holds fewer than {there_bytes} bytes")
        return mmap.mmap(file.fileno(), there_bytes if complete else size_bytes, access=mmap.ACCESS_READ)


def _lower_priority() -> None:
    """Nice applies to this thread alone on Linux."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), UPLOAD_NICE)

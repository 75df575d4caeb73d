"""A node's uploads: staged shards to the store, in threads of low priority, never two for one shard.

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
from pathlib import Path

from orchestrator.checkpoint.save import ShardPlace, upload_shard
from orchestrator.clock import Clock
from orchestrator.errors import FormatError, StoreError
from orchestrator.storage.base import ObjectStore
from orchestrator.telemetry import reached

UPLOAD_NICE = 19  # uploads share the machine with training
REST_SHARE = 1.0  # of the time that a piece took
REST_SECONDS_MAX = 0.25  # after one piece: a notice that comes meanwhile is not kept waiting longer


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
        self._reading: set[Path] = set()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload", initializer=_lower_priority)

    def reading(self, path: Path) -> bool:
        """Whether an upload still reads this slot."""
        return path in self._reading

    def start(
        self, place: ShardPlace, path: Path, size_bytes: int, still_there: Callable[[], bool]
    ) -> asyncio.Future[float]:
        """Begin to upload one staged shard and write its receipt; the result is the seconds it took, without rests.

        From now until the end the slot counts as being read. The future raises StoreError, FormatError, OSError.
        """
        self._reading.add(path)
        loop = asyncio.get_running_loop()
        upload = loop.run_in_executor(self._pool, self._upload, place, path, size_bytes, still_there)
        upload.add_done_callback(lambda _: self._reading.discard(path))
        return upload

    def _upload(self, place: ShardPlace, path: Path, size_bytes: int, still_there: Callable[[], bool]) -> float:
        where = {"rank": place.rank, "step": place.checkpoint.step}
        reached("before-shard-upload", **where)
        started = self._clock.monotonic()
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < size_bytes:
                raise FormatError(place.shard_key, f"its slot {path} holds fewer than {size_bytes} bytes")
            memory = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)

        def before_receipt() -> None:
            reached("after-shard-upload", **where)
            if not still_there():
                raise StoreError(place.shard_key, "its slot was used again while it was read: no receipt is written")

        since, rested_seconds = started, 0.0

        def between_pieces() -> None:
            nonlocal since, rested_seconds
            if not self._hurried():
                now = self._clock.monotonic()
                self._sleep(min(REST_SHARE * (now - since), REST_SECONDS_MAX))
                rested_seconds += self._clock.monotonic() - now
            since = self._clock.monotonic()

        # The memory is never closed by hand: after a failure the traceback still holds views of it.
        upload_shard(self._store, place, memoryview(memory), before_receipt, between_pieces)
        reached("after-receipt", **where)
        return self._clock.monotonic() - started - rested_seconds

    def close(self) -> None:
        """Wait for running uploads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _lower_priority() -> None:
    """Nice applies to this thread alone on Linux."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), UPLOAD_NICE)

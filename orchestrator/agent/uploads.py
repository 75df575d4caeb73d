"""A node's uploads: staged shards to the store, in threads of low priority, never two for one shard.

Used by `agent.node` only. The slot is read while it is staged and is not freed before the upload has ended.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.checkpoint.save import ShardPlace, upload_shard
from orchestrator.clock import Clock
from orchestrator.errors import FormatError, StoreError
from orchestrator.storage.base import ObjectStore
from orchestrator.telemetry import reached

UPLOAD_NICE = 19  # uploads share the machine with training


class Uploads:
    """Runs uploads and knows which slots are being read."""

    def __init__(self, store: ObjectStore, clock: Clock, threads: int) -> None:
        self._store = store
        self._clock = clock
        self._reading: set[Path] = set()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload", initializer=_lower_priority)

    def reading(self, path: Path) -> bool:
        """Whether an upload still reads this slot."""
        return path in self._reading

    def start(
        self, place: ShardPlace, path: Path, size_bytes: int, still_there: Callable[[], bool]
    ) -> asyncio.Future[float]:
        """Begin to upload one staged shard and write its receipt; the result is the seconds that it took.

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

        # The memory is never closed by hand: after a failure the traceback still holds views of it.
        upload_shard(self._store, place, memoryview(memory), before_receipt)
        reached("after-receipt", **where)
        return self._clock.monotonic() - started

    def close(self) -> None:
        """Wait for running uploads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _lower_priority() -> None:
    """Nice applies to this thread alone on Linux."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), UPLOAD_NICE)

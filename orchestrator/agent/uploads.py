"""A node's uploads: staged shards to the store, in threads of low priority, never two for one shard.

An upload may begin while its shard is still being staged, and then follows it; its receipt waits for the order.

While training goes on they rest as long as they work: nice leaves the processors to it, but not the memory's bandwidth.

Used by `agent.node` only. Only the slot of a worker that is gone is freed while it is read: then no receipt is written.
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
class DurableShard:
    """What has become of an upload: shard and receipt are on the store."""

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
        self.store = store
        self.clock = clock
        self.hurried = hurried
        self.sleep = sleep
        self.closing = False
        self._reading: set[Path] = set()
        # As many again: those that follow wait for their workers, and nobody shall have to wait behind them.
        self._pool = ThreadPoolExecutor(2 * threads, thread_name_prefix="upload", initializer=_lower_priority)

    def reading(self, path: Path) -> bool:
        """Whether an upload still reads this slot."""
        return path in self._reading

    def start(
        self,
        place: ShardPlace,
        path: Path,
        look: Callable[[], tuple[int, bool]],
        ordered: Callable[[], bool] = lambda: True,
    ) -> asyncio.Future[DurableShard]:
        """Begin to upload one shard and to write its receipt.

        `look` says how many bytes of it are there and whether that is all, `ordered` whether the receipt may be
        written; both are asked again and again, in any thread, and raise StoreError if it will come to nothing. From
        now until the end the slot counts as being read. The future raises StoreError, FormatError, OSError.
        """
        self._reading.add(path)
        loop = asyncio.get_running_loop()
        upload = loop.run_in_executor(self._pool, _Upload(self, place, look, ordered).run, path)
        upload.add_done_callback(lambda _: self._reading.discard(path))
        return upload

    def close(self) -> None:
        """Wait for running uploads; those that wait themselves give up."""
        self.closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Upload:
    """One shard's way to the store, in a thread of its own."""

    def __init__(
        self,
        uploads: Uploads,
        place: ShardPlace,
        look: Callable[[], tuple[int, bool]],
        ordered: Callable[[], bool],
    ) -> None:
        self._all = uploads
        self._place = place
        self._look = look
        self._ordered = ordered
        self._where = {"rank": place.rank, "step": place.checkpoint.step}
        self._since = 0.0
        self._idle_seconds = 0.0

    def run(self, path: Path) -> DurableShard:
        """Raises StoreError, FormatError, OSError."""
        reached("before-shard-upload", **self._where)
        started = self._since = self._all.clock.monotonic()
        # Until its first byte is there the worker may still make its slot larger. The memory is never closed by hand:
        # after a failure the traceback still holds views of it.
        memory = _mapped(self._place, path, *self._wait_for(1))
        receipt = upload_shard(
            self._all.store,
            self._place,
            memoryview(memory),
            before_receipt=self._before_receipt,
            between_pieces=self._between_pieces,
            await_bytes=self._wait_for,
        )
        reached("after-receipt", **self._where)
        seconds = self._all.clock.monotonic() - started - self._idle_seconds
        return DurableShard(size_bytes=receipt.size_bytes, seconds=seconds)

    def _rest(self, seconds: float) -> None:
        now = self._all.clock.monotonic()
        self._all.sleep(seconds)
        self._since = self._all.clock.monotonic()
        self._idle_seconds += self._since - now

    def _wait(self) -> None:
        """For the worker or the supervisor; not for ever."""
        if self._all.closing:
            raise StoreError(self._place.shard_key, "its agent ended while it waited for the shard, or for the order")
        self._rest(WAIT_SECONDS)

    def _wait_for(self, size_bytes: int) -> tuple[int, bool]:
        found, complete = self._look()
        while found < size_bytes and not complete:
            self._wait()
            found, complete = self._look()
        return found, complete

    def _before_receipt(self) -> None:
        reached("after-shard-upload", **self._where)
        while not self._ordered():
            self._look()  # its generation may be over
            self._wait()
        self._look()  # its slot may have been used again while it was read: no receipt is written

    def _between_pieces(self) -> None:
        if not self._all.hurried():
            self._rest(min(REST_SHARE * (self._all.clock.monotonic() - self._since), REST_SECONDS_MAX))
        self._since = self._all.clock.monotonic()


def _mapped(place: ShardPlace, path: Path, there_bytes: int, complete: bool) -> mmap.mmap:
    """The memory of a slot's shard, or of all that it may become. Raises FormatError, OSError."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < max(there_bytes, 1):
            raise FormatError(place.shard_key, f"its slot {path} holds {size_bytes} bytes, not {there_bytes}")
        return mmap.mmap(file.fileno(), there_bytes if complete else size_bytes, access=mmap.ACCESS_READ)


def _lower_priority() -> None:
    """Nice applies to this thread alone on Linux."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), UPLOAD_NICE)

"""What an act costs its process: time, processor time, memory at its peak. Loads no torch."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOOK_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one act."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process, in the kernel too."""


def cost_of(act: Callable[[], object]) -> Cost:
    """How long it takes, on the wall and on the processors."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    act()
    return Cost(seconds=time.perf_counter() - begin, cpu_seconds=time.process_time() - begin_cpu)


def peak_extra_bytes(act: Callable[[], object]) -> int:
    """The most anonymous memory of this process during an act, beyond what it had before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what an earlier save has freed would be taken again unseen
    before = highest = anonymous_bytes()
    ended = threading.Event()

    def look() -> None:
        nonlocal highest
        while not ended.wait(LOOK_SECONDS):
            highest = max(highest, anonymous_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        act()
    finally:
        ended.set()
        watcher.join()
    return highest - before


def anonymous_bytes() -> int:
    """Resident memory that is no file and no shared memory."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024

"""Work that may never end, in a thread that dies with the process and that nobody waits for at the end.

A name resolver or a file system that hangs shall keep neither a watcher from saying so nor an agent from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def detached(work: Callable[[], ResultT], name: str) -> asyncio.Future[ResultT]:
    """What `work` returns or raises. Who gives it up leaves its thread behind: do not start many."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT) -> None:
        if not found.done():
            found.set_result(result)

    def fail(error: Exception) -> None:
        if not found.done():
            found.set_exception(error)

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, daemon=True, name=name).start()
    return found

"""Simulated time for production code: an asyncio loop, blocking threads and processes in one real thread.

Coroutines run on `SimulatedLoop`, whose clock jumps to the next thing that is due. Blocking code (a worker's loop,
a store's calls in `asyncio.to_thread`) runs in a `SimulatedThread`, a greenlet that gives way in `pause`. Every task
and thread belongs to a `SimulatedProcess`, which can be killed at any instant: nothing of it runs again. Nothing here
reads a real clock; the same seed gives the same run. Needs the package greenlet (in the extra `dev`). Used by
`testing.simulated_cluster`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, Token
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

_PROCESS: ContextVar[SimulatedProcess | None] = ContextVar("simulated_process", default=None)


class Stuck(AssertionError):
    """Nothing is left that could ever happen."""


class SimulatedProcess:
    """What is killed together: tasks, threads, and what they hold."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.threads: dict[SimulatedThread, None] = {}
        self.on_death: list[Callable[[], None]] = []

    def kill(self) -> None:
        """SIGKILL. What its tasks do while they unwind reaches nobody: every port asks whether its process lives."""
        if not self.alive:
            return
        self.alive = False
        for task in list(self.tasks):
            task.cancel()
        for thread in list(self.threads):
            thread.loop.call_soon(thread.end)
        for act in self.on_death:
            act()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a task of this process."""
        token: Token[SimulatedProcess | None] = _PROCESS.set(self)
        try:
            return asyncio.get_running_loop().create_task(work)
        finally:
            _PROCESS.reset(token)


def current_process() -> SimulatedProcess | None:
    """The process whose code runs at the moment."""
    running = getcurrent()
    return running.process if isinstance(running, SimulatedThread) else _PROCESS.get()


def die_here() -> None:
    """The running process is killed and this very line is its last."""
    process = current_process()
    assert process is not None
    process.kill()
    if isinstance(getcurrent(), SimulatedThread):
        raise GreenletExit
    raise asyncio.CancelledError


class SimulatedThread(greenlet):  # type: ignore[misc]
    """Blocking code of a process; it gives way in `pause` and `wait`."""

    def __init__(self, loop: SimulatedLoop, process: SimulatedProcess | None, work: Callable[[], Any]) -> None:
        super().__init__(work, parent=loop.hub)
        self.loop = loop
        self.process = process
        if process is not None:
            process.threads[self] = None

    def resume(self) -> None:
        """Run until it gives way or ends."""
        if self.dead or (self.process is not None and not self.process.alive):
            return
        self.switch()
        if self.dead and self.process is not None:
            self.process.threads.pop(self, None)

    def end(self) -> None:
        """It never runs again."""
        if self.process is not None:
            self.process.threads.pop(self, None)
        if self.gr_frame is not None:
            with contextlib.suppress(GreenletExit):
                self.throw(GreenletExit)

    def pause(self, seconds: float) -> None:
        """Sleep in simulated time."""
        self.loop.call_later(seconds, self.resume)
        self.loop.hub.switch()

    def wait(self) -> None:
        """Give way until somebody calls `resume`."""
        self.loop.hub.switch()


def pause(seconds: float) -> None:
    """Sleep in simulated time; outside a simulated thread nothing happens."""
    running = getcurrent()
    if isinstance(running, SimulatedThread):
        running.pause(seconds)


class _Selector:
    """Waiting is advancing the clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Called by asyncio when nothing is ready."""
        if timeout is None:
            raise Stuck(f"nothing can happen any more after {self._loop.now:.3f} s")
        self._loop.now += max(timeout, 0.0)
        return []

    def close(self) -> None:
        """Nothing is open."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop in simulated time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.hub = getcurrent()
        self._selector = _Selector(self)
        self.set_task_factory(_task_of_process)  # type: ignore[arg-type]

    def time(self) -> float:
        """Simulated seconds."""
        return self.now

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no files."""

    def _write_to_self(self) -> None:
        """There are no other threads."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run blocking code in a simulated thread of the calling process."""
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except GreenletExit:
                return
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.start_thread(current_process(), work)
        return future

    def start_thread(self, process: SimulatedProcess | None, work: Callable[[], Any]) -> SimulatedThread:
        """A new thread of a process; it begins to run soon."""
        thread = SimulatedThread(self, process, work)
        self.call_soon(thread.resume)
        return thread


def _task_of_process(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
    task = asyncio.Task(work, loop=loop, **options)
    process = _PROCESS.get()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
    return task


class SimulatedClock:
    """One host's clocks: monotonic is simulated time, wall time may be set back and forth."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.wall_offset_seconds = 1_700_000_000.0

    def monotonic(self) -> float:
        """Simulated seconds."""
        return self._loop.now

    def wall(self) -> float:
        """Whatever the host believes."""
        return self._loop.now + self.wall_offset_seconds

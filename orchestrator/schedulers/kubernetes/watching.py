"""A collection's objects as they are now: listed, then watched, for as long as needed.

A server that is away, asks to come later, or has forgotten the version (410) changes nothing of what is known: the last
state stands until a new list says otherwise. Nobody takes an object for gone because it could not be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from orchestrator.errors import KubernetesError
from orchestrator.schedulers.kubernetes.client import KubernetesClient, Watch
from orchestrator.schedulers.kubernetes.names import Key, Object, key_of, path_of

PAUSE_SECONDS_FIRST = 0.5
PAUSE_SECONDS_MAX = 30.0
"""Between two requests where the first one failed, or ended soon. After so long a one everything is listed anew: the
server may not know the version any more and not say so."""
GONE = 410
"""The server has forgotten the version that was asked for."""
STEADY_SECONDS = 5.0
"""A watch that has lasted so long was a good one: the next pause is the shortest again."""


class Collection:
    """The objects of one collection. Everything but the thread runs on the event loop that `start` was called on."""

    def __init__(
        self,
        client: KubernetesClient,
        plural: str,
        *,
        namespace: str | None = None,
        selector: str = "",
        on_change: Callable[[Object, bool], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`on_change`: called with an object as it is, or was, and whether it is gone."""
        self._client = client
        self.path = path_of(plural, namespace)
        """Of the collection, for messages."""
        self._selector = selector
        self._on_change = on_change
        self._draw = draw
        self._objects: dict[Key, Object] = {}
        self._version = ""
        """That the thread has come to; empty: it has to list."""
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._thread: threading.Thread | None = None
        self._first = asyncio.Event()
        self.problem: str | None = None
        """Why it cannot be seen just now; what is known may be old."""

    @property
    def objects(self) -> Mapping[Key, Object]:
        """As they were last seen."""
        return MappingProxyType(self._objects)

    def start(self) -> None:
        """Begin to look."""
        loop = asyncio.get_running_loop()
        name = f"watch {self.path}"
        self._thread = threading.Thread(target=self._look_for_ever, args=(loop,), name=name, daemon=True)
        self._thread.start()

    async def listed(self) -> None:
        """Wait until all objects were seen for the first time."""
        await self._first.wait()

    def stop(self) -> None:
        """Look no more. The thread ends by itself, at the latest when its request does."""
        self._stopped.set()
        if self._watch is not None:
            self._watch.close()

    # ------------------------------------------------------------------------------------------ the thread

    def _look_for_ever(self, loop: asyncio.AbstractEventLoop) -> None:
        def tell(work: Callable[..., None], *what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                loop.call_soon_threadsafe(work, *what)

        pause = PAUSE_SECONDS_FIRST
        while not self._stopped.is_set():
            began, asked = time.monotonic(), 0.0
            try:
                if not self._version:
                    found, self._version = self._client.list(self.path, self._selector)
                    tell(self._on_listed, found)
                self._follow(tell)
            except (
                Exception
            ) as error:  # whatever it is: a thread that has ended would be blind for good, and not say so
                if not isinstance(error, KubernetesError):
                    error = KubernetesError(f"{self.path} is not understood: {error!r}", status=GONE)
                tell(self._say, str(error))
                asked = min(error.retry_after_seconds or 0.0, PAUSE_SECONDS_MAX)
                if error.status == GONE or pause >= PAUSE_SECONDS_MAX:
                    self._version = ""
            if time.monotonic() - began > STEADY_SECONDS:
                pause = PAUSE_SECONDS_FIRST
            self._stopped.wait(max(asked, pause * (0.5 + 0.5 * self._draw())))
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _follow(self, tell: Callable[..., None]) -> None:
        """One watch to its end. The next one goes on from the last change that came."""
        self._watch = self._client.watch(self.path, self._version, self._selector)
        if self._stopped.is_set():
            self._watch.close()
        tell(self._say, None)
        for kind, found in self._watch:
            if kind != "BOOKMARK":
                tell(self._on_object, found, kind == "DELETED")
            self._version = _version(found) or self._version

    # ------------------------------------------------------------------------------------------ on the loop

    def _say(self, problem: str | None) -> None:
        self.problem = problem

    def _on_listed(self, found: list[Object]) -> None:
        self.problem = None
        now = {key_of(one): one for one in found}
        for key in [key for key in self._objects if key not in now]:
            self._on_object(self._objects[key], gone=True)
        for one in now.values():
            self._on_object(one, gone=False)
        self._first.set()

    def _on_object(self, found: Object, gone: bool) -> None:
        if self._stopped.is_set():
            return
        key = key_of(found)
        known = self._objects.get(key)
        if gone and known is not None and _uid(known) != _uid(found):
            return  # another one has its name by now
        if gone:
            self._objects.pop(key, None)
        elif known is not None and _version(known) == _version(found):
            return
        else:
            self._objects[key] = found
        if known is not None and not gone and _uid(known) != _uid(found):
            self._on_change(known, True)  # gone and made again between two looks
        self._on_change(found, gone)


def _version(found: Object) -> str:
    return str((found.get("metadata") or {}).get("resourceVersion") or "")


def _uid(found: Object) -> str:
    return str((found.get("metadata") or {}).get("uid"))

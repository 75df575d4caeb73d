"""What every simulated metadata service is: a port on loopback that counts what it is asked, and faults.

Subclasses in `metadata` say what a cloud's service answers; `machines` gives each process that asks one of its own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# ------------------------------------------------------------------------------------------------------ faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Unauthorized:
    """401, whatever the token says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """An answer with another status."""

    status: int = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """The right answer, late."""

    seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Status 200 and another body: empty, cut, of a login page."""

    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The connection ends in the middle of the answer."""


Fault = Unauthorized | Status | Slow | Body | Cut


class MetadataServer(ABC):
    """One service on a port of its own. Subclasses say what it answers."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """How often each path was asked for."""
        self._fault: tuple[Fault, int | None, str] | None = None
        self._runner: web.AppRunner | None = None
        self.port = 0
        """Where it listens, once it does."""
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        """What agents are given in place of the link-local address."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after a `stop` at the same port as before."""

        @web.middleware
        async def with_faults(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._with_faults(request, handler)

        app = web.Application(middlewares=[with_faults])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Connections are refused from now on."""
        self.changed()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def misbehave(self, fault: Fault, *, times: int | None = None, path: str = "") -> None:
        """The next `times` requests (None: all) to paths that contain `path` meet the fault."""
        self._fault = (fault, times, path)
        self.changed()

    def behave(self) -> None:
        """No fault from now on."""
        self._fault = None

    def changed(self) -> None:
        """Wakes whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    @abstractmethod
    def routes(self) -> list[web.RouteDef]:
        """What it serves."""

    async def _with_faults(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests[request.path] += 1
        fault = self._met(request.path)
        match fault:
            case Unauthorized():
                return web.Response(status=401)
            case Status(status=status):
                return web.Response(status=status)
            case Body(body=body):
                return web.Response(body=body, headers=self.own_headers())
            case Slow(seconds=seconds):
                await asyncio.sleep(seconds)
            case Cut():
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b"{")
                assert request.transport is not None
                request.transport.abort()
                return response
            case None:
                pass
        return await handler(request)

    def own_headers(self) -> dict[str, str]:
        """Headers that every answer of the service has."""
        return {}

    def _met(self, path: str) -> Fault | None:
        if self._fault is None or self._fault[2] not in path:
            return None
        fault, times, where = self._fault
        if times is not None:
            self._fault = (fault, times - 1, where) if times > 1 else None
        return fault


class AnnouncingServer(MetadataServer):
    """One that says when a machine is taken; Oracle's does not."""

    lead_seconds: float | None = None
    """How long ahead the cloud announces that it takes a machine; None: its metadata do not say."""

    @abstractmethod
    def interrupt(self, seconds: float | None = None) -> None:
        """Announce that this machine is taken, and when if the cloud says that; None: as far ahead as it ever is."""

    @abstractmethod
    def forget(self) -> None:
        """Nothing is announced any more: whoever asks from now on is another machine."""


def wall_time(seconds: float) -> datetime:
    """The wall time in so many seconds, in UTC."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


def rfc3339(seconds: float) -> str:
    """The wall time in so many seconds, as in 2017-09-18T08:22:00Z."""
    return wall_time(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def http_date(seconds: float, *, weekday: bool = True) -> str:
    """The wall time in so many seconds, as in Mon, 19 Sep 2016 18:29:47 GMT."""
    return wall_time(seconds).strftime("%a, %d %b %Y %H:%M:%S GMT" if weekday else "%d %b %Y %H:%M:%S GMT")

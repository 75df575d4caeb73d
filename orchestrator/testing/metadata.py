"""Clouds' metadata services on loopback, for rehearsals and tests: they announce, withdraw and hint when told to.

    async with SimulatedAWS() as aws:
        …                                      # agents watch aws.url in place of http://169.254.169.254
        aws.interrupt(seconds=120)             # a spot interruption, as the instance's metadata say it

Faults are set in place: `aws.misbehave(Unauthorized(), times=3)`. Every answer is counted in `requests`. Not here:
anything but what the watchers read, and the clouds' own delays.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
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


class MetadataServer:
    """One service on a port of its own. Subclasses say what it answers."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """How often each path was asked for."""
        self._fault: tuple[Fault, int | None, str] | None = None
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        """What agents are given in place of the link-local address."""
        return f"http://127.0.0.1:{self._port}"

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
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

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

    def routes(self) -> list[web.RouteDef]:
        """What it serves."""
        raise NotImplementedError

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


def _at(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def rfc3339(seconds: float) -> str:
    """The wall time in so many seconds, as in 2017-09-18T08:22:00Z."""
    return _at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def http_date(seconds: float, *, weekday: bool = True) -> str:
    """The wall time in so many seconds, as in Mon, 19 Sep 2016 18:29:47 GMT."""
    return _at(seconds).strftime("%a, %d %b %Y %H:%M:%S GMT" if weekday else "%d %b %Y %H:%M:%S GMT")


# --------------------------------------------------------------------------------------------------------- AWS


class SimulatedAWS(MetadataServer):
    """IMDSv2 of a spot instance in an Auto Scaling group."""

    def __init__(self, *, instance_id: str = "i-0123456789abcdef0", token_seconds: float = 3600.0) -> None:
        super().__init__()
        self.instance_id = instance_id
        self.token_seconds = token_seconds
        self.keys: dict[str, str] = {
            "instance-id": instance_id,
            "events/maintenance/scheduled": "[]",
            "autoscaling/target-lifecycle-state": "InService",
        }
        """What is answered, by key; may be changed at will. A key that is not here is a 404."""
        self._tokens: dict[str, float] = {}
        self._numbers = itertools.count(1)

    def interrupt(self, seconds: float = 120.0, action: str = "terminate", **more: str) -> None:
        """Announce a spot interruption; `more` are fields that no client knows."""
        record = {"action": action, "time": rfc3339(seconds), **more}
        self.keys["spot/instance-action"] = json.dumps(record)

    def recommend_rebalance(self) -> None:
        """The hint that an interruption has become likely."""
        self.keys["events/recommendations/rebalance"] = json.dumps({"noticeTime": rfc3339(0)})

    def schedule(self, *, event_id: str, seconds: float, code: str = "system-reboot", state: str = "active") -> None:
        """Add or change a scheduled event; `state` "canceled" or "completed" takes it back."""
        events = [event for event in json.loads(self._scheduled()) if event["EventId"] != event_id]
        event = {
            "NotBefore": http_date(seconds, weekday=False),
            "Code": code,
            "Description": f"scheduled {code}",
            "EventId": event_id,
            "NotAfter": http_date(seconds + 3600, weekday=False),
            "State": state,
        }
        self.keys["events/maintenance/scheduled"] = json.dumps([*events, event])

    def _scheduled(self) -> str:
        return self.keys["events/maintenance/scheduled"]

    def forget_tokens(self) -> None:
        """All tokens that were given out are void from now on."""
        self._tokens.clear()

    def routes(self) -> list[web.RouteDef]:
        """The token, and the keys."""
        return [
            web.put("/latest/api/token", self._token),
            web.get("/latest/meta-data/{key:.+}", self._key),
        ]

    async def _token(self, request: web.Request) -> web.Response:
        asked = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if not asked.isdigit() or not 1 <= int(asked) <= 21600:
            return web.Response(status=400)
        token = f"token-{next(self._numbers)}=="
        seconds = min(float(asked), self.token_seconds)
        self._tokens[token] = time.monotonic() + seconds
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(int(seconds))}
        return web.Response(text=token, headers=headers)

    async def _key(self, request: web.Request) -> web.Response:
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        if self._tokens.get(token, 0.0) <= time.monotonic():
            return web.Response(status=401)
        value = self.keys.get(request.match_info["key"])
        return web.Response(status=404) if value is None else web.Response(text=value)

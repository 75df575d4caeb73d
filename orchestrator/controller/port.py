"""The controller's one port: every job's agents reach their supervisor here, each job with a token of its own.

A job that nobody supervises here is answered with 503, never with 401: its agents train on and come again, until the
Service leads them to the controller that holds the lease. So one that waits for it is as ready as the one that acts.
"""

from __future__ import annotations

from typing import Any

from aiohttp import hdrs, web

from orchestrator.agent.objects import bears, token_middleware
from orchestrator.certificates import Identity, server_context
from orchestrator.schedulers.kubernetes.names import Key
from orchestrator.supervisor.loop import Supervisor
from orchestrator.supervisor.metrics import Metrics
from orchestrator.supervisor.server import SupervisorApi
from orchestrator.telemetry import EventRecord

AGAIN_SECONDS = 1


class ControllerPort:
    """Listens with TLS."""

    def __init__(self, identity: Identity, metrics_token: str, *, address: str, port: int) -> None:
        self._identity = identity
        self._metrics_token = metrics_token
        self._address = address
        self._port = port
        self._runner: web.AppRunner | None = None
        self._jobs: dict[Key, JobPort] = {}
        self.metrics = Metrics()

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/readyz", self._health),
                web.route("*", "/jobs/{namespace}/{name}/{tail}", self._job),
            ]
        )
        guarded = web.Application(middlewares=[token_middleware(self._metrics_token)])
        guarded.add_routes([web.get("", self._tell_metrics)])
        app.add_subapp("/metrics", guarded)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        context = server_context(self._identity)
        await web.TCPSite(self._runner, self._address, self._port, ssl_context=context).start()

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    def job(self, key: Key, url: str, supervisor: Supervisor, token: str) -> JobPort:
        """Where one job's supervisor is reached; open from its `start` to its `stop`."""
        return JobPort(self, key, url, supervisor, token)

    def forget(self, key: Key) -> None:
        """The job does not exist any more: nothing is counted of it."""
        self.metrics.forget("/".join(key))

    def open(self, key: Key, job: JobPort) -> None:
        """From now on the job is answered."""
        self._jobs[key] = job

    def close(self, key: Key, job: JobPort) -> None:
        """From now on it is not."""
        if self._jobs.get(key) is job:
            del self._jobs[key]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _job(self, request: web.Request) -> web.StreamResponse:
        job = self._jobs.get((request.match_info["namespace"], request.match_info["name"]))
        if job is None:
            raise web.HTTPServiceUnavailable(headers={hdrs.RETRY_AFTER: str(AGAIN_SECONDS)})
        return await job.answer(request, request.match_info["tail"])

    async def _tell_metrics(self, _: web.Request) -> web.Response:
        statuses = [job.status() for job in self._jobs.values()]
        return web.Response(body=self.metrics.text(*statuses), content_type="text/plain")


class JobPort:
    """One job's part of the port. See `supervisor.loop.Server`."""

    def __init__(self, port: ControllerPort, key: Key, url: str, supervisor: Supervisor, token: str) -> None:
        self._port = port
        self._key = key
        self._url = url
        self._api = SupervisorApi(supervisor)
        self._handlers = {(route.method, route.path): route.handler for route in self._api.routes()}
        self.token = token

    async def start(self) -> str:
        """Answer from now on; returns the URL by which agents reach it."""
        self._port.open(self._key, self)
        return self._url

    async def stop(self) -> None:
        """Answer no more."""
        self._port.close(self._key, self)

    def count(self, record: EventRecord) -> None:
        """Count an event."""
        self._port.metrics.count("/".join(self._key), record.kind)

    def status(self) -> dict[str, Any]:
        """What the job is doing, under a name that tells it from those of other namespaces."""
        return {**self._api.status(), "job": "/".join(self._key)}

    async def answer(self, request: web.Request, tail: str) -> web.StreamResponse:
        """One request, with this job's token."""
        if not bears(request, self.token):
            raise web.HTTPUnauthorized(text="the token is missing or wrong", headers={hdrs.WWW_AUTHENTICATE: "Bearer"})
        handler = self._handlers.get((request.method, f"/{tail}"))
        if handler is None:
            raise web.HTTPNotFound
        answer: web.StreamResponse = await handler(request)
        return answer

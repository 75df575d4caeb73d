"""The supervisor's port: agents by WebSocket, verbs and metrics by HTTP. Every request needs the token.

`SupervisorApi` answers; `SupervisorServer` is a port of its own for one supervisor. A controller has one port for all
of its supervisors (`controller.port`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from orchestrator.agent.link import HEARTBEAT_SECONDS, WebSocketLink
from orchestrator.agent.objects import token_middleware
from orchestrator.agent.wire import FRAME_BYTES_MAX
from orchestrator.certificates import Identity, server_context, url_of
from orchestrator.core.messages import Request, Requested
from orchestrator.errors import ConfigError
from orchestrator.supervisor.metrics import Metrics
from orchestrator.telemetry import EventRecord

if TYPE_CHECKING:
    from orchestrator.supervisor.loop import Supervisor


class SupervisorServer:
    """Listens on loopback; with an identity, over TLS at the address by which the run's other hosts reach this one."""

    def __init__(
        self, supervisor: Supervisor, token: str, *, address: str = "127.0.0.1", identity: Identity | None = None
    ) -> None:
        self._api = SupervisorApi(supervisor)
        self._address = address
        self._identity = identity
        self.token = token
        self._runner: web.AppRunner | None = None
        self.url = ""
        self._metrics = Metrics()

    async def start(self) -> str:
        """Listen; returns the URL."""
        app = web.Application(middlewares=[token_middleware(self.token)])
        app.add_routes([*self._api.routes(), web.get("/metrics", self._tell_metrics)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, 0, ssl_context=server_context(self._identity)).start()
        self.url = url_of(self._address, self._runner.addresses[0][1], self._identity)
        return self.url

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    def count(self, record: EventRecord) -> None:
        """Count an event."""
        self._metrics.count(record.job, record.kind)

    async def _tell_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(self._api.status()), content_type="text/plain")


class SupervisorApi:
    """What agents and verbs may ask of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def routes(self) -> list[web.RouteDef]:
        """Who serves them asks for the token first."""
        return [
            web.get("/agent", self._agent),
            web.get("/status", self._status),
            web.post("/requests", self._request),
            web.post("/notices", self._notice),
        ]

    def status(self) -> dict[str, Any]:
        """What the job is doing."""
        return self._supervisor.status()

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=FRAME_BYTES_MAX)
        await socket.prepare(request)
        await self._supervisor.links.serve(WebSocketLink(socket))
        return socket

    # -- verbs -------------------------------------------------------------------------------------------

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._supervisor.status())

    async def _request(self, request: web.Request) -> web.Response:
        try:
            asked = parse_request(await request.json())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"not a request: {error}"}, status=400)
        job = self._supervisor.job
        if asked.request is Request.ROLLBACK and (job.spec.attached or job.ending is not None):
            why = "a script that supervises itself" if job.spec.attached else "a job that is ending"
            return web.json_response({"error": f"{why} is rolled back once it has ended"}, status=409)
        self._supervisor.submit(asked)
        return web.json_response({"accepted": str(asked.request)})

    async def _notice(self, request: web.Request) -> web.Response:
        """A rehearsed notice; at its deadline the node is really taken away."""
        try:
            body = await request.json()
            node, seconds = str(body["node"]), float(body["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            return web.json_response({"error": f"not a notice: {error}"}, status=400)
        known = [info.node for info in self._supervisor.scheduler.nodes()]
        if node not in known or not 0 <= seconds <= 86400:
            return web.json_response({"error": f"node must be one of {known}, seconds 0 to 86400"}, status=400)
        try:
            self._supervisor.rehearse_notice(node, seconds)
        except ConfigError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"accepted": node})


def parse_request(body: dict[str, Any]) -> Requested:
    """What a verb asks for. Raises ValueError, KeyError, TypeError, AttributeError."""
    what, nodes, step = Request(body["request"]), body.get("nodes"), body.get("step")
    if (what is Request.RESIZE) != (type(nodes) is int and 1 <= nodes <= 4096):
        raise ValueError("resize takes a number of nodes from 1 to 4096, other requests take none")
    if (what is Request.ROLLBACK) != (type(step) is int and 0 <= step < 1 << 63):
        raise ValueError("rollback takes a step, other requests take none")
    return Requested(request=what, by=str(body.get("by", "a request"))[:200], nodes=nodes, step=step)

"""The project's own Kubernetes API server, in memory: REST, watches and subresources as the real one has them.

For tests only. It serves plain HTTP on loopback from a thread with an event loop of its own. What it does not do:
admission webhooks, RBAC, CEL, server-side apply, conversion, chunked lists. Requests whose User-Agent begins with
`simulated-` come from the simulated controllers and kubelets: faults that a test asks for do not meet them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.kubernetes.api_objects import Selects, apply_patch, field_selector, label_selector
from tests.kubernetes.api_status import ApiError, Object, bad_request
from tests.kubernetes.api_store import NAMESPACES, PODS, Change, Resource, Store, finalized

SIMULATED = "simulated-"
START_SECONDS = 10.0
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[^/]+))?)?/?"
)


@dataclass(frozen=True)
class Seen:
    """A request that the server has answered; for a watch, when it was opened."""

    method: str
    path: str
    code: int
    agent: str
    """Its User-Agent."""
    at_seconds: float = field(default_factory=time.monotonic)


@dataclass
class _Fault:
    method: str
    path: re.Pattern[str]
    status: int
    left: int
    retry_after: int | None


@dataclass(frozen=True)
class _Target:
    resource: Resource
    namespace: str | None
    name: str
    part: str


class ApiServer:
    """One server on one port; `stop()` and `start()` keep the port and the data."""

    def __init__(
        self, *, token: str | None = None, log_folder: Path | None = None, bookmark_seconds: float = 5.0
    ) -> None:
        self.token = token
        self.log_folder = log_folder
        self.bookmark_seconds = bookmark_seconds
        self.pause_seconds = 0.0
        """How long every request of others than simulated components waits before it is looked at."""
        self.ahead_seconds = 0.0
        """Of the time that its answers say; what objects say is `api_store.timestamp`'s."""
        self.store = Store()
        self.store.on_change = self._wake
        self.port = 0
        self._seen: list[Seen] = []
        self._faults: list[_Fault] = []
        self._lost: list[_Fault] = []
        self._watches: dict[asyncio.Event, web.Request] = {}
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    # -- from a test's thread ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[Seen]:
        """All requests so far."""
        return list(self._seen)

    def start(self) -> None:
        """Serve; after `stop()` on the same port."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="api-server", daemon=True)
            self._thread.start()
        self._run(self._start())

    def stop(self) -> None:
        """Refuse connections, break those there are; the data stay."""
        self._run(self._stop())

    def close(self) -> None:
        """End the server and its thread."""
        if self._thread is not None:
            self._run(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(START_SECONDS)
            self._loop.close()

    def fail_next(
        self, method: str, path_regex: str, status: int = 500, count: int = 1, retry_after: int | None = None
    ) -> None:
        """Answer the next `count` such requests with that status; 0 breaks the connection instead of an answer."""
        self._faults.append(_Fault(method, re.compile(path_regex), status, count, retry_after))

    def lose_answers(self, method: str, path_regex: str, count: int = 1) -> None:
        """Do what the next `count` such requests ask, and break the connection instead of an answer."""
        self._lost.append(_Fault(method, re.compile(path_regex), 0, count, None))

    @property
    def loses_answers(self) -> bool:
        """Whether there is still an answer to be lost."""
        return any(fault.left for fault in self._lost)

    def break_watches(self) -> None:
        """Break the connections of all watches."""
        self._run(self._break_watches())

    def compact(self) -> None:
        """Forget old changes: a watch from before now gets 410, though those that run go on."""

        async def compact() -> None:
            self.store.compact()

        self._run(compact())

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)

    # -- in its own loop -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        assert self._runner is None
        application = web.Application(client_max_size=4 << 20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            for site in list(runner.sites):
                await site.stop()
            await self._break_watches()
            await runner.cleanup()

    async def _break_watches(self) -> None:
        for request in list(self._watches.values()):
            if request.transport is not None:
                request.transport.abort()

    def _wake(self) -> None:
        for event in self._watches:
            event.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        agent = request.headers.get("User-Agent", "")
        try:
            if not agent.startswith(SIMULATED):
                await asyncio.sleep(self.pause_seconds)
                self._fail(request)
            if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise ApiError(401, "Unauthorized", "Unauthorized")
            response = await self._answer(request)
            if not agent.startswith(SIMULATED) and request.transport is not None:
                self._lose(request, request.transport)
        except ApiError as error:
            headers = {} if error.retry_after_seconds is None else {"Retry-After": str(error.retry_after_seconds)}
            response = web.json_response(error.status(), status=error.code, headers=headers)
        if not response.prepared:
            response.headers["Date"] = formatdate(time.time() + self.ahead_seconds, usegmt=True)
            self._seen.append(Seen(request.method, request.path_qs, response.status, agent))
        return response

    def _fail(self, request: web.Request) -> None:
        for fault in self._faults:
            if fault.left > 0 and fault.method == request.method and fault.path.search(request.path_qs):
                fault.left -= 1
                if fault.status == 0 and request.transport is not None:
                    request.transport.abort()
                reason = {
                    409: "Conflict",
                    429: "TooManyRequests",
                    503: "ServiceUnavailable",
                    504: "Timeout",
                    403: "Forbidden",
                }
                words = reason.get(fault.status, "InternalError")
                raise ApiError(
                    fault.status or 500, words, "a test asked for this", retry_after_seconds=fault.retry_after
                )

    def _lose(self, request: web.Request, connection: asyncio.Transport) -> None:
        for fault in self._lost:
            if fault.left > 0 and fault.method == request.method and fault.path.search(request.path_qs):
                fault.left -= 1
                connection.abort()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/healthz", "/readyz", "/livez"):
            return web.Response(text="ok")
        if request.path == "/version":
            return web.json_response(
                {"major": "1", "minor": "36", "gitVersion": "v1.36.0-double", "platform": "linux/amd64"}
            )
        discovered = self._discovery(request.path.rstrip("/"))
        if discovered is not None:
            return web.json_response(discovered)
        target = self._target(request.path)
        if request.method == "GET" and not target.name and request.query.get("watch", "") in ("1", "true", "True"):
            return await self._watch(request, target)
        if request.method == "GET" and target.part == "log":
            return self._log(target)
        try:
            body = json.loads(await request.read() or b"null")
        except ValueError as error:
            raise bad_request(f"the body is no JSON: {error}") from None
        with self.store.rehearsal() if request.query.get("dryRun") == "All" else contextlib.nullcontext():
            code, answer = self._call(request, target, body)
        return web.json_response(answer, status=code)

    def _target(self, path: str) -> _Target:
        found = PATH.fullmatch(path)
        if found is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        group, namespace, plural, name, part = (
            found[word] or "" for word in ("group", "namespace", "plural", "name", "part")
        )
        if plural in ("status", "finalize") and not name and namespace and not group:
            namespace, plural, name, part = "", "namespaces", namespace, plural
        resource = self.store.resources.get((group, found["version"], plural))
        if group and not any(key[:2] == (group, found["version"]) for key in self.store.resources):
            raise web.HTTPNotFound(text="404 page not found\n")  # as of a definition that is not installed
        if resource is None or (namespace and not resource.namespaced):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if name and resource.namespaced and not namespace:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return _Target(resource, namespace or (None if resource.namespaced else ""), name, part)

    def _call(self, request: web.Request, target: _Target, body: Any) -> tuple[int, Object]:
        if target.part in ("", "status"):
            answer = self._call_one(request, target, body) if target.name else self._call_all(request, target, body)
        else:
            answer = self._call_part(request, target, body)
        if answer is None and target.part:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if answer is None:
            message = "the server does not allow this method on the requested resource"
            raise ApiError(405, "MethodNotAllowed", message)
        return answer

    def _call_all(self, request: web.Request, target: _Target, body: Any) -> tuple[int, Object] | None:
        """A request that names no object."""
        if request.method == "GET":
            return 200, self._list(request, target)
        if request.method == "POST" and target.namespace is not None:
            return 201, self.store.create(target.resource, target.namespace, body)
        if request.method == "DELETE" and target.namespace is not None:
            listed = self._list(request, target)
            for thing in listed["items"]:
                options = _options(request, body)
                self.store.delete(target.resource, target.namespace, thing["metadata"]["name"], options)
            return 200, listed
        return None

    def _call_one(self, request: web.Request, target: _Target, body: Any) -> tuple[int, Object] | None:
        """A request for one object or its status."""
        store, resource, where, name = self.store, target.resource, target.namespace or "", target.name
        if target.part and not resource.status:
            return None
        match request.method:
            case "GET":
                return 200, store.versioned(resource, store.read(resource, where, name))
            case "DELETE" if not target.part:
                return 200, store.delete(resource, where, name, _options(request, body))
            case "PUT" | "PATCH" as method:
                change = self._change(request, resource, body)
                return 200, store.update(resource, where, name, change, part=target.part, put=method == "PUT")
        return None

    def _call_part(self, request: web.Request, target: _Target, body: Any) -> tuple[int, Object] | None:
        """A request for another subresource."""
        store, resource, where, name = self.store, target.resource, target.namespace or "", target.name
        match request.method, target.part:
            case "POST", "binding" if resource is PODS:
                store.bind(where, name, body["target"]["name"])
                return 201, _created()
            case "POST", "eviction" if resource is PODS:
                store.evict(where, name, dict((body or {}).get("deleteOptions") or {}))
                return 201, _created()
            case "PUT", "finalize" if resource is NAMESPACES:
                return 200, store.update(resource, where, name, lambda old: finalized(old, body))
            case "GET", "scale" if resource.scale is not None:
                return 200, store.scale(resource, where, name)
            case "PUT" | "PATCH", "scale" if resource.scale is not None:
                return 200, store.set_scale(resource, where, name, self._change(request, resource, body))
        return None

    def _change(self, request: web.Request, resource: Resource, body: Any) -> Callable[[Object], Object]:
        if request.method == "PUT":
            return lambda old: body
        return lambda old: apply_patch(request.content_type, old, body, custom=resource.custom)

    # -- lists and watches ---------------------------------------------------------------------------------

    def _list(self, request: web.Request, target: _Target) -> Object:
        resource, selects = target.resource, _selection(request)
        things = [
            self.store.versioned(resource, one) for one in self.store.select(resource, target.namespace) if selects(one)
        ]
        if not resource.custom:
            things = [{key: value for key, value in one.items() if key not in ("kind", "apiVersion")} for one in things]
        metadata = {"resourceVersion": str(self.store.version)}
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": things,
        }

    async def _watch(self, request: web.Request, target: _Target) -> web.StreamResponse:
        start = request.query.get("resourceVersion", "")
        if start and not start.isdigit():
            raise bad_request(f"resourceVersion: Invalid value: {start!r}")
        selects = _selection(request)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        wake = asyncio.Event()
        self._watches[wake] = request
        agent = request.headers.get("User-Agent", "")
        self._seen.append(Seen(request.method, request.path_qs, 200, agent))
        try:
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await self._send_changes(request, target, selects, response, wake)
        finally:
            del self._watches[wake]
        return response

    async def _send_changes(
        self, request: web.Request, target: _Target, selects: Selects, response: web.StreamResponse, wake: asyncio.Event
    ) -> None:
        resource, version = target.resource, int(request.query.get("resourceVersion") or 0)

        async def send(kind: str, thing: Object) -> None:
            await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")

        if 0 < version < self.store.compacted:
            message = f"too old resource version: {version} ({self.store.compacted})"
            await send("ERROR", ApiError(410, "Expired", message).status())
            return
        if version == 0:
            version = self.store.version
            for thing in self.store.select(resource, target.namespace):
                if selects(thing):
                    await send("ADDED", self.store.versioned(resource, thing))
        loop = asyncio.get_running_loop()
        end = loop.time() + float(request.query.get("timeoutSeconds") or 1800)
        bookmarks = request.query.get("allowWatchBookmarks", "") in ("1", "true", "True")
        while loop.time() < end:
            wake.clear()
            for change in self.store.since(version):
                version = change.version
                event = _event(change, target, selects)
                if event is not None:
                    await send(event[0], self.store.versioned(resource, event[1]))
            wait = min(end - loop.time(), self.bookmark_seconds)
            try:
                await asyncio.wait_for(wake.wait(), max(wait, 0))
            except TimeoutError:
                version = max(version, self.store.compacted)
                if bookmarks and not self.store.since(version):
                    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
                    await send(
                        "BOOKMARK", {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
                    )

    # -- the rest ------------------------------------------------------------------------------------------

    def _log(self, target: _Target) -> web.Response:
        pod = self.store.read(target.resource, target.namespace or "", target.name)
        pattern = f"*/logs/{target.namespace}_{target.name}_{pod['metadata']['uid']}.log"
        path = next(iter(self.log_folder.glob(pattern)), None) if self.log_folder else None
        if path is None:
            container = pod["spec"]["containers"][0]["name"]
            raise bad_request(f'container "{container}" in pod "{target.name}" is waiting to start: ContainerCreating')
        return web.Response(text=path.read_text(errors="replace"))

    def _discovery(self, path: str) -> Object | None:
        """What kubectl asks first; None: something else is asked."""
        groups = sorted({(one.group, one.version) for one in self.store.resources.values()})
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            found: dict[str, list[Object]] = {}
            for group, version in groups:
                if group:
                    found.setdefault(group, []).append({"groupVersion": f"{group}/{version}", "version": version})
            listed = [{"name": name, "versions": all_, "preferredVersion": all_[-1]} for name, all_ in found.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        for group, version in groups:
            if path == (f"/apis/{group}/{version}" if group else f"/api/{version}"):
                resources = [
                    one for one in self.store.resources.values() if (one.group, one.version) == (group, version)
                ]
                return {
                    **{
                        "kind": "APIResourceList",
                        "apiVersion": "v1",
                        "groupVersion": f"{group}/{version}" if group else version,
                    },
                    "resources": [entry for one in resources for entry in _entries(one)],
                }
        return None


def _entries(resource: Resource) -> list[Object]:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    base = {"singularName": resource.kind.lower(), "namespaced": resource.namespaced, "kind": resource.kind}
    entries = [{"name": resource.plural, **base, "verbs": verbs}]
    if resource.status:
        entries.append({"name": f"{resource.plural}/status", **base, "verbs": ["get", "patch", "update"]})
    return entries


def _selection(request: web.Request) -> Selects:
    by_label = label_selector(request.query.get("labelSelector", ""))
    by_field = field_selector(request.query.get("fieldSelector", ""))
    return lambda thing: by_label(thing) and by_field(thing)


def _event(change: Change, target: _Target, selects: Selects) -> tuple[str, Object] | None:
    """A change as a watch tells it: what leaves a selection is DELETED, as it was last in it; what enters is ADDED."""
    namespace = change.new["metadata"].get("namespace", "")
    if change.key != target.resource.key or (target.namespace is not None and namespace != target.namespace):
        return None
    before = change.old is not None and selects(change.old)
    if change.gone:
        return ("DELETED", change.new) if before else None
    if selects(change.new):
        return ("MODIFIED" if before else "ADDED"), change.new
    if not before or change.old is None:
        return None
    metadata = {**change.old["metadata"], "resourceVersion": str(change.version)}
    return "DELETED", {**change.old, "metadata": metadata}


def _options(request: web.Request, body: Any) -> Object:
    options = dict(body or {})
    if "gracePeriodSeconds" in request.query:
        options["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
    return options


def _created() -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

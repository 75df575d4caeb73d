"""The agent's ears for notices: it watches the sources that the job names, and takes what is pushed to its port.

Nothing of it delays the agent's start or ends the agent: what goes wrong is reported to the supervisor as a blind
watcher. What a source says is turned into notices by `preemption.watching`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from orchestrator.agent.objects import bears
from orchestrator.agent.settings import AgentSettings
from orchestrator.clock import Clock
from orchestrator.config import parse_notices
from orchestrator.core.messages import NoticeKind, NoticeReceived, WatcherReported
from orchestrator.errors import SourceError
from orchestrator.preemption.base import EVENTS_MAX, Found, Reading, Source, digest_id
from orchestrator.preemption.clouds import Clouds
from orchestrator.preemption.pushed import BODY_BYTES_MAX, parse_pushed
from orchestrator.preemption.watching import Watcher

LOOK_AGAIN_SECONDS = 30.0
GRACE_SECONDS = 30.0
"""That a cloud leaves which does not say, where the settings do not either."""


class Pushed:
    """What was pushed and is not withdrawn, as a source."""

    def __init__(self) -> None:
        self._standing: dict[str, Found] = {}
        self._changed = asyncio.Event()

    @property
    def source(self) -> Source:
        """To be watched like any other; it answers when something was pushed."""
        return Source(cloud="webhook", key="push", look=self._look, every_seconds=0.0, withdraws=True)

    def take(self, found: Found) -> bool:
        """Whether that was possible: a cancel needs something to withdraw, and there is a limit to what stands."""
        if found.kind is NoticeKind.CANCEL:
            if self._standing.pop(found.event_id, None) is None:
                return False
        elif found.event_id not in self._standing and len(self._standing) >= EVENTS_MAX:
            return False
        else:
            self._standing[found.event_id] = found
        self._changed.set()
        return True

    async def _look(self) -> Reading:
        try:
            async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            pass  # what is far away comes nearer
        self._changed.clear()
        return Reading(found=tuple(self._standing.values()))


class NoticeWatch:
    """Everything that an agent hears of its machine's end, but for signals."""

    def __init__(
        self,
        settings: AgentSettings,
        clock: Clock,
        tell: Callable[[NoticeReceived], None],
        report: Callable[[WatcherReported], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._report = report
        chosen = parse_notices(settings.notices)
        self._chosen = chosen.names
        self._clouds = Clouds(clock, chosen.addresses, settings.notice_look_seconds)
        grace_seconds = settings.grace_seconds or GRACE_SECONDS
        self._watcher = Watcher(settings.node, clock, grace_seconds=grace_seconds, tell=tell, report=report)
        self._pushed = Pushed()
        self._own_id: str | None = None
        self.watched: tuple[str, ...] = ()
        """Clouds, files and `webhook`, once they are known."""

    @property
    def takes_pushed(self) -> bool:
        """Whether the agent's port takes notices."""
        return bool({"webhook", "auto", "oci"} & set(self._chosen))

    async def run(self) -> None:
        """Watch until cancelled."""
        named = [name for name in self._chosen if name not in ("auto", "none", "webhook")]
        if self.takes_pushed:
            named.append("webhook")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(named))
                if "auto" in self._chosen:
                    group.create_task(self._watch_found())
        except Exception as error:  # of ours; the training goes on, and signals still work
            problem = f"watching has ended, which is a bug: {error!r}"
            self._report(WatcherReported(node=self._settings.node, source="everything", problem=problem))
        finally:
            await self._clouds.close()

    async def _watch_found(self) -> None:
        """What was named is watched meanwhile."""
        found = await self._clouds.find()
        if found is not None and found not in self._chosen:
            await self._watch([found])

    async def _watch(self, names: list[str]) -> None:
        self.watched += tuple(names)
        sources = [source for name in names for source in self._clouds.sources_of(name)]
        if "webhook" in names:
            sources.append(self._pushed.source)
        await self._watcher.watch(sources)

    async def acknowledge(self) -> tuple[str, ...]:
        """The machine may go now: nothing here is needed any more. What went wrong with saying so."""
        return await self._watcher.acknowledge()

    # -- pushed notices ----------------------------------------------------------------------------------

    def routes(self) -> list[web.RouteDef]:
        """`POST /notices` with the job's token; workers, which have another one, may not."""
        return [web.post("/notices", self._take)] if self.takes_pushed else []

    async def _take(self, request: web.Request) -> web.Response:
        if not bears(request, self._settings.token):
            raise web.HTTPForbidden(text="only the job's token may push notices")
        body = b""
        try:
            while len(body) <= BODY_BYTES_MAX and (more := await request.content.read(BODY_BYTES_MAX + 1 - len(body))):
                body += more
        except web.RequestPayloadError as error:
            raise web.HTTPBadRequest(text="the body is not encoded as it says") from error
        if len(body) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(BODY_BYTES_MAX, len(body))
        try:
            found = parse_pushed(body, self._clock.wall(), await self._id(body))
        except SourceError as error:
            return web.json_response({"error": str(error)}, status=400)
        if found is None:
            return web.json_response({"ignored": "it is not about this machine's end"})
        if not self._pushed.take(replace(found, version=digest_id(body.hex()))):
            problem = f"{found.event_id}: nothing of that id stands, or too much stands already"
            return web.json_response({"error": problem}, status=409)
        return web.json_response({"accepted": str(found.kind), "id": found.event_id})

    async def _id(self, body: bytes) -> str | None:
        """This machine's id, asked for once, and only where the body may need it."""
        if self._own_id is None and (b'"detail-type"' in body or b'"eventType"' in body):
            self._own_id = await self._clouds.own_id(self.watched)
        return self._own_id

"""Requests to a Kubernetes API, for tests: one at a time from any thread, and lists that a component follows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

Object = dict[str, Any]
Result = TypeVar("Result")
REQUEST_SECONDS = 15.0
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


@dataclass(frozen=True, kw_only=True)
class Api:
    """Where an API server is and how one may ask it."""

    url: str
    token: str | None = None
    ca: Path | None = None
    """The certificates that are believed; None: plain HTTP, or the system's."""
    certificate: tuple[Path, Path] | None = None
    """A client's certificate and key, where there is no token."""

    def context(self) -> ssl.SSLContext | None:
        """For TLS."""
        if not self.url.startswith("https"):
            return None
        context = ssl.create_default_context(cafile=self.ca)
        context.verify_flags &= ~ssl.VerifyFlags.VERIFY_X509_STRICT  # clusters' own certificates lack this and that
        if self.certificate is not None:
            context.load_cert_chain(*self.certificate)
        return context

    def kubeconfig(self) -> Object:
        """A kubeconfig of one context, as kubectl, helm and the SDKs read it."""
        cluster = {"server": self.url, **({} if self.ca is None else {"certificate-authority": str(self.ca)})}
        user = {"token": self.token} if self.token else {}
        if self.certificate is not None:
            user |= {"client-certificate": str(self.certificate[0]), "client-key": str(self.certificate[1])}
        return {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "test"},
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
        }

    def headers(self, agent: str) -> dict[str, str]:
        """What each request carries."""
        return {"User-Agent": agent, **({"Authorization": f"Bearer {self.token}"} if self.token else {})}

    def request(self, method: str, path: str, body: object = None, content_type: str | None = None) -> tuple[int, Any]:
        """One request: its status and its answer, text where it is no JSON. A PATCH is a merge patch by default."""
        content = content_type or (MERGE if method == "PATCH" else "application/json")
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers("test"), "Content-Type": content, "Accept": "application/json"}
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.context())
        )
        try:
            with opener.open(asked, timeout=REQUEST_SECONDS) as answer:
                return answer.status, _read(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _read(error.read())


def _read(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


class Loop:
    """A thread with an event loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result], seconds: float = 30.0) -> Result:
        """Run it there and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def close(self) -> None:
        """Cancel what still runs there and end the thread."""

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Client:
    """Requests from within an event loop."""

    def __init__(self, api: Api, agent: str) -> None:
        self.api, self.agent = api, agent
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Made within the loop that first wants it."""
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self.api.context() or True, limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS)
            headers = self.api.headers(self.agent)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        return self._session

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()
            if self.api.url.startswith("https"):
                await asyncio.sleep(0.1)  # aiohttp's advice: TLS connections end a moment after their session

    async def request(
        self, method: str, path: str, body: object = None, content_type: str | None = None
    ) -> tuple[int, Object]:
        """As `Api.request`; (0, {}) where no answer came."""
        content = content_type or (MERGE if method == "PATCH" else "application/json")
        data = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async with self.session.request(
                    method, self.api.url + path, data=data, headers={"Content-Type": content}
                ) as answer:
                    return answer.status, await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return 0, {}


class Followed:
    """A list that is kept as the server has it: listed, then watched, listed again after any trouble."""

    def __init__(
        self, client: Client, path: str, query: str = "", *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.client, self.path, self.query, self.on_change = client, path, query, on_change
        self.things: dict[str, Object] = {}
        """By uid."""
        self.lists = 0
        """How often it was listed: watches broke in between."""

    async def follow(self) -> None:
        """For ever."""
        while True:
            status, answer = await self.client.request("GET", f"{self.path}?{self.query}")
            if status == 200:
                self.things = {one["metadata"]["uid"]: one for one in answer["items"]}
                self.lists += 1
                self.on_change()
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
                    await self._watch(answer["metadata"]["resourceVersion"])
            await asyncio.sleep(0.05 if status == 200 else 0.2)

    async def _watch(self, version: str) -> None:
        while True:
            query = f"{self.query}&watch=1&resourceVersion={version}&timeoutSeconds=300&allowWatchBookmarks=true"
            async with self.client.session.get(
                f"{self.client.api.url}{self.path}?{query}", read_bufsize=1 << 22
            ) as answer:
                if answer.status != 200:
                    return
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return
                    thing = event["object"]
                    version = thing["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        self.things.pop(thing["metadata"]["uid"], None)
                    elif event["type"] != "BOOKMARK":
                        self.things[thing["metadata"]["uid"]] = thing
                    self.on_change()

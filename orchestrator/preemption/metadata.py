"""HTTP to a metadata service: a link-local address, small answers, short patience, no proxy, no redirect.

Names are resolved in threads of their own that nobody waits for at the end: a resolver that hangs shall not keep an
agent from ending.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from orchestrator.errors import SourceError
from orchestrator.preemption.detached import detached

REQUEST_SECONDS = 2.0
ANSWER_BYTES_MAX = 64 << 10
TOKEN_PATH = "/latest/api/token"
TOKEN_SECONDS = 3600
TOKEN_RENEW_SECONDS = 15.0
"""Before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a metadata service answered; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Metadata:
    """One service, by its address. Close it at the end."""

    def __init__(self, base_url: str, request_seconds: float = REQUEST_SECONDS) -> None:
        self.base_url = base_url.rstrip("/")
        self._request_seconds = request_seconds
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        waits_seconds: float = 0.0,
    ) -> Answer:
        """One request, not tried again; `waits_seconds`: how long the service may wait before it answers.

        Raises SourceError where there is no whole answer in time.
        """
        url = self.base_url + path
        seconds = waits_seconds + self._request_seconds
        try:
            async with asyncio.timeout(seconds):
                session = self._opened()
                async with session.request(method, url, headers=headers, data=body, allow_redirects=False) as response:
                    read = await _limited(response)
        except TimeoutError as error:
            raise SourceError(f"{url}: no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SourceError(f"{url}: {str(error) or type(error).__name__}") from error
        named = {name.lower(): value for name, value in response.headers.items()}
        return Answer(status=response.status, headers=named, body=read)

    async def get(self, path: str, headers: Mapping[str, str] | None = None, waits_seconds: float = 0.0) -> Answer:
        """GET. Raises SourceError."""
        return await self.request("GET", path, headers=headers, waits_seconds=waits_seconds)

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(resolver=_DetachedResolver(), limit=16)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._request_seconds)
            headers = {"Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        return self._session

    def refused(self, path: str, answer: Answer) -> SourceError:
        """An answer's status as an error."""
        return SourceError(f"{self.base_url}{path}: status {answer.status}")


class TokenKeys:
    """Keys that are read with a token (IMDSv2). It is renewed in time, and once more where it is refused."""

    def __init__(self, metadata: Metadata, monotonic: Callable[[], float], header: str) -> None:
        self._metadata = metadata
        self._monotonic = monotonic
        self._header = header
        self._token = ""
        self._renew_at_seconds = 0.0
        self._renewing = asyncio.Lock()

    async def read(self, path: str) -> bytes | None:
        """A key's value; None where there is no such key. Raises SourceError."""
        token = await self._valid_token()
        answer = await self._metadata.get(path, {self._header: token})
        if answer.status == HTTPStatus.UNAUTHORIZED:
            if token == self._token:
                self._token = ""
            answer = await self._metadata.get(path, {self._header: await self._valid_token()})
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status != HTTPStatus.OK:
            raise self._metadata.refused(path, answer)
        return answer.body

    async def _valid_token(self) -> str:
        async with self._renewing:
            if not self._token or self._monotonic() >= self._renew_at_seconds:
                await self._renew()
            return self._token

    async def _renew(self) -> None:
        asked, header = self._monotonic(), f"{self._header}-ttl-seconds"
        answer = await self._metadata.request("PUT", TOKEN_PATH, headers={header: str(TOKEN_SECONDS)})
        if answer.status != HTTPStatus.OK:
            raise self._metadata.refused(TOKEN_PATH, answer)
        if not re.fullmatch(rb"[!-~]{1,1024}", answer.body):
            raise SourceError(f"{TOKEN_PATH}: the token is empty, or is none")
        told = answer.headers.get(header.lower(), "")
        seconds = min(int(told), TOKEN_SECONDS) if re.fullmatch(r"[0-9]{1,6}", told) else TOKEN_SECONDS
        self._token = answer.body.decode("ascii")
        self._renew_at_seconds = asked + seconds - TOKEN_RENEW_SECONDS


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > ANSWER_BYTES_MAX:
            raise ValueError(f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
    return body


class _DetachedResolver(AbstractResolver):
    """getaddrinfo in a thread that dies with the process."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        def ask() -> list[Any]:
            return socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)

        try:
            found = await detached(ask, f"resolve {host}")
        except UnicodeError as error:
            raise OSError(str(error)) from error
        return [
            ResolveResult(hostname=host, host=where[0], port=where[1], family=kind, proto=protocol, flags=0)
            for kind, _, protocol, _, where in found
        ]

    async def close(self) -> None:
        """Nothing is kept."""

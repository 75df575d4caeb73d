"""Serves an agent's objects to its workers and peers over HTTP: the other end of `storage.peers`.

That one describes the protocol. Not here: which objects there are (`agent.staged`). The server is made by
`agent.ports`; `supervisor.server` checks tokens in the same way.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from orchestrator.certificates import Identity, server_context, url_of
from orchestrator.errors import ConfigError, NotFoundError, StoreDeniedError, StoreError, StoreFullError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.peers import RANGE_BYTES_MAX

_PIECE_BYTES_MAX = 4 << 20
"""Read and sent at a time, so that a peer which reads slowly holds this much memory and no more."""

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


def object_routes(store: ObjectStore) -> list[web.RouteDef]:
    """Routes under which a `PeerStore` reads `store`. Store calls run in threads."""

    async def size(request: web.Request) -> web.StreamResponse:
        size_bytes = await asyncio.to_thread(store.size, request.match_info["key"])
        return web.Response(headers={hdrs.CONTENT_LENGTH: str(size_bytes)})

    async def read(request: web.Request) -> web.StreamResponse:
        return await _send_range(store, request)

    async def entries(request: web.Request) -> web.StreamResponse:
        prefix = request.query.get("prefix", "")
        body = await asyncio.to_thread(_listing, store, prefix)
        return web.Response(body=body, content_type="application/json")

    return [
        web.head("/objects/{key:.+}", _with_errors(size)),
        web.get("/objects/{key:.+}", _with_errors(read), allow_head=False),
        web.get("/entries", _with_errors(entries), allow_head=False),
    ]


class HttpObjectServer:
    """Serves one store on a port of its own, for readers that have the token; over TLS if it is given an identity."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self._runner: web.AppRunner | None = None

    async def start(
        self, store: ObjectStore, tokens: tuple[str, ...], address: str, routes: Sequence[web.RouteDef] = ()
    ) -> str:
        """Listen at the address, for whoever has one of the tokens; returns the URL. `routes`: served as well."""
        app = web.Application(middlewares=[token_middleware(*tokens)])
        app.add_routes([*object_routes(store), *routes])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, 0, ssl_context=server_context(self._identity)).start()
        return url_of(address, self._runner.addresses[0][1], self._identity)

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()


def bears(request: web.Request, *tokens: str) -> bool:
    """Whether a request carries one of the tokens; an empty one is none."""
    given = request.headers.get(hdrs.AUTHORIZATION, "").encode("utf-8", "surrogateescape")
    expected = [f"Bearer {token}".encode() for token in tokens if token]
    return any([hmac.compare_digest(given, one) for one in expected])  # a list: all are compared, always


def token_middleware(*tokens: str) -> Middleware:
    """Lets only requests through that carry `Authorization: Bearer {one of the tokens}`; all others get 401.

    Raises ConfigError when a token is empty.
    """
    if not all(tokens) or not tokens:
        raise ConfigError("the token is empty; it would let everyone in")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not bears(request, *tokens):
            raise web.HTTPUnauthorized(text="the token is missing or wrong", headers={hdrs.WWW_AUTHENTICATE: "Bearer"})
        return await handler(request)

    return check


async def _send_range(store: ObjectStore, request: web.Request) -> web.StreamResponse:
    """Streams the range asked for, cut at the object's end and at RANGE_BYTES_MAX."""
    key = request.match_info["key"]
    asked = _RANGE.fullmatch(request.headers.get(hdrs.RANGE, ""))
    if asked is None:
        raise web.HTTPBadRequest(text="a read carries the header `Range: bytes=first-last`")
    start, stop = int(asked[1]), int(asked[2]) + 1
    size_bytes = await asyncio.to_thread(store.size, key)
    stop = min(stop, size_bytes, start + RANGE_BYTES_MAX)
    if start >= stop:
        raise web.HTTPRequestRangeNotSatisfiable(headers={hdrs.CONTENT_RANGE: f"bytes */{size_bytes}"})
    piece = await _read_piece(store, key, start, stop)
    response = web.StreamResponse(status=HTTPStatus.PARTIAL_CONTENT)
    response.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{stop - 1}/{size_bytes}"
    response.content_length = stop - start
    await response.prepare(request)
    try:
        await response.write(piece)
        for position in range(start + _PIECE_BYTES_MAX, stop, _PIECE_BYTES_MAX):
            await response.write(await _read_piece(store, key, position, stop))
    except StoreError as error:
        # The status is out already. Only a cut connection tells the peer that what it got is not all.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError(f"reading failed in the middle of an answer: {error}") from error
    await response.write_eof()
    return response


async def _read_piece(store: ObjectStore, key: str, start: int, stop: int) -> bytes:
    """Up to _PIECE_BYTES_MAX bytes. Raises StoreError when the object ends before them."""
    stop = min(stop, start + _PIECE_BYTES_MAX)
    piece = await asyncio.to_thread(store.read, key, start, stop)
    if len(piece) != stop - start:
        raise StoreError(key, f"has {len(piece)} bytes in [{start}, {stop}), less than its size said")
    return piece


def _listing(store: ObjectStore, prefix: str) -> bytes:
    return json.dumps([[entry.key, entry.size_bytes] for entry in store.entries(prefix)]).encode()


def _with_errors(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """`handler`, with the store's errors as the statuses that `storage/peers` turns back into them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except NotFoundError as error:
            raise web.HTTPNotFound(text=error.problem) from error
        except StoreDeniedError as error:
            raise web.HTTPForbidden(text=error.problem) from error
        except StoreFullError as error:
            raise web.HTTPInsufficientStorage(text=error.problem) from error
        except StoreError as error:
            raise web.HTTPInternalServerError(text=error.problem) from error

    return answer

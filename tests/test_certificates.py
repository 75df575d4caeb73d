"""TLS between hosts: one certificate that is trusted alone, the token inside, nothing readable outside."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from orchestrator.agent.client import WebSocketConnector
from orchestrator.agent.objects import HttpObjectServer
from orchestrator.agent.settings import AgentSettings
from orchestrator.certificates import Identity, client_context, new_identity, server_context, url_of
from orchestrator.cli.client import SupervisorClient
from orchestrator.clock import SystemClock
from orchestrator.core.states import JobSpec
from orchestrator.errors import StoreError, SupervisorError
from orchestrator.storage.memory import MemoryStore
from orchestrator.storage.peers import PeerStore
from orchestrator.supervisor.loop import Supervisor
from orchestrator.supervisor.server import SupervisorServer
from orchestrator.supervisor.state_folder import SupervisorAddress
from orchestrator.telemetry import EventLog
from tests.supervisor.test_server import NoNodes

TOKEN = "a-token-that-nobody-else-has"


@pytest.fixture(scope="module")
def identity() -> Identity:
    return new_identity()


@pytest.fixture
async def supervisor(identity: Identity) -> AsyncIterator[Supervisor]:
    """One whose port speaks TLS."""
    spec = JobSpec(name="small", nodes_min=1, nodes_max=1, workers_per_node=1, save_every_steps=10)
    instance = Supervisor(
        spec,
        NoNodes(),
        SystemClock(),
        EventLog(),
        TOKEN,
        open_server=lambda supervisor, token: SupervisorServer(supervisor, token, identity=identity),
    )
    await instance.server.start()
    yield instance
    await instance.server.stop()


def url(supervisor: Supervisor) -> str:
    assert isinstance(supervisor.server, SupervisorServer)
    return supervisor.server.url


def settings(address: str, identity: Identity | None, folder: Path) -> AgentSettings:
    return AgentSettings(
        job="small",
        node="node-0",
        workers=1,
        command=("true",),
        store=str(folder),
        owner="o",
        claimant="c",
        supervisor_url=address,
        token=TOKEN,
        identity=identity,
        staging=folder,
        logs=folder,
    )


def test_the_key_is_in_no_text_for_people(identity: Identity) -> None:
    assert "PRIVATE KEY" in identity.key
    assert "PRIVATE KEY" not in repr(identity) + identity.certificate


def test_nothing_is_left_of_the_key_on_the_disk(
    identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert server_context(identity) is not None
    assert list(tmp_path.iterdir()) == []


def test_without_an_identity_there_is_no_tls() -> None:
    assert server_context(None) is client_context(None) is None
    assert url_of("127.0.0.1", 80, None) == "http://127.0.0.1:80"


@pytest.mark.parametrize(("address", "host"), [("10.0.0.7", "10.0.0.7"), ("fd00::1", "[fd00::1]"), ("gpu-3", "gpu-3")])
def test_urls(identity: Identity, address: str, host: str) -> None:
    assert url_of(address, 443, identity) == f"https://{host}:443"


async def test_an_agent_connects(supervisor: Supervisor, identity: Identity, tmp_path: Path) -> None:
    link = await WebSocketConnector(settings(url(supervisor), identity, tmp_path))()
    serving = asyncio.create_task(link.send(json.dumps({"node": "node-0", "received": 0, "life": ""})))
    assert json.loads(await link.receive() or "")["received"] == 0
    await serving
    await link.close()


async def test_an_agent_of_another_run_sends_no_token(supervisor: Supervisor, tmp_path: Path) -> None:
    """The port may be somebody else's by now: without the certificate nothing is said."""
    with pytest.raises(ConnectionError):
        await WebSocketConnector(settings(url(supervisor), new_identity(), tmp_path))()


async def test_an_agent_without_a_certificate_does_not_trust_it(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        await WebSocketConnector(settings(url(supervisor), None, tmp_path))()


async def test_plain_http_gets_nothing(supervisor: Supervisor) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(url(supervisor).replace("https", "http") + "/status")


async def test_old_tls_is_refused(supervisor: Supervisor, identity: Identity) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=identity.certificate)
    port = int(url(supervisor).rpartition(":")[2])
    with pytest.raises(OSError):  # noqa: PT011 (an alert, or the end of the connection)
        await asyncio.open_connection("127.0.0.1", port, ssl=context)


async def test_peers_read_each_other(identity: Identity) -> None:
    store = MemoryStore()
    data = os.urandom(3 << 20)
    store.create("a/b", [data])
    server = HttpObjectServer(identity)
    address = await server.start(store, (TOKEN,), "127.0.0.1")
    assert address.startswith("https://127.0.0.1:")
    trusted, other = client_context(identity.certificate), client_context(new_identity().certificate)
    with PeerStore(address, TOKEN, tls=trusted) as peer:
        assert await asyncio.to_thread(peer.read, "a/b") == data
    with PeerStore(address, TOKEN, tls=other) as stranger, pytest.raises(StoreError, match="does not answer"):
        await asyncio.to_thread(stranger.read, "a/b")
    await server.stop()


# ---------------------------------------------------------------------------------------------------- the verbs


def address(supervisor: Supervisor, certificate: str | None) -> SupervisorAddress:
    return SupervisorAddress(job="small", url=url(supervisor), token=TOKEN, pid=1, host="a", certificate=certificate)


async def test_a_verb_on_another_host(supervisor: Supervisor, identity: Identity) -> None:
    client = SupervisorClient(address(supervisor, identity.certificate))
    assert (await asyncio.to_thread(client.status))["job"] == "small"


async def test_a_verb_trusts_nobody_else(supervisor: Supervisor) -> None:
    client = SupervisorClient(address(supervisor, new_identity().certificate))
    with pytest.raises(SupervisorError, match="cannot be reached"):
        await asyncio.to_thread(client.status)


async def test_without_a_certificate_the_token_stays_here(supervisor: Supervisor) -> None:
    with pytest.raises(SupervisorError, match="is not on this machine"):
        SupervisorClient(address(supervisor, None))


def test_a_port_that_speaks_no_tls_gets_no_token(identity: Identity) -> None:
    seen: list[bytes] = []

    def answer(server: socket.socket) -> None:
        accepted, _ = server.accept()
        with accepted:
            seen.append(accepted.recv(4096))
            accepted.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        trusted = client_context(identity.certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", server.getsockname()[1], timeout=5, context=trusted)
        with pytest.raises(ssl.SSLError):
            connection.request("GET", "/status", headers={"Authorization": f"Bearer {TOKEN}"})
        connection.close()
        thread.join(10)
    assert seen
    assert TOKEN.encode() not in seen[0]

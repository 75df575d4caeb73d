"""Every process that asks has a metadata service of its own, at one address."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from orchestrator.errors import SourceError
from orchestrator.preemption.metadata import Metadata
from orchestrator.testing.machines import Machines, process_at
from orchestrator.testing.metadata import SimulatedTencent
from orchestrator.testing.metadata_server import Cut, Unauthorized

KEY = "/latest/meta-data/spot/termination-time"
ASKS = """
import http.client, sys
for line in sys.stdin:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    connection.request("GET", sys.argv[2])
    print(connection.getresponse().status, flush=True)
"""


@asynccontextmanager
async def machines_of_tencent() -> AsyncIterator[Machines]:
    machines = Machines(SimulatedTencent)
    await machines.start()
    try:
        yield machines
    finally:
        await machines.stop()


@asynccontextmanager
async def here(machines: Machines) -> AsyncIterator[Metadata]:
    """This process asks."""
    metadata = Metadata(f"http://127.0.0.1:{machines.port}")
    try:
        yield metadata
    finally:
        await metadata.close()


async def test_one_machine_is_interrupted_and_the_other_is_not() -> None:
    pipe = asyncio.subprocess.PIPE
    async with machines_of_tencent() as machines, here(machines) as asking:
        words = (sys.executable, "-c", ASKS, str(machines.port), KEY)
        child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
        assert child.stdin is not None
        assert child.stdout is not None
        assert (await asking.get(KEY)).status == 404
        child.stdin.write(b"ask\n")
        assert await child.stdout.readline() == b"404\n"
        other = machines.all[1]
        assert other.pid == child.pid
        other.server.interrupt()
        child.stdin.write(b"ask\n")
        assert await child.stdout.readline() == b"200\n"
        assert (await asking.get(KEY)).status == 404
        child.stdin.close()
        async with asyncio.timeout(10):
            await machines.until(lambda: other.gone)
            await child.wait()
        assert machines.present == machines.all[:1]


async def test_faults_meet_those_that_come_later_as_well() -> None:
    async with machines_of_tencent() as machines, here(machines) as asking:
        machines.misbehave(Unauthorized())
        assert (await asking.get(KEY)).status == 401
        machines.misbehave(Cut())
        with pytest.raises(SourceError):
            await asking.get(KEY)
        machines.behave()
        assert (await asking.get(KEY)).status == 404
        assert len(machines.all) == 1


async def test_a_connection_that_is_nobodys() -> None:
    assert process_at(1, 1) == 0


async def test_many_connections_at_once_are_one_machine() -> None:
    async with machines_of_tencent() as machines, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{machines.port}{KEY}"

        async def ask() -> int:
            async with session.get(url) as answer:
                return answer.status

        assert await asyncio.gather(*(ask() for _ in range(20))) == [404] * 20
        assert len(machines.all) == 1
        assert machines.all[0].server.requests[KEY] == 20

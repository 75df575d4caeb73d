"""Which cloud this is: simulated services, several at once, none, a silent one; and that nobody asks the real ones."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from orchestrator.clock import SystemClock
from orchestrator.preemption import clouds as choosing
from orchestrator.preemption.clouds import Clouds, cloud_of_firmware
from orchestrator.testing.metadata import SERVICES, SimulatedAWS, SimulatedGCP, SimulatedOCI
from orchestrator.testing.metadata_server import Body, MetadataServer, Slow
from tests.no_metadata.sitecustomize import STRAYS_VARIABLE

SERVERS: dict[str, Callable[[], MetadataServer]] = {**SERVICES, "oci": SimulatedOCI}


@contextmanager
def nobody() -> Iterator[str]:
    """An address that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def silence() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def find(address: str, seconds: float = 3.0) -> str | None:
    """All clouds' addresses lead to this one: on AWS, GCP, Azure and OCI they are really the same."""
    return await find_by({"auto": address}, seconds)


async def find_by(addresses: dict[str, str], seconds: float = 3.0) -> str | None:
    clouds = Clouds(SystemClock(), addresses)
    try:
        return await clouds.find(seconds, Path("/nosuch"))
    finally:
        await clouds.close()


@pytest.mark.parametrize("name", SERVERS)
async def test_each_cloud_is_found_by_its_own_answer(name: str) -> None:
    async with SERVERS[name]() as server:
        assert await find(server.url) == name


async def test_the_others_may_be_silent_or_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SimulatedGCP() as server:
        with nobody() as refusing, silence() as silent:
            monkeypatch.setattr(choosing, "ADDRESSES", {"aws": silent, "azure": refusing, "gcp": server.url})
            began = time.monotonic()
            assert await find_by({}) == "gcp"
            print(f"found after {time.monotonic() - began:.3f} s")


async def test_a_cloud_that_is_rehearsed_is_not_the_one_that_this_machine_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with SimulatedAWS() as rehearsed, SimulatedGCP() as real:
        monkeypatch.setattr(choosing, "ADDRESSES", {"aws": real.url, "gcp": real.url})
        assert await find_by({"aws": rehearsed.url}) == "gcp"
    assert rehearsed.requests.total() == 0


async def test_none_of_them() -> None:
    with nobody() as refusing:
        assert await find(refusing) is None


async def test_a_silent_one_is_given_up() -> None:
    with silence() as silent:
        async with asyncio.timeout(5):
            assert await find(silent, seconds=0.3) is None
            assert await find(silent) is None


async def test_a_login_page_at_all_addresses_is_no_cloud() -> None:
    async with SimulatedAWS() as server:
        server.misbehave(Body(body=b"<html>please log in</html>"))
        assert await find(server.url) is None


async def test_one_that_is_slow_is_found_in_time() -> None:
    async with SimulatedAWS() as server:
        server.misbehave(Slow(seconds=0.4))
        assert await find(server.url) == "aws"


@pytest.mark.parametrize(
    ("file", "words", "cloud"),
    [
        ("sys_vendor", "Amazon EC2\n", "aws"),
        ("product_name", "Google Compute Engine", "gcp"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
        ("sys_vendor", "Microsoft Corporation", None),
        ("sys_vendor", "QEMU", None),
    ],
)
def test_firmware(tmp_path: Path, file: str, words: str, cloud: str | None) -> None:
    assert cloud_of_firmware(tmp_path) is None
    (tmp_path / file).write_text(words)
    assert cloud_of_firmware(tmp_path) == cloud


async def test_own_id() -> None:
    async with AsyncExitStack() as stack:
        aws = await stack.enter_async_context(SimulatedAWS(instance_id="i-7"))
        oci = await stack.enter_async_context(SimulatedOCI())
        clouds = Clouds(SystemClock(), {"aws": aws.url, "oci": oci.url})
        stack.push_async_callback(clouds.close)
        assert await clouds.own_id(["webhook", "aws"]) == "i-7"
        assert await clouds.own_id(["oci"]) == oci.instance_id
        assert await clouds.own_id(["webhook"]) is None
        await aws.stop()
        assert await clouds.own_id(["aws"]) is None


def test_the_tests_reach_no_real_metadata_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes that tests start, too."""
    strays = tmp_path / "strays"
    monkeypatch.setenv(STRAYS_VARIABLE, str(strays))
    program = "import socket; socket.socket().connect(('169.254.169.254', 80))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30)
    assert "a test may not ask 169.254.169.254" in done.stderr
    assert "169.254.169.254" in strays.read_text()
    with pytest.raises(OSError, match="may not ask"):
        socket.getaddrinfo("metadata.google.internal", 80)
    assert len(strays.read_text().splitlines()) == 2

"""Which sources are watched: those that were named, and with `auto` those of the cloud that this machine is on.

`find_cloud` asks all metadata addresses at once, and takes the first that answers as its cloud does. Where none does,
the machine's firmware may still say whose it is (`cloud_of_firmware`): then that cloud is watched all the same, so that
metadata which cannot be reached (switched off, or a container too many hops away) are an alarm and not silence.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType

from orchestrator.clock import Clock
from orchestrator.errors import SourceError
from orchestrator.preemption import aws, azure, gcp, termination_time, watched_file
from orchestrator.preemption.base import Source, json_of, text_of
from orchestrator.preemption.metadata import TOKEN_PATH, Metadata, TokenKeys

FIND_SECONDS = 3.0
OCI_ADDRESS = "http://169.254.169.254"
OCI_PATH = "/opc/v2/instance/"
FIRMWARE = Path("/sys/class/dmi/id")
ADDRESSES: Mapping[str, str] = MappingProxyType(
    {
        "aws": aws.ADDRESS,
        "gcp": gcp.ADDRESS,
        "azure": azure.ADDRESS,
        "alibaba": termination_time.ALIBABA_ADDRESS,
        "tencent": termination_time.TENCENT_ADDRESS,
        "volcengine": termination_time.VOLCENGINE_ADDRESS,
        "oci": OCI_ADDRESS,
    }
)
_FIRMWARE_WORDS = (
    ("Amazon EC2", "aws"),
    ("Google Compute Engine", "gcp"),
    ("7783-7084-3265-9085-8269-3286-77", "azure"),  # the chassis' tag; other machines of Microsoft's have none
    ("Alibaba Cloud", "alibaba"),
    ("Tencent Cloud", "tencent"),
    ("OracleCloud.com", "oci"),
)


class Clouds:
    """The metadata services that an agent uses. Close it at the end.

    `addresses`, of a rehearsal, are those of `config.Notices`: a cloud that is named there is watched there, and where
    `auto` is, every other one.
    """

    def __init__(self, clock: Clock, addresses: Mapping[str, str], every_seconds: float | None = None):
        self._clock = clock
        self._addresses = addresses
        self._every_seconds = every_seconds
        self._services: dict[str, Metadata] = {}

    def sources_of(self, name: str) -> Sequence[Source]:
        """Of one word of `--notices`: a cloud, or `file:/path`. Clouds that only push have none."""
        clock, every = self._clock, self._every_seconds
        if name.startswith("file:"):
            path = Path(name.removeprefix("file:"))
            return watched_file.sources(path, clock.wall, every or watched_file.EVERY_SECONDS)
        makers: dict[str, Callable[[Metadata], list[Source]]] = {
            "aws": lambda service: aws.sources(service, clock.wall, clock.monotonic, every or aws.EVERY_SECONDS),
            "gcp": lambda service: gcp.sources(service, every or gcp.EVERY_SECONDS),
            "azure": lambda service: azure.sources(service, clock.wall, every or azure.EVERY_SECONDS),
            "alibaba": lambda service: termination_time.alibaba(
                service, clock.wall, clock.monotonic, every or termination_time.EVERY_SECONDS
            ),
            "tencent": lambda service: termination_time.tencent(
                service, clock.wall, every or termination_time.EVERY_SECONDS
            ),
            "volcengine": lambda service: termination_time.volcengine(
                service, clock.wall, every or termination_time.EVERY_SECONDS
            ),
        }
        return makers[name](self._service(name)) if name in makers else ()

    async def find(self, seconds: float = FIND_SECONDS, firmware: Path = FIRMWARE) -> str | None:
        """The cloud that this machine is on; None if it is on none that is known. Never raises.

        A cloud with an address of its own is rehearsed, and no answer to that.
        """
        names = [name for name in ADDRESSES if name not in self._addresses]
        asked = {asyncio.create_task(self._is_on(name)): name for name in names}
        waiting = set(asked)
        until = asyncio.get_running_loop().time() + seconds
        try:
            while waiting:
                left = max(until - asyncio.get_running_loop().time(), 0.0)
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                found = [asked[task] for task in done if task.result()]
                if found:
                    return found[0]
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return None if "auto" in self._addresses else cloud_of_firmware(firmware)

    async def own_id(self, names: Sequence[str]) -> str | None:
        """This machine's id at its cloud, for those of the clouds whose pushed events name it."""
        for name in names:
            try:
                if name == "aws":
                    keys = TokenKeys(self._service(name), self._clock.monotonic, aws.TOKEN_HEADER)
                    body = await keys.read(f"{aws.KEYS}instance-id")
                    if body:
                        return text_of(body)
                elif name == "oci":
                    return await _oci_id(self._service(name))
            except SourceError:
                continue
        return None

    async def close(self) -> None:
        """Close all connections."""
        for service in self._services.values():
            await service.close()

    def _service(self, name: str) -> Metadata:
        if name not in self._services:
            address = self._addresses.get(name) or self._addresses.get("auto") or ADDRESSES[name]
            self._services[name] = Metadata(address)
        return self._services[name]

    async def _is_on(self, name: str) -> bool:
        try:
            return await _PROBES[name](self._service(name))
        except SourceError:
            return False


# ---------------------------------------------------------------------------------------- how each cloud answers


async def _gives_token(service: Metadata, header: str) -> bool:
    answer = await service.request("PUT", TOKEN_PATH, headers={f"{header}-ttl-seconds": "60"})
    return answer.status == HTTPStatus.OK and re.fullmatch(rb"[!-~]{1,1024}", answer.body) is not None


async def _is_gcp(service: Metadata) -> bool:
    answer = await service.get(gcp.ROOT, gcp.FLAVOR)
    gcp.require_google(answer)
    return True


async def _is_azure(service: Metadata) -> bool:
    answer = await service.get(azure.NAME_PATH, azure.HEADERS)
    return answer.status == HTTPStatus.OK and azure.is_name(text_of(answer.body))


async def _oci_id(service: Metadata) -> str | None:
    answer = await service.get(OCI_PATH, {"Authorization": "Bearer Oracle"})
    record = json_of(answer.body) if answer.status == HTTPStatus.OK else None
    found = record.get("id") if isinstance(record, dict) else None
    return found if isinstance(found, str) and found.startswith("ocid1.") else None


async def _is_oci(service: Metadata) -> bool:
    return await _oci_id(service) is not None


async def _has_id(service: Metadata, path: str, form: bytes) -> bool:
    answer = await service.get(path)
    return answer.status == HTTPStatus.OK and re.fullmatch(form, answer.body.strip()) is not None


_PROBES: Mapping[str, Callable[[Metadata], Awaitable[bool]]] = MappingProxyType(
    {
        "aws": lambda service: _gives_token(service, aws.TOKEN_HEADER),
        "gcp": _is_gcp,
        "azure": _is_azure,
        "alibaba": lambda service: _gives_token(service, termination_time.ALIBABA_TOKEN_HEADER),
        "tencent": lambda service: _has_id(service, "/latest/meta-data/instance-id", rb"ins-[a-z0-9]+"),
        "volcengine": lambda service: _has_id(service, "/latest/instance_id", rb"i-[a-z0-9]+"),
        "oci": _is_oci,
    }
)


def cloud_of_firmware(folder: Path = FIRMWARE) -> str | None:
    """Whose machine this is by its firmware's words; costs a few reads of files."""
    said = []
    for name in ("sys_vendor", "product_name", "bios_vendor", "chassis_asset_tag"):
        try:
            said.append((folder / name).read_text(errors="replace").strip())
        except OSError:
            continue
    return next((cloud for words, cloud in _FIRMWARE_WORDS if any(words in text for text in said)), None)

"""Looks at the host and its devices now and then, and says what has changed. A look that has to wait blocks nobody."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

from orchestrator.core.messages import HostReported
from orchestrator.health import xid
from orchestrator.health.gpu import NVIDIA_SMI, Answer, Devices, NoAnswer, judge_devices, visible
from orchestrator.health.host import HostReading, judge
from orchestrator.health.joining import VISIBLE_DEVICES
from orchestrator.health.trouble import Trouble

LOOK_SECONDS = 10.0
DEVICE_LOOK_SECONDS = 60.0
LOG_LOOK_SECONDS = 1.0
Post = Callable[[HostReported], None]


async def watch_host(node: str, read: Callable[[], HostReading], post: Post) -> None:
    """Until it is cancelled."""
    troubled: dict[str, Trouble] = {}
    while True:
        found = judge(await asyncio.to_thread(read), troubled)
        _tell(node, found, troubled, post)
        troubled = found
        await asyncio.sleep(LOOK_SECONDS)


class DeviceWatch:
    """What the driver says of the node's devices: when it is asked, each minute, and in the kernel's log."""

    def __init__(
        self, node: str, read: Callable[[], Answer], new_log_lines: Callable[[], list[str]] | None, post: Post
    ) -> None:
        self._node = node
        self._read = read
        self._new_log_lines = new_log_lines
        self._post = post
        self._addresses: frozenset[str] = frozenset()
        """Of the devices of this node's workers: the log is the whole machine's."""
        self._logged: dict[str, Trouble] = {}

    async def run(self) -> None:
        """Until it is cancelled; ends at once where there are no devices."""
        first = visible(await self._first_answer(), os.environ.get(VISIBLE_DEVICES))
        self._addresses = frozenset(device.address for device in first) - {""}
        if first:
            await asyncio.gather(self._ask_for_ever(first), self._look_at_log_for_ever())

    async def _first_answer(self) -> Devices:
        """Without it nothing is watched, which is told once."""
        blind: dict[str, Trouble] = {}
        while isinstance(found := await asyncio.to_thread(self._read), NoAnswer):
            words = f"{found.words}; until it answers no device is watched"
            now = {NVIDIA_SMI: Trouble(words=words, condemns=found.lost)}
            _tell(self._node, now, blind, self._post)
            blind = now
            await asyncio.sleep(DEVICE_LOOK_SECONDS)
        _tell(self._node, {}, blind, self._post)
        return found

    async def _ask_for_ever(self, first: Devices) -> None:
        troubled = judge_devices(first, first, {})  # what was there before this agent is told as well
        _tell(self._node, troubled, {}, self._post)
        while True:
            await asyncio.sleep(DEVICE_LOOK_SECONDS)
            found = judge_devices(await asyncio.to_thread(self._read), first, troubled)
            _tell(self._node, found, troubled, self._post)
            troubled = found

    async def _look_at_log_for_ever(self) -> None:
        while self._new_log_lines is not None:
            self.look_at_log()
            await asyncio.sleep(LOG_LOOK_SECONDS)

    def look_at_log(self) -> None:
        """Also when a worker has ended: why that was may be there. Each error of a device is told once."""
        if self._new_log_lines is None or not self._addresses:
            return
        found = dict(self._logged)
        for error in xid.parse(self._new_log_lines()):
            what = f"{error.address} Xid {error.code}"
            trouble = xid.judge(error) if error.address in self._addresses else None
            if trouble is None:
                found.pop(what, None)  # the driver asks for nothing any more
            elif what not in found or trouble.condemns:
                found[what] = trouble
        _tell(self._node, found, self._logged, self._post)
        self._logged = found


def _tell(node: str, found: Mapping[str, Trouble], before: Mapping[str, Trouble], post: Post) -> None:
    """What is new, what is over, and what has become, or is no longer, a reason to go."""
    for what in sorted(found.keys() | before.keys()):
        trouble, known = found.get(what), before.get(what)
        if trouble is None:
            post(HostReported(node=node, what=what, problem=None))
        elif known is None or trouble.condemns is not known.condemns:
            post(HostReported(node=node, what=what, problem=trouble.words, condemns=trouble.condemns))

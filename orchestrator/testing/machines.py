"""A simulated metadata service for every process that asks, all at one address: as each machine has one of its own.

The nodes of a local job share this machine. Here each agent is told what its own machine would say, so that one node
can be interrupted, and its replacement is not. Which process asks is read from /proc; those that are not this user's
count as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.testing.metadata_server import AnnouncingServer, Fault

COPY_BYTES = 64 << 10


@dataclass(kw_only=True)
class Machine:
    """What one process is told."""

    pid: int
    """0: a process that could not be seen."""
    server: AnnouncingServer
    gone: bool = False
    """The process has ended."""

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else "a process that cannot be seen"


class Machines:
    """Listens on loopback, and hands each connection on to the service of the process at its other end."""

    def __init__(self, make: Callable[[], AnnouncingServer]) -> None:
        self._make = make
        self._fault: Fault | None = None
        self._seen: dict[int, Machine] = {}
        self._handles: dict[int, int] = {}
        self._listening: asyncio.Server | None = None
        self._handing: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._finding = asyncio.Lock()
        self._changed = asyncio.Event()
        self.port = 0

    @property
    def all(self) -> list[Machine]:
        """In the order in which they have asked first."""
        return list(self._seen.values())

    @property
    def present(self) -> list[Machine]:
        """Those whose processes live."""
        return [machine for machine in self._seen.values() if not machine.gone]

    async def start(self, port: int = 0) -> None:
        """Listen; 0: at a free port. Raises OSError if it is taken."""
        self._listening = await asyncio.start_server(self._joined, "127.0.0.1", port)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Connections end, and are refused from now on."""
        if self._listening is not None:
            self._listening.close()
        for writer in self._handing.values():
            writer.transport.abort()
        await asyncio.gather(*self._handing, return_exceptions=True)
        for pid in tuple(self._handles):
            self._forget_handle(pid)
        for machine in self._seen.values():
            await machine.server.stop()

    def misbehave(self, fault: Fault) -> None:
        """Every request meets the fault from now on, also of processes that are still to come."""
        self._fault = fault
        for machine in self._seen.values():
            machine.server.misbehave(fault)

    def behave(self) -> None:
        """No fault from now on."""
        self._fault = None
        for machine in self._seen.values():
            machine.server.behave()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that comes true when somebody comes or goes."""
        while not condition():
            await self._changed.wait()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handing[task] = writer
        try:
            machine = await self._machine(int(writer.get_extra_info("peername")[1]))
            await _hand_on(reader, writer, machine.server.port)
        finally:
            writer.close()
            del self._handing[task]

    async def _machine(self, port: int) -> Machine:
        pid = await asyncio.to_thread(process_at, port, self.port)
        async with self._finding:
            if pid not in self._seen:
                server = self._make()
                if self._fault is not None:
                    server.misbehave(self._fault)
                await server.start()
                self._seen[pid] = Machine(pid=pid, server=server)
                self._watch(self._seen[pid])
                self._wake()
        return self._seen[pid]

    def _watch(self, machine: Machine) -> None:
        if machine.pid == 0:
            return
        try:
            handle = os.pidfd_open(machine.pid)
        except OSError:
            machine.gone = True
            return
        self._handles[machine.pid] = handle
        asyncio.get_running_loop().add_reader(handle, self._ended, machine)

    def _ended(self, machine: Machine) -> None:
        machine.gone = True
        self._forget_handle(machine.pid)
        self._wake()

    def _forget_handle(self, pid: int) -> None:
        handle = self._handles.pop(pid)
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Both directions, until one end closes."""
    try:
        there, back = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return
    directions = [asyncio.ensure_future(_copy(reader, back)), asyncio.ensure_future(_copy(there, writer))]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        back.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(COPY_BYTES):
            sink.write(piece)
            await sink.drain()


# --------------------------------------------------------------------------------------------------- who asks


def process_at(port: int, peer_port: int) -> int:
    """The process of this user's that has the connection from one port of 127.0.0.1 to another; 0 if none is seen."""
    ends = [f"0100007F:{port:04X}", f"0100007F:{peer_port:04X}"]
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    inode = next((fields[9] for fields in lines if fields[1:3] == ends), None)
    if inode is None:
        return 0
    for folder in Path("/proc").glob("[0-9]*/fd"):
        if f"socket:[{inode}]" in _links(folder):
            return int(folder.parent.name)
    return 0


def _links(folder: Path) -> list[str]:
    """Of the files that a process has open; fewer where it is somebody else's, or ends or closes them meanwhile."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.readlink(folder / name))
    return found

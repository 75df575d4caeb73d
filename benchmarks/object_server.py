"""Serves a folder as an agent does: `python -m benchmarks.object_server FOLDER TOKEN`, until its input ends.

Like an agent it loads no torch.
"""

from __future__ import annotations

import asyncio
import sys

from orchestrator.agent.objects import HttpObjectServer
from orchestrator.storage.opening import open_store


async def serve(folder: str, token: str) -> None:
    """Prints the URL first."""
    server = HttpObjectServer()
    print(await server.start(open_store(folder), (token,), "127.0.0.1"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

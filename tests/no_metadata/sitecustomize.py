"""No process of the tests, and none that they start, sends anything to a cloud's real metadata service.

Python imports this by its name in every process whose PYTHONPATH has the folder (`tests/conftest.py` sees to that).
Whoever tries gets the error of a machine without a route there, and the run fails at its end, with the address.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

STRAYS_VARIABLE = "ORCHESTRATOR_TEST_STRAYS"
_BEGINNINGS = ("169.254.", "100.100.100.200", "100.96.0.96", "metadata.", "fd00:ec2:")
_installed: list[bool] = []


def install() -> None:
    """From now on; there is no way back."""
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_look)


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        host = str(address[0]) if isinstance(address, tuple) else ""
    elif event == "socket.getaddrinfo":
        host = arguments[0].decode("ascii", "replace") if isinstance(arguments[0], bytes) else str(arguments[0])
    else:
        return
    if not host.startswith(_BEGINNINGS):
        return
    path = os.environ.get(STRAYS_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(f"{event} to {host} by {sys.argv[:8]}\n")
    raise OSError(errno.ENETUNREACH, f"a test may not ask {host}")


if os.environ.get(STRAYS_VARIABLE):
    install()

"""`python -m tests.beside_seaweedfs COMMAND …`: runs a command beside a SeaweedFS of its own, and ends both together.

The server is on loopback, in a temporary folder that is removed at the end. The command finds it, its credentials and
the bucket `s3://bucket` through the usual AWS_* variables; its exit code is this program's. What it is not: a test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.s3_servers import S3Server, seaweedfs

END_SECONDS_MAX = 60.0
"""How long the command may take to end what it has started, after a signal."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(Exception):
    """A signal has come."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(command: Sequence[str]) -> int:
    """Run the command beside the server; its exit code, 128 and the signal's number after a signal."""
    if not command:
        sys.stderr.write("usage: python -m tests.beside_seaweedfs COMMAND …\n")
        return 2
    for number in ENDING:
        signal.signal(number, _raise_ended)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]  # somebody's profile, say: neither the server's nor the command's
    try:
        with tempfile.TemporaryDirectory(prefix="orchestrator-seaweedfs-") as folder, started(Path(folder)) as server:
            return run(command, server)
    except Ended as ended:
        return 128 + ended.number


@contextmanager
def started(folder: Path) -> Iterator[S3Server]:
    """A server that has made its bucket, for as long as the block lasts."""
    try:
        server = seaweedfs(folder)
    except pytest.skip.Exception as error:
        raise SystemExit(f"SeaweedFS cannot be started: {error}") from None
    try:
        server.start()
        yield server
    finally:
        _ignore_signals()
        server.kill()


def run(command: Sequence[str], server: S3Server) -> int:
    """The command's exit code. A signal is handed on to it, once, and then it is waited for."""
    with subprocess.Popen(
        command,
        env={**os.environ, **server.variables()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # or the terminal's Ctrl-C would reach it too, and a second one means more than one
    ) as process:
        try:
            code = process.wait()
        except Ended as ended:
            _ignore_signals()
            process.send_signal(ended.number)
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return code if code >= 0 else 128 - code


def _raise_ended(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

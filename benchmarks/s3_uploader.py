"""Uploads of a staged shard, as an agent does it, and what they are compared with: `python -m benchmarks.s3_uploader`.

A process of its own without torch, like an agent, at normal priority: nothing else runs beside it here. Each request
is a line of JSON, until its input ends; the bucket is the one that the SDK's variables name.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig

from benchmarks.costs import cost_of, peak_extra_bytes
from orchestrator.agent import uploads
from orchestrator.checkpoint.save import ShardPlace
from orchestrator.clock import SystemClock
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from orchestrator.storage.retrying import Patience, RetryingStore
from orchestrator.storage.s3.bucket import Bucket, make_client
from orchestrator.storage.s3.store import S3Store

BUCKET = "bucket"
STORE = f"s3://{BUCKET}/job"
SIGNED, UNSIGNED = "signed", "payload unsigned"
ANSWER_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What shall leave, from where."""

    way: str
    job: str
    path: str
    size_bytes: int
    generation: int
    step: int
    memory: bool
    """Look at the memory that it takes, and not at its time: looking takes some."""

    @property
    def key(self) -> str:
        """Where ways other than ours put it."""
        return f"{self.way.replace(' ', '-')}/{self.step}"


class Uploader:
    """All ways of sending a file."""

    def __init__(self) -> None:
        uploads.UPLOAD_NICE = 0
        self._signed = open_store(STORE)
        self._unsigned = unsigned_store()
        self._boto3: Any = None
        self.ways: dict[str, Callable[[Upload], object]] = {
            SIGNED: partial(self._ours, self._signed),
            UNSIGNED: partial(self._ours, self._unsigned),
            "upload_file": self._upload_file,
            "raw PUT": partial(raw_put, send_memory),
            "sendfile": partial(raw_put, send_file),
        }

    def _ours(self, store: ObjectStore, upload: Upload) -> None:
        place = ShardPlace(
            job=upload.job,
            checkpoint=CheckpointId(generation=upload.generation, step=upload.step),
            rank=0,
            world_size=1,
            absent=(),
        )
        asyncio.run(upload_staged(store, place, upload))

    def _upload_file(self, upload: Upload) -> None:
        """boto3's transfer manager with its defaults."""
        if self._boto3 is None:
            self._boto3 = boto3.client("s3")
        config = TransferConfig(preferred_transfer_client="classic")
        self._boto3.upload_file(upload.path, BUCKET, upload.key, Config=config)


def unsigned_store() -> ObjectStore:
    """As `open_store` makes it, with a client as it is over TLS: bodies are not hashed for the signature."""
    client, patience = make_client(), Patience()
    client.meta.config.s3 = {**(client.meta.config.s3 or {}), "payload_signing_enabled": False}
    return RetryingStore(S3Store(Bucket(BUCKET, "unsigned", client=client), patience.call), patience)


async def upload_staged(store: ObjectStore, place: ShardPlace, upload: Upload) -> None:
    """What the agent does with a staged shard: mapped, digested once, its receipt included."""
    pool = uploads.Uploads(store, SystemClock(), 1)
    try:
        await pool.start(place, Path(upload.path), lambda: (upload.size_bytes, True))
    finally:
        pool.close()


# ------------------------------------------------------------------------------------------------ the floor


def raw_put(send: Callable[[socket.socket, int, int], None], upload: Upload) -> None:
    """One request over one connection, neither signed nor digested: the floor."""
    address = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with Path(upload.path).open("rb") as file, socket.create_connection((address.hostname, address.port)) as client:
        head = f"PUT /{BUCKET}/{upload.key} HTTP/1.1\r\nHost: x\r\nContent-Length: {upload.size_bytes}\r\n\r\n"
        client.sendall(head.encode())
        send(client, file.fileno(), upload.size_bytes)
        answer = client.recv(ANSWER_BYTES_MAX)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the sink has answered {answer!r:.200}")


def send_memory(client: socket.socket, file: int, size_bytes: int) -> None:
    """From mapped memory."""
    with mmap.mmap(file, size_bytes, access=mmap.ACCESS_READ) as memory, memoryview(memory) as data:
        client.sendall(data)


def send_file(client: socket.socket, file: int, size_bytes: int) -> None:
    """By the kernel alone."""
    sent = 0
    while sent < size_bytes:
        sent += os.sendfile(client.fileno(), file, sent, size_bytes - sent)


def main() -> None:
    """One answer for each request: a `Cost`, or bytes."""
    uploader = Uploader()
    print("ready", flush=True)
    for line in sys.stdin:
        upload = Upload(**json.loads(line))
        act = partial(uploader.ways[upload.way], upload)
        answer = {"extra_bytes": peak_extra_bytes(act)} if upload.memory else asdict(cost_of(act))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

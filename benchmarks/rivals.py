"""What the checkpoint engine is compared with: torch's own checkpoints, safetensors, three libraries, and bare bytes.

All files are flushed to the disk before a save counts, as ours are. `torchsnapshot`, `torch_checkpointing` and
`s3torchconnector` are used where they are installed (`make bench` installs them); `import_problem` says why one is not.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch._C._distributed_c10d import FileStore, HashStore

WRITE_BYTES = 1 << 20
Tensors = Mapping[str, torch.Tensor]


def import_problem(module: str) -> str | None:
    """Why a library cannot be used, or None."""
    try:
        with quiet():
            importlib.import_module(module)
    except Exception as error:  # whatever a library raises while it is imported, it cannot be measured
        return f"{module} ({type(error).__name__}: {error})"
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns of its own deprecations, and that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---------------------------------------------------------------------------- torch.distributed.checkpoint


def dcp_save(tensors: Tensors, folder: Path) -> None:
    """Blocking. With a process group, all ranks call it."""
    with quiet():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))


def dcp_async_save(tensors: Tensors, folder: Path) -> Any:
    """Its future. Needs a process group."""
    with quiet():
        return dcp.async_save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))


def dcp_load(tensors: Tensors, folder: Path) -> None:
    """Into the tensors themselves; a part of a checkpoint's if not all are named."""
    with quiet():
        dcp.load(dict(tensors), checkpoint_id=folder)


@contextmanager
def process_group(rank: int = 0, world_size: int = 1, store_path: Path | None = None) -> Iterator[None]:
    """Of gloo, over a file; made here unless there is one."""
    if dist.is_initialized():
        yield
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore() if store_path is None else FileStore(str(store_path), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------- safetensors, raw bytes


def safetensors_save(tensors: Tensors, folder: Path) -> None:
    """One file, flushed."""
    folder.mkdir()
    path = folder / "state.safetensors"
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, path)
    _flush(path)
    _flush(folder)


def raw_write(data: memoryview, folder: Path) -> None:
    """The same bytes from warm memory, nothing around them, flushed: the floor of a save."""
    folder.mkdir()
    path = folder / "raw"
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), WRITE_BYTES):
            file.write(data[start : start + WRITE_BYTES])
        os.fsync(file.fileno())
    _flush(folder)


def raw_read(path: Path, into: memoryview) -> None:
    """A file's bytes into warm memory, nothing around them: the floor of a load."""
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(into), WRITE_BYTES):
            file.readinto(into[start : start + WRITE_BYTES])


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """A checkpoint that was measured."""
    shutil.rmtree(folder, ignore_errors=True)


# --------------------------------------------------------------------------------------------- into a bucket


def dcp_save_s3(tensors: Tensors, url: str) -> None:
    """torch.distributed.checkpoint with s3torchconnector's writer, as its manual says; the endpoint is a variable's."""
    library = importlib.import_module("s3torchconnector")
    writers = importlib.import_module("s3torchconnector.dcp")
    config = library.S3ClientConfig(force_path_style=True)
    with quiet():
        writer = writers.S3StorageWriter(os.environ["AWS_REGION"], url, s3client_config=config)
        dcp.save(dict(tensors), storage_writer=writer)


def torch_save_s3(tensors: Tensors, client: Any, bucket: str, key: str) -> None:
    """torch.save into memory, then boto3's transfer manager with its defaults."""
    data = io.BytesIO()
    torch.save(dict(tensors), data)
    data.seek(0)
    client.upload_fileobj(data, bucket, key)


# --------------------------------------------------------------------------------------- other libraries


class TorchSnapshot:
    """`torchsnapshot.Snapshot.async_take`."""

    def __init__(self) -> None:
        self._library = importlib.import_module("torchsnapshot")
        self._pending: Any = None

    def begin(self, tensors: Tensors, folder: Path) -> None:
        """Returns when the state is staged."""
        with quiet():
            state = self._library.StateDict(**dict(tensors))
            self._pending = self._library.Snapshot.async_take(path=str(folder), app_state={"state": state})

    def done(self) -> bool:
        """Whether the last one is durable."""
        return self._pending is None or bool(self._pending.done())

    def ready(self) -> bool:
        """Waits for the last one."""
        if self._pending is not None:
            self._pending.wait()
        return True

    def close(self) -> None:
        """Nothing to end."""


class TorchCheckpointing:
    """`torch_checkpointing.CheckpointManager` as its manual says for CPUs; direct I/O fails here."""

    def __init__(self) -> None:
        library = importlib.import_module("torch_checkpointing")
        config = importlib.import_module("torch_checkpointing.config")
        staging = importlib.import_module("torch_checkpointing.staging")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        stager = staging.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = library.CheckpointManager(
            library.CheckpointManager.Config(
                save=config.AsyncCheckpointSaverConfig(staging_config=stager),
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._future: Any = None

    def begin(self, tensors: Tensors, folder: Path) -> None:
        """Returns at once; updates of the state belong under `lock`."""
        self._future = self._manager.save(str(folder), {"state": dict(tensors)})

    def lock(self) -> Any:
        """Held around an update of the state."""
        return self._manager.lock()

    def done(self) -> bool:
        """Whether the last one is written."""
        return self._future is None or bool(self._future.done())

    def ready(self) -> bool:
        """Waits for the last one."""
        if self._future is not None:
            self._future.result()
        return True

    def close(self) -> None:
        """End its process."""
        self._manager.close()

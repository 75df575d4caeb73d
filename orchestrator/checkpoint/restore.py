"""From a committed checkpoint into existing tensors, every byte verified. Called by `training.session`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping

import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.layout import DTYPES, TORCH_DTYPES
from orchestrator.checkpoint.reader import Piece, read_pieces
from orchestrator.errors import FormatError, StateError
from orchestrator.storage.base import ObjectStore


def check_target(name: str, record: fmt.TensorRecord, tensor: torch.Tensor) -> None:
    """The tensor to restore into has the saved dtype and shape. Raises StateError naming it."""
    dtype, shape = DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if (dtype, shape) != (record.dtype, record.shape):
        raise StateError(
            name, f"the checkpoint has {record.dtype} {list(record.shape)}, the script {dtype} {list(shape)}"
        )


def empty_like(record: fmt.TensorRecord) -> torch.Tensor:
    """A new CPU tensor for a saved one. The size was checked against the shards when the index was read."""
    return torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype])


def read_tensors(store: ObjectStore, index: fmt.Index, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill each target (name → tensor of the saved dtype and shape), reading each needed block once.

    Raises DigestError, FormatError, StateError, StoreError. Targets are half filled if it fails: do not train on.
    """
    buffers: dict[str, torch.Tensor] = {}
    for name, tensor in targets.items():
        record = index.tensors.get(name)
        if record is None:
            raise FormatError(fmt.index_key(index.id), f"has no tensor {name}")
        check_target(name, record, tensor)
        buffers[name] = tensor if _is_plain_memory(tensor) else torch.empty(record.shape, dtype=tensor.dtype)
    views = {name: _byte_view(buffer) for name, buffer in buffers.items()}
    for shard, pieces in _pieces_by_shard(index, views):
        read_pieces(store, index, shard, pieces)
    with torch.no_grad():
        for name, tensor in targets.items():
            if buffers[name] is not tensor:
                _copy(buffers[name], tensor)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """`target.copy_(source)`, also where `target` was expanded: its repeated elements are one, and so saved alike."""
    for dimension, (stride, length) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and length > 1:
            source, target = source.narrow(dimension, 0, 1), target.narrow(dimension, 0, 1)
    target.copy_(source)


def _pieces_by_shard(
    index: fmt.Index, views: Mapping[str, memoryview]
) -> Iterator[tuple[fmt.ShardRecord, list[Piece]]]:
    """What is needed of each shard that anything is needed of, by rank. Raises FormatError."""
    pieces: dict[int, list[Piece]] = {}
    for name, view in views.items():
        width = fmt.DTYPE_BYTES[index.tensors[name].dtype]
        for rank, start, stop, first, last in index.chunks(name):
            if start < stop:
                pieces.setdefault(rank, []).append((first, last, view[start * width : stop * width]))
    for rank in sorted(pieces):
        yield index.by_rank[rank], sorted(pieces[rank], key=lambda piece: piece[0])


def _byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a plain tensor as bytes, for as long as the caller keeps the tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")  # numpy: 4 × as long

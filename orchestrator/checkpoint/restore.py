"""From a committed checkpoint into existing tensors, every byte verified.

Called by `training.saved_state`, `training.sharing` and `checkpoint.opened`.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from operator import itemgetter

import numpy as np
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.boxes import Box, boxes_of_range, corner, overlap, span, spans, whole, within
from orchestrator.checkpoint.chunks import Chunk
from orchestrator.checkpoint.layout import DTYPES, TORCH_DTYPES, as_sharded, local_box, local_part
from orchestrator.checkpoint.reader import Piece, Sink, read_pieces
from orchestrator.checkpoint.records import collector_resting
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


Part = tuple[str, torch.Tensor, Box | None]
"""The name of a saved tensor, and a plain tensor of its dtype that is to be this box of it; None: all of it."""


def parts_of(index: fmt.Index, targets: Mapping[str, torch.Tensor]) -> list[Part]:
    """What this rank holds of each target (name → tensor of the saved dtype and shape, or a DTensor on any mesh).

    Raises FormatError for a name that was not saved, StateError for a target that is not like the saved tensor.
    """
    parts: list[Part] = []
    for name, tensor in targets.items():
        record = index.tensors.get(name)
        if record is None:
            raise FormatError(fmt.index_key(index.id), f"has no tensor {name}")
        check_target(name, record, tensor)
        if as_sharded(tensor) is None:
            parts.append((name, tensor, None))
            continue
        local, box = local_part(tensor), local_box(name, tensor)
        if tuple(local.shape) != box.lengths:
            raise StateError(name, f"this rank holds {list(local.shape)} where its placements say {list(box.lengths)}")
        parts.append((name, local, box))
    return parts


@collector_resting()
def read_tensors(store: ObjectStore, index: fmt.Index, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill each target (name → tensor of the saved dtype and shape), reading each needed block once.

    A target may be a DTensor on any mesh, however the saved one was sharded: only what this rank holds is read.
    Raises DigestError, FormatError, StateError, StoreError. Targets are half filled if it fails: do not train on.
    """
    read_parts(store, index, parts_of(index, targets))


def read_parts(store: ObjectStore, index: fmt.Index, parts: Sequence[Part]) -> None:
    """Fill plain tensors. Several may be parts of one saved tensor. Raises as `read_tensors`."""
    buffers = [
        tensor if _is_plain_memory(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype) for _, tensor, _ in parts
    ]
    wanted = [(name, _byte_view(buffer), box) for buffer, (name, _, box) in zip(buffers, parts, strict=True)]
    for shard, pieces in _pieces_by_shard(index, wanted):
        read_pieces(store, index, shard, pieces)
    with torch.no_grad():
        for buffer, (_, tensor, _) in zip(buffers, parts, strict=True):
            if buffer is not tensor:
                copy_alike(buffer, tensor)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def copy_alike(source: torch.Tensor, target: torch.Tensor) -> None:
    """`target.copy_(source)`, also where `target` was expanded: its repeated elements are one, and so saved alike."""
    for dimension, (stride, length) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and length > 1:
            source, target = source.narrow(dimension, 0, 1), target.narrow(dimension, 0, 1)
    target.copy_(source)


class Scatter:
    """Memory in which elements of the piece lie apart: what two boxes have in common, in the order of the saved one."""

    def __init__(self, view: memoryview, *, width: int, target: Box, saved: Box, start: int) -> None:
        elements = np.frombuffer(view, dtype=f"u{width}")
        self._elements = elements.reshape(target.lengths)
        self._width = width
        self._target = within(target, saved)
        self._saved = saved.lengths
        self._start = start

    def put(self, offset: int, data: memoryview) -> None:
        """Copy those that the target has. Chunks and windows are aligned, so no element is cut in two."""
        source = np.frombuffer(data, dtype=f"u{self._width}")
        start = self._start + offset // self._width
        for box in boxes_of_range(self._saved, start, start + len(source)):
            count = box.elements
            common = overlap(box, self._target)
            if common is not None:
                piece = source[:count].reshape(box.lengths)
                self._elements[_slices(common, self._target)] = piece[_slices(common, box)]
            source = source[count:]


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(*within(inner, outer), strict=True))


_WRITABLE = 0x200  # PyBUF_WRITE
_MEMORY_VIEW = ctypes.pythonapi.PyMemoryView_FromMemory  # by way of numpy or a ctypes array: many times as long
_MEMORY_VIEW.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_MEMORY_VIEW.restype = ctypes.py_object

Wanted = Iterable[tuple[str, memoryview, Box | None]]
"""Tensors' names, the memory of what is to be filled, and the box of the saved tensor that it is; None: all of it."""


def _pieces_by_shard(index: fmt.Index, wanted: Wanted) -> Iterator[tuple[fmt.ShardRecord, list[Piece]]]:
    """What is needed of each shard that anything is needed of, by rank. Raises FormatError."""
    pieces: dict[int, list[Piece]] = {rank: [] for rank in index.by_rank}
    for name, view, box in wanted:
        record = index.tensors[name]
        width, chunks = fmt.DTYPE_BYTES[record.dtype], index.chunks(name)
        if box is None and chunks[0].box is None:  # most tensors
            for rank, start, stop, first, last, _ in chunks:
                _check_aligned(index, name, rank, first, width)
                pieces[rank].append((first, last, view[start * width : stop * width]))
            continue
        everything = whole(record.shape)
        target = everything if box is None else box
        for chunk in _near(chunks, target, record.shape) if target.elements else ():
            _check_aligned(index, name, chunk.rank, chunk.first_byte, width)
            pieces[chunk.rank].extend(_pieces(chunk, chunk.box or everything, view, target, width))
    for rank, found in pieces.items():
        if found:
            yield index.by_rank[rank], sorted(found, key=itemgetter(0))


def _check_aligned(index: fmt.Index, name: str, rank: int, first_byte: int, width: int) -> None:
    if first_byte % width:
        raise FormatError(fmt.index_key(index.id), f"{name}: rank {rank}'s chunk is not aligned")


def _near(chunks: list[Chunk], box: Box, shape: tuple[int, ...]) -> Iterator[Chunk]:
    """The chunks that may have something of a box: there can be thousands, of which a rank needs one."""
    if chunks[0].box is not None:
        yield from chunks
        return
    first = corner(box, shape)
    last = first + corner(Box(tuple(length - 1 for length in box.lengths), box.lengths), shape)
    begin = bisect_right(chunks, first, key=_start) - 1
    yield from takewhile(lambda chunk: chunk.start <= last, islice(chunks, max(begin, 0), None))


def _start(chunk: Chunk) -> int:
    return chunk.start


def _pieces(chunk: Chunk, saved: Box, view: memoryview, target: Box, width: int) -> Iterator[Piece]:
    """The bytes of a chunk that a target needs; `saved` is the box whose elements the chunk counts."""
    common = overlap(saved, target)
    if common is None:
        return
    there, here = span(common, saved), span(common, target)
    joined = there is not None and here is not None
    for low, high in [there] if there is not None else spans(common, saved, max(fmt.BLOCK_BYTES // width, 1)):
        start, stop = max(low, chunk.start), min(high, chunk.stop)
        if start >= stop:
            continue
        first = chunk.first_byte + (start - chunk.start) * width
        if joined and here is not None:
            begin = (here[0] + start - low) * width
            place: memoryview | Sink = view[begin : begin + (stop - start) * width]
        else:
            place = Scatter(view, width=width, target=target, saved=saved, start=start)
        yield first, first + (stop - start) * width, place


def _byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a plain tensor as bytes, for as long as the caller keeps the tensor."""
    return _MEMORY_VIEW(tensor.data_ptr(), tensor.nbytes, _WRITABLE) if tensor.nbytes else memoryview(bytearray())

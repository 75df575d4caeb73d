"""Who writes what, and where in the shard file: from tensors to a plan. Torch for dtypes only; no copying here.

Every rank computes the same ownership from the same names, dtypes and shapes, so no rank has to ask another. This
release lays out plain tensors, alike on every rank (DDP); sharded tensors are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from orchestrator.checkpoint.format import element_count
from orchestrator.checkpoint.slots import header_size
from orchestrator.core.ownership import owned_spans, present_ranks
from orchestrator.errors import StateError

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}
HEADER_SLACK_BYTES = 8192
"""Room for values that grow (numbers with more digits) before the header has to be planned anew."""


class Scope(StrEnum):
    """How the ranks hold a tensor."""

    SHARED = "shared"
    """Alike on every rank: split among them by bytes."""
    FIRST = "first"
    """Every rank's may differ, the first present rank's counts (buffers that DDP broadcasts)."""
    RANK = "rank"
    """This rank's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the plan needs to know of a tensor."""

    name: str
    dtype: str
    width: int
    """Bytes per element."""
    shape: tuple[int, ...]
    scope: Scope

    @property
    def elements(self) -> int:
        """Number of elements."""
        return element_count(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """Elements [start, stop) of a tensor at bytes [first_byte, last_byte) after the header."""

    spec: TensorSpec
    start: int
    stop: int
    first_byte: int
    last_byte: int

    @property
    def whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.start == 0 and self.stop == self.spec.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One rank's shard file."""

    specs: tuple[TensorSpec, ...]
    chunks: tuple[PlannedChunk, ...]
    header_bytes: int
    size_bytes: int

    def entries(self) -> dict[str, dict[str, Any]]:
        """The tensors of the safetensors header."""
        return {
            chunk.spec.name: {
                "dtype": chunk.spec.dtype,
                "shape": list(chunk.spec.shape) if chunk.whole else [chunk.stop - chunk.start],
                "data_offsets": [chunk.first_byte, chunk.last_byte],
            }
            for chunk in self.chunks
        }

    def parts(self) -> dict[str, Any]:
        """Shape and first element of each tensor of which this shard holds a part: what its entry does not say."""
        return {
            chunk.spec.name: {"shape": list(chunk.spec.shape), "start": chunk.start}
            for chunk in self.chunks
            if not chunk.whole
        }


def describe(name: str, tensor: torch.Tensor, scope: Scope) -> TensorSpec:
    """The spec of a tensor. Raises StateError naming tensors that this release cannot save exactly."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise StateError(name, f"a tensor of type {kind} cannot be saved yet: plain and DDP tensors can")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        what = "quantised" if tensor.is_quantized else str(tensor.layout)
        raise StateError(name, f"a tensor ({what}, on {tensor.device}) cannot be saved: plain dense ones can")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise StateError(name, f"tensors of {tensor.dtype} have no safetensors dtype")
    return TensorSpec(name=name, dtype=dtype, width=tensor.element_size(), shape=tuple(tensor.shape), scope=scope)


def plan_shard(
    specs: Collection[TensorSpec], *, rank: int, world_size: int, absent: Collection[int], metadata_bytes: int
) -> ShardPlan:
    """Lay out what `rank` owns: widest elements first, so that every view is aligned, then by name."""
    ordered = sorted(specs, key=lambda spec: (-spec.width, spec.name))
    shared = [spec for spec in ordered if spec.scope is Scope.SHARED]
    owned = {
        shared[span.tensor].name: (span.start, span.stop)
        for span in owned_spans(
            [(spec.elements, spec.width) for spec in shared], rank=rank, world_size=world_size, absent=absent
        )
    }
    first = present_ranks(world_size, absent)[0]
    for spec in ordered:
        if spec.scope is Scope.RANK or (spec.scope is Scope.FIRST and rank == first):
            owned[spec.name] = (0, spec.elements)
    chunks: list[PlannedChunk] = []
    offset = 0
    for spec in ordered:
        if spec.name in owned:
            start, stop = owned[spec.name]
            end = offset + (stop - start) * spec.width
            chunks.append(PlannedChunk(spec=spec, start=start, stop=stop, first_byte=offset, last_byte=end))
            offset = end
    draft = ShardPlan(specs=tuple(specs), chunks=tuple(chunks), header_bytes=0, size_bytes=0)
    parts = json.dumps(draft.parts())  # stands inside a JSON string: its quotes are escaped
    header = header_size(
        len(json.dumps(draft.entries())) + len(json.dumps(parts)) + metadata_bytes + HEADER_SLACK_BYTES
    )
    return ShardPlan(specs=tuple(specs), chunks=tuple(chunks), header_bytes=header, size_bytes=header + offset)

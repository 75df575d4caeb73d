"""Who writes what, and where in the shard file: from tensors to a plan. No copying and no communication here.

Every rank computes the same ownership from the same names, dtypes, shapes and meshes, so no rank has to ask another:
plain tensors are alike on every rank (DDP), a DTensor's mesh and placements say which rank holds which part of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.checkpoint.boxes import Box, corner, whole
from orchestrator.checkpoint.format import element_count
from orchestrator.checkpoint.meshes import Cut, Mesh, Share, share, with_copies
from orchestrator.checkpoint.slots import header_size
from orchestrator.core.ownership import owned_spans, present_ranks
from orchestrator.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

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

PIPELINE_NAMES = frozenset({"pp", "pipe", "pipeline", "stage"})
"""Mesh dimensions whose ranks hold different tensors, not copies of the same: not to be taken for them."""


class Scope(StrEnum):
    """How the ranks hold a tensor."""

    SHARED = "shared"
    """Alike on every rank: split among them by bytes."""
    FIRST = "first"
    """Alike on every rank, or not needed to be: the first present rank's counts (buffers that DDP broadcasts)."""
    STATISTICS = "statistics"
    """Every rank has its own, and rank 0's counts: an exact save cannot be made without rank 0."""
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
    """Of the whole tensor."""
    scope: Scope
    share: Share | None = None
    """What this rank holds of a sharded tensor, and who else does; None: all of it, as every rank."""

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return element_count(self.shape)

    @property
    def local_elements(self) -> int:
        """Number of elements that this rank holds."""
        return self.elements if self.share is None else self.share.box.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """Elements [start, stop) of what this rank holds of a tensor, at bytes [first_byte, last_byte) after the header."""

    spec: TensorSpec
    start: int
    stop: int
    first_byte: int
    last_byte: int

    @property
    def whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.stop - self.start == self.spec.elements

    @property
    def shape(self) -> list[int]:
        """The shape of its entry in the header: of the tensor or the box, if it is all of that, else its length."""
        share = self.spec.share
        if self.whole:
            return list(self.spec.shape)
        if share is not None and not share.ranges and self.stop - self.start == share.box.elements:
            return list(share.box.lengths)
        return [self.stop - self.start]

    def part(self) -> dict[str, Any]:
        """What the entry of a part does not say: the tensor's shape, and where in it the part is."""
        spec, share = self.spec, self.spec.share
        if share is None:
            return {"shape": list(spec.shape), "start": self.start}
        first = corner(share.box, spec.shape)
        if share.ranges:
            return {"shape": list(spec.shape), "start": first + self.start}
        return {"shape": list(spec.shape), "start": first, "box": list(share.box.lengths), "before": self.start}


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
                "shape": chunk.shape,
                "data_offsets": [chunk.first_byte, chunk.last_byte],
            }
            for chunk in self.chunks
        }

    def parts(self) -> dict[str, Any]:
        """Shape and place of each tensor of which this shard holds a part: what its entry does not say."""
        return {chunk.spec.name: chunk.part() for chunk in self.chunks if not chunk.whole}

    def unique_bytes(self, rank: int) -> int:
        """Bytes of the shard that no other rank holds, the header among them."""
        alone = [
            chunk.last_byte - chunk.first_byte
            for chunk in self.chunks
            if chunk.spec.scope in (Scope.RANK, Scope.STATISTICS)
            or (chunk.spec.share is not None and chunk.spec.share.holders == (rank,))
        ]
        return self.header_bytes + sum(alone)


# ------------------------------------------------------------------------------------------- sharded tensors


def sharding_is_there() -> bool:
    """Whether this process can have DTensors at all: their module was imported, by whoever makes them."""
    return "torch.distributed.tensor" in sys.modules


def as_sharded(tensor: torch.Tensor) -> DTensor | None:
    """The tensor if it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def is_sharded_type(kind: type) -> bool:
    """Whether it is DTensor itself."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and kind is module.DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: a DTensor's own memory, or the tensor itself."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded._local_tensor


def is_whole_everywhere(tensor: torch.Tensor) -> bool:
    """Whether every rank holds all of a tensor: a plain one, or a DTensor that is replicated and nothing else."""
    sharded = as_sharded(tensor)
    return sharded is None or all(type(placement).__name__ == "Replicate" for placement in sharded.placements)


def local_box(name: str, tensor: torch.Tensor) -> Box:
    """Where what this rank holds lies in the tensor. Raises StateError naming placements that have no such place."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return whole(tensor.shape)
    return _share(name, sharded, _mesh(sharded.device_mesh), sharded.device_mesh.get_rank()).box


class Shares:
    """What a rank holds of sharded tensors: computed once for each shape, mesh and placements."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._meshes: dict[DeviceMesh, Mesh] = {}
        self._found: dict[Any, Share] = {}

    def of(self, name: str, tensor: DTensor) -> Share:
        """This rank's share. Raises StateError naming what cannot be saved."""
        key = (tensor.device_mesh, tensor.placements, tuple(tensor.shape))
        if key not in self._found:
            self._found[key] = _share(name, tensor, self._mesh(name, tensor.device_mesh), self._rank)
        box = self._found[key].box
        if box.lengths != tuple(tensor._local_tensor.shape):
            raise StateError(
                name,
                f"rank {self._rank} holds {list(tensor._local_tensor.shape)} of {list(tensor.shape)}, "
                f"{tensor.placements} on {list(tensor.device_mesh.shape)} would be {list(box.lengths)}",
            )
        return self._found[key]

    def _mesh(self, name: str, device_mesh: DeviceMesh) -> Mesh:
        """The mesh and its copies, which together are all ranks."""
        if device_mesh not in self._meshes:
            stages = PIPELINE_NAMES.intersection(device_mesh._get_root_mesh().mesh_dim_names or ())
            if stages - set(device_mesh.mesh_dim_names or ()):
                raise StateError(name, f"stages of a pipeline (mesh dimension {min(stages)}) cannot be saved yet")
            try:
                found = _copies(device_mesh)
            except ValueError as error:
                raise StateError(name, f"its mesh cannot be placed among all ranks: {error}") from error
            if sorted(found.ranks) != list(range(self._world_size)):
                raise StateError(
                    name,
                    f"is sharded over a mesh of ranks {_few(found.ranks)} of {self._world_size}: "
                    "what the other ranks hold of it is not known; make one mesh of all ranks",
                )
            self._meshes[device_mesh] = found
        return self._meshes[device_mesh]


def _copies(device_mesh: DeviceMesh) -> Mesh:
    """The mesh with all its copies: a part of a larger mesh stands in it several times. Raises ValueError."""
    layout = getattr(device_mesh, "_layout", None)
    if layout is not None:  # knows parts of flattened and unflattened meshes, too; older releases of torch have none
        ranks = layout.remap_to_tensor(device_mesh._rank_map)
        return Mesh(tuple(ranks.shape), tuple(int(rank) for rank in ranks.flatten().tolist()))
    return with_copies(_mesh(device_mesh), _mesh(device_mesh._get_root_mesh()))


def _few(ranks: tuple[int, ...]) -> str:
    return f"{list(ranks[:8])}{'…' if len(ranks) > 8 else ''}"


def _mesh(device_mesh: DeviceMesh) -> Mesh:
    ranks = device_mesh.mesh
    return Mesh(tuple(ranks.shape), tuple(int(rank) for rank in ranks.flatten().tolist()))


def _share(name: str, tensor: DTensor, mesh: Mesh, rank: int) -> Share:
    cuts = [_cut(name, placement) for placement in tensor.placements]
    if len(mesh.shape) > len(cuts):
        cuts.insert(0, None)  # copies of the mesh hold the same
    try:
        return share(tuple(tensor.shape), mesh, cuts, rank)
    except ValueError as error:
        raise StateError(name, f"{tensor.placements}: {error}") from error


def _cut(name: str, placement: Any) -> Cut | None:
    """What a placement does. Raises StateError for one that gives no part of the tensor (a partial sum)."""
    match type(placement).__name__:
        case "Replicate":
            return None
        case "Shard":
            return Cut(int(placement.dim))
        case "_StridedShard":
            return Cut(int(placement.dim), int(placement.split_factor))
    raise StateError(name, f"a DTensor with the placement {placement!r} cannot be saved: redistribute it first")


# -------------------------------------------------------------------------------------------------- planning


def describe(name: str, tensor: torch.Tensor, scope: Scope, shares: Shares | None = None) -> TensorSpec:
    """The spec of a tensor. Raises StateError naming tensors that this release cannot save exactly."""
    sharded = as_sharded(tensor)
    if sharded is not None:
        kind = type(tensor).__qualname__
        if shares is None or scope is Scope.RANK or type(tensor) is not sys.modules["torch.distributed.tensor"].DTensor:
            raise StateError(name, f"a {kind} cannot be saved here: DTensors in models, optimizers and objects can")
        local = describe(name, sharded._local_tensor, scope)
        return TensorSpec(
            name=name,
            dtype=local.dtype,
            width=local.width,
            shape=tuple(sharded.shape),
            scope=Scope.SHARED,
            share=shares.of(name, sharded) if sharded.numel() else None,
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise StateError(name, f"a tensor of type {kind} cannot be saved: plain tensors and DTensors of them can")
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
    owned = _owned(ordered, rank=rank, world_size=world_size, absent=absent)
    first = present_ranks(world_size, absent)[0]
    for spec in ordered:
        if spec.scope is Scope.RANK or (spec.scope in (Scope.FIRST, Scope.STATISTICS) and rank == first):
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


def _owned(
    ordered: Collection[TensorSpec], *, rank: int, world_size: int, absent: Collection[int]
) -> dict[str, tuple[int, int]]:
    """The elements that `rank` owns of what it holds and others hold, too: the holders of each part split it."""
    everyone = tuple(range(world_size))
    groups: dict[tuple[int, ...], list[TensorSpec]] = {}
    for spec in ordered:
        if spec.scope is Scope.SHARED and (spec.share is None or spec.share.box.elements):
            groups.setdefault(everyone if spec.share is None else spec.share.holders, []).append(spec)
    owned: dict[str, tuple[int, int]] = {}
    for holders, members in groups.items():
        sizes = [(spec.local_elements, spec.width) for spec in members]
        for span in owned_spans(sizes, rank=rank, holders=holders, absent=absent):
            owned[members[span.tensor].name] = (span.start, span.stop)
    return owned


def holder_sets(specs: Collection[TensorSpec], rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """For each part of the state that this rank has and not all have: the ranks that hold it."""
    found = {spec.share.holders for spec in specs if spec.share is not None and spec.share.box.elements}
    if rank == 0 and any(spec.scope is Scope.STATISTICS for spec in specs):
        found.add((0,))
    return tuple(sorted(holders for holders in found if len(holders) < world_size))

"""Copy a rank's part of the state into a slot: a file in memory laid out as the safetensors file it will become.

`SlotFile.stage` is complete when it returns. `SlotFile.begin` copies at once all but what nobody writes before the next
optimizer step, and gives a `Copy` of the rest, to be made while training goes on. Called by `training.stager` at
a step boundary.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.copying import PIECE_BYTES, Copy, CudaMover, HostMover, Mover, Outcome, Piece, copy_now
from orchestrator.checkpoint.layout import TORCH_DTYPES, PlannedChunk, ShardPlan
from orchestrator.checkpoint.save import METADATA_KEY
from orchestrator.checkpoint.slots import frame_header
from orchestrator.errors import RefusedError

PLANS_KEPT_MAX = 4  # nobody absent, the first node, the last node, and one to spare
_TOKEN = secrets.token_hex(16)
_BEGINNING = f'{{"__metadata__":{{"{METADATA_KEY}":"'.encode()


class Fixed:
    """A JSON tree that will not change any more: its text, as it stands inside a JSON string, is made once."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._text: bytes | None = None

    @property
    def text(self) -> bytes:
        """The tree's JSON text inside a JSON string."""
        if self._text is None:
            self._text = b"".join(_inside_string(self.tree))
        return self._text


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What travels in the shard's header beside the tensors. Trees may hold `Fixed` ones."""

    values: Any
    rank_values: Any
    gate: Mapping[str, Any]

    def inside(self, parts: Fixed) -> list[bytes]:
        """The JSON text, in pieces, of the header's metadata entry inside a JSON string. Raises ValueError for NaN."""
        return _inside_string(
            {"parts": parts, "values": self.values, "rank_values": self.rank_values, "gate": self.gate}
        )

    def size_bytes(self) -> int:
        """Room that the values need inside a JSON string."""
        return sum(map(len, _inside_string([self.values, self.rank_values, self.gate]))) + 64


def _inside_string(tree: Any) -> list[bytes]:
    """The JSON text of a tree, escaped as within a JSON string, in pieces: `Fixed` trees give the text they have."""
    fixed: list[Fixed] = []

    def token(value: Any) -> str:
        if not isinstance(value, Fixed):
            raise TypeError(f"a {type(value).__qualname__} is not JSON")
        fixed.append(value)
        return _TOKEN

    text = json.dumps(tree, separators=(",", ":"), allow_nan=False, default=token)
    first, *others = json.dumps(text)[1:-1].encode().split(f'\\"{_TOKEN}\\"'.encode())
    pieces = [first]
    for known, other in zip(fixed, others, strict=True):
        pieces += (known.text, other)
    return pieces


@dataclass(slots=True)
class _Moves:
    """One call's worth of copies: views of the slot, and which elements of which tensors go there."""

    names: list[str]
    targets: list[torch.Tensor]
    spans: list[tuple[int, int] | None]
    """Elements of the tensor; None: all of it."""
    stop_byte: int = 0
    """Where in the shard they end."""

    def piece(self, tensors: Mapping[str, torch.Tensor], *, keep: bool = False) -> Piece:
        """The copies of these tensors; with `keep`, parameters' of the memory that they have now, whatever they get."""
        sources = list(map(tensors.__getitem__, self.names))
        for place, span in enumerate(self.spans):
            if span is not None:
                sources[place] = _elements(sources[place], span)
        if keep:
            sources = [source.detach() if type(source) is torch.nn.Parameter else source for source in sources]
        return Piece(names=self.names, targets=self.targets, sources=sources)


def _elements(tensor: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    return tensor.detach().reshape(-1)[span[0] : span[1]]


class _Prepared:
    """What a slot keeps of a plan: the texts of its table, and views of the slot for its chunks."""

    def __init__(self, plan: ShardPlan, memory: torch.Tensor) -> None:
        self.plan = plan
        self._memory = memory
        self._parts = Fixed(plan.parts())
        table = json.dumps(plan.entries(), separators=(",", ":"))
        self._end = ('"},' if plan.chunks else '"}').encode() + table[1:].encode()
        self._moves: dict[frozenset[str], tuple[list[_Moves], list[_Moves]]] = {}

    def header(self, metadata: Metadata) -> list[bytes]:
        """The slot's beginning, in pieces. Raises ProtocolError if it outgrew its reserved room."""
        pieces = [_BEGINNING, *metadata.inside(self._parts), self._end]
        return frame_header(pieces, self.plan.header_bytes)

    def moves(self, tensors: Mapping[str, torch.Tensor], later: frozenset[str]) -> tuple[list[_Moves], list[_Moves]]:
        """The copies to be made at once, and those of the tensors named in `later`."""
        found = self._moves.get(later)
        if found is None:
            chunks = [chunk for chunk in self.plan.chunks if chunk.start != chunk.stop]
            at_once = [chunk for chunk in chunks if chunk.spec.name not in later]
            others = [chunk for chunk in chunks if chunk.spec.name in later]
            found = self._grouped(at_once, tensors), self._grouped(others, tensors)
            if len(self._moves) > 1:  # only what is copied later has changed: the older choice is not needed again
                self._moves.clear()
            self._moves[later] = found
        return found

    def _grouped(self, chunks: list[PlannedChunk], tensors: Mapping[str, torch.Tensor]) -> list[_Moves]:
        groups: list[_Moves] = []
        room_bytes = 0
        for chunk in chunks:
            tensor = tensors[chunk.spec.name]
            whole = chunk.stop - chunk.start == tensor.numel()
            per_piece = max(PIECE_BYTES // chunk.spec.width, 1)
            splits = chunk.stop - chunk.start > per_piece and tensor.is_contiguous()
            for start in range(chunk.start, chunk.stop, per_piece) if splits else (chunk.start,):
                stop = min(start + per_piece, chunk.stop) if splits else chunk.stop
                size_bytes = (stop - start) * chunk.spec.width
                if size_bytes > room_bytes:
                    groups.append(_Moves([], [], []))
                    room_bytes = PIECE_BYTES
                room_bytes -= size_bytes
                view = self._view(chunk, start, stop)
                groups[-1].names.append(chunk.spec.name)
                groups[-1].targets.append(view.view(tensor.shape) if whole and not splits else view)
                groups[-1].spans.append(None if whole and not splits else (start, stop))
                groups[-1].stop_byte = (
                    self.plan.header_bytes + chunk.first_byte + (stop - chunk.start) * chunk.spec.width
                )
        return groups

    def _view(self, chunk: PlannedChunk, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a chunk's tensor, in the slot."""
        base = self.plan.header_bytes + chunk.first_byte - chunk.start * chunk.spec.width
        data = self._memory[base + start * chunk.spec.width : base + stop * chunk.spec.width]
        return data.view(TORCH_DTYPES[chunk.spec.dtype])


class SlotFile:
    """One slot's file, mapped. The space is reserved before training needs it; the file outlives the worker."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        """`threads` copy at once while training stands still."""
        self.path = path
        self._threads = threads
        self._memory: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._prepared: dict[int, _Prepared] = {}
        self._registered = False

    @property
    def capacity_bytes(self) -> int:
        """Reserved bytes."""
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, size_bytes: int) -> None:
        """Make the slot at least that large. Raises RefusedError saying how much memory is missing where."""
        if size_bytes <= self.capacity_bytes:
            return
        self._unregister()
        self._prepared.clear()
        self._bytes = None
        self._memory = None
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size_bytes)
            self._memory = mmap.mmap(handle, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            folder, needed = self.path.parent, size_bytes / 2**20
            free = shutil.disk_usage(folder).free / 2**20
            raise RefusedError(
                f"{folder} has {free:.0f} MiB left, a staging slot needs {needed:.0f} MiB, and each rank has two: give "
                "it more (for /dev/shm: mount -o remount,size=…, in a container --shm-size or a memory volume) or name "
                "another folder with --staging"
            ) from error
        finally:
            os.close(handle)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def prepare(self, plan: ShardPlan, tensors: Mapping[str, torch.Tensor], later: frozenset[str]) -> None:
        """Make what is kept of a plan before the first save needs it."""
        self._of(plan).moves(tensors, later)

    def stage(
        self,
        plan: ShardPlan,
        tensors: Mapping[str, torch.Tensor],
        metadata: Metadata,
        there: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Write header and tensors; `there` is told, in any thread, how many bytes of the shard are there so far.

        Raises ProtocolError if the header outgrew its reserved room: plan anew.
        """
        self._write_at_once(plan, tensors, metadata, frozenset(), there)

    def begin(
        self,
        plan: ShardPlan,
        tensors: Mapping[str, torch.Tensor],
        metadata: Metadata,
        later: frozenset[str],
        finish: Callable[[Outcome], None],
        *,
        prove: bool,
        before_piece: Callable[[], None],
        there: Callable[[int], None],
    ) -> Copy:
        """Write header and tensors, but for those named in `later`: these are the copy's, which is not started yet.

        If nothing is left for later, `there` is told as by `stage`.
        """
        moves = self._write_at_once(plan, tensors, metadata, later, (lambda _: None) if later else there)
        pieces = [move.piece(tensors, keep=True) for move in moves]
        return Copy(pieces, self._mover(pieces)[0], finish, prove=prove, before_piece=before_piece)

    def _write_at_once(
        self,
        plan: ShardPlan,
        tensors: Mapping[str, torch.Tensor],
        metadata: Metadata,
        later: frozenset[str],
        there: Callable[[int], None],
    ) -> list[_Moves]:
        prepared = self._of(plan)
        header = prepared.header(metadata)
        assert self._memory is not None
        self._memory.seek(0)
        for piece in header:
            self._memory.write(piece)
        now, others = prepared.moves(tensors, later)
        pieces = [move.piece(tensors) for move in now]
        ends = [plan.header_bytes, *(move.stop_byte for move in now)]
        there(plan.header_bytes)
        mover, threads = self._mover(pieces)
        copy_now(mover, pieces, threads, lambda count: there(ends[count]))
        return others

    def _of(self, plan: ShardPlan) -> _Prepared:
        known = self._prepared.get(id(plan))
        if known is None:
            self.reserve(plan.size_bytes)
            assert self._bytes is not None
            while len(self._prepared) >= PLANS_KEPT_MAX:
                del self._prepared[next(iter(self._prepared))]
            known = self._prepared[id(plan)] = _Prepared(plan, self._bytes)
        return known

    def _mover(self, pieces: list[Piece]) -> tuple[Mover, int]:
        """How to copy, in how many threads: from several CUDA devices in this one, whose streams are the script's."""
        devices = {source.device for piece in pieces for source in piece.sources if source.is_cuda}
        if not devices:
            return HostMover(), self._threads
        if len(devices) > 1:
            return HostMover(), 1
        self._register()
        return CudaMover(devices.pop()), self._threads

    def _register(self) -> None:
        """Let CUDA copy straight into the slot. Where it refuses (locked memory is limited), copies are only slower."""
        if not self._registered and self._bytes is not None:
            result = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0)  # type: ignore[no-untyped-call]
            self._registered = int(result) == 0

    def _unregister(self) -> None:
        if self._registered and self._bytes is not None:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._registered = False

"""Copies tensors into a slot in pieces, at once (`copy_now`) or beside the training that goes on (`Copy`).

A `Copy` is shared by a thread of its own and by whoever needs it to be complete (`join`): both take pieces until none
is left. If a piece's tensors were written meanwhile, the whole copy is worthless, and its outcome says so.
Not here: when a copy may overlap with training (`training.overlap`), what becomes of the slot (`training.boundary`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from orchestrator.checkpoint.digest import crc

PIECE_BYTES = 16 * 2**20
"""One call's worth: long enough to work without the interpreter's lock, short enough to be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Copies made by one call: from each source to the target at the same place."""

    names: Sequence[str]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]


class Mover(Protocol):
    """How bytes get into host memory; a piece is there when `move` returns."""

    def move(self, piece: Piece) -> None:
        """Copy one piece. Called from several threads."""
        ...


class HostMover:
    """From host memory, or from anywhere while nothing else goes on."""

    def move(self, piece: Piece) -> None:
        """One multi-tensor call: it works without the interpreter's lock."""
        if piece.targets:
            with torch.no_grad():
                torch._foreach_copy_(piece.targets, piece.sources)


class CudaMover:
    """From one CUDA device, on a stream of its own, beginning when what was launched so far is done."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        boundary = torch.cuda.Event()  # type: ignore[no-untyped-call]
        boundary.record(torch.cuda.current_stream(device))
        self._stream.wait_event(boundary)

    def move(self, piece: Piece) -> None:
        """Waits for the piece, not for the device: kernels of other streams go on."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            torch._foreach_copy_(piece.targets, piece.sources, non_blocking=True)
        self._stream.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a copy came to."""

    damage: str | None
    """What was written while it was copied, or other reasons why the bytes are not the boundary's."""
    seconds: float
    """Time spent copying, all threads together."""


class _Work:
    """So many acts, each done once by one of the threads that call `take`."""

    def __init__(self, count: int, act: Callable[[int], None]) -> None:
        self._count = count
        self._act = act
        self._lock = threading.Lock()
        self._next = 0
        self._left = count
        self.over = threading.Event()
        """Set when the last one is done."""
        if not count:
            self.over.set()

    def take(self) -> None:
        """Act until nothing is left to be begun."""
        while True:
            with self._lock:
                number = self._next
                if number >= self._count:
                    return
                self._next += 1
            try:
                self._act(number)
            finally:
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self.over.set()

    def in_background(self, act: Callable[[], None]) -> None:
        """Begin to act in a thread of its own, if there is one to be had: else whoever waits does it all."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=act, name="staging").start()


def copy_now(mover: Mover, pieces: Sequence[Piece], threads: int, copied: Callable[[int], None]) -> None:
    """Copy all pieces with so many threads, while nothing else goes on. Raises what the mover raises.

    `copied` is told how many pieces from the first one on are there: never fewer than before, in any thread.
    """
    failures: list[Exception] = []
    done = [False] * len(pieces)
    first_open, lock = 0, threading.Lock()

    def act(number: int) -> None:
        nonlocal first_open
        try:
            mover.move(pieces[number])
            with lock:
                done[number] = True
                while first_open < len(pieces) and done[first_open]:
                    first_open += 1
                copied(first_open)
        except Exception as error:
            failures.append(error)

    work = _Work(len(pieces), act)
    for _ in range(min(threads, len(pieces)) - 1):
        work.in_background(work.take)
    work.take()
    work.over.wait()
    if failures:
        raise failures[0]


class Copy:
    """One copy in pieces, under way. `finish` is called once, by the thread that completes it.

    With `prove`, the digests that the tensors have at the start are compared with what was copied and, in `join`, with
    what the tensors are then: the copy is complete only when somebody joins.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        mover: Mover,
        finish: Callable[[Outcome], None],
        *,
        prove: bool,
        before_piece: Callable[[], None] = lambda: None,
    ) -> None:
        self._pieces = pieces
        self._mover = mover
        self._finish = finish
        self._before_piece = before_piece
        self._prove = prove
        self._versions: list[list[int]] = []
        self._digests: list[list[int]] = []
        self._work = _Work(len(pieces), self._take_piece)
        self._lock = threading.Lock()
        self._damage: str | None = None
        self._nanoseconds = 0
        self._ending = threading.Lock()
        self._over = False

    def start(self) -> None:
        """Begin in the background, at the boundary still.

        The interpreter waits for the thread when the script ends: the slot's memory is there as long as it is needed.
        """
        self._versions = [_versions(piece) for piece in self._pieces]
        if self._prove:
            self._digests = [[digest(source) for source in piece.sources] for piece in self._pieces]
        self._work.in_background(self._in_background)

    def join(self) -> None:
        """Complete the copy, taking what is left; returns when `finish` has been called."""
        if self._over:
            return
        self._work.take()
        self._work.over.wait()
        self._end(compare_sources=True)

    def _in_background(self) -> None:
        self._work.take()
        if self._work.over.is_set() and not self._prove:
            self._end(compare_sources=False)

    def _take_piece(self, number: int) -> None:
        try:
            self._before_piece()
            damage = self._copy(number)
        except Exception as error:  # the step is given up; the next save, in blocking mode, raises it
            damage = f"{self._pieces[number].names[0]} could not be copied: {error}"
        with self._lock:
            self._damage = self._damage or damage

    def _copy(self, number: int) -> str | None:
        """Copy one piece; what was written meanwhile, if it is known."""
        piece = self._pieces[number]
        started = time.perf_counter_ns()
        self._mover.move(piece)
        took = time.perf_counter_ns() - started
        with self._lock:
            self._nanoseconds += took
        damage = _difference(piece, self._versions[number], _versions(piece))
        if damage is None and self._prove:
            damage = _difference(piece, self._digests[number], [digest(target) for target in piece.targets])
        return damage

    def _end(self, *, compare_sources: bool) -> None:
        with self._ending:
            if self._over:
                return
            if compare_sources and self._prove:
                for piece, digests in zip(self._pieces, self._digests, strict=True):
                    now = [digest(source) for source in piece.sources]
                    self._damage = self._damage or _difference(piece, digests, now)
            self._pieces = ()  # lets the tensors go
            self._finish(Outcome(damage=self._damage, seconds=self._nanoseconds / 1e9))
            self._over = True


def digest(tensor: torch.Tensor) -> int:
    """crc32c of a tensor's elements in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return crc(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


def _versions(piece: Piece) -> list[int]:
    """Each source's version: a change proves that it was written, no change proves nothing (fused, `.data`)."""
    return [source._version for source in piece.sources]


def _difference(piece: Piece, then: Sequence[int], now: Sequence[int]) -> str | None:
    if then == now:
        return None
    name = next(name for name, before, after in zip(piece.names, then, now, strict=True) if before != after)
    return f"{name} was written between a step boundary and the next optimizer step"

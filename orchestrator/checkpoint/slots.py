"""What agent and worker share in memory: the control block, slot words and the shard header. No torch here.

The control block is one small file per rank and generation in the node's staging folder, mapped by the worker and
by its agent. Every 64-bit word has one writer. The agent publishes a record (the open proposal and the last
decision) in the idle one of two cells, each ending in a crc32c, and then switches the selector word; the worker
reads the record at step boundaries only, and publishes its step last, after its echo. Orders of plain 8-byte
stores are kept by x86; on Arm the reader's crc32c check catches a record that is not whole yet.

A slot's state is one word: free, writing(g, s) or staged(g, s). The worker makes it writing and staged; only the
agent makes it free: a staged one when nobody needs it, one that is being written when the worker has said that it
passed that step, or is gone.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import crc32c as _crc32c

from orchestrator.checkpoint import findings
from orchestrator.checkpoint.format import parse_header
from orchestrator.core.messages import CheckpointId, Mode
from orchestrator.errors import ProtocolError
from orchestrator.health.loss import Finding

MAGIC = 0x4F52_4348_4354_4C31  # "ORCHCTL1"
SLOTS = 2
HEADER_ALIGN_BYTES = 4096
_INFO_BYTES = 65536
_WORD_STEP, _WORD_ECHO, _WORD_PASSED, _WORD_STEP_NS, _WORD_BEAT_NS, _WORD_PHASE, _WORD_SIGNAL = range(8, 15)
_WORD_SAVE_ASKED, _WORD_INFO, _WORD_SLOT_BYTES, _WORD_UNIQUE_BYTES, _WORD_TWINS = range(15, 20)
_WORD_SLOTS = 20  # three words for each slot: state, bytes, staging nanoseconds
_WORD_THERE = 26  # one word for each slot: 16 bits of the step, 48 of bytes
_THERE_SHIFT, _THERE_STEP_MASK = 48, 0xFFFF
_WORD_PAUSE_UNTIL_NS = 28
_WORD_LOSS_FINDINGS = 29  # how many there were; the last four are in cells of seven words
_WORD_SELECTOR, _WORD_OUTCOME = 32, 33
_FINDINGS, _FINDINGS_AT_BYTE = 4, 8 * 34
_CELLS_AT_BYTE = 512
_CELL = struct.Struct("<QQQQQQ")  # sequence, proposal ballot, proposal step + 1, decided step + 1, mode, absent bytes
_STEP_BITS = 42
_GENERATION_BITS = 20
_STATE_SHIFT = _GENERATION_BITS + _STEP_BITS
_IMAGE = slice(8 * _WORD_STEP, 8 * (_WORD_OUTCOME + 1))


def _twins_bytes(world_size: int) -> int:
    """Room for what `set_twins` publishes: a few sets of ranks."""
    return 4096 + 32 * world_size


class WorkerPhase(IntEnum):
    """What the worker is doing; written by the worker only."""

    NOT_ATTACHED = 0
    RESTORING = 1
    RUNNING = 2
    WAITING = 3
    STAGING = 4
    FINISHED = 5
    REFUSED = 6
    LEFT = 7
    UNREADABLE = 8


class SlotState(IntEnum):
    """The state part of a slot's word."""

    FREE = 0
    WRITING = 1
    STAGED = 2


class LeaveOutcome(IntEnum):
    """How the step at which a worker waits to leave ended; written by the agent, read in attached mode."""

    NONE = 0
    COMMITTED = 1
    ABANDONED = 2
    RELEASED = 3
    SUPERSEDED = 4
    """Another run has taken over the job: what is trained here is saved no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The agent's word to its worker: the open proposal and the last decision."""

    ballot: int = 0
    proposed_step: int | None = None
    decided_step: int | None = None
    mode: Mode = Mode.STAY
    absent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot's word, unpacked, with the size of the shard that it holds."""

    index: int
    state: SlotState
    generation: int
    step: int
    size_bytes: int
    stage_seconds: float


def pack_slot(state: SlotState, generation: int, step: int) -> int:
    """One slot word: 2 bits of state, 20 of generation, 42 of step."""
    if generation >= 1 << _GENERATION_BITS or step >= 1 << _STEP_BITS:
        raise ProtocolError(f"generation {generation} or step {step} is too large for a slot word")
    return int(state) << _STATE_SHIFT | generation << _STEP_BITS | step


class ControlBlock:
    """A rank's shared memory. Construct by `create` (agent) or `open` (worker)."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        self._words = memoryview(memory)[:_CELLS_AT_BYTE].cast("Q")
        self._absent_bytes = -(-self.world_size // 8)
        self._cell_bytes = -(-(_CELL.size + self._absent_bytes + 4) // 64) * 64
        self._last = Record()
        self.record_selector = 0
        """The selector of the record that `read_record` returned last; it lags behind after a checksum mismatch."""

    @classmethod
    def create(cls, path: Path, *, generation: int, rank: int, world_size: int) -> ControlBlock:
        """Make the file (0600) and map it. Called by the agent before the worker starts."""
        cell_bytes = -(-(_CELL.size + -(-world_size // 8) + 4) // 64) * 64
        size = _CELLS_AT_BYTE + 2 * cell_bytes + _INFO_BYTES + _twins_bytes(world_size)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        struct.pack_into("<QQQQ", memory, 0, MAGIC, world_size, generation, rank)
        return cls(path, memory)

    @classmethod
    def open(cls, path: Path) -> ControlBlock:
        """Map an existing control block."""
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if size < _CELLS_AT_BYTE + _INFO_BYTES:
                raise ProtocolError(f"{path}: {size} bytes are no control block")
            memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        if struct.unpack_from("<Q", memory, 0)[0] != MAGIC:
            memory.close()
            raise ProtocolError(f"{path}: not a control block of this release")
        return cls(path, memory)

    def close(self) -> None:
        """Unmap; the file stays until its owner removes the staging folder."""
        self._words.release()
        self._memory.close()

    @property
    def world_size(self) -> int:
        """Ranks in the generation."""
        return int(struct.unpack_from("<Q", self._memory, 8)[0])

    @property
    def generation(self) -> int:
        """The generation that this block belongs to."""
        return int(self._words[2])

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return int(self._words[3])

    # -- written by the worker ---------------------------------------------------------------------------

    def publish(self, step: int, now_ns: int) -> None:
        """Publish a boundary: `step` completed optimizer steps. Last store of a boundary."""
        self._words[_WORD_BEAT_NS] = now_ns
        self._words[_WORD_STEP] = step + 1

    def echo(self, ballot: int) -> None:
        """Say that the proposal was read; before `publish` of the same boundary."""
        self._words[_WORD_ECHO] = ballot

    def report_passed(self, step: int) -> None:
        """Say that no decision came in time at `step`, and that it was not staged."""
        self._words[_WORD_PASSED] = step + 1

    def set_step_time(self, nanoseconds: int) -> None:
        """Publish the mean time of a step."""
        self._words[_WORD_STEP_NS] = nanoseconds

    def set_phase(self, phase: WorkerPhase) -> None:
        """Say what the worker is doing."""
        self._words[_WORD_PHASE] = phase

    def pause(self, until_ns: int) -> None:
        """Say that no step comes before this monotonic time; 0: go on."""
        self._words[_WORD_PAUSE_UNTIL_NS] = until_ns

    def note_signal(self, number: int) -> None:
        """Record a received signal; async-signal safe enough for a Python handler."""
        self._words[_WORD_SIGNAL] = number

    def ask_save(self) -> None:
        """Ask for a checkpoint at the next step that all ranks can agree on."""
        self._words[_WORD_SAVE_ASKED] += 1

    def tell_loss(self, finding: Finding) -> None:
        """Publish what was found about the loss; the agent can read the last four."""
        count = self._words[_WORD_LOSS_FINDINGS]
        packed, start = findings.pack(finding), self._finding_at_byte(count)
        self._memory[start : start + len(packed)] = packed
        self._words[_WORD_LOSS_FINDINGS] = count + 1

    def set_slot_bytes(self, size_bytes: int) -> None:
        """Publish the planned size of one slot."""
        self._words[_WORD_SLOT_BYTES] = size_bytes

    def set_unique_bytes(self, size_bytes: int) -> None:
        """Publish how much of this rank's shard no other rank holds; before `set_slot_bytes`."""
        self._words[_WORD_UNIQUE_BYTES] = size_bytes

    def set_twins(self, twins: Sequence[Sequence[int]]) -> None:
        """Publish, for each part of the state that this rank has and not all have, who holds it; as `unique_bytes`.

        If they are too many for their room, it is said that this rank is alone with something: the cautious answer.
        """
        data = json.dumps(twins, separators=(",", ":")).encode()
        if len(data) > _twins_bytes(self.world_size):
            data = json.dumps([[self.rank]]).encode()
        start = _CELLS_AT_BYTE + 2 * self._cell_bytes + _INFO_BYTES
        self._memory[start : start + len(data)] = data
        self._words[_WORD_TWINS] = len(data)

    def set_info(self, info: dict[str, Any]) -> None:
        """Publish what attach knows, as JSON, once."""
        data = json.dumps(info).encode()
        if len(data) > _INFO_BYTES:
            raise ProtocolError(f"attach information of {len(data)} bytes exceeds {_INFO_BYTES}")
        start = _CELLS_AT_BYTE + 2 * self._cell_bytes
        self._memory[start : start + len(data)] = data
        self._words[_WORD_INFO] = len(data)

    def start_slot(self, index: int, generation: int, step: int) -> None:
        """free → writing."""
        self.advance_slot(index, step, 0)
        self._words[_WORD_SLOTS + 3 * index] = pack_slot(SlotState.WRITING, generation, step)

    def advance_slot(self, index: int, step: int, there_bytes: int) -> None:
        """So many bytes of the shard that is being written are there, from its beginning on, and will not change."""
        self._words[_WORD_THERE + index] = (step & _THERE_STEP_MASK) << _THERE_SHIFT | there_bytes

    def finish_slot(self, index: int, generation: int, step: int, size_bytes: int, stage_ns: int) -> None:
        """writing → staged."""
        base = _WORD_SLOTS + 3 * index
        self._words[base + 1] = size_bytes
        self._words[base + 2] = stage_ns
        self._words[base] = pack_slot(SlotState.STAGED, generation, step)

    # -- written by the agent ----------------------------------------------------------------------------

    def write_record(self, record: Record) -> None:
        """Publish a proposal or decision: into the idle cell, then one store to switch."""
        selector = self._words[_WORD_SELECTOR]
        sequence = (selector >> 1) + 1
        cell = (selector & 1) ^ 1
        bitmap = bytearray(self._absent_bytes)
        for rank in record.absent:
            bitmap[rank // 8] |= 1 << rank % 8
        body = _CELL.pack(
            sequence,
            record.ballot,
            0 if record.proposed_step is None else record.proposed_step + 1,
            0 if record.decided_step is None else record.decided_step + 1,
            int(record.mode is Mode.LEAVE),
            len(bitmap),
        ) + bytes(bitmap)
        start = _CELLS_AT_BYTE + cell * self._cell_bytes
        self._memory[start : start + len(body)] = body
        struct.pack_into("<I", self._memory, start + len(body), _crc32c.crc32c(body))
        self._words[_WORD_SELECTOR] = sequence << 1 | cell

    def inherit_slot(self, index: int, checkpoint: CheckpointId, size_bytes: int) -> None:
        """Before the worker starts: this slot's file holds a shard of an older generation, until `free_slot`."""
        self.finish_slot(index, checkpoint.generation, checkpoint.step, size_bytes, 0)

    def free_slot(self, index: int) -> None:
        """staged or writing → free; the agent's alone."""
        self._words[_WORD_SLOTS + 3 * index] = 0

    def set_outcome(self, outcome: LeaveOutcome, step: int) -> None:
        """Tell a worker that waits to leave how its step ended. One word, so that the two cannot be torn apart."""
        self._words[_WORD_OUTCOME] = step + 1 << 3 | outcome

    # -- read by either ----------------------------------------------------------------------------------

    @property
    def selector(self) -> int:
        """Changes whenever a record is published."""
        return self._words[_WORD_SELECTOR]

    def read_record(self) -> Record:
        """The published record; on a checksum mismatch the one that was read before."""
        selector = self._words[_WORD_SELECTOR]
        if selector == 0:
            return self._last
        start = _CELLS_AT_BYTE + (selector & 1) * self._cell_bytes
        body_bytes = _CELL.size + self._absent_bytes
        body = bytes(self._memory[start : start + body_bytes])
        (digest,) = struct.unpack_from("<I", self._memory, start + body_bytes)
        if digest != _crc32c.crc32c(body):
            return self._last
        sequence, ballot, proposed, decided, leave, _ = _CELL.unpack_from(body)
        if sequence != selector >> 1:
            return self._last
        bitmap = body[_CELL.size :]
        absent = tuple(rank for rank in range(self.world_size) if bitmap[rank // 8] >> rank % 8 & 1)
        self._last = Record(
            ballot=ballot,
            proposed_step=None if proposed == 0 else proposed - 1,
            decided_step=None if decided == 0 else decided - 1,
            mode=Mode.LEAVE if leave else Mode.STAY,
            absent=absent,
        )
        self.record_selector = selector
        return self._last

    def image(self) -> bytes:
        """All words as they are now: equal to an earlier image, nothing has happened in between."""
        return self._memory[_IMAGE]

    @property
    def holds_any(self) -> bool:
        """Whether any slot is not free."""
        return any(self._words[_WORD_SLOTS + 3 * index] for index in range(SLOTS))

    @property
    def step(self) -> int | None:
        """The last published boundary."""
        word = self._words[_WORD_STEP]
        return None if word == 0 else word - 1

    @property
    def echoed(self) -> int:
        """The last echoed ballot."""
        return self._words[_WORD_ECHO]

    @property
    def passed(self) -> int | None:
        """The last agreed step that this rank passed without staging."""
        word = self._words[_WORD_PASSED]
        return None if word == 0 else word - 1

    @property
    def step_seconds(self) -> float:
        """Mean time of a step; 0 before two boundaries."""
        return self._words[_WORD_STEP_NS] / 1e9

    @property
    def beat_ns(self) -> int:
        """Monotonic time of the last boundary."""
        return self._words[_WORD_BEAT_NS]

    @property
    def phase(self) -> WorkerPhase:
        """What the worker says it is doing."""
        return WorkerPhase(self._words[_WORD_PHASE])

    @property
    def pause_until_ns(self) -> int:
        """Monotonic time until which the script has said that no step comes; 0: it has not."""
        return self._words[_WORD_PAUSE_UNTIL_NS]

    @property
    def stacks_path(self) -> Path:
        """Where the worker writes its stacks when it is asked to."""
        return self.path.with_suffix(".stacks")

    @property
    def signal(self) -> int:
        """The last signal that the worker noted; 0: none."""
        return self._words[_WORD_SIGNAL]

    @property
    def saves_asked(self) -> int:
        """How often the script asked for a save."""
        return self._words[_WORD_SAVE_ASKED]

    @property
    def loss_findings(self) -> int:
        """How often something was found about the loss."""
        return self._words[_WORD_LOSS_FINDINGS]

    def loss_finding(self, number: int) -> Finding | None:
        """The finding of that number, the first being 1; None: newer ones took its place, or it is not whole yet."""
        if not max(0, self.loss_findings - _FINDINGS) < number <= self.loss_findings:
            return None
        start = self._finding_at_byte(number - 1)
        return findings.unpack(self._memory[start : start + findings.CELL_BYTES])

    @staticmethod
    def _finding_at_byte(index: int) -> int:
        return _FINDINGS_AT_BYTE + index % _FINDINGS * findings.CELL_BYTES

    @property
    def slot_bytes(self) -> int:
        """Planned size of one slot; 0 before planning."""
        return self._words[_WORD_SLOT_BYTES]

    @property
    def unique_bytes(self) -> int:
        """Bytes of this rank's shard that no other rank holds; 0 before planning."""
        return self._words[_WORD_UNIQUE_BYTES]

    @property
    def twins(self) -> tuple[tuple[int, ...], ...]:
        """For each part of the state that this rank has and not all have: the ranks that hold it. Read when planned."""
        length = self._words[_WORD_TWINS]
        start = _CELLS_AT_BYTE + 2 * self._cell_bytes + _INFO_BYTES
        if length == 0 or length > len(self._memory) - start:
            return ()
        return tuple(tuple(ranks) for ranks in json.loads(self._memory[start : start + length]))

    @property
    def info(self) -> dict[str, Any] | None:
        """What attach published; None before."""
        length = self._words[_WORD_INFO]
        if length == 0 or length > _INFO_BYTES:
            return None
        start = _CELLS_AT_BYTE + 2 * self._cell_bytes
        info: dict[str, Any] = json.loads(self._memory[start : start + length])
        return info

    def slot(self, index: int) -> Slot:
        """One slot's state."""
        base = _WORD_SLOTS + 3 * index
        word = self._words[base]
        return Slot(
            index=index,
            state=SlotState(word >> _STATE_SHIFT),
            generation=word >> _STEP_BITS & (1 << _GENERATION_BITS) - 1,
            step=word & (1 << _STEP_BITS) - 1,
            size_bytes=self._words[base + 1],
            stage_seconds=self._words[base + 2] / 1e9,
        )

    def there_bytes(self, index: int, step: int) -> int:
        """How much of the shard of the step that is being written is there, from its beginning on."""
        word = self._words[_WORD_THERE + index]
        return word & (1 << _THERE_SHIFT) - 1 if word >> _THERE_SHIFT == step & _THERE_STEP_MASK else 0

    def slots(self) -> list[Slot]:
        """Both slots."""
        return [self.slot(index) for index in range(SLOTS)]

    def outcome(self) -> tuple[LeaveOutcome, int]:
        """(outcome, step) that the agent reported last."""
        word = self._words[_WORD_OUTCOME]
        return LeaveOutcome(word & 7), (word >> 3) - 1


# ------------------------------------------------------------------------------------------- shard header


def build_header(tensors: dict[str, dict[str, Any]], metadata: dict[str, str], header_bytes: int) -> bytes:
    """The first `header_bytes` bytes of a safetensors file: length, JSON, padding with spaces.

    Raises ProtocolError if the JSON does not fit: the slot has to be planned anew.
    """
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":"))
    return b"".join(frame_header([text.encode()], header_bytes))


def frame_header(pieces: list[bytes], header_bytes: int) -> list[bytes]:
    """A header of exactly that many bytes, in pieces, around its JSON text. Raises ProtocolError if it does not fit."""
    length, room = sum(map(len, pieces)), header_bytes - 8
    if length > room:
        raise ProtocolError(f"the shard header needs {length} bytes, {room} are reserved")
    return [struct.pack("<Q", room), *pieces, b" " * (room - length)]


def header_size(json_bytes: int) -> int:
    """Bytes to reserve for a header of that many JSON bytes: 8 more, padded to 4 KiB."""
    return -(-(json_bytes + 8) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES


def read_header(data: memoryview | bytes) -> tuple[int, dict[str, Any]]:
    """(header bytes including the length word, header JSON) of a safetensors file's beginning.

    Raises ProtocolError if it is not one; the length is checked before anything is read by it.
    """
    if len(data) < 8:
        raise ProtocolError("shorter than a safetensors length word")
    (length,) = struct.unpack_from("<Q", data, 0)
    if length > len(data) - 8:
        raise ProtocolError(f"safetensors header of {length} bytes in a file of {len(data)}")
    try:
        header = parse_header(bytes(data[8 : 8 + length]))
    except ValueError as error:
        raise ProtocolError(f"the safetensors header is not JSON, or not for all readers the same: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError("the safetensors header is not an object")
    return 8 + length, header

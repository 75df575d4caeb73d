"""The memory that agent and worker share: records are whole or not seen, words have limits, files are checked."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.checkpoint import slots
from orchestrator.checkpoint.slots import (
    ControlBlock,
    LeaveOutcome,
    Record,
    SlotState,
    WorkerPhase,
    build_header,
    header_size,
    pack_slot,
    read_header,
)
from orchestrator.core.messages import Mode
from orchestrator.errors import ProtocolError
from orchestrator.health.loss import Finding, LossState

TORTURE_RECORDS = 200
TORTURE_SECONDS_MAX = 40.0  # however loaded the machine is


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlBlock]:
    """The agent's mapping."""
    block = ControlBlock.create(tmp_path / "control", generation=3, rank=1, world_size=9)
    yield block
    block.close()


@pytest.fixture
def worker(control: ControlBlock) -> Iterator[ControlBlock]:
    """The worker's mapping of the same file."""
    block = ControlBlock.open(control.path)
    yield block
    block.close()


def cell_range(control: ControlBlock, selector: int) -> tuple[int, int]:
    """(first byte, one past the last) of the cell that a selector names, with its checksum."""
    start = slots._CELLS_AT_BYTE + (selector & 1) * control._cell_bytes
    return start, start + slots._CELL.size + control._absent_bytes + 4


# --------------------------------------------------------------------------------------------------- the file


def test_both_ends_see_whose_block_it_is(control: ControlBlock, worker: ControlBlock) -> None:
    for block in (control, worker):
        assert (block.generation, block.rank, block.world_size) == (3, 1, 9)
    assert control.path.stat().st_mode & 0o777 == 0o600


def test_a_block_is_made_once(control: ControlBlock) -> None:
    with pytest.raises(FileExistsError):
        ControlBlock.create(control.path, generation=3, rank=1, world_size=9)


@pytest.mark.parametrize("content", [b"", b"x", struct.pack("<Q", slots.MAGIC), b"\0" * (1 << 17)], ids=len)
def test_any_other_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ProtocolError, match="control block"):
        ControlBlock.open(path)


def test_at_first_nothing_is_said(worker: ControlBlock) -> None:
    assert worker.step is None
    assert worker.passed is None
    assert worker.info is None
    assert worker.phase is WorkerPhase.NOT_ATTACHED
    assert (worker.echoed, worker.signal, worker.saves_asked, worker.slot_bytes) == (0, 0, 0, 0)
    assert worker.outcome() == (LeaveOutcome.NONE, -1)
    assert worker.read_record() == Record()
    assert [slot.state for slot in worker.slots()] == [SlotState.FREE, SlotState.FREE]


def test_what_the_worker_says_reaches_the_agent(control: ControlBlock, worker: ControlBlock) -> None:
    worker.publish(0, 5)
    worker.echo(7)
    worker.report_passed(0)
    worker.set_step_time(1_500_000)
    worker.set_phase(WorkerPhase.STAGING)
    worker.note_signal(15)
    worker.ask_save()
    worker.ask_save()
    worker.set_slot_bytes(4096)
    worker.set_info({"step": 0, "until": None})
    assert (control.step, control.beat_ns, control.echoed, control.passed) == (0, 5, 7, 0)
    assert control.step_seconds == 0.0015
    assert (control.phase, control.signal, control.saves_asked, control.slot_bytes) == (
        WorkerPhase.STAGING,
        15,
        2,
        4096,
    )
    assert control.info == {"step": 0, "until": None}


def loss_finding(step: int) -> Finding:
    known = step % 2 == 0
    return Finding(
        state=LossState(step % 3),
        step=step,
        value=step / 7,
        usual=2.5 if known else None,
        bound=3.75 if known else None,
        good_step=step - 1 if known and step else None,
    )


def test_what_was_found_about_the_loss_reaches_the_agent_the_last_four_of_it(
    control: ControlBlock, worker: ControlBlock
) -> None:
    assert (control.loss_findings, control.loss_finding(0), control.loss_finding(1)) == (0, None, None)
    for number in range(1, 10):
        image = control.image()
        worker.tell_loss(loss_finding(number - 1))
        assert control.image() != image
        assert control.loss_findings == number
        known = [control.loss_finding(one) for one in range(1, number + 1)]
        assert known == [None] * (number - 4) + [loss_finding(one) for one in range(max(0, number - 4), number)]
    assert control.loss_finding(10) is None
    assert (control.read_record(), control.outcome()) == (Record(), (LeaveOutcome.NONE, -1)), "it is nobody else's room"


def test_a_loss_that_is_no_number_comes_through(control: ControlBlock, worker: ControlBlock) -> None:
    for value in (math.nan, math.inf, -math.inf):
        worker.tell_loss(replace(loss_finding(2), value=value))
        told = control.loss_finding(control.loss_findings)
        assert told is not None
        assert repr(told.value) == repr(value)


def test_a_finding_that_is_not_whole_is_not_read(control: ControlBlock, worker: ControlBlock) -> None:
    worker.tell_loss(loss_finding(3))
    worker._memory[slots._FINDINGS_AT_BYTE + 8] ^= 1
    assert (control.loss_findings, control.loss_finding(1)) == (1, None)


def test_information_has_a_limit(worker: ControlBlock) -> None:
    worker.set_info({"x": "y" * (slots._INFO_BYTES - 10)})
    with pytest.raises(ProtocolError, match="exceeds"):
        worker.set_info({"x": "y" * slots._INFO_BYTES})


# ---------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("world_size", [1, 7, 8, 9, 64, 4096])
def test_absent_ranks_come_through_at_every_world_size(world_size: int, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed + world_size)
    agent = ControlBlock.create(tmp_path / "control", generation=1, rank=0, world_size=world_size)
    worker = ControlBlock.open(agent.path)
    sets: list[tuple[int, ...]] = [(), (0,), (world_size - 1,), tuple(range(world_size))]
    sets += [tuple(rank for rank in range(world_size) if draw.random() < 0.5) for _ in range(5)]
    for ballot, absent in enumerate(sets, start=1):
        agent.write_record(Record(ballot=ballot, decided_step=ballot, mode=Mode.LEAVE, absent=absent))
        assert worker.read_record().absent == absent
    worker.set_info({"world_size": world_size})  # lies behind the cells and must not touch them
    assert worker.read_record().absent == sets[-1]
    assert agent.info == {"world_size": world_size}
    agent.close()
    worker.close()


def test_records_come_through_exactly(control: ControlBlock, worker: ControlBlock, seed: int) -> None:
    draw = random.Random(seed)
    for ballot in range(1, 200):
        record = Record(
            ballot=ballot,
            proposed_step=draw.choice([None, 0, 1, draw.getrandbits(42)]),
            decided_step=draw.choice([None, 0, 1, draw.getrandbits(42)]),
            mode=draw.choice(list(Mode)),
            absent=tuple(rank for rank in range(9) if draw.random() < 0.3),
        )
        before = worker.selector
        control.write_record(record)
        assert worker.selector != before
        assert worker.read_record() == record
        assert worker.read_record() == record
        assert worker.record_selector == worker.selector


def test_a_record_is_written_beside_the_published_one(control: ControlBlock) -> None:
    """A worker that reads while the agent writes finds the old record whole."""
    for ballot in range(1, 5):
        control.write_record(Record(ballot=ballot, proposed_step=ballot))
        start, stop = cell_range(control, control.selector)
        published = bytes(control._memory[start:stop])
        control.write_record(Record(ballot=ballot, decided_step=ballot, absent=(0,)))
        assert bytes(control._memory[start:stop]) == published


def test_a_torn_cell_leaves_the_record_before_it(control: ControlBlock, worker: ControlBlock) -> None:
    """Every single byte of the cell counts: whichever is not there yet, the worker keeps to what it knew."""
    old, new = Record(ballot=1, proposed_step=10), Record(ballot=2, proposed_step=20, absent=(8,))
    control.write_record(old)
    assert worker.read_record() == old
    known = worker.record_selector
    control.write_record(new)
    start, stop = cell_range(control, control.selector)
    for position in range(start, stop):
        whole = control._memory[position]
        control._memory[position] = whole ^ 0xFF
        assert worker.read_record() == old
        assert worker.record_selector == known != worker.selector  # so that it is looked at again
        control._memory[position] = whole
    assert worker.read_record() == new
    assert worker.record_selector == worker.selector


def test_a_whole_cell_of_another_turn_leaves_the_record_before_it(control: ControlBlock, worker: ControlBlock) -> None:
    """Where stores arrive out of order the selector may be ahead of the cell: its checksum holds, its number is old."""
    first, second, third = (Record(ballot=number, decided_step=number) for number in (1, 2, 3))
    control.write_record(first)
    start, stop = cell_range(control, control.selector)
    stale = bytes(control._memory[start:stop])
    control.write_record(second)
    assert worker.read_record() == second
    control.write_record(third)
    fresh = bytes(control._memory[start:stop])
    control._memory[start:stop] = stale
    assert worker.read_record() == second
    control._memory[start:stop] = fresh
    assert worker.read_record() == third


WRITER = """
import select, sys
from orchestrator.checkpoint.slots import ControlBlock, LeaveOutcome
from tests.checkpoint.test_slots import pattern, outcome_of
from pathlib import Path
control = ControlBlock.open(Path(sys.argv[1]))
print("ready", flush=True)
number = 0
while number % 100 or not select.select([sys.stdin], [], [], 0)[0]:
    number += 1
    control.echo(number)
    control.publish(number, 0)
    control.write_record(pattern(number))
    control.set_outcome(outcome_of(number), number)
print(number, flush=True)
"""
TORTURE_WORLD = 1024  # a cell of several cache lines


def pattern(number: int) -> Record:
    """A record every part of which tells its number."""
    return Record(
        ballot=number,
        proposed_step=number * 7 % (1 << 42),
        decided_step=number * 13 % (1 << 42) if number % 3 else None,
        mode=Mode.LEAVE if number % 2 else Mode.STAY,
        absent=tuple(range(number % 5, TORTURE_WORLD, 64 + number % 7)),
    )


def outcome_of(number: int) -> LeaveOutcome:
    return LeaveOutcome.COMMITTED if number % 2 else LeaveOutcome.ABANDONED


def test_torture_by_two_processes(tmp_path: Path) -> None:
    """One process writes as fast as it can, this one reads: every record is whole, in order, and newer words first."""
    control = ControlBlock.create(tmp_path / "control", generation=1, rank=0, world_size=TORTURE_WORLD)
    command = [sys.executable, "-c", WRITER, str(control.path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        last, seen, until_seconds = 0, 0, time.monotonic() + TORTURE_SECONDS_MAX
        while seen < TORTURE_RECORDS:
            assert time.monotonic() < until_seconds, f"only {seen} records were seen in {TORTURE_SECONDS_MAX} s"
            for _ in range(200):
                step = control.step or 0
                echo = control.echoed
                assert echo >= step  # written in the other order
                outcome, of_step = control.outcome()
                assert of_step == -1 or outcome is outcome_of(of_step)
                record = control.read_record()
                if record.ballot != last:
                    assert record == pattern(record.ballot)
                    assert record.ballot > last
                    last, seen = record.ballot, seen + 1
        writer.stdin.close()
        written = int(writer.stdout.readline())
        assert writer.wait() == 0
    assert control.read_record() == pattern(written)
    control.close()


# ------------------------------------------------------------------------------------------------------- slots


def test_a_slot_goes_from_free_to_writing_to_staged_to_free(control: ControlBlock, worker: ControlBlock) -> None:
    worker.start_slot(1, 3, 40)
    slot = control.slot(1)
    assert (slot.state, slot.generation, slot.step) == (SlotState.WRITING, 3, 40)
    worker.finish_slot(1, 3, 40, 12_345, 2_000_000)
    slot = control.slot(1)
    assert (slot.state, slot.generation, slot.step) == (SlotState.STAGED, 3, 40)
    assert (slot.size_bytes, slot.stage_seconds) == (12_345, 0.002)
    assert control.slot(0).state is SlotState.FREE
    control.free_slot(1)
    assert worker.slot(1).state is SlotState.FREE


@pytest.mark.parametrize(("generation", "step"), [(0, 0), (1, 1), ((1 << 20) - 1, (1 << 42) - 1)])
def test_slot_words_hold_the_largest_numbers(
    control: ControlBlock, worker: ControlBlock, generation: int, step: int
) -> None:
    worker.finish_slot(0, generation, step, (1 << 64) - 1, 0)
    slot = control.slot(0)
    assert (slot.state, slot.generation, slot.step) == (SlotState.STAGED, generation, step)
    assert slot.size_bytes == (1 << 64) - 1


@pytest.mark.parametrize(("generation", "step"), [(1 << 20, 0), (0, 1 << 42)])
def test_larger_numbers_are_refused_instead_of_cut(generation: int, step: int) -> None:
    with pytest.raises(ProtocolError, match="too large"):
        pack_slot(SlotState.STAGED, generation, step)


def test_the_outcome_and_its_step_are_one_word(control: ControlBlock, worker: ControlBlock) -> None:
    for outcome, step in ((LeaveOutcome.COMMITTED, 0), (LeaveOutcome.ABANDONED, 40), (LeaveOutcome.RELEASED, 1 << 42)):
        control.set_outcome(outcome, step)
        assert worker.outcome() == (outcome, step)


# ----------------------------------------------------------------------------------------------- shard headers


def test_a_header_fills_its_room_exactly() -> None:
    tensors = {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    text_bytes = len(json.dumps({"__metadata__": {"k": "v"}, **tensors}, separators=(",", ":")))
    assert len(build_header(tensors, {"k": "v"}, text_bytes + 8)) == text_bytes + 8
    with pytest.raises(ProtocolError, match="are reserved"):
        build_header(tensors, {"k": "v"}, text_bytes + 7)
    header = build_header(tensors, {"k": "v"}, 4096)
    assert read_header(header) == (4096, {"__metadata__": {"k": "v"}, **tensors})


@pytest.mark.parametrize(("json_bytes", "reserved"), [(0, 4096), (4088, 4096), (4089, 8192), (8184, 8192)])
def test_header_sizes_are_whole_pages(json_bytes: int, reserved: int) -> None:
    assert header_size(json_bytes) == reserved


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1),
        struct.pack("<Q", (1 << 64) - 1) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{:",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
    ids=lambda data: f"{data[:12]!r}",
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_header(data)


def test_a_boundary_without_news_costs_microseconds(worker: ControlBlock) -> None:
    """What a step pays when nothing happens: generous by an order of magnitude, as machines differ."""
    turns = 20_000
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for step in range(turns):
            worker.publish(step, 0)
            assert worker.selector == 0
        best = min(best, (time.perf_counter() - began) / turns)
    assert best < 10e-6

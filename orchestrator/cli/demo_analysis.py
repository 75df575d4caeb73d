"""What the demo's runs come to: interruptions and their cost, the sample stream, bit-identity, the checks.

Pure functions over event records, the training logs and two open checkpoints' digests. Called by `cli.demo`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.boxes import places
from orchestrator.checkpoint.chunks import Chunk
from orchestrator.checkpoint.digest import crc
from orchestrator.checkpoint.reader import verified_windows
from orchestrator.cli.report_page import Check, GenerationSpan, Interruption, LossPoint, TimelineEvent
from orchestrator.storage.base import ObjectStore
from orchestrator.telemetry import EventRecord

LOSS_TOLERANCE = 0.05
"""Largest difference of the last losses that a change of world size may cause (float sums in another order)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """What the training script wrote: for each step, by the highest generation that did it."""

    ids: Mapping[int, tuple[int, ...]]
    """Sample ids of the step's global batch, sorted."""
    losses: tuple[LossPoint, ...]


def read_training_log(folder: Path) -> TrainingLog:
    """Merge the per-rank files of a run; a step done twice counts as the later generation did it."""
    ids: dict[int, dict[int, list[int]]] = {}
    losses: dict[tuple[int, int], float] = {}
    for path in sorted(folder.glob("rank-*-gen-*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            ids.setdefault(line["step"], {}).setdefault(line["generation"], []).extend(line["ids"])
            losses[line["step"], line["generation"]] = line["loss"]
    last = {step: tuple(sorted(by_generation[max(by_generation)])) for step, by_generation in sorted(ids.items())}
    points = [LossPoint(step=step, loss=loss, generation=generation) for (step, generation), loss in losses.items()]
    return TrainingLog(ids=last, losses=tuple(sorted(points, key=lambda point: (point.generation, point.step))))


def timeline(records: Sequence[EventRecord], start_seconds: float) -> tuple[TimelineEvent, ...]:
    """The records with times since the run's start."""
    return tuple(
        TimelineEvent(
            time_seconds=record.monotonic_seconds - start_seconds,
            kind=record.kind,
            reason=record.reason,
            node=record.node,
            generation=record.generation,
            step=record.step,
        )
        for record in records
    )


def generation_spans(records: Sequence[EventRecord], start_seconds: float) -> tuple[GenerationSpan, ...]:
    """The life of each generation, from its opening to the next one's."""
    opened = [record for record in records if record.kind == "generation opened"]
    first = {r.generation: r.monotonic_seconds for r in records if r.kind == "first good step"}
    ends = {r.generation: r.monotonic_seconds for r in records if r.kind in ("gang broken", "left", "ended")}
    spans = []
    for number, record in enumerate(opened):
        following = opened[number + 1].monotonic_seconds if number + 1 < len(opened) else records[-1].monotonic_seconds
        done = first.get(record.generation)
        spans.append(
            GenerationSpan(
                generation=record.generation or 0,
                world_size=int(record.facts["world_size"] or 0),
                nodes=tuple(str(record.facts["nodes"]).split()),
                start_seconds=record.monotonic_seconds - start_seconds,
                first_step_seconds=None if done is None else done - start_seconds,
                end_seconds=min(ends.get(record.generation, following), following) - start_seconds,
            )
        )
    return tuple(spans)


@dataclass(kw_only=True)
class _Open:
    """An interruption that is not over yet."""

    cause: str
    node: str | None
    at_seconds: float
    generation: int | None
    stopped_seconds: float | None = None
    highest_step: int = 0
    commit_seconds: float | None = None


def interruptions(
    records: Sequence[EventRecord], start_seconds: float, step_seconds: float
) -> tuple[Interruption, ...]:
    """One row for each time that training stopped, with what it cost."""
    rows: list[Interruption] = []
    now: _Open | None = None
    base_step = 0
    for record in records:
        if now is None:
            now = _begin(record)
        if now is None:
            continue
        if record.kind == "gang broken" or (record.kind == "staged" and now.cause != "worker killed"):
            now.stopped_seconds = now.stopped_seconds or record.monotonic_seconds
            now.highest_step = max(now.highest_step, record.step or 0)
        elif record.kind == "committed" and record.generation == now.generation and now.stopped_seconds:
            now.commit_seconds = record.monotonic_seconds - now.at_seconds
        elif record.kind == "generation opened":
            base_step = record.step or 0
        elif record.kind == "first good step" and record.generation != now.generation:
            rows.append(_finish(now, record, base_step, start_seconds, step_seconds))
            now = None
    return tuple(rows)


def _begin(record: EventRecord) -> _Open | None:
    at, generation = record.monotonic_seconds, record.generation
    if record.kind == "notice received":
        return _Open(cause="preemption notice", node=record.node, at_seconds=at, generation=generation)
    if record.kind == "step agreed" and record.reason.startswith("leave"):
        return _Open(cause="a node joins", node=None, at_seconds=at, generation=generation)
    if (
        record.kind in ("worker exited", "node lost")
        and "status 0" not in record.reason
        and "announced" not in record.reason
    ):
        return _Open(
            cause="worker killed", node=record.node, at_seconds=at, generation=generation, highest_step=record.step or 0
        )
    return None


def _finish(now: _Open, first: EventRecord, base_step: int, start_seconds: float, step_seconds: float) -> Interruption:
    stopped = now.stopped_seconds or now.at_seconds
    down = first.monotonic_seconds - stopped
    lost = max(0, now.highest_step - base_step)
    return Interruption(
        cause=now.cause,
        node=now.node,
        at_seconds=now.at_seconds - start_seconds,
        notice_to_commit_seconds=now.commit_seconds,
        failure_to_first_step_seconds=down,
        steps_lost=lost,
        seconds_lost=down + lost * step_seconds,
    )


def tensor_digests(store: ObjectStore, index: fmt.Index) -> dict[str, str]:
    """crc32c and shape of every tensor of a checkpoint, however it is cut into shards."""
    wholes = {name: bytearray(fmt.tensor_bytes(record)) for name, record in index.tensors.items()}
    chunks = [(name, chunk) for name in index.tensors for chunk in index.chunks(name) if chunk.start < chunk.stop]
    for shard in index.shards:
        mine = [(name, chunk) for name, chunk in chunks if chunk.rank == shard.rank]
        pieces: dict[str, bytearray] = {name: bytearray(c.last_byte - c.first_byte) for name, c in mine}
        for window in verified_windows(store, index, shard, [(c.first_byte, c.last_byte) for _, c in mine]):
            for name, chunk in mine:
                offset, data = window.cut(chunk.first_byte, chunk.last_byte)
                if len(data):
                    pieces[name][offset : offset + len(data)] = data
        for name, chunk in mine:
            _lay_down(wholes[name], index.tensors[name], chunk, pieces[name])
    digests = {name: crc(data) for name, data in wholes.items()}
    return {name: f"{record.dtype}{list(record.shape)}:{digests[name]:08x}" for name, record in index.tensors.items()}


def _lay_down(whole: bytearray, record: fmt.TensorRecord, chunk: Chunk, data: bytearray) -> None:
    """A chunk's bytes to where they belong in the whole tensor."""
    width, position = fmt.DTYPE_BYTES[record.dtype], 0
    ranges = [(chunk.start, chunk.stop)]
    for start, stop in ranges if chunk.box is None else places(chunk.box, chunk.start, chunk.stop, record.shape):
        size_bytes = (stop - start) * width
        whole[start * width : stop * width] = data[position : position + size_bytes]
        position += size_bytes


def check_stream(log: TrainingLog, reference: TrainingLog, samples: int) -> list[Check]:
    """The interrupted run saw the same samples as the uninterrupted one, each exactly once."""
    same = log.ids == reference.ids
    seen = [sample for ids in log.ids.values() for sample in ids]
    repeated = len(seen) - len(set(seen))
    return [
        Check(
            name="same samples as the uninterrupted run",
            passed=same and bool(log.ids),
            detail=f"{len(log.ids)} global batches compared"
            + ("" if same else f"; first difference at step {_first_difference(log.ids, reference.ids)}"),
        ),
        Check(
            name="each sample exactly once",
            passed=len(seen) == samples and repeated == 0,
            detail=f"{len(seen)} samples used, {repeated} repeated, {samples} expected",
        ),
    ]


def check_losses(log: TrainingLog, reference: TrainingLog) -> Check:
    """After changes of world size the last losses agree within a tolerance (sums are added in another order)."""
    mine, theirs = _last(log.losses), _last(reference.losses)
    difference = abs(mine - theirs)
    return Check(
        name="loss agrees after changes of world size",
        passed=difference <= LOSS_TOLERANCE,
        detail=f"mean of the last 5 losses {mine:.4f}, uninterrupted {theirs:.4f}, tolerance {LOSS_TOLERANCE}",
    )


def check_identical(digests: Mapping[str, str], reference: Mapping[str, str]) -> Check:
    """Killed and resumed at the same world size: every tensor of the last checkpoint is bit-identical."""
    differing = sorted(name for name in {*digests, *reference} if digests.get(name) != reference.get(name))
    return Check(
        name="bit-identical after a kill at the same world size",
        passed=bool(digests) and not differing,
        detail=f"{len(digests)} tensors (parameters, optimizer, RNG) compared"
        + (f"; {len(differing)} differ, first {differing[0]}" if differing else ""),
    )


def check_deadline(records: Iterable[EventRecord]) -> Check:
    """The emergency checkpoint was committed before its deadline."""
    left = [r.facts["seconds_before_deadline"] for r in records if "seconds_before_deadline" in r.facts]
    seconds = min((float(value) for value in left if value is not None), default=-1.0)
    return Check(
        name="committed before the deadline",
        passed=seconds > 0,
        detail=f"{seconds:.1f} s were left" if left else "no emergency checkpoint was committed",
    )


def check_world_sizes(spans: Sequence[GenerationSpan], expected: Sequence[int]) -> Check:
    """The job shrank, grew back and restarted as the demo means to show."""
    sizes = [span.world_size for span in spans]
    words = " → ".join(str(size) for size in sizes)
    return Check(name="shrank, grew back, restarted", passed=sizes == list(expected), detail=f"world sizes {words}")


def check_causes(stops: Sequence[Interruption]) -> Check:
    """Training was stopped by what the demo means to show, in that order, and went on each time."""
    causes = [stop.cause for stop in stops]
    expected = ["preemption notice", "a node joins", "worker killed"]
    return Check(name="went on after each interruption", passed=causes == expected, detail=", ".join(causes))


def _last(losses: Sequence[LossPoint], count: int = 5) -> float:
    by_step = {point.step: point.loss for point in losses}  # the latest generation's, since they come in order
    values = [by_step[step] for step in sorted(by_step)[-count:]]
    return sum(values) / len(values) if values else float("nan")


def _first_difference(mine: Mapping[int, tuple[int, ...]], theirs: Mapping[int, tuple[int, ...]]) -> int | None:
    return next((step for step in sorted({*mine, *theirs}) if mine.get(step) != theirs.get(step)), None)

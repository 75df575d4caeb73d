"""What the index of a checkpoint costs at scale: seconds, memory, objects and bytes, for 64 to 4096 ranks.

Nothing of a job runs here: receipts as `upload_shard` writes them are put into a folder, beside shards that have their
size and no bytes (sparse files). Every step is a process of its own, so that its peak of resident memory beyond what it
had after its imports is its own.

    python -m benchmarks.index_scale                      # sharded evenly: 64, 512, 4096 ranks × 1000 tensors
    python -m benchmarks.index_scale --layout uneven      # each rank another length of each tensor: the worst case
    python -m benchmarks.index_scale --layout replicated  # DDP: all bytes cut into one window for each rank
    python -m benchmarks.index_scale --ranks 512 --json

It prints what it measured and never fails on a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import survey
from orchestrator.checkpoint.indexing import object_digests
from orchestrator.checkpoint.reader import read_committed, read_receipt
from orchestrator.checkpoint.save import METADATA_KEY, ShardPlace, commit, upload_shard
from orchestrator.checkpoint.slots import build_header, header_size
from orchestrator.core.messages import CheckpointId
from orchestrator.core.ownership import owned_spans
from orchestrator.storage.base import Entry, ObjectStore, Piece
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.memory import MemoryStore

CHECKPOINT = CheckpointId(generation=1, step=1000)
LAYOUTS = ("even", "uneven", "replicated")
HEADER_BYTES = 4096
ELEMENTS = 1024
"""Of each tensor on each rank where it is sharded evenly."""
GENERATOR_BYTES = 5056
"""What is one rank's alone: torch's generator."""
STEP_SECONDS_MAX = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The checkpoint that is measured."""

    ranks: int
    tensors: int
    layout: str

    def names(self) -> list[str]:
        """Names as long as real ones."""
        return [f"model.layers.{number // 10:03d}.attention.weight_{number:05d}" for number in range(self.tensors)]

    def chunks(self, rank: int) -> list[tuple[int, int, int]]:
        """(tensor, first element, elements) of what a rank has."""
        if self.layout == "replicated":
            sizes = [(self.ranks * ELEMENTS, 4)] * self.tensors
            spans = owned_spans(sizes, rank=rank, holders=range(self.ranks), absent=())
            return [(span.tensor, span.start, span.stop - span.start) for span in spans]
        low, high = rank * ELEMENTS, (rank + 1) * ELEMENTS
        if self.layout == "even":
            return [(tensor, low, ELEMENTS) for tensor in range(self.tensors)]
        return [
            (tensor, self._moved(tensor, low), self._moved(tensor, high) - self._moved(tensor, low))
            for tensor in range(self.tensors)
        ]

    def _moved(self, tensor: int, cut: int) -> int:
        """A place near `cut`, so that ranks do not have the same length twice in a row."""
        inner = 0 < cut < self.ranks * ELEMENTS
        return cut + ((cut // ELEMENTS) ** 2 * 7919 + tensor * 104729) % (ELEMENTS - 1) if inner else cut

    def receipt(self, rank: int, objects: dict[str, Any], digests: dict[str, int]) -> dict[str, Any]:
        """A rank's receipt, as `upload_shard` writes it."""
        names, mine = self.names(), self.chunks(rank)
        size_bytes = HEADER_BYTES + 4 * sum(length for _, _, length in mine) + GENERATOR_BYTES
        return {
            "version": fmt.FORMAT_VERSION,
            "job": "scale",
            "generation": CHECKPOINT.generation,
            "step": CHECKPOINT.step,
            "world_size": self.ranks,
            "absent": [],
            "rank": rank,
            "size_bytes": size_bytes,
            "header_bytes": HEADER_BYTES,
            "crc32c": rank,
            "blocks": fmt.pack_blocks(range(-(-size_bytes // fmt.BLOCK_BYTES))),
            "tensors": {
                "names": [names[tensor] for tensor, _, _ in mine] + [f"rank.{rank:05d}.rng.torch"],
                "dtypes": ["F32"] * len(mine) + ["U8"],
                "shapes": [[self.ranks, ELEMENTS]] * len(mine) + [[GENERATOR_BYTES]],
                "starts": [start for _, start, _ in mine] + [0],
                "lengths": [length for _, _, length in mine] + [GENERATOR_BYTES],
                "boxes": [[] for _ in mine] + [[]],
            },
            "objects": digests,
            "values": {"objects": objects} if rank == 0 else None,
            "gate": {"step": CHECKPOINT.step, "lr": "0badcafe", "data": "0badcafe", "rng": f"{rank:08x}"},
        }

    def write(self, folder: Path) -> int:
        """Receipts and sparse shards into a folder; bytes of receipts."""
        objects = {"model": {name: {"$": "tensor", "name": name} for name in self.names()}}
        digests = object_digests("objects", objects)
        (folder / fmt.folder_key(CHECKPOINT)).mkdir(parents=True)
        total = 0
        for rank in range(self.ranks):
            receipt = self.receipt(rank, objects, digests)
            body = fmt.canonical_json(receipt)
            (folder / fmt.receipt_key(CHECKPOINT, rank, self.ranks)).write_bytes(body)
            shard = folder / fmt.shard_key(CHECKPOINT, rank, self.ranks)
            shard.touch()
            os.truncate(shard, receipt["size_bytes"])
            total += len(body)
        return total


class CountingStore:
    """A folder that counts what is asked of it."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.reads = 0
        self.bytes_read = 0

    @property
    def url(self) -> str:
        """The folder."""
        return self._inner.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port."""
        self._inner.create(key, pieces)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        data = self._inner.read(key, start, stop)
        self.reads += 1
        self.bytes_read += len(data)
        return data

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port."""
        count = self._inner.read_into(key, start, buffers)
        self.reads += 1
        self.bytes_read += count
        return count

    def size(self, key: str) -> int:
        """See the port."""
        return self._inner.size(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port."""
        return self._inner.entries(prefix)

    def delete(self, key: str) -> None:
        """See the port."""
        self._inner.delete(key)


# -------------------------------------------------------------------------------------------- what is measured


def open_one_rank(store: ObjectStore) -> None:
    """What a rank needs to begin reading its own shard at the same world size."""
    index = read_committed(store, CHECKPOINT)
    read_receipt(store, index, index.shards[len(index.shards) // 2])


def locate_one(store: ObjectStore) -> None:
    """Every chunk of one tensor."""
    index = read_committed(store, CHECKPOINT)
    index.chunks(next(name for name in index.tensors if name.startswith("model.")))


def locate_all(store: ObjectStore) -> None:
    """Every chunk of every tensor, one tensor after another: what a remap may have to look at."""
    index = read_committed(store, CHECKPOINT)
    for name in index.tensors:
        index.chunks(name)


STEPS: dict[str, Callable[[ObjectStore], Any]] = {
    "commit": lambda store: commit(store, CHECKPOINT),
    "newest": lambda store: survey(store).newest(),
    "open one rank": open_one_rank,
    "locate one tensor": locate_one,
    "locate all tensors": locate_all,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One step, in a process of its own."""

    ranks: int
    tensors: int
    layout: str
    step: str
    seconds: float
    cpu_seconds: float
    peak_extra_mib: float
    objects_read: int
    mib_read: float


def measure(scene: Scene, step: str, folder: str) -> Measurement:
    """Run one step in this process."""
    store = CountingStore(FolderStore(Path(folder)))
    before = _peak_mib()
    started, cpu_started = time.monotonic(), time.process_time()
    STEPS[step](store)
    return Measurement(
        **asdict(scene),
        step=step,
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - cpu_started,
        peak_extra_mib=_peak_mib() - before,
        objects_read=store.reads,
        mib_read=store.bytes_read / 2**20,
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_all(scene: Scene, parent: str | None) -> Iterator[Measurement]:
    """All steps of one checkpoint, each in a new process."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        mib = scene.write(Path(folder)) / 2**20
        print(
            f"{scene.ranks} ranks × {scene.tensors} tensors, {scene.layout}: {mib:.1f} MiB of receipts", file=sys.stderr
        )
        for step in STEPS:
            command = [sys.executable, "-m", "benchmarks.index_scale", "--step", step, "--folder", folder]
            given = ["--ranks", str(scene.ranks), "--tensors", str(scene.tensors), "--layout", scene.layout]
            answer = subprocess.run(
                [*command, *given],
                stdout=subprocess.PIPE,
                check=True,
                timeout=STEP_SECONDS_MAX,
                cwd=Path(__file__).parents[1],
            )
            row = Measurement(**json.loads(answer.stdout))
            print(f"  {step}: {row.cpu_seconds:.1f} s of CPU, {row.peak_extra_mib:.0f} MiB more", file=sys.stderr)
            yield row


# ------------------------------------------------------------------------------------------------- one upload


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadMeasurement:
    """One rank's upload into memory, and the part of it that is not moving and digesting bytes."""

    tensors: int
    size_mib: float
    upload_cpu_seconds: float
    receipt_cpu_seconds: float
    receipt_mib: float


def measure_upload(tensors: int, kib_per_tensor: int = 64) -> UploadMeasurement:
    """A shard of many tensors, half of them parts of larger ones; the best of three."""
    names = Scene(ranks=1, tensors=tensors, layout="even").names()
    bytes_each = kib_per_tensor << 10
    entries = {
        name: {
            "dtype": "F32",
            "shape": [bytes_each // 4],
            "data_offsets": [place * bytes_each, (place + 1) * bytes_each],
        }
        for place, name in enumerate(names)
    }
    metadata = {
        "parts": {name: {"shape": [bytes_each // 2], "start": 0} for name in names[::2]},
        "values": {"objects": {"model": {name: {"$": "tensor", "name": name} for name in names}}},
        "rank_values": {},
        "gate": {"step": CHECKPOINT.step, "lr": "0badcafe", "data": None, "rng": "0badcafe"},
    }
    text = json.dumps(metadata, separators=(",", ":"))
    header = build_header(entries, {METADATA_KEY: text}, header_size(2 * len(text) + len(json.dumps(entries)) + 4096))
    data = memoryview(bytearray(header + bytes(tensors * bytes_each)))
    place = ShardPlace(job="scale", checkpoint=CHECKPOINT, rank=0, world_size=1, absent=())
    whole, after = [], []
    for _ in range(3):
        store, marks = MemoryStore(), []
        started = time.process_time()
        upload_shard(store, place, data, before_receipt=lambda: marks.append(time.process_time()))  # noqa: B023
        whole.append(time.process_time() - started)
        after.append(whole[-1] - (marks[0] - started))
    return UploadMeasurement(
        tensors=tensors,
        size_mib=len(data) / 2**20,
        upload_cpu_seconds=min(whole),
        receipt_cpu_seconds=min(after),
        receipt_mib=store.size(place.receipt_key) / 2**20,
    )


# ------------------------------------------------------------------------------------------------------- main


def main() -> None:
    """Measure and print."""
    options = _options()
    if options.step is not None:
        scene = Scene(ranks=options.ranks[0], tensors=options.tensors, layout=options.layout)
        print(json.dumps(asdict(measure(scene, options.step, options.folder))))
        return
    rows = [
        row
        for ranks in options.ranks
        for row in measure_all(Scene(ranks=ranks, tensors=options.tensors, layout=options.layout), options.folder)
    ]
    uploads = [measure_upload(tensors) for tensors in (1000, 4096, 16_000)]
    if options.json:
        print(
            json.dumps({"index": [asdict(row) for row in rows], "upload": [asdict(row) for row in uploads]}, indent=1)
        )
        return
    _print_table(rows)
    _print_table(uploads)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the index of a checkpoint costs at scale.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--layout", choices=LAYOUTS, default="even")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--folder", help="where to put the receipts for the time of the measurement")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _print_table(rows: list[Measurement] | list[UploadMeasurement]) -> None:
    cells = [[_cell(value) for value in asdict(row).values()] for row in rows]
    table = [[name.replace("_", " ") for name in asdict(rows[0])], *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

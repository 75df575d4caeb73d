"""How long from a notice to a committed checkpoint: the orchestrator, a SIGTERM handler with DCP, and the bare disk.

SIGTERM reaches both of two ranks at a random instant of a step, or with `--notice one` one of them: then the other one
writes everything, because who goes owns nothing that somebody else holds too. Measured is the time until the checkpoint
counts: its index for the orchestrator, its `.metadata` for torch.distributed.checkpoint, both looked for every
millisecond. In the same pair, the same bytes are written to the same folder by two plain threads and flushed: the
floor. Pairs alternate; medians are compared; every checkpoint is loaded and compared bit by bit with what the state
must be at its step. Staging state A takes 2 GiB of memory in /dev/shm.

`python -m benchmarks.notice_to_commit [--state A|B] [--pairs 7] [--notice all|one] [--folder DIR] [--json]`.
It never fails on a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from benchmarks.training_to_interrupt import make_tensors, train_one
from orchestrator.checkpoint.catalog import survey
from orchestrator.checkpoint.digest import crc
from orchestrator.checkpoint.reader import read_committed
from orchestrator.cli.demo_analysis import tensor_digests
from orchestrator.storage.opening import open_store

TRAINING = Path(__file__).with_name("training_to_interrupt.py")
STATES = {"A": (64, 8 << 20), "B": (4096, 32 << 10)}
"""Name → (tensors, bytes of each)."""
RANKS = 2
POLL_SECONDS = 0.05
"""How often an idle agent looks at its control blocks."""
FLOOR_FACTOR, HANDLER_FACTOR = 1.3, 0.4
"""The goals: at most this much of the floor, beside one poll and one step; at most this much of the handler."""
LOOK_SECONDS = 0.001
START_SECONDS_MAX = 180.0
COMMIT_SECONDS_MAX = 180.0
EVENT_SECONDS_MAX = 10.0
EVENTS = ("notice received", "step proposed", "step agreed", "staged", "uploaded", "committed")
WRITE_BYTES = 1 << 20
MEMORY = "/dev/shm"
REPLACEMENT_SECONDS = 120
"""Replacements of nodes start on other machines; here they would take the cores on which the upload is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One notice: seconds until the checkpoint counted, bytes that it has on the disk, the step that it is of."""

    seconds: float
    size_bytes: int
    step: int
    bit_equal: bool
    parts: dict[str, float] = field(default_factory=dict)
    """Event → seconds after the signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured."""

    state: str
    tensors: int
    tensor_bytes: int
    step_seconds: float
    notice: str
    """Who gets the signal: all ranks, or one."""

    def words(self, kind: str, folder: Path) -> list[str]:
        """The training command."""
        numbers = (self.tensors, self.tensor_bytes, self.step_seconds)
        return [sys.executable, str(TRAINING), kind, *map(str, numbers), str(folder)]


# ------------------------------------------------------------------------------------------ the three sides


def measure_orchestrator(setting: Setting, folder: Path, part: float) -> Sample:
    """A job of two local nodes; the workers get the signal."""
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="notice-to-commit-", dir=MEMORY, ignore_cleanup_errors=True) as staging:
        (folder / "settings.toml").write_text(f"replacement_seconds = {REPLACEMENT_SECONDS}\n")
        command = [
            *(sys.executable, "-m", "orchestrator", "run", "--notices", "none"),
            *("--config", str(folder / "settings.toml")),
            *("--job", "job", "--store", str(folder / "store")),
            *("--nodes", str(RANKS), "--workers-per-node", "1", "--save-every", "0", "--staging", staging, "--"),
            *setting.words("orchestrator", folder),
        ]
        with started([command], [environment], folder):
            notice = give_notice(await_ready(folder), part, setting)
            index = await_file(folder / "store" / "job" / "checkpoints", "*/index.json")
            seconds = time.monotonic() - notice
            parts = await_events(folder, notice)
    step, equal = check_ours(setting, folder)
    return Sample(seconds=seconds, size_bytes=size_of(index.parent), step=step, bit_equal=equal, parts=parts)


def measure_handler(setting: Setting, folder: Path, part: float) -> Sample:
    """Two plain processes with the handler."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    environments = [
        {**os.environ, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        for rank in range(RANKS)
    ]
    with started([setting.words("dcp", folder)] * RANKS, environments, folder):
        notice = give_notice(await_ready(folder), part, setting)
        metadata = await_file(folder / "checkpoint", ".metadata")
        seconds = time.monotonic() - notice
    step, equal = check_handlers(setting, folder / "checkpoint")
    return Sample(seconds=seconds, size_bytes=size_of(metadata.parent), step=step, bit_equal=equal)


def measure_floor(size_bytes: int, folder: Path) -> float:
    """The same bytes from warm memory, one thread per rank, each file flushed, then the folder. Seconds."""
    share = size_bytes // RANKS
    data = memoryview(bytearray(os.urandom(WRITE_BYTES)) * (share // WRITE_BYTES + 1))[:share]

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for start in range(0, share, WRITE_BYTES):
                file.write(data[start : start + WRITE_BYTES])
            os.fsync(file.fileno())

    began = time.monotonic()
    threads = [threading.Thread(target=write, args=(folder / f"floor-{rank}",)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)
    return time.monotonic() - began


# ------------------------------------------------------------------------------------------ what they share


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes, in sessions of their own; all that descends from them is gone afterwards."""
    with (folder / "output").open("wb") as output:
        running = [
            subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            for command, environment in zip(commands, environments, strict=True)
        ]
    try:
        yield running
    finally:
        for pid in {pid for process in running for pid in (process.pid, *descendants(process.pid))}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in running:
            process.wait()


def descendants(pid: int) -> list[int]:
    """Children, grandchildren, …"""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = list(parents.get(pid, ()))
    for child in found:
        found.extend(parents.get(child, ()))
    return found


def await_ready(folder: Path) -> list[int]:
    """The ranks' processes, once all have trained a little."""
    files = [await_file(folder, f"rank-{rank}", START_SECONDS_MAX) for rank in range(RANKS)]
    time.sleep(0.5)
    return [int(file.read_text()) for file in files]


def give_notice(pids: Sequence[int], part: float, setting: Setting) -> float:
    """SIGTERM at a part of a step, to all ranks or to the last; when it was sent."""
    time.sleep(part * setting.step_seconds)
    notice = time.monotonic()
    for pid in pids if setting.notice == "all" else pids[-1:]:
        os.kill(pid, signal.SIGTERM)
    return notice


def await_file(folder: Path, pattern: str, limit_seconds: float = COMMIT_SECONDS_MAX) -> Path:
    """The first file of that name. Exits with the programs' last words if it does not come."""
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        for path in folder.glob(pattern):
            return path
        time.sleep(LOOK_SECONDS)
    words = next((path for path in (folder, *folder.parents) if (path / "output").exists()), folder) / "output"
    sys.exit(f"no {pattern} in {folder} within {limit_seconds:.0f} s:\n{words.read_text(errors='replace')[-2000:]}")


def await_events(folder: Path, notice: float) -> dict[str, float]:
    """The events' times, once the last one is there: it follows the index, as soon as the agent has read that back."""
    end = time.monotonic() + EVENT_SECONDS_MAX
    while EVENTS[-1] not in (found := event_times(folder, notice)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def event_times(folder: Path, notice: float) -> dict[str, float]:
    """When the supervisor noted each event, after the signal."""
    found: dict[str, float] = {}
    for path in (folder / "state").rglob("events.jsonl"):
        for text in path.read_text().splitlines():
            record = json.loads(text)
            if record["kind"] in EVENTS and record["monotonic_seconds"] >= notice:
                found.setdefault(record["kind"], record["monotonic_seconds"] - notice)
    return found


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_ours(setting: Setting, folder: Path) -> tuple[int, bool]:
    """(step, whether every tensor of the checkpoint is what it must be there)."""
    store = open_store(str(folder / "store" / "job"))
    newest = survey(store).newest()
    assert newest is not None
    found = tensor_digests(store, read_committed(store, newest.id))
    true = expected(setting, newest.id.step)
    digests = [f"{crc(memoryview(tensor.numpy().data).cast('B')):08x}" for tensor in true]
    equal = all(found[f"model.t{number}"].endswith(f":{digest}") for number, digest in enumerate(digests))
    return newest.id.step, equal


def check_handlers(setting: Setting, folder: Path) -> tuple[int, bool]:
    """(step, whether every tensor of the checkpoint is what it must be there)."""
    state: dict[str, Any] = {f"t{number}": torch.zeros(setting.tensor_bytes // 4) for number in range(setting.tensors)}
    state["step"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads without a process group
        dcp.load(state, checkpoint_id=folder)
    true = expected(setting, state["step"])
    return state["step"], all(torch.equal(state[f"t{number}"], tensor) for number, tensor in enumerate(true))


def expected(setting: Setting, step: int) -> list[torch.Tensor]:
    """The state after that many steps."""
    tensors = make_tensors(setting.tensors, setting.tensor_bytes)
    for done in range(step):
        train_one(done, tensors)
    return tensors


# -------------------------------------------------------------------------------------------------- results


@dataclass(kw_only=True)
class Result:
    """All pairs of one state."""

    setting: Setting
    ours: list[Sample] = field(default_factory=list)
    handler: list[Sample] = field(default_factory=list)
    floor_seconds: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    """The machine's load average before each pair."""

    def summary(self) -> dict[str, object]:
        """Medians, ratios and everything they come from."""
        floor, ours, handler = (
            statistics.median(values)
            for values in (self.floor_seconds, [s.seconds for s in self.ours], [s.seconds for s in self.handler])
        )
        parts = {
            event: statistics.median([sample.parts[event] for sample in self.ours if event in sample.parts] or [-1.0])
            for event in EVENTS
        }
        bound = FLOOR_FACTOR * floor + POLL_SECONDS + self.setting.step_seconds
        return {
            "setting": asdict(self.setting),
            "pairs": len(self.ours),
            "floor_seconds": floor,
            "goal_seconds": bound,
            "orchestrator_seconds": ours,
            "handler_seconds": handler,
            "of_goal": ours / bound,
            "of_handler": ours / handler,
            "bit_equal": all(sample.bit_equal for sample in (*self.ours, *self.handler)),
            "events_seconds": parts,
            "load": self.load,
            "floors": self.floor_seconds,
            "orchestrator": [asdict(sample) for sample in self.ours],
            "handler": [asdict(sample) for sample in self.handler],
        }


def measure(setting: Setting, pairs: int, folder: Path, numbers: random.Random) -> Result:
    """Interleaved: the floor in the middle, the two sides in turn first and last."""
    result = Result(setting=setting)
    for pair in range(pairs):
        result.load.append(os.getloadavg()[0])
        part = numbers.random()
        sides = [(measure_orchestrator, result.ours), (measure_handler, result.handler)]
        if pair % 2:
            sides.reverse()
        for number, (side, samples) in enumerate(sides):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                samples.append(side(setting, Path(own), part))
            if number == 0:
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    result.floor_seconds.append(measure_floor(samples[-1].size_bytes, Path(own)))
        sys.stderr.write(
            f"state {setting.state}, pair {pair + 1}: orchestrator {result.ours[-1].seconds:.2f} s, handler "
            f"{result.handler[-1].seconds:.2f} s, floor {result.floor_seconds[-1]:.2f} s, "
            f"load {result.load[-1]:.1f}\n"
        )
    return result


def show(summaries: Sequence[dict[str, Any]]) -> None:
    """Two tables: the comparison, and where the orchestrator's time goes."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title="From a notice to a committed checkpoint, medians")
    for column in (
        "state",
        "pairs",
        "floor (s)",
        "goal (s)",
        "orchestrator (s)",
        "of the goal",
        "handler (s)",
        "ratio",
    ):
        table.add_column(column, justify="right")
    table.add_column("bit-equal")
    events = Table(title="Where it goes: median seconds after the signal")
    for column in ("state", *EVENTS):
        events.add_column(column, justify="right")
    for summary in summaries:
        setting = summary["setting"]
        seconds = [f"{summary[name]:.2f}" for name in ("floor_seconds", "goal_seconds", "orchestrator_seconds")]
        ratios = [f"{summary['of_goal']:.2f}", f"{summary['handler_seconds']:.2f}", f"{summary['of_handler']:.2f}"]
        equal = "yes" if summary["bit_equal"] else "NO"
        table.add_row(setting["state"], str(summary["pairs"]), *seconds, *ratios, equal)
        events.add_row(setting["state"], *(f"{summary['events_seconds'][event]:.3f}" for event in EVENTS))
    console.print(table, events)
    for summary in summaries:
        setting, load = summary["setting"], summary["load"]
        console.print(
            f"state {setting['state']}: {setting['tensors']} tensors of {setting['tensor_bytes'] // 1024} KiB, steps "
            f"of {setting['step_seconds']} s, {RANKS} ranks on {os.cpu_count()} cores, load {min(load):.1f} to "
            f"{max(load):.1f}; goals: {FLOOR_FACTOR} × floor + one poll ({POLL_SECONDS} s) + one step; "
            f"≤ {HANDLER_FACTOR} of the handler",
            highlight=False,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=sorted(STATES), action="append", help="A, B; both if not given")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--notice", choices=("all", "one"), default="all", help="which ranks get the signal")
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--folder", type=Path, default=None, help="where to save; a temporary folder if not given")
    parser.add_argument("--seed", type=int, default=1, help="of the instants within a step")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # not without ending what was started
    summaries = []
    for state in options.state or sorted(STATES):
        count, tensor_bytes = STATES[state]
        setting = Setting(
            state=state,
            tensors=count,
            tensor_bytes=tensor_bytes,
            step_seconds=options.step_seconds,
            notice=options.notice,
        )
        with tempfile.TemporaryDirectory(prefix="notice-to-commit-", dir=options.folder) as folder:
            result = measure(setting, options.pairs, Path(folder), random.Random(options.seed))
        summaries.append(result.summary())
    if options.json:
        print(json.dumps(summaries, indent=1))
    else:
        show(summaries)


if __name__ == "__main__":
    main()

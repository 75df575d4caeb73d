"""G7: a shard into an S3 bucket, signed and digested, over loopback to a process that discards it.

Ours is what an agent does with a staged shard, receipt included, in a process of its own at normal priority. Over
http the SDK signs the sha256 of each body, which takes much of the time; over TLS it does not, nor does
`s3torchconnector` here: lines of "payload unsigned" are like with like. Compared with `s3torchconnector`'s writer for
torch.distributed.checkpoint, `torch.save` into memory and boto3's `upload_fileobj`, boto3's `upload_file` of the
staged file, and a bare PUT. What each takes of the processors and of memory is looked at, too. What ours sends is
read back once, from a bucket that keeps it, and compared.

    python -m benchmarks.uploading [--state A|B] [--pairs 7] [--quick] [--json]
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

import boto3
from crc32c import crc32c

from benchmarks import engine, rivals
from benchmarks.costs import Cost, cost_of, peak_extra_bytes
from benchmarks.measuring import (
    MEMORY,
    MIB,
    OURS,
    Line,
    Options,
    Report,
    Samples,
    State,
    after,
    equal,
    interleave,
    options,
    scratch,
    show,
)
from benchmarks.s3_uploader import BUCKET, SIGNED, STORE, UNSIGNED
from orchestrator.storage.opening import open_store

STAGED_TOO = f"{OURS}, staged too"
OURS_UNSIGNED = f"{OURS}, {UNSIGNED}"
DCP, TORCH_SAVE, UPLOAD_FILE = "s3torchconnector", "torch.save + boto3", "upload_file"
RAW, SENDFILE = "raw PUT", "sendfile"
EXTRA_MIB_MAX = 16.0
MEMORY_ROUNDS = 3
QUICK_TIMES = 8
"""As many tensors in tiny states: 24 MiB are more than one part of an upload."""
END_SECONDS = 30


def main() -> None:
    """Measure and print."""
    given, report = options(__doc__), Report()
    problem = rivals.import_problem("s3torchconnector.dcp")
    if problem is not None:
        report.leave_out(problem)
    times = QUICK_TIMES if given.quick else 1
    for state in (dataclasses.replace(one, tensors=times * one.tensors) for one in given.states):
        with scratch(MEMORY) as staging:
            measure(Sides(state, staging, problem is None), given, report)
    show(report, "A shard into a bucket (G7)", given)


def measure(sides: Sides, given: Options, report: Report) -> None:
    """One state."""
    with bucket(keep=True), uploader() as process:
        bit_equal = sides.arrives(process)
    with bucket(), uploader() as process:
        costs = Costs(sides.acts(process))
        samples = interleave(costs.timed, given.pairs, after(given.limit_seconds / 2))
        extra = interleave(sides.memory(process), min(given.pairs, MEMORY_ROUNDS), lambda: False)
    name, gib = sides.state.name, sides.state.size_bytes / 2**30
    report.add(f"upload, {name}", samples, lines_of(f"upload, {name}", samples, bit_equal))
    cpu = Samples(by_side={side: [one / gib for one in taken[1:]] for side, taken in costs.cpu_seconds.items()})
    report.add(f"CPU, {name}", cpu, cpu_lines(f"CPU per GiB, {name}", cpu))
    extra.by_side["bound"] = [EXTRA_MIB_MAX] * len(extra.by_side[OURS])
    report.add(f"extra memory, {name}", extra, memory_lines(f"extra memory, {name}", extra))


# ------------------------------------------------------------------------------------------------ the sides


class Sides:
    """All ways from one state into a bucket, each time under keys of its own."""

    def __init__(self, state: State, staging: Path, with_dcp: bool) -> None:
        self.state = state
        self._tensors = state.make()
        self._rank = engine.Rank(self._tensors, staging)
        self._with_dcp = with_dcp
        self._steps = count(1)
        self._size_bytes = self._rank.stage(0)
        self._rank.stage(1)  # both slots are warm from now on

    def acts(self, process: UploadProcess) -> Mapping[str, Callable[[], Cost]]:
        """Name → what it costs."""
        sides = {name: partial(self._there, process, way) for name, way in WAYS.items()}
        return (
            sides
            | {STAGED_TOO: partial(self._staged_too, process)}
            | {name: partial(cost_of, act) for name, act in self._here().items()}
        )

    def memory(self, process: UploadProcess) -> Mapping[str, Callable[[], float]]:
        """Name → MiB that it takes beside the training state and the slot."""
        ways = {name: way for name, way in WAYS.items() if way in (SIGNED, UNSIGNED, UPLOAD_FILE)}
        return {name: partial(self._memory_there, process, way) for name, way in ways.items()} | {
            name: partial(_memory_here, act) for name, act in self._here().items()
        }

    def arrives(self, process: UploadProcess) -> bool:
        """Whether what came into the bucket has the bits that were sent, as a file and as tensors."""
        step = next(self._steps)
        self._rank.stage(step)
        process.cost(self._upload(SIGNED, step))
        store = open_store(STORE)
        engine.commit_step(store, step)
        there = crc32c(store.read(engine.shard_key(step)))
        loaded = self.state.zeros()
        engine.load(store, engine.checkpoint_of(step), loaded)
        return there == crc32c(self._rank.slot(step).read_bytes()[: self._size_bytes]) and equal(self._tensors, loaded)

    def _here(self) -> dict[str, Callable[[], object]]:
        """What starts from the tensors, in their process."""
        client = boto3.client("s3")
        found: dict[str, Callable[[], object]] = {
            TORCH_SAVE: lambda: rivals.torch_save_s3(self._tensors, client, BUCKET, f"torch/{next(self._steps)}")
        }
        if self._with_dcp:
            found[DCP] = lambda: rivals.dcp_save_s3(self._tensors, f"s3://{BUCKET}/dcp/{next(self._steps)}")
        return found

    def _upload(self, way: str, step: int) -> dict[str, object]:
        return {
            "way": way,
            "job": engine.JOB,
            "path": str(self._rank.slot(step)),
            "size_bytes": self._size_bytes,
            "generation": engine.GENERATION,
            "step": step,
        }

    def _there(self, process: UploadProcess, way: str) -> Cost:
        return process.cost(self._upload(way, next(self._steps)))

    def _memory_there(self, process: UploadProcess, way: str) -> float:
        return process.extra_bytes(self._upload(way, next(self._steps))) / MIB

    def _staged_too(self, process: UploadProcess) -> Cost:
        step = next(self._steps)
        staging = cost_of(lambda: self._rank.stage(step))
        cost = process.cost(self._upload(SIGNED, step))
        return Cost(seconds=staging.seconds + cost.seconds, cpu_seconds=staging.cpu_seconds + cost.cpu_seconds)


WAYS = {OURS: SIGNED, OURS_UNSIGNED: UNSIGNED, UPLOAD_FILE: UPLOAD_FILE, RAW: RAW, SENDFILE: SENDFILE}
"""What starts from the staged file, in a process of its own."""


def _memory_here(act: Callable[[], object]) -> float:
    return peak_extra_bytes(act) / MIB


class Costs:
    """Sides for `interleave`, which knows of time alone; what they take of the processors is kept here."""

    def __init__(self, acts: Mapping[str, Callable[[], Cost]]) -> None:
        self.cpu_seconds: dict[str, list[float]] = {name: [] for name in acts}
        """Of all rounds, the first one too."""
        self.timed = {name: partial(self._seconds, name, act) for name, act in acts.items()}

    def _seconds(self, name: str, act: Callable[[], Cost]) -> float:
        cost = act()
        self.cpu_seconds[name].append(cost.cpu_seconds)
        return cost.seconds


# ------------------------------------------------------------------------------------------- other processes


class UploadProcess:
    """A process that uploads; see `s3_uploader`."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers

    def cost(self, upload: Mapping[str, object]) -> Cost:
        """Of one upload."""
        return Cost(**self._ask({**upload, "memory": False}))

    def extra_bytes(self, upload: Mapping[str, object]) -> int:
        """The most memory that it takes."""
        return int(self._ask({**upload, "memory": True})["extra_bytes"])

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        line = self._answers.readline()
        if not line:
            raise SystemExit("the process that uploads has failed, and has said why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def uploader() -> Iterator[UploadProcess]:
    """Its bucket is that of this process's variables."""
    with started("benchmarks.s3_uploader") as (requests, answers):
        answers.readline()
        yield UploadProcess(requests, answers)


@contextmanager
def bucket(*, keep: bool = False) -> Iterator[None]:
    """A bucket on loopback; the variables name it, for this process and those that it starts."""
    with ExitStack() as stack:
        _, answers = stack.enter_context(started("benchmarks.s3_sink", *(["--keep"] if keep else [])))
        variables = {
            "AWS_ENDPOINT_URL": answers.readline().strip(),
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "accesskey000",
            "AWS_SECRET_ACCESS_KEY": "secretkey000",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextmanager
def started(module: str, *words: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """A process of ours that ends with its input: (its input, its output)."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=engine.ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
        finally:
            process.stdin.close()
            process.wait(timeout=END_SECONDS)


# -------------------------------------------------------------------------------------------------- results


def lines_of(what: str, samples: Samples, bit_equal: bool) -> list[Line]:
    """× faster than each other side; of the bare PUT's speed."""

    def line(than: str, must: float | None = None, moonshot: float | None = None, ours: str = OURS) -> Line:
        return samples.line(
            "G7",
            what + ours.removeprefix(OURS),
            ours=ours,
            than=than,
            must=must,
            moonshot=moonshot,
            at_least=True,
            floor=RAW,
            bit_equal=bit_equal if ours == OURS else None,
        )

    goals = {DCP: (2.0, None), TORCH_SAVE: (4.0, None), RAW: (0.6, 0.8), UPLOAD_FILE: (None, None)}
    lines = [line(than, *goals[than]) for than in goals if than in samples.by_side]
    lines += [line(than, ours=STAGED_TOO) for than in (DCP, TORCH_SAVE) if than in samples.by_side]
    return [*lines, *(line(than, ours=OURS_UNSIGNED) for than in (*goals, SENDFILE) if than in samples.by_side)]


def cpu_lines(what: str, samples: Samples) -> list[Line]:
    """Of each other side's; nobody has to reach anything."""
    others = [side for side in samples.by_side if side not in (OURS, STAGED_TOO)]
    return [samples.line("G7", what, than=than, must=None, unit="s") for than in others]


def memory_lines(what: str, samples: Samples) -> list[Line]:
    """Of what is allowed, and of what others take."""
    lines = [samples.line("G7", what, than="bound", must=1.0, unit="MiB")]
    others = [side for side in samples.by_side if side not in (OURS, "bound")]
    return lines + [samples.line("G7", what, than=than, must=None, unit="MiB") for than in others]


if __name__ == "__main__":
    main()

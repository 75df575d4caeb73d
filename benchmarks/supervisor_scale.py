#!/usr/bin/env python3
"""Seconds of supervisor CPU for one whole save of a large job: every event of its agents, fed to the core.

    python benchmarks/supervisor_scale.py                          # 256, 1024, 4096 and 16384 nodes with one rank each
    python benchmarks/supervisor_scale.py --nodes 512 --workers 8
    python benchmarks/supervisor_scale.py --json

The core alone: no sockets, no JSON. Every figure is CPU time of this process in `core.job.step`. Figures are printed,
never judged: it fails only where the save does not end committed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from orchestrator.core.job import Job, JobSpec, Phase, new_job, step
from orchestrator.core.messages import (
    Action,
    Commit,
    Decide,
    Echoed,
    Event,
    GenerationOpened,
    IndexDecided,
    NodeJoined,
    OpenGeneration,
    Prepare,
    Progress,
    RankAttached,
    RankPlanned,
    RankProgress,
    Settled,
    Staged,
    Tick,
    Upload,
    Uploaded,
)

NODES = (256, 1024, 4096, 16384)
SAVE_EVERY_STEPS = 100
SAVE_PHASES = ("propose", "echo and decide", "progress", "stage", "upload", "commit")
"""What belongs to one save; the other phases are the start of the job and plain training."""


@dataclass
class Drive:
    """A job that is fed with events; seconds and events of each phase."""

    nodes: int
    workers: int
    job: Job = field(init=False)
    now: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = JobSpec(
            name="scale",
            nodes_min=self.nodes,
            nodes_max=self.nodes,
            workers_per_node=self.workers,
            save_every_steps=SAVE_EVERY_STEPS,
        )
        self.job = new_job(spec, 0.0)

    @property
    def names(self) -> list[str]:
        """All nodes."""
        return [f"node-{number}" for number in range(self.nodes)]

    @property
    def places(self) -> list[tuple[str, int]]:
        """(node, rank) of every rank, as the gang has them."""
        assert self.job.gang is not None
        return [(place.node, rank) for place in self.job.gang.places for rank in place.ranks]

    def feed(self, phase: str, events: Iterable[Event]) -> list[Action]:
        """Feed the events of a phase; all actions that came back."""
        given = list(events)
        actions: list[Action] = []
        begin = time.process_time()
        for event in given:
            self.now += 1e-5
            self.job, more = step(self.job, event, self.now)
            actions.extend(more)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - begin
        self.events[phase] = self.events.get(phase, 0) + len(given)
        return actions


def expect(actions: Iterable[Action], kind: type, count: int) -> None:
    """The save must go on as it should: a figure of something else would be worth nothing."""
    found = sum(isinstance(action, kind) for action in actions)
    if found != count:
        raise SystemExit(f"{found} {kind.__name__} instead of {count}")


def progress(drive: Drive, number: int) -> list[Event]:
    """One Progress from every node."""
    assert drive.job.gang is not None
    return [
        Progress(
            node=place.node,
            generation=1,
            ranks=tuple(
                RankProgress(rank=rank, step=number, step_seconds=0.5 + (rank * 7919 % 1000) / 1e5, free_slots=2)
                for rank in place.ranks
            ),
        )
        for place in drive.job.gang.places
    ]


def start(drive: Drive) -> None:
    """From nothing to a running gang."""
    nodes = drive.nodes
    actions = drive.feed("join", [NodeJoined(node=name, workers=drive.workers) for name in drive.names])
    expect(actions, OpenGeneration, 1)
    opened = GenerationOpened(
        node=drive.job.members[0],
        generation=1,
        base=None,
        meeting_address="10.0.0.1",
        meeting_port=29500,
        rolled_forward=0,
    )
    drive.feed("open", [opened])
    attached = [
        RankAttached(node=node, generation=1, rank=rank, pid=1, step=0, until=None, allowed_world_sizes=None)
        for node, rank in drive.places
    ]
    drive.feed("attach", attached)
    planned = [
        RankPlanned(node=node, generation=1, rank=rank, slot_bytes=1 << 30, unique_bytes=1 << 16)
        for node, rank in drive.places
    ]
    drive.feed("plan", planned)
    if drive.job.phase is not Phase.RUNNING:
        raise SystemExit(f"{nodes} nodes: {drive.job.phase}")
    drive.feed("train (one step)", progress(drive, 10))


def save(drive: Drive) -> None:
    """One periodic save, from the proposal to the index."""
    at = SAVE_EVERY_STEPS
    ranks = {node: [] for node in drive.names}  # type: dict[str, list[int]]
    for node, rank in drive.places:
        ranks[node].append(rank)
    actions = drive.feed("propose", progress(drive, at - 3))
    expect(actions, Prepare, drive.nodes)
    ballot = drive.job.ballot
    echoed = [Echoed(node=node, generation=1, ballot=ballot, ranks=tuple(some)) for node, some in ranks.items()]
    expect(drive.feed("echo and decide", echoed), Decide, drive.nodes)
    drive.feed("progress", progress(drive, at))
    staged = [
        Staged(node=node, generation=1, step=at, rank=rank, size_bytes=1 << 30, seconds=0.5)
        for node, rank in drive.places
    ]
    expect(drive.feed("stage", staged), Upload, drive.nodes)
    uploaded = [
        Uploaded(node=node, generation=1, step=at, rank=rank, size_bytes=1 << 30, seconds=5.0)
        for node, rank in drive.places
    ]
    actions = drive.feed("upload", uploaded)
    expect(actions, Commit, 1)
    committer = next(action.node for action in actions if isinstance(action, Commit))
    decided = IndexDecided(node=committer, generation=1, step=at, committed=True)
    expect(drive.feed("commit", [decided]), Settled, drive.nodes)
    if drive.job.newest_committed is None or drive.job.newest_committed.step != at:
        raise SystemExit("the save was not committed")
    drive.feed("a hundred ticks", [Tick()] * 100)


def main() -> int:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description="Seconds of supervisor CPU for one save of a large job.")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="numbers of nodes")
    parser.add_argument("--workers", type=int, default=1, help="ranks per node")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    runs = []
    for nodes in options.nodes:
        drive = Drive(nodes, options.workers)
        start(drive)
        save(drive)
        whole = sum(drive.seconds[phase] for phase in SAVE_PHASES)
        runs.append({"nodes": nodes, "ranks": nodes * options.workers, "save_seconds": whole, "phases": drive.seconds})
        if not options.json:
            print(f"{nodes} nodes x {options.workers}: {whole:.3f} s for the whole save", flush=True)
            for phase, seconds in drive.seconds.items():
                events = drive.events[phase]
                mark = "*" if phase in SAVE_PHASES else " "
                each = seconds / events * 1e6
                print(f"  {mark} {phase:<18}{events:>7} events {seconds:>9.3f} s {each:>10.1f} us each")
    if options.json:
        print(json.dumps({"benchmark": "supervisor_scale", "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a running job is doing at this instant, seen from outside: its processes, control blocks and store folder.

Reads only. Events arrive some milliseconds after what they tell, which is longer than some phases of a save last; the
control blocks in memory and the files on the store do not. Used by `tests.processes.kill_times`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from orchestrator.checkpoint.format import folder_key, index_key
from orchestrator.checkpoint.slots import ControlBlock, SlotState, WorkerPhase
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import ProtocolError

LIST_SECONDS = 0.05
"""How long a listing of control blocks is believed: they come and go with a generation only."""

GAP_SECONDS_MAX = 0.01
"""Between two looks; a moment's duration is not believed if nobody looked for longer."""


class Moment(StrEnum):
    """What a job is doing."""

    RESTARTING = "restarting"
    TRAINING = "training"
    STAGING = "staging"
    UPLOADING = "uploading"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look: what is going on, in which generation, and the lowest published step."""

    moment: Moment
    generation: int
    step: int


class Observer:
    """Looks at one job."""

    def __init__(
        self, staging: Path, store: Path, world_size: int, durations: dict[Moment, deque[float]] | None = None
    ) -> None:
        self.durations = {moment: deque[float](maxlen=25) for moment in Moment} if durations is None else durations
        """How long moments lasted that were looked at all the time, in seconds."""
        self._last = (Moment.RESTARTING, 0.0, 0.0)
        self._staging = staging
        self._store = store
        self._world_size = world_size
        self._listed_seconds = 0.0
        self._blocks: dict[Path, ControlBlock] = {}
        self._decided: set[CheckpointId] = set()

    def look(self) -> Observation:
        """The narrowest moment of any save in flight, else training, or restarting."""
        seen = self._look()
        now = time.monotonic()
        moment, since, looked = self._last
        if moment is not seen.moment:
            if now - looked < GAP_SECONDS_MAX:
                self.durations[moment].append(now - since)
            since = now
        self._last = (seen.moment, since, now)
        return seen

    def _look(self) -> Observation:
        blocks = self._newest_blocks()
        if len(blocks) < self._world_size:
            return Observation(moment=Moment.RESTARTING, generation=0, step=0)
        generation = blocks[0].generation
        step = min(block.step or 0 for block in blocks)
        started = all(block.phase not in (WorkerPhase.NOT_ATTACHED, WorkerPhase.RESTORING) for block in blocks)
        moment = self._saving(blocks, generation) if started else Moment.RESTARTING
        return Observation(moment=moment, generation=generation, step=step)

    def _newest_blocks(self) -> list[ControlBlock]:
        now = time.monotonic()
        if now - self._listed_seconds > LIST_SECONDS:
            self._listed_seconds = now
            self._list()
        newest = max((block.generation for block in self._blocks.values()), default=0)
        return [block for block in self._blocks.values() if block.generation == newest]

    def _list(self) -> None:
        there = {  # a walk passes over folders that go away meanwhile
            Path(folder, name)
            for folder, _, names in os.walk(self._staging)
            for name in names
            if name.endswith(".control")
        }
        self._blocks = {path: block for path, block in self._blocks.items() if path in there}
        for path in there - self._blocks.keys():
            with contextlib.suppress(OSError, ProtocolError):  # gone again, or not made whole yet
                self._blocks[path] = ControlBlock.open(path)

    def _saving(self, blocks: list[ControlBlock], generation: int) -> Moment:
        states: dict[int, list[SlotState]] = {}
        for block in blocks:
            for slot in block.slots():
                if slot.state is not SlotState.FREE and slot.generation == generation:
                    states.setdefault(slot.step, []).append(slot.state)
        moments = set()
        for step, found in states.items():
            checkpoint = CheckpointId(generation=generation, step=step)
            if self._is_decided(checkpoint):
                continue
            if found.count(SlotState.STAGED) < self._world_size:
                moments.add(Moment.STAGING)
            elif self._receipts(checkpoint) < self._world_size:
                moments.add(Moment.UPLOADING)
            else:
                moments.add(Moment.COMMITTING)
        order = (Moment.STAGING, Moment.COMMITTING, Moment.UPLOADING)
        return next((moment for moment in order if moment in moments), Moment.TRAINING)

    def _is_decided(self, checkpoint: CheckpointId) -> bool:
        if checkpoint not in self._decided and (self._store / index_key(checkpoint)).exists():
            self._decided.add(checkpoint)
        return checkpoint in self._decided

    def _receipts(self, checkpoint: CheckpointId) -> int:
        try:
            names = os.listdir(self._store / folder_key(checkpoint))
        except FileNotFoundError:
            return 0
        return sum(name.startswith("shard-") and name.endswith(".json") for name in names)


# ----------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The job's processes by what they are; in the order in which they were started."""

    agents: tuple[int, ...]
    workers: tuple[int, ...]
    children: Mapping[int, tuple[int, ...]]

    def below(self, pid: int) -> list[int]:
        """All descendants of a process."""
        found = list(self.children.get(pid, ()))
        for child in found:
            found.extend(self.children.get(child, ()))
        return found


def processes(supervisor: int, script: str) -> Processes:
    """What descends from a supervisor now. Workers are those that run the training script already."""
    children: dict[int, list[int]] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if stat[0] != "Z":
                children.setdefault(int(stat[1]), []).append(pid)
    agents = [pid for pid in children.get(supervisor, ()) if "orchestrator.agent" in _words(pid)]
    workers = [pid for agent in agents for pid in children.get(agent, ()) if _is_worker(pid, script)]
    return Processes(
        agents=tuple(agents),
        workers=tuple(workers),
        children={parent: tuple(found) for parent, found in children.items()},
    )


def _is_worker(pid: int, script: str) -> bool:
    words = _words(pid)
    return script in words and not any(word.endswith("exec_worker.py") for word in words)


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def staging_folder_of(agent: int, staging: Path) -> Path | None:
    """The staging folder of a node: where the control blocks that its agent has mapped are; None before it has any."""
    try:
        maps = Path(f"/proc/{agent}/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if path.startswith(str(staging)) and path.endswith(".control"):
            return Path(path).parent
    return None

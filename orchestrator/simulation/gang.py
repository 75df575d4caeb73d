"""One generation's agents and workers, coarsely: all ranks in lockstep, one worker per node, no random delays.

What it stands for: `agent.gang` and `training.boundary` of every node at once. It echoes a proposal at the first
boundary after it arrived, or refuses it if it is at its step already; waits at the proposed step for the decision;
stages, then goes on or stops; uploads one step after the other; reports each rank's part. What it leaves out: drift
between ranks, lost messages, failing workers, time-outs while waiting: tested elsewhere; here time is counted. Made and
driven by `model`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from orchestrator.core.messages import (
    CheckpointId,
    Decide,
    Echoed,
    Event,
    Mode,
    Prepare,
    Progress,
    RankAttached,
    RankExited,
    RankPlanned,
    RankProgress,
    Refused,
    Staged,
    Upload,
    Uploaded,
    Verdict,
)
from orchestrator.simulation.goodput import Ledger, Segment
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.traces import MICROSECONDS

REPORT_US = 500_000  # how often progress is told, at a boundary, while a periodic save is near
NEAR_US = 2_000_000  # how long before the periodic save's step that begins, and
NEAR_STEPS = 6  # so many steps before; the core arms a save about a second or four steps ahead
EXIT_US = 50_000  # from the order to end a worker to its confirmed exit
QUIET_US = 60_000_000  # how often progress is told at least
SLOTS = 2


class Doing(StrEnum):
    """What the gang does."""

    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting for a decision"
    STAGING = "staging"
    STOPPED = "stopped"


class World(Protocol):
    """What a gang needs of the simulation."""

    scenario: Scenario
    ledger: Ledger
    now_us: int

    def later(self, delay_us: int, work: Callable[[], None]) -> None:
        """Do something later."""

    def post(self, event: Event) -> None:
        """Send to the supervisor."""

    def lives(self, node: str) -> bool:
        """Whether a node is still there."""

    def receive(self, key: CheckpointId, rank: int, needed: frozenset[int]) -> None:
        """A receipt is on the store."""


class Gang:
    """The ranks 0 … n-1 on `nodes`, starting from `base_step`."""

    def __init__(self, world: World, generation: int, nodes: tuple[str, ...], base_step: int) -> None:
        self.world, self.generation, self.nodes = world, generation, nodes
        self.doing = Doing.STARTING
        self.why_stopped: Doing | None = None
        self.step_us = world.scenario.step_us(len(nodes))
        self.saves = 0
        self._base_us, self._base_step = world.now_us, base_step
        self._stretch = 0
        """Rises whenever training pauses or goes on: boundaries foreseen before do not count any more."""
        self._ballot, self._proposed = 0, -1
        self._decision: Decide | None = None
        self._slots: set[int] = set()
        self._wanted: set[int] = set()
        self._settled: dict[int, bool] = {}
        self._uploads_end_us = 0
        self._ending = False
        self._told: tuple[int, int] = (base_step, SLOTS)
        world.later(world.scenario.restart_us, self._attach)

    # ------------------------------------------------------------------------------------------- training

    @property
    def step(self) -> int:
        """The last completed step."""
        if self.doing is not Doing.TRAINING:
            return self._base_step
        return self._base_step + (self.world.now_us - self._base_us) // self.step_us

    def _attach(self) -> None:
        if self.doing is not Doing.STARTING:
            return
        size = self.world.scenario.shard_bytes(len(self.nodes))
        for rank, node in enumerate(self.nodes):
            where = (node, self.generation, rank)
            self.world.post(_attached(*where, self._base_step))
            self.world.post(
                RankPlanned(node=node, generation=self.generation, rank=rank, slot_bytes=size, unique_bytes=size)
            )
        self._train()
        self._at_step(self._base_step + 1, self._tell_all)

    def _train(self) -> None:
        """Train on from the present boundary."""
        self.doing = Doing.TRAINING
        self._base_us = self.world.now_us
        self._stretch += 1
        self._report_later()

    def _pause(self, doing: Doing) -> None:
        """Stop training; whole steps count, a part of one does not."""
        if self.doing is Doing.TRAINING:
            segment = Segment(
                start_us=self._base_us,
                step_us=self.step_us,
                nodes=len(self.nodes),
                first_step=self._base_step,
                steps=self.step - self._base_step,
            )
            self.world.ledger.trained(segment)
            self._base_step = self.step
        self.doing = doing
        self._stretch += 1

    def stop(self) -> None:
        """The workers are ended, or hang because one of them is gone."""
        if self.doing is not Doing.STOPPED:
            self.why_stopped = self.doing
            self._pause(Doing.STOPPED)

    def _at_step(self, step: int, work: Callable[[], None]) -> None:
        """Do something at a coming boundary of this stretch of training."""
        stretch, at_us = self._stretch, self._base_us + (step - self._base_step) * self.step_us
        self.world.later(at_us - self.world.now_us, lambda: work() if stretch == self._stretch else None)

    # ------------------------------------------------------------------------------------------- reports

    def _report_later(self) -> None:
        """Tell the next step, but leave out reports that only confirm that training goes on, which decide nothing."""
        step, every = self.step, self.world.scenario.save_every_steps
        left = every - step % every if every else 1 << 62
        far = left - NEAR_STEPS - -(-NEAR_US // self.step_us)
        self._at_step(step + max(min(far, -(-QUIET_US // self.step_us)), -(-REPORT_US // self.step_us)), self._report)

    def _report(self) -> None:
        self.tell()
        self._report_later()

    def tell(self) -> None:
        """The first rank's news, which stand for all: ranks are in lockstep."""
        news = (self.step, SLOTS - len(self._slots))
        if news != self._told and self.doing is not Doing.STARTING:
            self._told = news
            self._post_progress((0,))

    def _tell_all(self) -> None:
        self._told = (self.step, SLOTS - len(self._slots))
        self._post_progress(range(len(self.nodes)))

    def _post_progress(self, ranks: range | tuple[int, ...]) -> None:
        for rank in ranks:
            progress = RankProgress(
                rank=rank, step=self._told[0], step_seconds=self.step_us / MICROSECONDS, free_slots=self._told[1]
            )
            node = self.nodes[rank]
            if self.world.lives(node):
                self.world.post(Progress(node=node, generation=self.generation, ranks=(progress,)))

    # ------------------------------------------------------------------------------------------- agreement

    def prepare(self, action: Prepare) -> None:
        """A proposal reaches the control blocks."""
        if action.ballot <= self._ballot or self.doing in (Doing.STARTING, Doing.STOPPED):
            return
        self._ballot = action.ballot
        waited = self.doing is Doing.WAITING
        if action.step < self.step or (action.step == self.step and not waited):
            refused = Refused(
                node=self.nodes[0], generation=self.generation, ballot=action.ballot, rank=0, step=self.step
            )
            self.world.post(refused)
            return
        self._proposed = action.step
        if waited:
            self._echo(action.ballot)
            if action.step != self.step:
                self._train()
                self._at_step(action.step, self._arrive)
        elif self.doing is Doing.TRAINING:
            self._at_step(self.step + 1, lambda: self._echo(action.ballot))
            self._at_step(action.step, self._arrive)
        # while staging: read, echoed and foreseen at the boundary after it (`_staged`)

    def _echo(self, ballot: int) -> None:
        if ballot == self._ballot:
            for rank, node in enumerate(self.nodes):
                if self.world.lives(node):
                    self.world.post(Echoed(node=node, generation=self.generation, ballot=ballot, ranks=(rank,)))

    def decide(self, action: Decide) -> None:
        """A decision reaches the control blocks."""
        if action.ballot != self._ballot or self._proposed != action.step:
            return
        self._decision, self._proposed = action, -1
        if self.doing is Doing.WAITING and action.step == self.step:
            self._stage(action)

    def _arrive(self) -> None:
        """At a boundary for which a save is proposed or decided."""
        if self._decision is not None and self._decision.step == self.step:
            self._stage(self._decision)
        elif self._proposed == self.step:
            self._pause(Doing.WAITING)

    # ------------------------------------------------------------------------------------------- saving

    def _stage(self, decision: Decide) -> None:
        self._pause(Doing.STAGING)
        stretch = self._stretch
        self.world.later(
            self.world.scenario.stall_us, lambda: self._staged(decision) if stretch == self._stretch else None
        )

    def _staged(self, decision: Decide) -> None:
        self.saves += 1
        self._slots.add(decision.step)
        self._decision = None
        present = len(self.nodes) - len(decision.absent)
        seconds = self.world.scenario.stall_us / MICROSECONDS
        for rank, node in enumerate(self.nodes):
            size = 0 if rank in decision.absent else self.world.scenario.shard_bytes(present)
            self.world.post(
                Staged(
                    node=node,
                    generation=self.generation,
                    step=decision.step,
                    rank=rank,
                    size_bytes=size,
                    seconds=seconds,
                )
            )
        if decision.mode is Mode.LEAVE:
            self.stop()
            return
        self._train()
        if self._proposed > self.step:
            ballot = self._ballot
            self._at_step(self.step + 1, lambda: self._echo(ballot))
            self._at_step(self._proposed, self._arrive)

    def upload(self, action: Upload) -> None:
        """The step is complete: every rank sends its part, after what it is sending already."""
        if action.step in self._wanted:
            return
        self._wanted.add(action.step)
        self._free()
        needed = frozenset(range(len(self.nodes))) - frozenset(action.absent)
        size = self.world.scenario.shard_bytes(len(needed))
        took_us = round(size / self.world.scenario.bandwidth_bytes_per_second * MICROSECONDS)
        self._uploads_end_us = max(self._uploads_end_us, self.world.now_us) + took_us
        self.world.later(
            self._uploads_end_us - self.world.now_us, lambda: self._uploaded(action.step, needed, size, took_us)
        )

    def _uploaded(self, step: int, needed: frozenset[int], size: int, took_us: int) -> None:
        key = CheckpointId(generation=self.generation, step=step)
        for rank, node in enumerate(self.nodes):
            if self.world.lives(node):
                self.world.receive(key, rank, needed)
                self.world.post(
                    Uploaded(
                        node=node,
                        generation=self.generation,
                        step=step,
                        rank=rank,
                        size_bytes=size if rank in needed else 0,
                        seconds=took_us / MICROSECONDS,
                    )
                )

    def settle(self, step: int, *, committed: bool) -> None:
        """The step is decided for good: its slot is free once a newer one is wanted, or at once if abandoned."""
        self._settled[step] = committed
        self._free()

    def _free(self) -> None:
        for step in list(self._slots):
            if step in self._settled and (not self._settled[step] or any(step < newer for newer in self._wanted)):
                self._slots.discard(step)

    # ------------------------------------------------------------------------------------------- ends

    def end(self) -> None:
        """All workers are to be ended; each exit is confirmed."""
        self.stop()
        if not self._ending:
            self._ending = True
            self.world.later(EXIT_US, self._exited)

    def _exited(self) -> None:
        for rank, node in enumerate(self.nodes):
            if self.world.lives(node):
                self.world.post(
                    RankExited(
                        node=node,
                        generation=self.generation,
                        rank=rank,
                        exit_code=-9,
                        attached=True,
                        verdict=Verdict.NONE,
                        ended_by_us=True,
                        evidence="",
                    )
                )


def _attached(node: str, generation: int, rank: int, step: int) -> RankAttached:
    return RankAttached(
        node=node, generation=generation, rank=rank, pid=1, step=step, until=None, allowed_world_sizes=None
    )

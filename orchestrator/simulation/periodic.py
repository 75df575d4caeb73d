"""The usual way, to compare with: save periodically, restart everything from the newest checkpoint after each loss.

What it stands for: a script that saves with `torch.distributed.checkpoint` while it stands still, under a launcher that
starts the workers again on whatever nodes are there. It is elastic, knows each loss at once, and its shares of the
state are written in parallel; nothing announces a loss to it, so what it did since its newest checkpoint is lost. It is
the same work on the same nodes as in `model`, counted by the same ledger. Called by `comparison`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.simulation.goodput import Cause, Ledger, Outcome, Segment
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.traces import MICROSECONDS, Change, Trace

GROWTH_PATIENCE = (0.0, 1.0, math.inf)
"""When nodes that wait are let in, at a checkpoint: at the next one; once they have waited as many node-seconds as the
restart costs; never (only when a loss restarts everything anyway). `best_periodic` takes what comes out best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicPolicy:
    """How it saves and restarts. `interval_seconds` of training between saves (Young's, as a rule)."""

    interval_seconds: float
    stall_seconds: float
    restart_seconds: float
    growth_patience: float

    @property
    def growth(self) -> str:
        """When new nodes are let in, in words."""
        if math.isinf(self.growth_patience):
            return "new nodes join at the next loss"
        return "new nodes join at a save" + (", once they waited for a restart's cost" if self.growth_patience else "")


class _Doing(StrEnum):
    WAITING = "waiting"
    RESTARTING = "restarting"
    TRAINING = "training"
    SAVING = "saving"


def best_periodic(trace: Trace, scenario: Scenario, policy: PeriodicPolicy) -> tuple[PeriodicPolicy, Outcome]:
    """Replay with each way to let nodes in, and keep the best: the comparison is with a tuned job."""
    tried = [replace(policy, growth_patience=patience) for patience in GROWTH_PATIENCE]
    return max(((one, PeriodicReplay(trace, scenario, one).run()) for one in tried), key=lambda pair: pair[1].goodput)


class PeriodicReplay:
    """One job over one trace. `run` may be called once."""

    def __init__(self, trace: Trace, scenario: Scenario, policy: PeriodicPolicy) -> None:
        self.trace, self.scenario, self.policy = trace, scenario, policy
        self._ledger = Ledger()
        self._live: dict[str, None] = {}
        self._members: tuple[str, ...] = ()
        self._doing = _Doing.WAITING
        self._now_us = 0
        self._ends_us: int | None = None
        """When the present restart, save, or training up to the next save is over."""
        self._since_us = 0
        self._step, self._saved_step = 0, 0
        self._idle_us = 0
        """Node-microseconds that nodes have waited to join this gang."""
        self._interruptions = dict.fromkeys(("notice", "loss", "growth"), 0)
        self._restarts = -1
        self._saves = 0

    def run(self) -> Outcome:
        """Replay the whole trace."""
        changes = list(self.trace.changes)
        place = 0
        while True:
            due = changes[place].at_us if place < len(changes) else self.trace.duration_us
            if self._ends_us is not None and self._ends_us <= due and self._ends_us < self.trace.duration_us:
                self._advance(self._ends_us)
                self._go_on()
            elif due >= self.trace.duration_us:
                break
            else:
                self._advance(due)
                place = self._change_all(changes, place)
            self._book()
        self._advance(self.trace.duration_us)
        self._pause()
        return self._ledger.close(interruptions=self._interruptions, restarts=max(0, self._restarts), saves=self._saves)

    def _advance(self, now_us: int) -> None:
        if self._doing in (_Doing.TRAINING, _Doing.SAVING):
            self._idle_us += (self._available() - len(self._members)) * (now_us - self._now_us)
        self._ledger.advance(now_us)
        self._now_us = now_us

    def _available(self) -> int:
        return min(len(self._live), self.scenario.nodes_max)

    def _change_all(self, changes: list[Change], place: int) -> int:
        """All changes of this instant, then what follows from them."""
        lost_member = False
        while place < len(changes) and changes[place].at_us == self._now_us:
            change = changes[place]
            if change.appears:
                self._live[change.node] = None
            else:
                del self._live[change.node]
                lost_member |= change.node in self._members
            place += 1
        if lost_member:
            self._interruptions["loss"] += self._doing in (_Doing.TRAINING, _Doing.SAVING)
            self._restart()
        elif self._doing is _Doing.WAITING:
            self._restart()
        return place

    def _restart(self) -> None:
        """End everything; start again from the newest checkpoint on the nodes that are there, if they are enough."""
        self._pause()
        self._ledger.roll_back(self._saved_step)
        self._step, self._idle_us = self._saved_step, 0
        if self._available() < self.scenario.nodes_min:
            self._members, self._doing, self._ends_us = (), _Doing.WAITING, None
            return
        survivors = [node for node in self._members if node in self._live]
        others = [node for node in self._live if node not in survivors]
        self._members = tuple((survivors + others)[: self.scenario.nodes_max])
        self._restarts += 1
        self._doing = _Doing.RESTARTING
        self._ends_us = self._now_us + round(self.policy.restart_seconds * MICROSECONDS)

    def _pause(self) -> None:
        if self._doing is not _Doing.TRAINING:
            return
        step_us = self.scenario.step_us(len(self._members))
        steps = (self._now_us - self._since_us) // step_us
        segment = Segment(
            start_us=self._since_us, step_us=step_us, nodes=len(self._members), first_step=self._step, steps=steps
        )
        self._ledger.trained(segment)
        self._step += steps

    def _go_on(self) -> None:
        """What was waited for is over."""
        self._pause()
        if self._doing is _Doing.TRAINING:
            self._doing = _Doing.SAVING
            self._ends_us = self._now_us + round(self.policy.stall_seconds * MICROSECONDS)
            return
        if self._doing is _Doing.SAVING:
            self._saved_step = self._step
            self._saves += 1
            if self._worth_growing():
                self._interruptions["growth"] += 1
                self._restart()
                return
        self._doing, self._since_us = _Doing.TRAINING, self._now_us
        step_us = self.scenario.step_us(len(self._members))
        steps = max(1, round(self.policy.interval_seconds * MICROSECONDS / step_us))
        self._ends_us = self._now_us + steps * step_us

    def _worth_growing(self) -> bool:
        if self._available() <= len(self._members):
            return False
        cost_us = self.policy.restart_seconds * MICROSECONDS * len(self._members)
        return self._idle_us >= self.policy.growth_patience * cost_us

    def _book(self) -> None:
        available, members = self._available(), len(self._members)
        match self._doing:
            case _Doing.TRAINING | _Doing.SAVING:
                doing = Cause.USEFUL if self._doing is _Doing.TRAINING else Cause.SAVING
                self._ledger.occupy(doing, {doing: members, Cause.SPARE: available - members})
            case _Doing.RESTARTING:
                self._ledger.occupy(Cause.RESTARTING, {Cause.RESTARTING: available})
            case _Doing.WAITING:
                self._ledger.occupy(Cause.WAITING, {Cause.WAITING: available})

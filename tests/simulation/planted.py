"""Known bugs, planted one at a time into the product, to show that the simulation finds them.

Each is a function that takes a `pytest.MonkeyPatch`. Most of them are what a naive version of the protocol does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.agent.gang import LocalGang
from orchestrator.agent.saves import LocalSaves
from orchestrator.agent.uploads import Uploads
from orchestrator.agent.workers import Worker
from orchestrator.checkpoint import catalog, generations, retention, sweeping
from orchestrator.core import agreement, proposing, settling
from orchestrator.core.messages import Event, Refused
from orchestrator.core.turn import Turn
from orchestrator.storage.base import ObjectStore
from orchestrator.testing import simulated_workers
from orchestrator.testing.simulated_cluster import SimulatedCluster
from orchestrator.testing.simulated_store import SimulatedStore
from orchestrator.testing.simulated_workers import SimulatedStager
from orchestrator.training.boundary import Boundary, Finish, Order, Passing, There
from tests.simulation import disaster

Plant = Callable[[pytest.MonkeyPatch], None]


def step_without_the_echo(patch: pytest.MonkeyPatch) -> None:
    """The naive rule: the highest step plus a margin, without hearing from every rank (W6)."""
    patch.setattr(agreement, "agreed", lambda proposal, world_size: proposal.refused_by is None)


def echo_from_the_agent(patch: pytest.MonkeyPatch) -> None:
    """The agent says that the proposal has arrived; whether the worker reads it in time nobody knows."""

    def observe(self: LocalGang, worker: Worker, echoed: list[int]) -> Iterator[Event]:
        if self.record.proposed_step is not None and worker.news("echo", self.record.ballot):
            echoed.append(worker.rank)
        for event in real(self, worker, []):
            if not isinstance(event, Refused):
                yield event

    real = LocalGang._observe_agreement
    patch.setattr(LocalGang, "_observe_agreement", observe)


def slot_reused_while_it_is_read(patch: pytest.MonkeyPatch) -> None:
    """A slot becomes free as soon as its step is ordered, whoever still reads it."""
    patch.setattr(Uploads, "reading", lambda self, path: False)
    patch.setattr(LocalSaves, "may_free", lambda self, step: step in self._ordered)

    def follow(self: LocalGang, worker: Worker, index: int, step: int) -> Callable[[], tuple[int, bool]]:
        size_bytes = worker.control.slot(index).size_bytes
        return lambda: (size_bytes, True)

    patch.setattr(LocalGang, "follow", follow)


def two_attempts_in_one_generation(patch: pytest.MonkeyPatch) -> None:
    """A restart takes the number that it has, without a claim (F80, W8)."""
    real = generations.open_generation

    def open_again(
        store: ObjectStore, who: generations.Claimant, own: int | None, avoid: object, wall_seconds: float
    ) -> generations.Opened:
        if own is None:
            return real(store, who, own, (), wall_seconds)
        rolled = generations.roll_forward(store)
        chosen = catalog.survey(store).newest()
        return generations.Opened(
            generation=own, base=None if chosen is None else chosen.id, rolled_forward=rolled, skipped=()
        )

    patch.setattr(generations, "open_generation", open_again)


def committed_before_the_last_receipt(patch: pytest.MonkeyPatch) -> None:
    """The index is asked for as soon as any shard is durable (F28)."""
    patch.setattr(settling, "committable", lambda save, **_: bool(save.durable))


def swept_without_deciding_the_index(patch: pytest.MonkeyPatch) -> None:
    """A sweeper deletes what has no index, as if nobody could still write it (F72)."""

    def sweep(store: SimulatedStore) -> None:
        for checkpoint in disaster.undecided(store):
            disaster.remove(store, checkpoint)

    patch.setattr(disaster, "sweep", sweep)


def rollback_not_bounding(patch: pytest.MonkeyPatch) -> None:
    """What a person went back from is selected, and rolled forward, again."""
    for module in (catalog, generations):
        patch.setattr(module, "rollback_bound", lambda numbers, generation: float("inf"))


def base_before_roll_forward(patch: pytest.MonkeyPatch) -> None:
    """The base is chosen first; what was waiting for its index only is committed behind it."""
    patch.setattr(generations, "roll_forward", lambda store: ())


def leave_as_a_separate_word(patch: pytest.MonkeyPatch) -> None:
    """Workers hear that they are to leave apart from the step at which to save, and leave at the next boundary."""
    leaving: set[int] = set()
    start, propose, at = SimulatedCluster.__init__, proposing._propose, Boundary.at

    def start_afresh(self: SimulatedCluster, *arguments: Any, **named: Any) -> None:
        leaving.clear()
        start(self, *arguments, **named)

    def propose_and_say(turn: Turn, step: int, why: str, arithmetic: str) -> None:
        propose(turn, step, why, arithmetic)
        if turn.job.leave is not None and turn.job.gang is not None:
            leaving.add(turn.job.gang.generation)

    def at_any_step(self: Boundary, step: int, *, final: bool) -> Passing:
        passing = at(self, step, final=final)
        return Passing.LEAVE if self._launch.generation in leaving and not final else passing

    patch.setattr(SimulatedCluster, "__init__", start_afresh)
    patch.setattr(proposing, "_propose", propose_and_say)
    patch.setattr(Boundary, "at", at_any_step)


def nobody_waits_for_the_decision(patch: pytest.MonkeyPatch) -> None:
    """Workers echo, but go on at the proposed step when the decision is not there yet."""

    def keep(self: Boundary, step: int, patience_seconds: float, *, final: bool) -> Passing:
        return self._stage_now(step, final=final) if self._record.decided_step == step else Passing.GO_ON

    patch.setattr(Boundary, "_keep", keep)


def staged_when_the_copy_begins(patch: pytest.MonkeyPatch) -> None:
    """The slot is called staged at the boundary, while its bytes are copied beside the training."""

    def stage(self: SimulatedStager, order: Order, finish: Finish, there: There) -> None:
        plan = simulated_workers._plan(self._launch.rank, self._launch.world_size, order.absent)
        finish(plan.size_bytes, 0)
        real(self, order, lambda size_bytes, copy_ns: None, there)

    real = SimulatedStager.stage
    patch.setattr(SimulatedStager, "stage", stage)


def followed_beyond_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """An agent that follows the staging takes all that the slot has room for, whether it was written yet or not."""

    def follow(self: LocalGang, worker: Worker, index: int, step: int) -> Callable[[], tuple[int, bool]]:
        return lambda: (worker.slot_paths[index].stat().st_size, True)

    patch.setattr(LocalGang, "follow", follow)


def the_base_is_retired_like_any_other(patch: pytest.MonkeyPatch) -> None:
    """Retention goes by age alone: what the present generation started from may be old."""
    real = retention.choose
    patch.setattr(sweeping, "choose", lambda entries, keep, base: real(entries, keep, None))
    patch.setattr(sweeping, "_bases", lambda *_: set())


PLANTED: tuple[Plant, ...] = (
    step_without_the_echo,
    echo_from_the_agent,
    slot_reused_while_it_is_read,
    two_attempts_in_one_generation,
    committed_before_the_last_receipt,
    swept_without_deciding_the_index,
    rollback_not_bounding,
    base_before_roll_forward,
    leave_as_a_separate_word,
    nobody_waits_for_the_decision,
    staged_when_the_copy_begins,
    followed_beyond_what_is_there,
    the_base_is_retired_like_any_other,
)

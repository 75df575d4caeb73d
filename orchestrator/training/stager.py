"""Plans and stages one rank's saves, beside the training that goes on wherever that is safe. A `boundary.Stager`.

At the boundary: values, generators, and every tensor that the forward or backward pass may write. Parameters and
optimizer state are copied by a background thread, until an optimizer is about to write them, or the next boundary
comes. The first saves prove that nobody else writes them (`training.overlap`).
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mode

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.copying import Copy, Outcome
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.layout import Scope, ShardPlan, Shares, holder_sets, plan_shard
from orchestrator.checkpoint.records import collector_resting
from orchestrator.checkpoint.staging import Metadata, SlotFile
from orchestrator.errors import ProtocolError, RefusedError
from orchestrator.telemetry import reached
from orchestrator.training import rng
from orchestrator.training.boundary import Finish, Order, There
from orchestrator.training.captures import Captures
from orchestrator.training.overlap import Choice, Way, choose
from orchestrator.training.parts import Captured, Part

COPYING_THREADS_MAX = 4
"""Of one rank at a boundary: more than these few wait for memory and not for a processor."""
NOTHING_LATER: frozenset[str] = frozenset()
Gate = Callable[[int, rng.RngState], fmt.Gate]


class StateStager:
    """Copies the state of all parts into this rank's slots."""

    def __init__(self, launch: Launch, parts: Sequence[Part], gate: Gate) -> None:
        self._launch = launch
        self._gate = gate
        self._captures = Captures(parts, Shares(launch.rank, launch.world_size))
        self._slots = tuple(SlotFile(Path(path), _copying_threads(launch)) for path in launch.slot_paths)
        self._plans: dict[tuple[int, ...], ShardPlan] = {}
        self._planned_for: object = None
        self._copy: Copy | None = None
        self._hook: RemovableHandle | None = None
        self._pid = os.getpid()
        self._proofs = 0
        self._blocked: str | None = None
        self.planned = False
        self.unique_bytes = 0
        """Bytes of the shard that no other rank holds, the header's among them."""
        self.twins: tuple[tuple[int, ...], ...] = ()
        """For each part of the state that this rank has and not all have: the ranks that hold it."""

    # -- planning ----------------------------------------------------------------------------------------

    def plan(self, step: int = 0) -> int:
        """Plan the layout and reserve both slots, with room for the loss of one node; bytes of one slot.

        Raises StateError naming what cannot be saved, RefusedError if memory is short.
        """
        captured, metadata = self._capture(step)
        self.twins = holder_sets(captured.specs(), self._launch.rank, self._launch.world_size)
        plans = [self._plan_for(captured, metadata, absent) for absent in self._possible_absences()]
        size = max(plan.size_bytes for plan in plans)
        self.unique_bytes = max(plan.unique_bytes(self._launch.rank) for plan in plans)
        for slot in self._slots:
            slot.reserve(size)
            for later in (self._captures.later, NOTHING_LATER):  # overlapping, and at once
                slot.prepare(plans[0], captured.tensors, later)
        self.planned = True
        return size

    def _possible_absences(self) -> list[tuple[int, ...]]:
        """Nobody, or all ranks of one node, if this rank is not one of them.

        Nodes that take equal shares from this rank need not all be tried: the first and the last one, and of those that
        hold the same part of the state as this rank, also those with the most of its holders before and after this one.
        """
        world, local = self._launch.world_size, self._launch.local_world_size
        own, nodes = self._launch.rank // local, set[int]()
        for twins in (range(world), *self.twins):
            holders = [rank // local for rank in twins]
            for found in ([node for node in holders if node < own], [node for node in holders if node > own]):
                nodes.update((found[0], found[-1], mode(found)) if found else ())
        firsts = [node * local for node in nodes]
        return [(), *(tuple(range(first, min(first + local, world))) for first in sorted(firsts))]

    def _plan_for(self, captured: Captured, metadata: Metadata, absent: tuple[int, ...]) -> ShardPlan:
        """The layout for this set of absent ranks; planned anew only when the set of tensors has changed."""
        planned_for = (self._captures.version, len(captured.tensors))  # generators of devices may have come
        if planned_for != self._planned_for:
            self._plans.clear()
            self._proofs = 0
            self._planned_for = planned_for
        if absent not in self._plans:
            self._plans[absent] = plan_shard(
                captured.specs(),
                rank=self._launch.rank,
                world_size=self._launch.world_size,
                absent=absent,
                metadata_bytes=metadata.size_bytes(),
            )
        return self._plans[absent]

    def _capture(self, step: int) -> tuple[Captured, Metadata]:
        captured, objects = self._captures.take()
        state = rng.capture()
        prefix = f"rank.{self._launch.rank:05d}.rng."
        for name, tensor in state.tensors().items():
            captured.add_tensor(prefix + name, tensor, Scope.RANK)
        metadata = Metadata(
            values={"objects": objects},
            rank_values={"rng": state.values()},
            gate=self._gate(step, state).model_dump(),
        )
        return captured, metadata

    # -- staging -----------------------------------------------------------------------------------------

    @collector_resting()
    def stage(self, order: Order, finish: Finish, there: There) -> None:
        """Copy the state at this boundary into a slot: at once, or the most of it beside the next step.

        Raises RefusedError if memory is short for what was planned. Where it is short for the shares of several nodes
        that are absent at once, this step is given up, and training goes on.
        """
        self.join()
        self._reached("before-stage", order)
        started_ns = time.perf_counter_ns()
        captured, metadata = self._capture(order.step)
        plan = self._plan_for(captured, metadata, order.absent)
        way = self._choose(order, plan).way
        at_once_ns = 0

        def complete(outcome: Outcome) -> None:
            self._judge(outcome, order, proved=way is Way.PROVE)
            self._reached("after-stage", order)
            size_bytes = None if outcome.damage else plan.size_bytes
            finish(size_bytes, at_once_ns + int(outcome.seconds * 1e9))

        later = NOTHING_LATER if way is Way.BLOCKING else self._captures.later

        def begin() -> Copy:
            return self._slots[order.slot].begin(
                plan,
                captured.tensors,
                metadata,
                later,
                complete,
                prove=way is Way.PROVE,
                before_piece=lambda: self._reached("while-staging", order),
                there=there,
            )

        try:
            try:
                copy = begin()
            except ProtocolError:  # the values outgrew the header's reserved room
                self._plans.clear()
                plan = self._plan_for(captured, metadata, order.absent)
                copy = begin()
        except RefusedError as error:
            if not order.absent:
                raise
            _say(f"step {order.step} is not saved: more ranks are absent than room was reserved for: {error}")
            finish(None, time.perf_counter_ns() - started_ns)
            return
        at_once_ns = time.perf_counter_ns() - started_ns
        if way is Way.BLOCKING:
            copy.join()
        else:
            self._hook = register_optimizer_step_pre_hook(self._before_optimizer_step)
            atexit.register(self.join)  # the script may end without another boundary
            self._copy = copy
            copy.start()

    def join(self) -> None:
        """Complete the copy that is under way, if there is one."""
        if self._copy is None:
            return
        self._copy.join()
        self._copy = None
        atexit.unregister(self.join)
        if self._hook is not None:
            self._hook.remove()

    def _before_optimizer_step(self, *_: object) -> None:
        """An optimizer, any, is about to write; a process forked off this one has no part in the copy."""
        if self._copy is not None and os.getpid() == self._pid:
            self._copy.join()

    def _choose(self, order: Order, plan: ShardPlan) -> Choice:
        later = self._captures.later
        choice = choose(
            self._captures.owners,
            proofs=self._proofs,
            damage=self._blocked,
            goes_on=order.may_overlap,
            copied_later=any(chunk.spec.name in later and chunk.start != chunk.stop for chunk in plan.chunks),
        )
        if choice.lasts and self._blocked is None:
            self._blocked = choice.reason
            if self._launch.rank == 0:  # the others find the same
                _say(f"the script waits while its state is staged: {choice.reason}")
        return choice

    def _judge(self, outcome: Outcome, order: Order, *, proved: bool) -> None:
        """Called once for each copy, by the thread that completed it."""
        if outcome.damage is None:
            self._proofs += proved
            return
        self._blocked = outcome.damage
        of = f"rank {self._launch.rank}: " if self._launch.world_size > 1 else ""
        _say(
            f"{of}{outcome.damage}; step {order.step} is not saved, and from now on the script waits while it is staged"
        )

    def _reached(self, point: str, order: Order) -> None:
        reached(point, rank=self._launch.rank, step=order.step)


def _copying_threads(launch: Launch) -> int:
    """This rank's part of the processors: all ranks of a node stage at the same time."""
    share = len(os.sched_getaffinity(0)) // launch.local_world_size
    return min(max(share, 1), COPYING_THREADS_MAX)


def _say(text: str) -> None:
    """One line for the person."""
    sys.stderr.write(f"orchestrator: {text}\n")

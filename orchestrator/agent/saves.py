"""What a node knows of its generation's decided steps: decided, ordered to upload, uploaded, settled. No I/O.

`agent.node` keeps one for each gang. It is what a supervisor that was started again learns from the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.messages import Decide, Settled, StepDecided, Upload, Uploaded


class LocalSaves:
    """Decided steps of one generation on one node."""

    def __init__(self, generation: int = 0, world_size: int = 0) -> None:
        self._generation = generation
        self._world_size = world_size
        self._decided: dict[int, Decide] = {}
        self._ordered: dict[int, Upload] = {}
        self._alone: dict[int, Upload] = {}
        self._uploaded: dict[tuple[int, int], Uploaded] = {}
        self._settled: dict[int, bool] = {}
        self.committed_step: int | None = None
        """The newest step that this node knows as committed."""

    def decide(self, action: Decide) -> None:
        """The supervisor has decided a step."""
        self._decided[action.step] = action
        self._forget_settled()

    def order(self, action: Upload) -> None:
        """The supervisor has said that a step is complete and shall be uploaded."""
        self._ordered[action.step] = action

    def orders_alone(self, node: str) -> list[Upload]:
        """Without a supervisor: every decided step that is not settled. Whether it is complete, the receipts tell."""
        for step, decision in self._decided.items():
            if step not in self._ordered and step not in self._settled:
                self._alone[step] = Upload(
                    node=node,
                    generation=self._generation,
                    step=step,
                    world_size=self._world_size,
                    absent=decision.absent,
                )
        orders = {**self._alone, **self._ordered}
        return [order for step, order in sorted(orders.items()) if step not in self._settled]

    def order_of(self, step: int) -> Upload | None:
        """The order to upload a step, whoever gave it."""
        return self._ordered.get(step) or self._alone.get(step)

    def uploaded(self, event: Uploaded) -> None:
        """A rank's shard and receipt are durable."""
        self._uploaded[event.step, event.rank] = event

    def upload_of(self, step: int, rank: int) -> Uploaded | None:
        """The news that this rank's shard is durable, if it is."""
        return self._uploaded.get((step, rank))

    def settle(self, action: Settled) -> None:
        """The step's index is decided."""
        self._settled[action.step] = action.committed
        if action.committed:
            self.committed_step = max(action.step, self.committed_step or 0)

    def is_settled(self, step: int) -> bool:
        """Whether the step's index is decided, one way or the other."""
        return step in self._settled

    def may_free(self, step: int) -> bool:
        """A settled step's slot is free once a newer step is complete, or at once if it was abandoned."""
        if step not in self._settled:
            return False
        newest_complete = max((*self._ordered, self.committed_step or 0))
        return not self._settled[step] or step < newest_complete

    def undecided(self, staged: Mapping[int, tuple[int, ...]]) -> tuple[StepDecided, ...]:
        """Decided steps whose index is not known; `staged` gives this node's ranks that hold each step."""
        return tuple(
            StepDecided(step=step, mode=action.mode, absent=action.absent, staged=staged.get(step, ()))
            for step, action in sorted(self._decided.items())
            if step not in self._settled
        )

    def _forget_settled(self) -> None:
        """A settled step is neither uploaded nor told of again; how it was settled still says when its slot is free."""
        for step in [step for step in self._decided if step in self._settled]:
            del self._decided[step]
            self._ordered.pop(step, None)
            self._alone.pop(step, None)

"""One step in the making: what the handlers change and ask for. Lives for one call of `core.job.step`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.core.commit import Save
from orchestrator.core.messages import Action, Mode, Note, Scalar
from orchestrator.core.ranks import NOBODY, RankSet
from orchestrator.core.states import TRANSITIONS, Job, Node, Phase, Trigger


class Turn:
    """One step in the making: the next job value, and the actions so far."""

    def __init__(self, job: Job, now_seconds: float) -> None:
        self.job = job
        self.now = now_seconds
        self.actions: list[Action] = []

    def set(self, **changes: Any) -> None:
        """Change fields of the job."""
        self.job = self.job.changed(**changes)

    def do(self, *actions: Action) -> None:
        """Ask for actions, in order."""
        self.actions.extend(actions)

    def note(self, kind: str, reason: str, **where: Any) -> None:
        """Record an event; `where` takes node, step, rank, generation and facts."""
        where.setdefault("generation", self.job.gang.generation if self.job.gang else self.job.own)
        self.do(Note(kind=kind, reason=reason, **where))

    def facts(self, **facts: Scalar) -> dict[str, Scalar]:
        """Numbers to go with a note."""
        return facts

    def go(self, trigger: Trigger) -> None:
        """Move along the transition table; a trigger that the table does not have is a bug."""
        target = TRANSITIONS[self.job.phase].get(trigger)
        assert target is not None, f"no transition from {self.job.phase} on {trigger}"
        job = self.job
        if job.phase is Phase.RUNNING:
            trained_seconds = self.now - max(job.since_seconds, job.committed_at_seconds or 0.0)
            self.set(uncommitted_seconds=job.uncommitted_seconds + trained_seconds)
        self.set(phase=target, since_seconds=self.now)

    def commit_is_new(self) -> None:
        """A newer checkpoint is committed: whatever was counted since the last one begins anew."""
        if self.job.overdue:
            self.note("commit caught up", "a checkpoint is committed again")
        self.set(
            failures=0,
            attempts=(),
            fruitless=0,
            barren=0,
            failed_saves=0,
            save_not_before_seconds=0.0,
            trouble=None,
            overdue=False,
            uncommitted_seconds=0.0,
        )

    def set_node(self, name: str, **changes: Any) -> None:
        """Change what is known of one node."""
        self._put_node(replace(self.job.nodes[name], **changes))

    def add_node(self, name: str, objects_url: str) -> None:
        """A node is there."""
        self._put_node(Node(name=name, objects_url=objects_url, joined_at_seconds=self.now))

    def _put_node(self, node: Node) -> None:
        job = self.job
        going = _with(job.going, node.name, node.going)
        hinted = _with(job.hinted, node.name, bool(node.hints))
        condemned = _with(job.condemned, node.name, bool(node.condemned))
        self.set(nodes={**job.nodes, node.name: node}, going=going, hinted=hinted, condemned=condemned)

    def remove_node(self, name: str) -> None:
        """A node does not exist for the job any more."""
        job, gone = self.job, {name}
        rest = {key: value for key, value in job.nodes.items() if key != name}
        self.set(nodes=rest, going=job.going - gone, hinted=job.hinted - gone, condemned=job.condemned - gone)

    def lose_member(self, name: str) -> None:
        """A node of the gang is gone, with its ranks and its memory."""
        job = self.job
        assert job.gang is not None
        gone = job.gone_ranks | RankSet.of(job.gang.ranks_of(name))
        self.set(lost_in_gang=(*job.lost_in_gang, name), gone_ranks=gone)

    def leaving_save(self) -> Save | None:
        """The decided step at which all workers leave, while it is not settled."""
        return next((save for save in self.job.saves.values() if save.mode is Mode.LEAVE), None)

    def set_save(self, save: Save) -> None:
        """Store the new value of one decided step."""
        self.set(saves={**self.job.saves, save.id: save})

    def drop_save(self, save: Save) -> None:
        """Forget a settled step."""
        self.set(saves={key: value for key, value in self.job.saves.items() if key != save.id})

    def going_members(self) -> list[str]:
        """The gang's nodes that a notice has named and that are still there, in the order in which they joined."""
        gang, going = self.job.gang, self.job.going
        if gang is None or not going:
            return []
        return [name for name in self.job.nodes if name in going and name in gang]

    def going_ranks(self) -> RankSet:
        """The ranks on those nodes."""
        return self.ranks_on(self.job.going)

    def ranks_on(self, nodes: frozenset[str]) -> RankSet:
        """The gang's ranks on these nodes."""
        gang = self.job.gang
        return NOBODY if gang is None else RankSet.of(rank for name in nodes for rank in gang.ranks_of(name))

    def gang_nodes(self) -> list[str]:
        """The gang's nodes that are still there."""
        gang = self.job.gang
        return [] if gang is None else [node for node in gang.nodes if node in self.job.nodes]

    def is_present(self, generation: int) -> bool:
        """Whether a message belongs to the present generation; every other is ignored."""
        return self.job.gang is not None and self.job.gang.generation == generation


def _with(names: frozenset[str], name: str, there: bool) -> frozenset[str]:
    if there is (name in names):
        return names
    return names | {name} if there else names - {name}

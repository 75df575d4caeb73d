"""Replays a trace against the real `core.job.step`: supervisor, scheduler and store around a simulated gang.

What is real: every decision (when to save, to leave, to grow, whom to form with, what to wait for). What is simulated,
coarsely and without chance: nodes that come and go as the trace says, the gang (`gang`), the store's answers, messages
that take a fixed time. Called by `comparison`. Time is counted in whole microseconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.job import JobSpec, Phase, new_job, step
from orchestrator.core.messages import (
    Abandon,
    Action,
    CheckpointId,
    Commit,
    Decide,
    EndRecorded,
    EndWorkers,
    Event,
    Finish,
    GenerationOpened,
    IndexDecided,
    LaunchWorkers,
    NodeJoined,
    NodeLost,
    Note,
    NoticeKind,
    NoticeReceived,
    OpenGeneration,
    Prepare,
    RecordEnd,
    ReleaseNode,
    RequestNodes,
    Settled,
    Tick,
    Upload,
)
from orchestrator.simulation.gang import Doing, Gang
from orchestrator.simulation.goodput import Cause, Ledger, Outcome
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.traces import MICROSECONDS, Change, Trace, removal_times

MESSAGE_US = 20_000  # between supervisor and agent, each way
OPEN_US = 200_000  # claim, roll forward, base
INDEX_US = 100_000  # read the receipts back, write the index
LOSS_SEEN_US = 1_000_000  # from a node's end to the scheduler's being certain of it
TICK_US = 100_000
TICK_QUIET_US = 5_000_000  # while nothing waits for a time to pass
PROGRESS_EVERY = 5_000  # events between two calls of `on_progress`


class Standing(StrEnum):
    """Where a node of the trace stands with the job."""

    FREE = "free"
    COMING = "coming"
    HELD = "held"
    GIVEN_BACK = "given back"
    """It was announced to go and given back: the scheduler does not give it again."""


@dataclass(kw_only=True, eq=False)
class TraceNode:
    """A node that is there."""

    name: str
    goes_at_us: int | None
    standing: Standing = Standing.FREE
    announced: bool = False


class Replay:
    """One job over one trace. `run` may be called once."""

    def __init__(self, trace: Trace, scenario: Scenario) -> None:
        self.trace, self.scenario = trace, scenario
        self.now_us = 0
        self.ledger = Ledger()
        self.nodes: dict[str, TraceNode] = {}
        self.gang: Gang | None = None
        spec = JobSpec(
            name="replay",
            nodes_min=scenario.nodes_min,
            nodes_max=scenario.nodes_max,
            workers_per_node=1,
            save_every_steps=scenario.save_every_steps,
            sweep_seconds=math.inf,  # costs no training time
            hang_seconds=0.0,  # traces know no hangs
        )
        self.job = new_job(spec, 0.0)
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._outstanding = 0
        self._announced = 0
        self._generation = 0
        self._newest: CheckpointId | None = None
        self._receipts: dict[CheckpointId, set[int]] = {}
        self._needed: dict[CheckpointId, frozenset[int]] = {}
        self._decided: dict[CheckpointId, bool] = {}
        self._finish: Finish | None = None
        self._interruptions = dict.fromkeys(("notice", "loss", "growth"), 0)
        self._saves = 0
        self._booked: object = None
        self._tick_us = -1

    # ------------------------------------------------------------------------------------------- time

    def run(self, on_progress: Callable[[float], None] = lambda _: None) -> Outcome:
        """Replay the whole trace. `on_progress` is told now and then which share of it is done."""
        gone_at = removal_times(self.trace.changes)
        for index, change in enumerate(self.trace.changes):
            self.later(change.at_us, self._change(change, gone_at.get(index)))
        self._perform_all(Tick())
        self._tick_later()
        while self._queue and self._queue[0][0] < self.trace.duration_us:
            at_us, _, work = heapq.heappop(self._queue)
            self.ledger.advance(at_us)
            self.now_us = at_us
            work()
            self._book()
            if self._count % PROGRESS_EVERY == 0:
                on_progress(at_us / self.trace.duration_us)
        self.ledger.advance(self.trace.duration_us)
        self.now_us = self.trace.duration_us
        if self.gang is not None:
            self.gang.stop()
            self._saves += self.gang.saves
        return self.ledger.close(
            interruptions=self._interruptions,
            restarts=max(0, self._generation - 1),
            saves=self._saves,
            stopped=self._finish.reason if self._finish is not None else None,
        )

    def later(self, delay_us: int, work: Callable[[], None]) -> None:
        """Do something later; what is due at one time is done in the order in which it was asked for."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_us + delay_us, self._count, work))

    def _tick(self, due_us: int) -> None:
        """Let the supervisor look at its clock, unless an earlier look was found to be needed meanwhile."""
        if due_us == self._tick_us:
            self._tick_us = -1
            if self.gang is not None and self._waits():
                self.gang.tell()  # it leaves out reports that decide nothing, but now they do
            self._submit(Tick())
            self._tick_later()

    def _tick_later(self) -> None:
        """See to it that the supervisor's clock ticks soon enough for what it waits for."""
        phase, available = self.job.phase, len(self.job.available)
        quiet = phase in (Phase.STARTING, Phase.OPENING) or (phase is Phase.RUNNING and not self._waits())
        short = phase is Phase.GATHERING and available < self.scenario.nodes_min
        due_us = self.now_us + (TICK_QUIET_US if quiet or short else TICK_US)
        if not self.now_us <= self._tick_us <= due_us:
            self._tick_us = due_us
            self.later(due_us - self.now_us, lambda: self._tick(due_us))

    def _waits(self) -> bool:
        """Whether the supervisor waits for a time to come while the gang trains: to leave later, or to let nodes in."""
        job = self.job
        usable = min(len(job.available), self.scenario.nodes_max)
        return job.leave is not None or (job.gang is not None and usable > len(job.gang.nodes))

    def _book(self) -> None:
        """Say what every node that is there is doing."""
        live, gang = len(self.nodes), self.gang
        seen = (live, self._announced, self._finish, gang, gang.doing if gang is not None else None)
        if seen == self._booked:
            return
        self._booked = seen
        available = min(live, self.scenario.nodes_max)
        if gang is not None and gang.doing in (Doing.TRAINING, Doing.WAITING, Doing.STAGING):
            members = len(gang.nodes)
            doing = Cause.USEFUL if gang.doing is Doing.TRAINING else Cause.SAVING
            members_announced = sum(self.nodes[name].announced for name in gang.nodes) if self._announced else 0
            announced = min(self._announced - members_announced, available - members)
            rest = {Cause.ANNOUNCED: announced, Cause.SPARE: available - members - announced}
            self.ledger.occupy(doing, {doing: members, **rest})
            return
        usable = min(live - self._announced, available)
        enough = usable >= self.scenario.nodes_min and self._finish is None
        doing = Cause.RESTARTING if enough else Cause.WAITING
        self.ledger.occupy(doing, {doing: usable, Cause.ANNOUNCED: available - usable})

    # ------------------------------------------------------------------------------------------- supervisor

    def post(self, event: Event) -> None:
        """From an agent to the supervisor."""
        self.later(MESSAGE_US, lambda: self._submit(event))

    def _submit(self, event: Event) -> None:
        if self._finish is None:
            self._perform_all(event)

    def _outside(self, event: Event) -> None:
        """What the gang did not bring about: by then the supervisor knows the time, and how far the gang is."""
        if self.gang is not None:
            self.gang.tell()
        self.post(Tick())
        self.post(event)

    def _perform_all(self, event: Event) -> None:
        """Feed the real core; perform what it answers."""
        self.job, actions = step(self.job, event, self.now_us / MICROSECONDS)
        for action in actions:
            self._perform(action)
        self._tick_later()

    def _perform(self, action: Action) -> None:
        match action:
            case RequestNodes():
                self._outstanding += action.count
                self._hand_out()
            case ReleaseNode():
                self._take_back(action.node)
            case Finish():
                self._finish = action
                if self.gang is not None:
                    self.gang.stop()
            case Note():
                self._count_interruption(action)
            case _:
                self.later(MESSAGE_US, lambda: self._act(action))

    def _count_interruption(self, note: Note) -> None:
        """Count the end of a gang that trained, by why it ended."""
        trained = self.gang is not None and Doing.STARTING not in (self.gang.doing, self.gang.why_stopped)
        if note.kind == "gang broken" and trained:
            self._interruptions["loss"] += 1
        elif note.kind == "left":
            going = any(self.job.nodes[name].going for name in self.job.nodes)
            self._interruptions["notice" if going else "growth"] += 1

    # ------------------------------------------------------------------------------------------- scheduler

    def _change(self, change: Change, goes_at_us: int | None) -> Callable[[], None]:
        if change.appears:
            return lambda: self._appear(TraceNode(name=change.node, goes_at_us=goes_at_us))
        return lambda: self._lose(change.node)

    def _appear(self, node: TraceNode) -> None:
        self.nodes[node.name] = node
        if node.goes_at_us is not None and self.scenario.notice_us:
            self.later(max(0, node.goes_at_us - self.scenario.notice_us - self.now_us), lambda: self._announce(node))
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the job the nodes that it asked for, as far as there are any."""
        for node in self.nodes.values() if self._outstanding else ():
            if self._outstanding and node.standing is Standing.FREE and not node.announced:
                self._outstanding -= 1
                node.standing = Standing.COMING
                self.later(self.scenario.replacement_us, lambda node=node: self._join(node))  # type: ignore[misc]

    def _join(self, node: TraceNode) -> None:
        if not self.lives_as(node):
            return
        node.standing = Standing.HELD
        self._outside(NodeJoined(node=node.name, workers=1))
        if node.announced:
            self._give_notice(node)

    def lives_as(self, node: TraceNode) -> bool:
        """Whether this very node is still there (a later one may have its name)."""
        return self.nodes.get(node.name) is node

    def lives(self, node: str) -> bool:
        """Whether a node is there and the job's."""
        found = self.nodes.get(node)
        return found is not None and found.standing is Standing.HELD

    def _announce(self, node: TraceNode) -> None:
        if self.lives_as(node):
            node.announced = True
            self._announced += 1
            if node.standing is Standing.HELD:
                self._give_notice(node)

    def _give_notice(self, node: TraceNode) -> None:
        assert node.goes_at_us is not None
        notice = NoticeReceived(
            node=node.name,
            source="trace",
            kind=NoticeKind.PREEMPT,
            remaining_seconds=(node.goes_at_us - self.now_us - MESSAGE_US) / MICROSECONDS,
            notice_id=f"{node.name} {node.goes_at_us}",
        )
        self._outside(notice)

    def _lose(self, name: str) -> None:
        node = self.nodes.pop(name)
        self._announced -= node.announced
        if self.gang is not None and node.standing is Standing.HELD and name in self.gang.nodes:
            self.gang.stop()
        if node.standing in (Standing.HELD, Standing.COMING):
            self.later(LOSS_SEEN_US, lambda: self._submit(NodeLost(node=name, reason="reclaimed")))

    def _take_back(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is not None and node.standing is Standing.HELD:
            node.standing = Standing.GIVEN_BACK if node.announced else Standing.FREE
            self._hand_out()

    # ------------------------------------------------------------------------------------------- agents

    def _act(self, action: Action) -> None:
        """An action reaches its agent. What concerns a gang is done once for all of its nodes."""
        gang = self.gang
        node = str(getattr(action, "node", ""))
        if not self.lives(node):
            return
        match action:
            case OpenGeneration():
                self.later(OPEN_US, lambda: self._open(action))
            case LaunchWorkers():
                self._launch(action)
            case Commit() | Abandon():
                self.later(INDEX_US, lambda: self._write_index(action))
            case RecordEnd():
                self.post(EndRecorded(node=node))
            case Prepare() | Decide() | EndWorkers() | Upload() | Settled():
                if gang is not None and gang.generation == action.generation:
                    _act_on_gang(gang, action)
            case _:
                raise AssertionError(f"nobody performs {action}")

    def _launch(self, action: LaunchWorkers) -> None:
        """All nodes of a generation start with the first one's word; its base is where they go on."""
        if self.gang is not None and self.gang.generation >= action.generation:
            return
        assert self.job.gang is not None
        if self.job.gang.generation != action.generation:
            return
        if self.gang is not None:
            self._saves += self.gang.saves
        base = action.base.step if action.base else 0
        self.ledger.roll_back(base)
        self.gang = Gang(self, action.generation, self.job.gang.nodes, base)
        if not all(self.lives(name) for name in self.gang.nodes):
            self.gang.stop()

    # ------------------------------------------------------------------------------------------- store

    def _open(self, action: OpenGeneration) -> None:
        if not self.lives(action.node):
            return
        self._generation += 1
        undecided = [key for key in self._receipts if key not in self._decided and self._whole(key)]
        for key in undecided:
            self._decide(key, committed=True)
        opened = GenerationOpened(
            node=action.node,
            generation=self._generation,
            base=self._newest,
            meeting_address="simulated",
            meeting_port=1,
            rolled_forward=len(undecided),
            after=action.own or 0,
        )
        self.post(opened)

    def _whole(self, key: CheckpointId) -> bool:
        return self._needed[key] <= self._receipts[key]

    def receive(self, key: CheckpointId, rank: int, needed: frozenset[int]) -> None:
        """A receipt is on the store; `needed` are the ranks without which nothing can be committed."""
        self._needed[key] = needed
        self._receipts.setdefault(key, set()).add(rank)

    def _write_index(self, action: Commit | Abandon) -> None:
        if not self.lives(action.node):
            return
        key = CheckpointId(generation=action.generation, step=action.step)
        committed = self._decide(key, committed=isinstance(action, Commit))
        self.post(IndexDecided(node=action.node, generation=action.generation, step=action.step, committed=committed))

    def _decide(self, key: CheckpointId, *, committed: bool) -> bool:
        """The index is written once; what stands there afterwards."""
        if key not in self._decided:
            assert not committed or self._whole(key), f"{key} would be committed without all receipts"
            self._decided[key] = committed
            if committed:
                self._newest = key if self._newest is None else max(self._newest, key)
            self._receipts.pop(key, None)
        return self._decided[key]


def _act_on_gang(gang: Gang, action: Prepare | Decide | EndWorkers | Upload | Settled) -> None:
    match action:
        case Prepare():
            gang.prepare(action)
        case Decide():
            gang.decide(action)
        case EndWorkers():
            gang.end()
        case Upload():
            gang.upload(action)
        case Settled():
            gang.settle(action.step, committed=action.committed)

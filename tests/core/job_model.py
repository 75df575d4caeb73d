"""A model of a whole job around the real `core.job.step`: agents, workers, scheduler and store, in simulated time.

Workers keep to the rules of `training.boundary` (read, echo, publish, wait at the proposed step, stage, pass), agents
to those of `agent.gang` and `agent.node` (lower ballots refused, step read before echo, refusal at or past the step).
What is random: every delay, how far free-running ranks drift apart, and the faults. What is checked, all along: a
decided step has not been passed by any rank; a commit is asked for only when every required receipt is there;
committed shards all hold the same step; bases are committed; generation numbers are used once; a generation starts
only when no older worker lives. Used by `test_job_model` only.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

from orchestrator.checkpoint.slots import Record
from orchestrator.core.job import JobSpec, new_job, step
from orchestrator.core.messages import (
    Abandon,
    Action,
    CheckpointId,
    Commit,
    Decide,
    Echoed,
    EndRecorded,
    EndWorkers,
    Event,
    Finish,
    GenerationOpened,
    GenerationRefused,
    HandedOver,
    HandOver,
    IndexDecided,
    IndexFailed,
    LaunchWorkers,
    Mode,
    NodeJoined,
    NodeLost,
    Note,
    NoticeKind,
    NoticeReceived,
    OpenGeneration,
    Passed,
    Prepare,
    Progress,
    RankAttached,
    RankExited,
    RankPlanned,
    RankProgress,
    RecordEnd,
    Refusal,
    Refused,
    ReleaseNode,
    Request,
    Requested,
    RequestNodes,
    SaveAsked,
    Settled,
    Staged,
    Tick,
    Upload,
    Uploaded,
    UploadFailed,
    Verdict,
)

FINAL_WAIT_SECONDS = 60.0
SLOT_BYTES = 100
SLOT_WAIT_SECONDS = 5.0
TICK_SECONDS = 0.5
LIMIT_SECONDS = 400.0
FAULTS_UNTIL_SECONDS = 15.0


class Violation(AssertionError):
    """A rule of the protocol was broken."""


@dataclass(kw_only=True)
class Slot:
    """One slot of one rank: which step it holds."""

    step: int | None = None
    staged: bool = False
    reading: bool = False


@dataclass(kw_only=True, eq=False)
class Worker:
    """One rank's process and its control block."""

    rank: int
    generation: int
    step: int
    duration: float
    record: Record = field(default_factory=Record)
    attached: bool = False
    published: int | None = None
    echo: int = 0
    passed: int | None = None
    past: int = -1
    """The highest boundary that it has left."""
    at: int = -1
    """The highest boundary that it has reached."""
    slots: tuple[Slot, Slot] = field(default_factory=lambda: (Slot(), Slot()))
    staged: set[int] = field(default_factory=set)
    dead: bool = False
    code: int | None = None
    ended_by_us: bool = False
    finished: bool = False
    reported: dict[str, int] = field(default_factory=dict)

    def news(self, what: str, value: int) -> bool:
        """True if the value differs from the one reported before."""
        if self.reported.get(what) == value:
            return False
        self.reported[what] = value
        return True


@dataclass(kw_only=True, eq=False)
class Agent:
    """One node."""

    name: str
    alive: bool = True
    given_up: bool = False
    """The scheduler has reported it lost."""
    generation: int = 0
    record: Record = field(default_factory=Record)
    refused_ballot: int = 0
    workers: list[Worker] = field(default_factory=list)
    wanted: dict[int, Upload] = field(default_factory=dict)
    settled: dict[int, bool] = field(default_factory=dict)
    looking: bool = False
    delivered: float = 0.0
    sent: float = 0.0


@dataclass(kw_only=True)
class Store:
    """Create-if-absent, as the real one."""

    generations: dict[int, str] = field(default_factory=dict)
    bases: dict[int, CheckpointId | None] = field(default_factory=dict)
    receipts: dict[CheckpointId, dict[int, tuple[int, frozenset[int], int]]] = field(default_factory=dict)
    """checkpoint → rank → (world size, absent ranks, step that the shard really holds)"""
    indexes: dict[CheckpointId, bool] = field(default_factory=dict)

    def missing(self, key: CheckpointId) -> frozenset[int]:
        """Ranks whose receipt is needed and not there."""
        receipts = self.receipts.get(key, {})
        if not receipts:
            return frozenset({0})
        world_size, absent, _ = next(iter(receipts.values()))
        return frozenset(range(world_size)) - absent - receipts.keys()

    def decide(self, key: CheckpointId, committed: bool) -> bool:
        """Create the index; what stands there afterwards."""
        if key not in self.indexes:
            if committed:
                held = {step for _, _, step in self.receipts[key].values()}
                if held != {key.step} or self.missing(key):
                    raise Violation(f"{key} committed with shards of steps {held}, missing {self.missing(key)}")
            self.indexes[key] = committed
        return self.indexes[key]

    def open(self, own: int | None, avoid: tuple[CheckpointId, ...]) -> tuple[int, CheckpointId | None, int]:
        """Claim, roll forward, choose the base."""
        number = (max(self.generations, default=0) if own is None else own) + 1
        while number in self.generations:
            number += 1
        self.generations[number] = "claimed"
        undecided = [key for key in self.receipts if key not in self.indexes and not self.missing(key)]
        for key in undecided:
            self.decide(key, True)
        base = max((key for key, committed in self.indexes.items() if committed and key not in avoid), default=None)
        self.bases[number] = base
        return number, base, len(undecided)


@dataclass(kw_only=True)
class Result:
    """How a run ended."""

    exit_code: int
    seconds: float
    until: int
    newest: CheckpointId | None
    store_faults: int
    generations: int
    commits: int


Waiting = Generator[float, None, None]


class Model:
    """One job, one seed."""

    def __init__(self, seed: int, ending: Request | None = None, *, short_of_time: bool = False) -> None:
        """`short_of_time`: uploads that take longer than most notices leave, and nothing but notices as faults."""
        self.seed, self.ending, self.short_of_time = seed, ending, short_of_time
        self.random = random.Random(seed)
        draw = self.random
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.until = draw.randint(15, 40)
        self.synchronous = draw.random() < 0.5
        self.spec = JobSpec(
            name="model",
            nodes_min=1,
            nodes_max=draw.randint(1, 3),
            workers_per_node=draw.randint(1, 2),
            save_every_steps=draw.choice([4, 7, 1000]),
            failures_max=1000,
            gather_seconds=3.0,
            reform_seconds=1.0,
            open_seconds=5.0,
            exit_seconds=3.0,
            leave_seconds=5.0,
            upload_seconds=20.0,
            store_retry_seconds=1.0,
        )
        self.step_seconds = draw.choice([0.02, 0.1, 0.4])
        self.unique_bytes = draw.choice([1, SLOT_BYTES])
        self.upload_seconds = [0.05, 0.2, 0.5, 3.0]
        self.delay_seconds = draw.choice([0.005, 0.05, 0.2])
        self.decision_wait_seconds = (
            draw.choice([0.2, 1.0]) + 4 * self.delay_seconds if self.synchronous else draw.choice([0.5, 10.0])
        )
        self.job = new_job(self.spec, 0.0)
        self.store = Store()
        self.agents: dict[str, Agent] = {}
        self.names = 0
        self.launched: set[int] = set()
        self.decided: dict[CheckpointId, tuple[int, frozenset[int]]] = {}
        self.finish: Finish | None = None
        self.faults_left = draw.randint(0, 6)
        self.store_faults = 0
        self.handed_over = 0
        self.trace: list[tuple[float, object]] = []
        if short_of_time:
            self.spec = replace(self.spec, nodes_max=draw.randint(2, 3), save_every_steps=7)
            self.job = new_job(self.spec, 0.0)
            self.until, self.step_seconds, self.faults_left = 60, 0.1, 4
            self.unique_bytes, self.upload_seconds = SLOT_BYTES, [1.5, 2.5]

    # -- simulated time ----------------------------------------------------------------------------------

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Do something later."""
        self.count += 1
        heapq.heappush(self.queue, (self.now + seconds, self.count, work))

    def delay(self, scale: float = 1.0) -> float:
        """A random delay with a long tail."""
        return self.delay_seconds * scale * self.random.choice([0.1, 0.5, 1.0, 1.0, 3.0])

    def run(self) -> Result:
        """Until the job ends; Violation if it does not in time."""
        self.submit(Tick())
        self.later(TICK_SECONDS, self.tick)
        for _ in range(self.faults_left):
            self.later(self.random.uniform(0.5, FAULTS_UNTIL_SECONDS), self.fault)
        if self.ending is not None:
            request = Requested(request=self.ending, by="model")
            self.later(self.random.uniform(0.0, 12.0), lambda: self.submit(request))
        while self.finish is None:
            if not self.queue or self.now > LIMIT_SECONDS:
                raise Violation(f"still {self.job.phase} after {self.now:.0f} s: {self.job.saves}")
            self.now, _, work = heapq.heappop(self.queue)
            work()
        newest = max((key for key, committed in self.store.indexes.items() if committed), default=None)
        return Result(
            exit_code=self.finish.exit_code,
            seconds=self.now,
            until=self.until,
            newest=newest,
            store_faults=self.store_faults,
            generations=len(self.store.generations),
            commits=sum(self.store.indexes.values()),
        )

    def tick(self) -> None:
        """The supervisor's clock."""
        self.submit(Tick())
        self.later(TICK_SECONDS, self.tick)

    # -- supervisor --------------------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Feed the real core; perform what it answers."""
        if self.finish is not None:
            return
        before = self.job.phase
        self.job, actions = step(self.job, event, self.now)
        if not isinstance(event, Tick) or actions:
            self.trace.append((self.now, event))
        if self.job.phase is not before:
            self.trace.append((self.now, self.job.phase))
        for action in actions:
            self.trace.append((self.now, action))
            self.perform(action)

    def perform(self, action: Action) -> None:
        """The supervisor's side of an action."""
        match action:
            case RequestNodes():
                for _ in range(action.count):
                    self.later(self.random.choice([0.1, 0.5, 4.0]), self.join)
            case ReleaseNode():
                self.remove(action.node)
            case Finish():
                self.finish = action
            case Note():
                pass
            case _:
                self.check(action)
                self.send(action)

    def check(self, action: Action) -> None:
        """Rules that hold when an action is given."""
        match action:
            case Decide():
                key = CheckpointId(generation=action.generation, step=action.step)
                self.decided[key] = (self.world_size(), frozenset(action.absent))
                for worker in self.workers(action.generation):
                    if worker.past >= action.step and worker.passed != action.step and not worker.dead:
                        raise Violation(f"step {action.step} decided; rank {worker.rank} has left {worker.past}")
            case Commit():
                key = CheckpointId(generation=action.generation, step=action.step)
                world_size, absent = self.decided[key]
                missing = frozenset(range(world_size)) - absent - self.store.receipts.get(key, {}).keys()
                if missing:
                    raise Violation(f"{key} to be committed without the receipts of ranks {sorted(missing)}")
            case LaunchWorkers():
                base = self.store.bases[action.generation]
                if action.base != base or (base is not None and not self.store.indexes.get(base)):
                    raise Violation(f"generation {action.generation} starts from {action.base}, not from {base}")
                live = [worker for worker in self.workers(None) if worker.generation < action.generation]
                if any(not worker.dead for worker in live):
                    raise Violation(f"generation {action.generation} starts beside workers of an older one")
                self.launched.add(action.generation)

    def world_size(self) -> int:
        """Ranks in the gang."""
        assert self.job.gang is not None
        return self.job.gang.world_size

    def workers(self, generation: int | None) -> list[Worker]:
        """All workers of a generation on living nodes."""
        workers = [worker for agent in self.agents.values() if agent.alive for worker in agent.workers]
        return [worker for worker in workers if generation in (None, worker.generation)]

    def send(self, action: Action) -> None:
        """Supervisor → agent, in order."""
        agent = self.agents.get(str(getattr(action, "node", None)))
        if agent is None:
            return
        agent.sent = max(agent.sent, self.now + self.delay()) + 1e-6
        self.later(agent.sent - self.now, lambda: self.act(agent, action))

    def post(self, agent: Agent, event: Event) -> None:
        """Agent → supervisor, in order; what is on its way arrives even if the node is lost."""
        agent.delivered = max(agent.delivered, self.now + self.delay()) + 1e-6

        def arrive() -> None:
            if agent.given_up and isinstance(event, NodeJoined):
                return  # the one late word that would bring a lost node back to life: the core cannot tell it
            self.submit(event)

        self.later(agent.delivered - self.now, arrive)

    # -- scheduler ---------------------------------------------------------------------------------------

    def join(self) -> None:
        """A requested node comes up."""
        self.names += 1
        agent = Agent(name=f"node-{self.names}")
        self.agents[agent.name] = agent
        joined = NodeJoined(node=agent.name, workers=self.spec.workers_per_node, objects_url=f"memory://{agent.name}")
        self.post(agent, joined)

    def remove(self, name: str) -> None:
        """A node is given back: its agent ends its workers and goes."""
        agent = self.agents.pop(name, None)
        if agent is not None:
            self.stop(agent)

    def stop(self, agent: Agent) -> None:
        """A node and everything on it is gone."""
        agent.alive = False
        for worker in agent.workers:
            worker.dead = True

    def lose(self, name: str) -> None:
        """A node vanishes; the scheduler says so some time later."""
        agent = self.agents.pop(name, None)
        if agent is None:
            return
        self.stop(agent)

        def report() -> None:
            agent.given_up = True
            self.submit(NodeLost(node=name, reason="reclaimed"))

        self.later(self.delay(4), report)

    # -- faults ------------------------------------------------------------------------------------------

    def fault(self) -> None:
        """One random fault."""
        kinds = [self.fault_loss, self.fault_notice, self.fault_notice, self.fault_death, self.fault_request]
        self.random.choice(kinds[1:3] if self.short_of_time else kinds)()

    def some_node(self) -> str | None:
        """A random node."""
        return self.random.choice(sorted(self.agents)) if self.agents else None

    def fault_loss(self) -> None:
        """A node vanishes without notice."""
        name = self.some_node()
        if name is not None:
            self.lose(name)

    def fault_notice(self) -> None:
        """A notice: true, false, or withdrawn; with a deadline or without."""
        name = self.some_node()
        if name is None:
            return
        seconds = self.random.choice([1.5, 2.5, 3.5] if self.short_of_time else [0.3, 2.0, 6.0, 15.0])
        promised = seconds * 20 if self.random.random() < 0.25 else seconds  # nobody should rely on a long notice
        told = None if self.random.random() < 0.2 else promised
        kind = self.random.choice([NoticeKind.PREEMPT] * 3 + [NoticeKind.HINT])
        notice = NoticeReceived(
            node=name, source="cloud", kind=kind, remaining_seconds=told, notice_id=f"n{self.count}"
        )
        self.submit(notice)
        what = self.random.random()
        if what < 0.6:
            self.later(seconds, lambda: self.lose(name))
        elif what < 0.8:
            self.later(seconds / 2, lambda: self.submit(replace(notice, kind=NoticeKind.CANCEL)))

    def fault_death(self) -> None:
        """A worker dies."""
        living = [(agent, worker) for agent in self.agents.values() for worker in agent.workers if worker.attached]
        living = [(agent, worker) for agent, worker in living if not worker.dead]
        if living:
            agent, worker = self.random.choice(living)
            self.die(agent, worker, self.random.choice([-9, 1]))

    def fault_request(self) -> None:
        """A person asks for something that does not end the job."""
        if self.random.random() < 0.5:
            gang = self.job.gang
            if gang is not None:
                self.submit(SaveAsked(node=gang.nodes[0], generation=gang.generation, rank=0))
        else:
            nodes = self.random.randint(1, self.spec.nodes_max)
            self.submit(Requested(request=Request.RESIZE, by="model", nodes=nodes))

    def store_fails(self) -> bool:
        """Whether this store operation fails; never once the faulty time is over."""
        if self.now < FAULTS_UNTIL_SECONDS and self.faults_left and self.random.random() < 0.05:
            self.store_faults += 1
            return True
        return False

    # -- agents ------------------------------------------------------------------------------------------

    def act(self, agent: Agent, action: Action) -> None:
        """An action reaches its agent."""
        if not agent.alive:
            return
        match action:
            case OpenGeneration():
                self.later(self.slow(), lambda: self.open(agent, action))
            case LaunchWorkers():
                self.launch(agent, action)
            case HandOver():
                self.later(self.slow(), lambda: self.hand_over(agent, action))
            case Commit() | Abandon():
                self.later(self.slow(), lambda: self.write_index(agent, action))
            case RecordEnd():
                self.later(self.slow(), lambda: self.post(agent, EndRecorded(node=agent.name)) if agent.alive else None)
            case Prepare() | Decide() | EndWorkers() | Upload() | Settled() if action.generation == agent.generation:
                self.act_on_gang(agent, action)

    def slow(self) -> float:
        """A store operation's time: mostly short, sometimes longer than the supervisor waits for an opening."""
        return self.random.choice([0.05, 0.1, 0.3, 1.0]) if self.random.random() < 0.98 else 6.0

    def act_on_gang(self, agent: Agent, action: Prepare | Decide | EndWorkers | Upload | Settled) -> None:
        """As `agent.gang`."""
        record = agent.record
        match action:
            case Prepare() if action.ballot > record.ballot:
                self.publish(agent, replace(record, ballot=action.ballot, proposed_step=action.step))
            case Decide() if action.ballot == record.ballot:
                self.publish(
                    agent,
                    replace(
                        record, proposed_step=None, decided_step=action.step, mode=action.mode, absent=action.absent
                    ),
                )
            case EndWorkers():
                for worker in agent.workers:
                    if not worker.dead:
                        worker.ended_by_us = True
                        self.later(self.delay(), lambda worker=worker: self.die(agent, worker, -9))  # type: ignore[misc]
            case Upload():
                agent.wanted[action.step] = action
                self.upload_staged(agent, action.step)
            case Settled():
                agent.settled[action.step] = action.committed
            case _:
                pass
        self.look(agent)

    def publish(self, agent: Agent, record: Record) -> None:
        """Write the record into every control block."""
        agent.record = record
        for worker in agent.workers:
            worker.record = record

    def open(self, agent: Agent, action: OpenGeneration) -> None:
        """Open a generation on the store; the node may be lost before or after it."""
        if not agent.alive:
            return
        if self.store.generations and self.store_fails():
            self.post(agent, GenerationRefused(node=agent.name, refusal=Refusal.STORE, reason="503"))
            return
        number, base, rolled = self.store.open(action.own, action.avoid)
        opened = GenerationOpened(
            node=agent.name,
            generation=number,
            base=base,
            meeting_address="10.0.0.1",
            meeting_port=1,
            rolled_forward=rolled,
            after=action.own or 0,
        )
        self.post(agent, opened)

    def write_index(self, agent: Agent, action: Commit | Abandon) -> None:
        """Commit or abandon; it may fail before or after the index is there."""
        if not agent.alive:
            return
        key = CheckpointId(generation=action.generation, step=action.step)
        fails, written = self.store_fails(), self.random.random() < 0.5
        committed = False
        if not fails or written:
            committed = self.store.decide(key, isinstance(action, Commit))
        where = {"node": agent.name, "generation": action.generation, "step": action.step}
        self.post(agent, IndexFailed(**where, reason="503") if fails else IndexDecided(**where, committed=committed))  # type: ignore[arg-type]

    def launch(self, agent: Agent, action: LaunchWorkers) -> None:
        """Start the workers of a generation."""
        if agent.generation >= action.generation:
            raise Violation(f"generation {action.generation} launched again or out of order on {agent.name}")
        agent.generation = action.generation
        agent.record, agent.refused_ballot, agent.wanted, agent.settled = Record(), 0, {}, {}
        base = action.base.step if action.base else 0
        ranks = range(action.first_rank, action.first_rank + action.count)
        agent.workers = [
            Worker(
                rank=rank,
                generation=action.generation,
                step=base,
                duration=self.step_seconds * self.random.uniform(0.8, 1.3),
            )
            for rank in ranks
        ]
        for worker in agent.workers:
            self.later(self.random.uniform(0.1, 1.0), lambda w=worker: self.resume(agent, w, self.life(agent, w)))  # type: ignore[misc]

    def look(self, agent: Agent) -> None:
        """Look at the control blocks soon; many changes may be seen at once."""
        if not agent.looking:
            agent.looking = True
            self.later(self.random.uniform(0.0, 0.05), lambda: self.observe(agent))

    def observe(self, agent: Agent) -> None:
        """As `LocalGang.observe`: step before echo, refusal at or past the step."""
        agent.looking = False
        if not agent.alive:
            return
        echoed: list[int] = []
        progress: list[RankProgress] = []
        for worker in agent.workers:
            self.observe_worker(agent, worker, echoed)
            free = sum(slot.step is None for slot in worker.slots)
            new = worker.published is not None and worker.news("step", worker.published)
            if worker.published is not None and (worker.news("free", free) or new):
                seconds = worker.duration if worker.published > worker.step + 1 else 0.0
                progress.append(
                    RankProgress(rank=worker.rank, step=worker.published, step_seconds=seconds, free_slots=free)
                )
        name, generation = agent.name, agent.generation
        if progress:
            self.post(agent, Progress(node=name, generation=generation, ranks=tuple(progress)))
        if echoed:
            self.post(agent, Echoed(node=name, generation=generation, ballot=agent.record.ballot, ranks=tuple(echoed)))
        self.free(agent)

    def observe_worker(self, agent: Agent, worker: Worker, echoed: list[int]) -> None:
        """One control block's news."""
        where = {"node": agent.name, "generation": agent.generation, "rank": worker.rank}
        record = agent.record
        if worker.attached and worker.news("attached", 1):
            attached = RankAttached(**where, pid=1, step=worker.step, until=self.until, allowed_world_sizes=None)  # type: ignore[arg-type]
            self.post(agent, attached)
            self.post(agent, RankPlanned(**where, slot_bytes=SLOT_BYTES, unique_bytes=self.unique_bytes))  # type: ignore[arg-type]
        proposed = record.proposed_step
        if proposed is not None and worker.echo == record.ballot and worker.news("echo", worker.echo):
            echoed.append(worker.rank)
        late = worker.published is not None and proposed is not None and worker.published >= proposed
        if late and record.ballot not in (worker.echo, agent.refused_ballot):
            agent.refused_ballot = record.ballot
            self.post(agent, Refused(**where, ballot=record.ballot, step=worker.published or 0))  # type: ignore[arg-type]
        if worker.passed is not None and worker.news("passed", worker.passed):
            self.post(agent, Passed(**where, step=worker.passed))  # type: ignore[arg-type]
        for index, slot in enumerate(worker.slots):
            if slot.staged and slot.step is not None and worker.news(f"slot-{index}", slot.step):
                self.post(agent, Staged(**where, step=slot.step, size_bytes=100, seconds=0.1))  # type: ignore[arg-type]
                self.upload_staged(agent, slot.step)

    def free(self, agent: Agent) -> None:
        """As the agent: a settled step's slot once a newer step is wanted, or at once if it was abandoned."""
        for worker in agent.workers:
            for slot in worker.slots:
                if slot.step is None or not slot.staged or slot.reading or slot.step not in agent.settled:
                    continue
                if not agent.settled[slot.step] or any(slot.step < newer for newer in agent.wanted):
                    slot.step, slot.staged = None, False
                    self.look(agent)

    def upload_staged(self, agent: Agent, number: int) -> None:
        """Upload what is staged of a wanted step."""
        action = agent.wanted.get(number)
        for worker in agent.workers if action is not None else []:
            for slot in worker.slots:
                if slot.staged and slot.step == number and worker.news(f"upload-{number}", 1):
                    assert action is not None
                    slot.reading = True
                    seconds = self.random.choice(self.upload_seconds)
                    self.later(seconds, self.uploading(agent, worker, slot, action, seconds))

    def hand_over(self, agent: Agent, action: HandOver) -> None:
        """A peer reads the slot of another node, if that is still there, and uploads what it has read."""
        if not agent.alive:
            return
        where = {"node": agent.name, "generation": action.generation, "step": action.step, "rank": action.rank}
        source = self.agents.get(action.source_url.removeprefix("memory://"))
        workers = source.workers if source is not None and source.alive else []
        slots = [
            slot
            for worker in workers
            for slot in worker.slots
            if (worker.generation, worker.rank) == (action.generation, action.rank) and slot.step == action.step
        ]
        if not slots or not slots[0].staged or self.store_fails():
            self.post(agent, UploadFailed(**where, reason="the shard could not be read"))  # type: ignore[arg-type]
            return
        self.handed_over += 1
        self.post(agent, HandedOver(**where, size_bytes=SLOT_BYTES, seconds=0.05))  # type: ignore[arg-type]
        key = CheckpointId(generation=action.generation, step=action.step)

        def end() -> None:
            if agent.alive:
                receipt = (action.world_size, frozenset(action.absent), action.step)
                self.store.receipts.setdefault(key, {})[action.rank] = receipt
                self.post(agent, Uploaded(**where, size_bytes=SLOT_BYTES, seconds=0.1))  # type: ignore[arg-type]

        self.later(self.slow(), end)

    def uploading(self, agent: Agent, worker: Worker, slot: Slot, action: Upload, seconds: float) -> Callable[[], None]:
        """The end of one shard's upload."""

        def end() -> None:
            if not agent.alive:
                return
            slot.reading = False
            where = {"node": agent.name, "generation": action.generation, "step": action.step, "rank": worker.rank}
            if self.store_fails():
                self.post(agent, UploadFailed(**where, reason="no space left"))  # type: ignore[arg-type]
            else:
                key = CheckpointId(generation=action.generation, step=action.step)
                assert slot.step is not None
                receipt = (action.world_size, frozenset(action.absent), slot.step)
                self.store.receipts.setdefault(key, {})[worker.rank] = receipt
                self.post(agent, Uploaded(**where, size_bytes=SLOT_BYTES, seconds=seconds))  # type: ignore[arg-type]
            self.look(agent)

        return end

    # -- workers -----------------------------------------------------------------------------------------

    def resume(self, agent: Agent, worker: Worker, life: Waiting) -> None:
        """Let a worker go on until it waits again."""
        if worker.dead or not agent.alive:
            return
        try:
            seconds = next(life)
        except StopIteration:
            self.die(agent, worker, 0)
            return
        self.look(agent)
        self.later(seconds, lambda: self.resume(agent, worker, life))

    def die(self, agent: Agent, worker: Worker, code: int) -> None:
        """A worker is gone; its agent has seen everything that it did before."""
        if worker.dead or not agent.alive:
            return
        worker.dead, worker.code = True, code
        self.observe(agent)
        for slot in worker.slots:
            if slot.step is not None and not slot.staged:
                slot.step = None
        event = RankExited(
            node=agent.name,
            generation=worker.generation,
            rank=worker.rank,
            exit_code=code,
            attached=worker.attached,
            verdict=Verdict.FINISHED if code == 0 else Verdict.NONE,
            ended_by_us=worker.ended_by_us,
            evidence="",
        )
        self.post(agent, event)

    def life(self, agent: Agent, worker: Worker) -> Waiting:
        """As `Run.steps`: restore, attach, train, save the last step, leave."""
        done = worker.step
        worker.attached = True
        worker.at = worker.past = done
        yield self.delay()
        while done < self.until:
            yield worker.duration * self.random.uniform(0.9, 1.1)
            while self.synchronous and self.behind(worker, done):
                yield 0.03
            done += 1
            leave = yield from self.boundary(worker, done)
            if leave:
                while True:
                    yield 1000.0
        worker.finished = True

    def behind(self, worker: Worker, done: int) -> bool:
        """Whether a collective of step done + 1 still waits for somebody: all must have left boundary `done`."""
        peers = self.workers(worker.generation)
        assert self.job.gang is not None
        return len(peers) < self.job.gang.world_size or any(
            peer.past < done or not peer.attached or (peer.dead and not peer.finished) for peer in peers
        )

    def boundary(self, worker: Worker, number: int) -> Generator[float, None, bool]:
        """As `Boundary.at`: read, echo, publish, keep; True: leave."""
        worker.at = number
        record = worker.record
        yield self.tiny()
        if number == self.until:
            patience = self.now + FINAL_WAIT_SECONDS
            while number not in (record.decided_step, record.proposed_step) and self.now < patience:
                self.echo(worker, record, number)
                yield 0.02
                record = worker.record
        self.echo(worker, record, number)
        yield self.tiny()
        worker.published = number
        if number not in (record.decided_step, record.proposed_step):
            worker.past = number
            return False
        final = number == self.until
        patience = self.now + (FINAL_WAIT_SECONDS if final else self.decision_wait_seconds)
        while record.decided_step != number:
            if record.proposed_step != number:
                self.echo(worker, record, number)
                worker.past = number
                return False
            if self.now > patience:
                worker.passed = worker.past = number
                return False
            yield 0.02
            record = worker.record
            self.echo(worker, record, number)
        return (yield from self.stage(worker, record, number))

    def tiny(self) -> float:
        """Between two lines of a boundary."""
        return self.random.choice([0.0, 0.0005, 0.005])

    def echo(self, worker: Worker, record: Record, number: int) -> None:
        """Echo a proposal that was read at or before its step."""
        if record.proposed_step is not None and number <= record.proposed_step:
            worker.echo = record.ballot

    def stage(self, worker: Worker, record: Record, number: int) -> Generator[float, None, bool]:
        """Into a free slot; pass if there is none for too long."""
        patience = self.now + SLOT_WAIT_SECONDS
        while True:
            free = next((slot for slot in worker.slots if slot.step is None), None)
            if free is not None:
                break
            if self.now > patience:
                worker.passed = worker.past = number
                return False
            yield 0.02
        free.step = number
        yield self.random.choice([0.01, 0.1, 0.3])
        free.staged = True
        worker.staged.add(number)
        worker.past = number
        return record.mode is Mode.LEAVE


def check_end(result: Result, ending: Request | None) -> None:
    """What must hold when no fault is left: done with the last step saved, or as a person asked."""
    codes = {None: {0}, Request.DRAIN: {0, 75}, Request.CANCEL: {0, 1}}[ending]
    if result.exit_code not in codes:
        raise Violation(f"exit code {result.exit_code}")
    if result.exit_code == 0 and (result.newest is None or result.newest.step != result.until):
        raise Violation(f"done with {result.newest}, the last step is {result.until}")


def run_seed(seed: int, ending: Request | None = None, *, short_of_time: bool = False) -> tuple[str | None, Model]:
    """Run one seed: what went wrong, with the end of the trace, or None. A failed assertion of the core counts."""
    model = Model(seed, ending, short_of_time=short_of_time)
    try:
        check_end(model.run(), ending)
    except AssertionError as error:
        told = [f"{seconds:9.3f} {what}" for seconds, what in model.trace[-40:]]
        return "\n".join([f"seed {seed}, {ending}: {type(error).__name__}: {error}", *told]), model
    return None, model

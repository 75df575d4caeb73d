"""The vocabulary between supervisor, agents and the core: events (what happened) and actions (what to do).

Values only: the supervisor feeds events to `core.job.step` and performs the actions that come back; agents
send most events and receive most actions as JSON (`agent.wire`). Times on the wire are remaining seconds,
never another host's clock. Every message of a generation carries its number; everyone ignores any other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointId:
    """A checkpoint's identity; the order is the age order: by generation, then by step."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"g{self.generation:08d}-s{self.step:010d}"


class Mode(StrEnum):
    """What a decided step means for the workers: go on after staging, or leave."""

    STAY = "stay"
    LEAVE = "leave"


class Outcome(StrEnum):
    """How a job ended; the content of its end record."""

    DONE = "done"
    DRAINED = "drained"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Verdict(StrEnum):
    """What a worker said of itself before it exited."""

    NONE = "none"
    FINISHED = "finished"
    REFUSED = "refused"
    UNREADABLE = "unreadable"


class NoticeKind(StrEnum):
    """What a notice means: the node goes; it may go; an earlier notice is withdrawn."""

    PREEMPT = "preempt"
    MAINTENANCE = "maintenance"
    HINT = "hint"
    CANCEL = "cancel"


class Refusal(StrEnum):
    """Why a generation could not be opened."""

    FENCED = "fenced"
    DONE = "done"
    CANCELLED = "cancelled"
    STORE = "store"
    """It fails for now."""
    DENIED = "denied"
    """It may not be used, or is full: a person has to change something."""
    FORMAT = "format"
    ROLLBACK = "rollback"
    """There is no checkpoint to go back to."""


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecided:
    """A decided step that an agent knows of and that is not settled, as far as it knows."""

    step: int
    mode: Mode
    absent: tuple[int, ...]
    staged: tuple[int, ...]
    """The agent's ranks whose shard is in its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """One rank's last published boundary."""

    rank: int
    step: int
    step_seconds: float
    free_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GangReturned:
    """What an agent runs, told to a supervisor that has never given it anything to run."""

    node: str
    generation: int
    world_size: int
    first_rank: int
    count: int
    base: CheckpointId | None
    progress: tuple[RankProgress, ...]
    """Of the ranks that have published a step."""
    ballot: int
    proposed_step: int | None
    decided: tuple[StepDecided, ...]
    ended: bool
    """Its workers were told to end by an earlier supervisor."""
    committed_step: int | None
    """The newest step of this generation that the agent knows as committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent connected and is ready to launch `workers` workers.

    `objects_url` is where peers read this node's staged shards; empty where they cannot.
    """

    node: str
    workers: int
    objects_url: str = ""
    returned: GangReturned | None = None
    """What it runs already, where an earlier supervisor of this run started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnfit:
    """An agent that will not join: what it found wrong with its devices before its first worker."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlaced:
    """Where a node stands, as the scheduler knows it: nodes with the same place are near each other."""

    node: str
    place: str
    """From wide to narrow, as zone/block/domain; orders newcomers' ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFound:
    """Nodes that an earlier supervisor of this run left running, as the scheduler sees them."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The scheduler is certain that the node is gone (a silent node is not lost)."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeReceived:
    """A node will go. `remaining_seconds` is None where the source gives no deadline."""

    node: str
    source: str
    kind: NoticeKind
    remaining_seconds: float | None
    notice_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherReported:
    """Whether a node can see the notices of a source. `problem`: why it cannot; None: it can again."""

    node: str
    source: str
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOpened:
    """Claimed, rolled forward, base written: what every rank of this generation loads.

    The workers meet on this node, which is rank 0's: where torch's rank 0 listens.
    """

    node: str
    generation: int
    base: CheckpointId | None
    meeting_address: str
    meeting_port: int
    rolled_forward: int
    skipped: tuple[str, ...] = ()
    rollback_to: int | None = None
    """As it was asked for: no generation up to then counts beyond this step any more."""
    after: int | None = None
    """The highest own generation that was known when it was asked for, 0 for none; None: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRefused:
    """The generation could not be opened; `refusal` says whether trying again makes sense."""

    node: str
    refusal: Refusal
    reason: str
    rollback_to: int | None = None
    """As it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttached:
    """A worker has called attach; `step` is the step that it restored (0: a fresh start)."""

    node: str
    generation: int
    rank: int
    pid: int
    step: int
    until: int | None
    allowed_world_sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlanned:
    """A rank's shard layout is known. `unique_bytes` of it are held by no other rank."""

    node: str
    generation: int
    rank: int
    slot_bytes: int
    unique_bytes: int
    twins: tuple[tuple[int, ...], ...] = ()
    """Each set of ranks, this one among them, that hold a part of the state alike, but for the set of all ranks.

    The set of this rank alone: it holds something that nobody else has.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a node's ranks have published since last time."""

    node: str
    generation: int
    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Some ranks of the node have said that no step comes for a while: for the longest of them, so long from now.

    `remaining_seconds` None: no rank of the node pauses any more.
    """

    node: str
    generation: int
    remaining_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """What one worker is doing, as its node sees it; taken twice, a moment apart."""

    rank: int
    step: int
    """The last published one; the base's before the first."""
    state: str
    """The kernel's letter for its main thread if it was the same both times, else "": T stopped, D uninterruptible."""
    traced: bool
    """A debugger holds it."""
    busy_seconds: float
    """Processor time that it and everything it started took in between."""
    waits: bool | None
    """Whether it waits for other ranks, by its stack; None: its stack is not known."""
    where: str
    """The innermost known place of its main thread; empty if its stack is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The answer to `Look`."""

    node: str
    generation: int
    step: int
    """Of the question."""
    awake_seconds: float
    """How long the agent has run without standing still itself."""
    ranks: tuple[RankLook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReported:
    """Something is wrong with the host under a node's workers, or is well again (`problem` None)."""

    node: str
    what: str
    """A folder, memory, a device, or one of a device's errors."""
    problem: str | None
    condemns: bool = False
    """The node is not to be in the next generation, if the job can do without; the present one goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReported:
    """A rank's loss is not finite or has spiked, or is well again (`problem` None)."""

    node: str
    generation: int
    rank: int
    step: int
    """Completed steps when the script told it."""
    value: float | str
    """A word ("nan", "inf") where it is no finite number."""
    usual: float | None
    """The median of the values before; None: there were none."""
    good_step: int | None
    """The last step at which the rank's loss was well, before the trouble; None: there was none."""
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsked:
    """The script called `run.save()`."""

    node: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Echoed:
    """The workers of these ranks have read the proposal at a boundary at or before its step."""

    node: str
    generation: int
    ballot: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A rank was at or past the proposed step before it could read the proposal."""

    node: str
    generation: int
    ballot: int
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A rank went on without staging the proposed step: no decision or no slot in time, or a copy that was no good."""

    node: str
    generation: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A rank's part of the state is in its slot."""

    node: str
    generation: int
    step: int
    rank: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """A shard and its receipt are durable."""

    node: str
    generation: int
    step: int
    rank: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailed:
    """A shard could not be made durable; training goes on."""

    node: str
    generation: int
    step: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """This node holds a staged shard of another node's rank, digests checked, and uploads it from now on."""

    node: str
    generation: int
    step: int
    rank: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexDecided:
    """`index.json` is there: committed or abandoned, whoever wrote it."""

    node: str
    generation: int
    step: int
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFailed:
    """`index.json` could not be written or read back."""

    node: str
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A worker is gone, confirmed by the kernel. `exit_code` is negative for a signal, None if nobody can know it."""

    node: str
    generation: int
    rank: int
    exit_code: int | None
    attached: bool
    verdict: Verdict
    ended_by_us: bool
    evidence: str
    memory_kills: int | None = None
    """Kills for want of memory that the kernel counted in its cgroup while it ran; None: that cannot be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecorded:
    """The end record is on the store (or could not be written: `reason`)."""

    node: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A sweep has ended. `problem`: why it did not do all that it should."""

    node: str
    generation: int
    retired: tuple[CheckpointId, ...] = ()
    abandoned: tuple[CheckpointId, ...] = ()
    committed: tuple[CheckpointId, ...] = ()
    """Undecided ones that were found to be whole."""
    unfinished: int = 0
    """Writes of which a part had arrived, and which nobody went on with."""
    freed_bytes: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackChecked:
    """Whether the job can go back to a step, as the store is now; `problem`: why not."""

    node: str
    step: int
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondReading:
    """A second node has read a checkpoint that another one could not read.

    `mismatch`: what is not as it was committed there either; then it has set it aside. `problem`: why it cannot tell.
    """

    node: str
    generation: int
    checkpoint: CheckpointId
    mismatch: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """Another run has claimed a higher generation than any of ours: the job is that run's, for ever."""

    node: str
    reason: str


class Request(StrEnum):
    """What a person may ask of a running job."""

    DRAIN = "drain"
    RESIZE = "resize"
    CANCEL = "cancel"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """A person asked for something; `nodes` belongs to resize, `step` to rollback."""

    request: Request
    by: str
    nodes: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = (
    NodeJoined
    | NodeUnfit
    | NodePlaced
    | NodesFound
    | NodeLost
    | NoticeReceived
    | WatcherReported
    | GenerationOpened
    | GenerationRefused
    | RankAttached
    | RankPlanned
    | Progress
    | Paused
    | Looked
    | HostReported
    | LossReported
    | SaveAsked
    | Echoed
    | Refused
    | Passed
    | Staged
    | Uploaded
    | UploadFailed
    | HandedOver
    | IndexDecided
    | IndexFailed
    | RankExited
    | EndRecorded
    | Swept
    | RollbackChecked
    | SecondReading
    | Superseded
    | Requested
    | Tick
)

# ----------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNodes:
    """Ask the scheduler for more nodes."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseNode:
    """Give a node back to the scheduler."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGeneration:
    """Claim `own` + 1 (a starting process, own None: the highest + 1), roll forward, write the base.

    `rollback_to`: no generation so far shall count beyond this step.
    """

    node: str
    own: int | None
    avoid: tuple[CheckpointId, ...] = ()
    rollback_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A node whose memory may still hold the shards that its ranks staged of a checkpoint."""

    first_rank: int
    count: int
    objects_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWorkers:
    """Start this node's workers of the generation. `holders`: where the base's shards may be read faster."""

    node: str
    generation: int
    world_size: int
    first_rank: int
    count: int
    base: CheckpointId | None
    meeting_address: str
    meeting_port: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Go on with the generation that you run, under this supervisor: report everything of it once more."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Put a proposal to save at `step` into every control block of the node."""

    node: str
    generation: int
    ballot: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """All ranks echoed: stage at `step`; `absent` ranks own nothing that a present one holds too."""

    node: str
    generation: int
    ballot: int
    step: int
    mode: Mode
    absent: tuple[int, ...]
    remaining_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """No step came after `step` for too long: write down your workers' stacks, and say what each of them does."""

    node: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWorkers:
    """End every worker of the generation on this node, at once, and confirm each exit."""

    node: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The step is complete: make this node's shards and receipts durable."""

    node: str
    generation: int
    step: int
    world_size: int
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Copy a staged shard of a node that will go from its memory, and upload it as its rank would.

    `source_url` is that node's `objects_url`. Answers: `HandedOver`, then `Uploaded` or `UploadFailed` of that rank.
    """

    node: str
    generation: int
    step: int
    rank: int
    world_size: int
    absent: tuple[int, ...]
    source_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All needed receipts are there: write the index."""

    node: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Write the abandoned index, unless a committed one is there already."""

    node: str
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The step is decided for good: slots that hold it may be freed by the agent's rules."""

    node: str
    generation: int
    step: int
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Delete what is not kept, and what nobody has gone on with for `grace_seconds`, but nothing of `in_flight`."""

    node: str
    generation: int
    keep_last: int
    keep_every_steps: int
    in_flight: tuple[CheckpointId, ...]
    grace_seconds: float
    claimed_through: int = 0
    """Up to there the job's own claims go beyond `generation`; no gang was formed in them, and none will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRollback:
    """Look whether there is a committed checkpoint of this step that can be gone back to. Nothing is written."""

    node: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAgain:
    """Read what another node could not read, `first` in its words; set it aside if it is bad here, too."""

    node: str
    generation: int
    checkpoint: CheckpointId
    first: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEnd:
    """Write the end record of the newest generation that is ours."""

    node: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the event log: what happened or was decided, and why."""

    kind: str
    reason: str
    node: str | None = None
    generation: int | None = None
    step: int | None = None
    rank: int | None = None
    facts: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The job is over for this supervisor."""

    exit_code: int
    reason: str


Action = (
    RequestNodes
    | ReleaseNode
    | OpenGeneration
    | LaunchWorkers
    | TakeBack
    | Prepare
    | Decide
    | Look
    | EndWorkers
    | Upload
    | HandOver
    | Commit
    | Abandon
    | Settled
    | Sweep
    | CheckRollback
    | ReadAgain
    | RecordEnd
    | Note
    | Finish
)

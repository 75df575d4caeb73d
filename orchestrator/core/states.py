"""The job's state: phases, the one transition table, and the values that the handlers work on.

`core.job.step` is the only entry. The handlers change a `core.turn.Turn`, which lives for one step: it holds the next
job value and collects actions. A job value itself is never changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.core.agreement import Proposal
from orchestrator.core.commit import Save
from orchestrator.core.deadline import NOTHING_MEASURED, Choice, Course, Measured
from orchestrator.core.hangs import NOTHING_SEEN, Quiet
from orchestrator.core.ladder import Attempt
from orchestrator.core.membership import Gang
from orchestrator.core.messages import CheckpointId, GangReturned, Outcome
from orchestrator.core.ranks import NO_RACE, NO_RANKS, NOBODY, Race, Ranks, RankSet
from orchestrator.core.values import Changeable


class Phase(StrEnum):
    """Where the job is."""

    GATHERING = "gathering"
    OPENING = "opening"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    CLEARING = "clearing"
    ENDING = "ending"
    ENDED = "ended"


class Trigger(StrEnum):
    """What moves the job from one phase to the next."""

    ENOUGH_NODES = "enough nodes"
    OPENED = "generation opened"
    TAKEN_BACK = "gang taken back"
    OPEN_FAILED = "generation not opened"
    REFUSED = "generation refused"
    ALL_ATTACHED = "all ranks attached"
    LEAVE_DECIDED = "leave decided"
    BROKEN = "gang broken"
    LEFT = "staged and left"
    ALL_DONE = "all ranks done"
    CLEARED = "cleared"
    CONCLUDED = "concluded"
    RECORDED = "end recorded"
    SUPERSEDED = "another run took over"


TRANSITIONS: Mapping[Phase, Mapping[Trigger, Phase]] = {
    Phase.GATHERING: {
        Trigger.ENOUGH_NODES: Phase.OPENING,
        Trigger.TAKEN_BACK: Phase.STARTING,
        Trigger.CONCLUDED: Phase.ENDING,
        Trigger.RECORDED: Phase.ENDED,
        Trigger.SUPERSEDED: Phase.ENDED,
    },
    Phase.OPENING: {
        Trigger.OPENED: Phase.STARTING,
        Trigger.OPEN_FAILED: Phase.GATHERING,
        Trigger.REFUSED: Phase.ENDED,
        Trigger.CONCLUDED: Phase.ENDING,
        Trigger.SUPERSEDED: Phase.ENDED,
    },
    Phase.STARTING: {
        Trigger.ALL_ATTACHED: Phase.RUNNING,
        Trigger.BROKEN: Phase.CLEARING,
        Trigger.ALL_DONE: Phase.CLEARING,
        Trigger.SUPERSEDED: Phase.ENDED,
    },
    Phase.RUNNING: {
        Trigger.LEAVE_DECIDED: Phase.LEAVING,
        Trigger.BROKEN: Phase.CLEARING,
        Trigger.ALL_DONE: Phase.CLEARING,
        Trigger.SUPERSEDED: Phase.ENDED,
    },
    Phase.LEAVING: {
        Trigger.LEFT: Phase.CLEARING,
        Trigger.BROKEN: Phase.CLEARING,
        Trigger.SUPERSEDED: Phase.ENDED,
    },
    Phase.CLEARING: {
        Trigger.CLEARED: Phase.GATHERING,
        Trigger.CONCLUDED: Phase.ENDING,
        Trigger.SUPERSEDED: Phase.ENDED,
    },
    Phase.ENDING: {Trigger.RECORDED: Phase.ENDED, Trigger.SUPERSEDED: Phase.ENDED},
    Phase.ENDED: {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the user asked for, and the limits of every wait (seconds)."""

    name: str
    nodes_min: int
    nodes_max: int
    workers_per_node: int
    save_every_steps: int
    attached: bool = False
    """The workers were started by somebody else; they are adopted and never restarted."""
    fruitless_max: int = 10
    """Generations in a row that lost nodes unannounced and committed nothing, before the job stops."""
    grace_seconds: float = 30.0
    """Notice that a signal gives where its sender does not say; preflight compares saving with it."""
    failures_max: int = 3
    """Failures from one base before an older one is tried, as often; then the job stops. Preemptions never count."""
    gather_seconds: float = 30.0
    """How long the first generation waits for more than the smallest number of nodes, and any for a condemned one's
    replacement."""
    reform_seconds: float = 2.0
    """How long a later generation waits for replacements that are about to come."""
    return_seconds: float = 30.0
    """How long a supervisor that was started again waits for the nodes that were left running."""
    open_seconds: float = 60.0
    """Time limit for claiming a generation and choosing its base."""
    exit_seconds: float = 10.0
    """A worker whose exit is not confirmed by then excludes its node."""
    leave_seconds: float = 60.0
    """Once a node or worker is lost while all are to leave, the others must have staged the agreed step by then."""
    reach_seconds: float = 600.0
    """Without any loss, all ranks must have staged an agreed step by then (ten steps' time is added)."""
    upload_seconds: float = 3600.0
    """A complete step that is not durable by then is abandoned when the gang is cleared."""
    store_retry_seconds: float = 5.0
    """Pause before a generation is opened or a periodic save tried again after the store failed; doubles each time."""
    start_seconds: float = 1800.0
    """A generation of which not every rank has attached by then has failed."""
    hang_seconds: float = 60.0
    """No step for longer than this, than ten steps' time and than twice the longest pause is suspicious; 0: never."""
    overdue_seconds: float = 600.0
    """No commit for longer than this, and than the time of three periodic saves, is an alarm."""
    keep_last: int = 0
    """Newest committed checkpoints that are kept; 0: all."""
    keep_every_steps: int = 0
    """Besides, the first one of every so many steps is kept; 0: none."""
    sweep_seconds: float = 600.0
    """Between two sweeps where no commit asks for one."""
    sweep_grace_seconds: float = 3600.0
    """What lies on the store undecided or unfinished, and unchanged for that long, is swept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingNotice:
    """A notice that names a node and is not withdrawn."""

    notice_id: str
    deadline_seconds: float | None
    notice_seconds: float | None
    """How long before that deadline it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A connected node; `going` once a notice named it, with its deadline if one is known."""

    name: str
    going: bool = False
    deadline_seconds: float | None = None
    notice_seconds: float | None = None
    """How long before that deadline the notice came that gave it."""
    notices: tuple[StandingNotice, ...] = ()
    """Why it is going; the earliest deadline of them is the node's."""
    hints: tuple[str, ...] = ()
    """Ids of what says that it may go."""
    blind: tuple[str, ...] = ()
    """Sources whose notices it cannot see."""
    condemned: Mapping[str, str] = field(default_factory=dict)
    """What speaks against using it in another generation: a device or an error of it → in words."""
    joined_at_seconds: float = 0.0
    objects_url: str = ""
    """Where peers read its staged shards; empty where they cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Why all workers shall leave at an agreed step."""

    reason: str
    since_seconds: float
    may_wait: bool = False
    """Notices are the only reason and no time for leaving has come yet: all may train on while there is ample time."""
    choice: Choice | None = None
    """What the time until the deadline is used for, where a notice is the reason."""
    deadline_seconds: float | None = None
    """The deadline that this was chosen for."""

    @property
    def is_due(self) -> bool:
        """Whether all shall leave now, not later."""
        return self.choice is None or self.choice.course is not Course.TRAIN

    @property
    def waits(self) -> bool:
        """Nothing is proposed: everybody leaves as soon as the step that is being staged is complete."""
        return self.choice is not None and self.choice.course is Course.WAIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A checkpoint that a node could not read, for another one to look at."""

    checkpoint: CheckpointId
    node: str
    words: str
    """What the node's worker said."""
    asked: str | None = None
    """The second node, once it is reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackCheck:
    """A step that a person wants to go back to, while a node looks whether that can be."""

    step: int
    by: str
    node: str
    since_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTrouble:
    """The ranks' loss is not finite or has spiked, as the first of them told it."""

    rank: int
    step: int
    value: float | str
    """A word where it is no finite number."""
    usual: float | None
    words: str
    ranks: RankSet
    """Those whose loss is not well yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the job will end once the gang is cleared."""

    outcome: Outcome
    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Job(Changeable):
    """Everything the supervisor knows."""

    spec: JobSpec
    phase: Phase = Phase.GATHERING
    since_seconds: float = 0.0
    wanted_nodes: int = 0
    nodes_requested: int = 0
    request_at_seconds: float = 0.0
    """No node is asked for earlier: the last ones were not fit."""
    unfit: int = 0
    """Nodes in a row that were not."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """Where nodes stand, of those of which it is known; names are never given twice."""
    going: frozenset[str] = frozenset()
    """The nodes that a notice has named."""
    shard_bytes: int = 0
    """The largest shard of this generation's last save from which nobody was absent; 0: none yet. Slots are larger."""
    hinted: frozenset[str] = frozenset()
    """The nodes that may go, as a hint said."""
    condemned: frozenset[str] = frozenset()
    """The nodes that are only used again if there are too few others."""
    expected: frozenset[str] = frozenset()
    """Nodes that an earlier supervisor left running and that may still report."""
    unwanted: Mapping[str, str] = field(default_factory=dict)
    """Nodes that are given back before the next gang is formed, and why."""
    given_back: frozenset[str] = frozenset()
    """Nodes that were given back before they reported: one that does so all the same is about to be ended."""
    expect_until_seconds: float = 0.0
    returned: Mapping[str, GangReturned] = field(default_factory=dict)
    """What the nodes that have reported run."""
    taken_back: bool = False
    """The gang was started by an earlier supervisor: it has trained already."""
    own: int | None = None
    members: tuple[str, ...] = ()
    opener: str | None = None
    retry_at_seconds: float = 0.0
    gang: Gang | None = None
    base: CheckpointId | None = None
    avoid: tuple[CheckpointId, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    rollback_check: RollbackCheck | None = None
    """A person has asked to go back, and a node looks whether that can be."""
    rollback_to: int | None = None
    """The next generation shall go on from this step, as a person asked."""
    rollback_refusal: str | None = None
    """Why the last request to go back came to nothing."""
    ranks: Ranks = NO_RANKS
    lost_in_gang: tuple[str, ...] = ()
    gone_ranks: RankSet = NOBODY
    """Ranks of the gang whose node is lost: nothing of theirs can still come."""
    lost_at_seconds: float | None = None
    broken_at_seconds: float | None = None
    ended_at_seconds: float | None = None
    """When the last gang was ended; None once something else than the job's own work has held up the next one."""
    proposal: Proposal | None = None
    ballot: int = 0
    attempt: int = 1
    saves: Mapping[CheckpointId, Save] = field(default_factory=dict)
    last_save_step: int = 0
    save_asked: bool = False
    leave: Leave | None = None
    ending: Ending | None = None
    newest_committed: CheckpointId | None = None
    base_gang: Gang | None = None
    """The gang that staged the base, where this supervisor knows it: its nodes may still have the shards in memory."""
    committed_at_seconds: float | None = None
    allowed_world_sizes: tuple[int, ...] | None = None
    until: int | None = None
    ever_attached: bool = False
    failures: int = 0
    attempts: tuple[Attempt, ...] = ()
    """The failed generations since the last commit."""
    fault: str | None = None
    """What was wrong with the present generation, where its workers were ended for that."""
    fruitless: int = 0
    barren: int = 0
    """Generations in a row that started and have committed nothing."""
    open_failures: int = 0
    """How often in a row the store failed when a generation was to be opened."""
    failed_saves: int = 0
    """Saves in a row that the store failed."""
    save_not_before_seconds: float = 0.0
    """No periodic save is proposed earlier, because the store failed the last one."""
    trouble: str | None = None
    """Why the last save failed, since the last commit."""
    overdue: bool = False
    """Whether the alarm about the newest commit's age was given."""
    uncommitted_seconds: float = 0.0
    """Training time since the last commit, before the present phase."""
    sweeper: str | None = None
    """The node that sweeps just now."""
    swept_at_seconds: float = 0.0
    """When the last sweep was asked for, or the job began."""
    sweep_wanted: bool = False
    """Something was committed since then, and older ones may go."""
    sweep_problem: str | None = None
    """Why the last sweep did not do all that it should."""
    measured: Measured = NOTHING_MEASURED
    quiet: Quiet = NOTHING_SEEN
    """How long no step has come, and what was found out about that."""
    race: Race = NO_RACE
    """Who comes last to the boundary."""
    loss_trouble: LossTrouble | None = None
    """What stands of the losses that the ranks of this generation have told."""
    progress_at_seconds: float = 0.0
    """When the highest step rose last, or all ranks had attached."""
    awaiting_first_step: bool = False

    @property
    def rollback_pending(self) -> int | None:
        """The step that a person wants to go back to, until the claim that says so is there, or it is refused."""
        return self.rollback_to if self.rollback_check is None else self.rollback_check.step

    @property
    def highest_step(self) -> int:
        """The highest step that any rank has published in this generation."""
        return self.ranks.steps.highest or 0

    @property
    def lowest_step(self) -> int:
        """The lowest step that any rank has published in this generation. Looks at all of them."""
        return min(self.ranks.steps, default=0)

    @property
    def step_seconds(self) -> float:
        """The slowest rank's mean step time; 1 s before anything is known."""
        return self.ranks.step_seconds.highest or 1.0

    @property
    def available(self) -> tuple[str, ...]:
        """Connected nodes that no notice has named. Looks at all of them."""
        return tuple(name for name in self.nodes if name not in self.going)

    @property
    def available_count(self) -> int:
        """How many connected nodes no notice has named."""
        return len(self.nodes) - len(self.going)

    @property
    def sound_count(self) -> int:
        """How many of them are not condemned either."""
        return len(self.nodes) - len(self.going | self.condemned)

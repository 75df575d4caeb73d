"""The decision maker: `step(job, event, now) → (job, actions)`. Pure: same values in, same values out.

The phases and the one transition table are in `core.states`. The handlers of events, from the top: `forming`,
`returning`, `leaving`, `rollback`, `exits`, `proposing`, `courses`, `growing`, `shards`, `handovers`, `hanging`,
`breaking`, `settling`, `sweeping`, `suspects`; `clearing` and `finishing` end a generation and the job; `preflight`,
`overdue`, `straggling` and `losses` only report, `hosts` remembers what condemns a node. Imports among them point down
only. The supervisor (`supervisor.loop`) is the only caller outside tests and simulation.
"""

from __future__ import annotations

from typing import assert_never

from orchestrator.core import (
    breaking,
    clearing,
    courses,
    exits,
    finishing,
    forming,
    growing,
    handovers,
    hanging,
    hosts,
    leaving,
    losses,
    overdue,
    proposing,
    returning,
    rollback,
    settling,
    shards,
    suspects,
    sweeping,
)
from orchestrator.core.messages import (
    Action,
    Echoed,
    EndRecorded,
    Event,
    GenerationOpened,
    GenerationRefused,
    HandedOver,
    HostReported,
    IndexDecided,
    IndexFailed,
    Looked,
    LossReported,
    NodeJoined,
    NodeLost,
    NodePlaced,
    NodesFound,
    NodeUnfit,
    NoticeReceived,
    Passed,
    Paused,
    Progress,
    RankAttached,
    RankExited,
    RankPlanned,
    Refused,
    Requested,
    RollbackChecked,
    SaveAsked,
    SecondReading,
    Staged,
    Superseded,
    Swept,
    Tick,
    Uploaded,
    UploadFailed,
    WatcherReported,
)
from orchestrator.core.states import TRANSITIONS, Job, JobSpec, Phase, Trigger
from orchestrator.core.turn import Turn

__all__ = ["TRANSITIONS", "Job", "JobSpec", "Phase", "Trigger", "new_job", "step"]


def new_job(spec: JobSpec, now_seconds: float) -> Job:
    """A job before its first node."""
    return Job(spec=spec, wanted_nodes=spec.nodes_max, since_seconds=now_seconds, swept_at_seconds=now_seconds)


def step(job: Job, event: Event, now_seconds: float) -> tuple[Job, tuple[Action, ...]]:
    """Take in one event at a time on the supervisor's monotonic clock."""
    turn = Turn(job, now_seconds)
    if job.phase is not Phase.ENDED:
        _dispatch(turn, event)
        returning.give_back_silent(turn)
        clearing.clear(turn)
        forming.consider(turn)
    return turn.job, tuple(turn.actions)


def _dispatch(turn: Turn, event: Event) -> None:  # noqa: PLR0912, PLR0915 (one case for each event)
    match event:
        case NodeJoined():
            forming.on_node_joined(turn, event)
        case NodeUnfit():
            forming.on_node_unfit(turn, event)
        case NodePlaced():
            turn.set(places={**turn.job.places, event.node: event.place})
        case NodesFound():
            returning.on_nodes_found(turn, event)
        case NodeLost():
            exits.on_node_lost(turn, event)
        case NoticeReceived():
            leaving.on_notice(turn, event)
        case WatcherReported():
            leaving.on_watcher_reported(turn, event)
        case GenerationOpened():
            forming.on_generation_opened(turn, event)
        case GenerationRefused():
            forming.on_generation_refused(turn, event)
        case RankAttached():
            forming.on_rank_attached(turn, event)
        case RankPlanned():
            forming.on_rank_planned(turn, event)
        case Progress():
            proposing.on_progress(turn, event)
        case Paused():
            hanging.on_paused(turn, event)
        case Looked():
            hanging.on_looked(turn, event)
        case HostReported():
            hosts.on_reported(turn, event)
        case LossReported():
            losses.on_reported(turn, event)
        case SaveAsked():
            proposing.on_save_asked(turn, event)
        case Echoed():
            proposing.on_echoed(turn, event)
        case Refused():
            proposing.on_refused(turn, event)
        case Passed():
            proposing.on_passed(turn, event)
        case Staged():
            shards.on_staged(turn, event)
        case Uploaded():
            shards.on_uploaded(turn, event)
        case UploadFailed():
            shards.on_upload_failed(turn, event)
        case HandedOver():
            handovers.on_handed_over(turn, event)
        case IndexDecided():
            settling.on_index_decided(turn, event)
            shards.move_saves(turn)
        case IndexFailed():
            settling.on_index_failed(turn, event)
            shards.move_saves(turn)
        case RankExited():
            exits.on_rank_exited(turn, event)
        case EndRecorded():
            finishing.on_end_recorded(turn, event)
        case Swept():
            sweeping.on_swept(turn, event)
        case RollbackChecked():
            rollback.on_checked(turn, event)
        case SecondReading():
            suspects.on_second_reading(turn, event)
        case Superseded():
            finishing.on_superseded(turn, event)
        case Requested():
            leaving.on_requested(turn, event)
        case Tick():
            _on_tick(turn)
        case _:
            assert_never(event)


def _on_tick(turn: Turn) -> None:
    job = turn.job
    if job.phase is Phase.OPENING and turn.now - job.since_seconds > job.spec.open_seconds:
        turn.note("store failed", f"{job.opener} did not open a generation within {job.spec.open_seconds:.0f} s")
        turn.go(Trigger.OPEN_FAILED)
        turn.set(open_failures=job.open_failures + 1)
    if job.phase is Phase.STARTING:
        leaving.limit_start_under_notice(turn)
    if turn.job.phase is Phase.STARTING:
        breaking.limit_starting(turn)
    if job.phase is Phase.LEAVING:
        breaking.limit_leaving(turn)
    if job.phase is Phase.ENDING:
        finishing.limit_recording(turn)
    rollback.limit_checking(turn)
    job = turn.job
    if job.phase in (Phase.RUNNING, Phase.LEAVING, Phase.CLEARING):
        handovers.ask(turn)
        shards.move_saves(turn)
        if courses.follow(turn):
            proposing.drive(turn)
        forming.request_missing(turn)
    if job.phase is Phase.RUNNING:
        overdue.watch(turn)
        sweeping.consider(turn)
        suspects.consider(turn)
        if growing.grow_if_worth_it(turn):
            proposing.drive(turn)
        hanging.watch(turn)

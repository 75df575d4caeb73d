"""What to do about one TrainingJob. Pure: what was seen goes in, one act and why comes out.

Level-triggered: nothing is remembered but what stands in the objects themselves and what this process hosts just now,
so it does not matter which change was seen, or whether another controller was here before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.controller.crd import TrainingJobSpec
from orchestrator.core.messages import Outcome
from orchestrator.errors import ExitCode

LIVE_FIELDS = ("nodesMax", "suspend", "cancel", "takeOver")
"""Of the spec: what takes effect at once. All else waits for the next run."""
ENDED = ("Done", "Failed", "Cancelled")
OTHER_SPEC = 0
"""As `endedGeneration`: an edit had been waiting for the next run. A failed job is started again with it."""
RESTART_SECONDS_FIRST = 5.0
RESTART_SECONDS_MAX = 300.0


class Act(StrEnum):
    """What is done about a TrainingJob."""

    NOTHING = "nothing"
    HOST = "host"
    DRAIN = "drain"
    CANCEL = "cancel"
    RESIZE = "resize"
    ROLL_BACK = "roll back"
    CLEAR = "clear"
    """Its run is over: pods that are left of it are deleted."""
    LET_GO = "let go"
    """Nothing of it is left: it may be deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One act, and why; what it says of the job's state where nothing runs."""

    act: Act
    reason: str
    number: int | None = None
    """Nodes, or a step."""
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """A run that this process supervises."""

    wanted_nodes: int
    ending: bool
    """It was told to drain or to cancel."""
    cancelling: bool
    waits_for: Sequence[str] = ()
    """Fields of the spec that were edited since the run began, and wait for the next one."""
    pods_run: bool = True
    """Some pod of it has come to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A TrainingJob, and what there is of it."""

    spec: TrainingJobSpec | None
    problems: Sequence[str]
    """What is wrong with the spec, if it is None."""
    suspend: bool
    cancel: bool
    """What it says of these, whatever is wrong with the rest of it."""
    edited: int
    """`metadata.generation`: rises with every edit of the spec."""
    deleting: bool
    status: Mapping[str, Any]
    rollback_to: str | None
    """The annotation's text."""
    hosted: Hosted | None
    pods_work: bool
    """Some of its pods may still work, whoever started them."""


def reconcile(seen: Seen) -> Decision:
    """What to do now."""
    if seen.hosted is not None:
        return _about_hosted(seen, seen.hosted)
    if seen.pods_work:
        if _is_over(seen):
            return Decision(act=Act.LET_GO if seen.deleting else Act.CLEAR, reason="its run is over")
        return Decision(act=Act.HOST, reason="its pods run, and nobody supervises them")
    if seen.deleting:
        return Decision(act=Act.LET_GO, reason="nothing of it runs")
    ended = seen.status.get("state")
    if _is_over(seen) and ended != "Suspended":
        return Decision(act=Act.NOTHING, reason="it has ended; an edit of its spec starts a failed one again")
    if seen.cancel:
        said = "it was cancelled while nothing of it ran"
        return Decision(act=Act.NOTHING, reason=said, state=None if ended in ENDED else "Cancelled")
    if seen.suspend:
        said = str(seen.status.get("reason") or "") if ended == "Suspended" else "suspended before it ran"
        return Decision(act=Act.NOTHING, reason=said, state="Suspended")
    if seen.spec is None:
        return Decision(act=Act.NOTHING, reason="; ".join(seen.problems), state="Invalid")
    return Decision(act=Act.HOST, reason="it shall run")


def _is_over(seen: Seen) -> bool:
    """Whether its last run has come to an end that stands, as the status says."""
    state, spec = seen.status.get("state"), seen.spec
    if state == "Suspended":
        return seen.suspend or seen.deleting
    if state == "Done" and (spec is None or not spec.take_over):
        return True
    return state in ENDED and seen.status.get("endedGeneration") == seen.edited


def may_take_over(spec: TrainingJobSpec, status: Mapping[str, Any]) -> bool:
    """Until it has trained, and when it has ended and was edited. What goes on after that needs no force.

    A first run of which no pod came to train (a wrong image, a controller that died) has taken nothing over yet.
    """
    return spec.take_over and ("startedStep" not in status or status.get("state") in ENDED)


def _about_hosted(seen: Seen, hosted: Hosted) -> Decision:
    if seen.cancel and not hosted.cancelling:
        return Decision(act=Act.CANCEL, reason="spec.cancel")
    if hosted.ending:
        return Decision(act=Act.NOTHING, reason="it ends")
    if seen.deleting:
        return Decision(act=Act.DRAIN, reason="the deletion of its TrainingJob")
    if seen.suspend:
        return Decision(act=Act.DRAIN, reason="spec.suspend")
    if seen.spec is None:
        return Decision(act=Act.NOTHING, reason="; ".join(seen.problems))
    if seen.rollback_to is not None:
        step = int(seen.rollback_to) if seen.rollback_to.isdecimal() and len(seen.rollback_to) < 19 else None
        return Decision(act=Act.ROLL_BACK, reason=f"annotation rollback-to: {seen.rollback_to}", number=step)
    if hosted.waits_for and not hosted.pods_run:
        words = f"{', '.join(hosted.waits_for)} of its spec were edited, and none of its pods runs: it begins anew"
        return Decision(act=Act.DRAIN, reason=words)
    if seen.spec.nodes_max != hosted.wanted_nodes:
        return Decision(act=Act.RESIZE, reason="spec.nodesMax was edited", number=seen.spec.nodes_max)
    return Decision(act=Act.NOTHING, reason="it runs")


def differs(spec: Mapping[str, Any], run_spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of a spec that wait for the next run, because the present one began with others."""
    names = {*spec, *run_spec} - {*LIVE_FIELDS}
    return tuple(sorted(name for name in names if spec.get(name) != run_spec.get(name)))


def state_after(outcome: Outcome | None, exit_code: int, *, goes_on: bool) -> str:
    """What a run that has ended makes of its job. `goes_on`: nobody wants it to stay suspended."""
    if exit_code == ExitCode.DONE:
        return "Done"
    if outcome is Outcome.CANCELLED:
        return "Cancelled"
    if exit_code == ExitCode.RESUMABLE:
        return "Pending" if goes_on else "Suspended"
    return "Failed"


def restart_seconds(crashes: int) -> float:
    """How long a job whose supervision has failed by a fault of ours waits for the next attempt."""
    return float(min(RESTART_SECONDS_FIRST * 2 ** min(crashes - 1, 10), RESTART_SECONDS_MAX)) if crashes else 0.0

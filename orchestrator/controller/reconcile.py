"""What to do about one TrainingJob, and what to say of it. Pure: what was seen goes in, one act and why comes out.

Level-triggered: nothing is remembered but what stands in the objects themselves and what this process hosts just now,
so it does not matter which change was seen, or whether another controller was here before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from orchestrator.controller.crd import TrainingJobSpec, selector_of
from orchestrator.core.messages import Outcome
from orchestrator.core.wording import counted
from orchestrator.errors import ExitCode, KubernetesError
from orchestrator.schedulers.kubernetes.client import Object
from orchestrator.schedulers.kubernetes.pods import Pod

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


# ---------------------------------------------------------------------------------------------------- status


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What is known of a hosted run."""

    supervisor: Mapping[str, Any]
    """`supervisor.loop.describe`'s."""
    run: str
    run_spec: Mapping[str, Any]
    waiting: Sequence[Pod]
    refusal: KubernetesError | None
    staging_bytes: int | None
    nodes: int
    problems: Sequence[str] = ()
    """What is wrong with the spec as it is now; the run goes on with its own."""
    first_step: int | None = None
    """That the run began at; None: not known."""


PHASES = {
    "gathering": "Pending",
    "opening": "Pending",
    "starting": "Pending",
    "running": "Running",
    "leaving": "Saving",
    "clearing": "Saving",
    "ending": "Saving",
    "ended": "Saving",
}


def running_status(
    before: Mapping[str, Any], running: Running, spec: Mapping[str, Any], *, job: str, edited: int, now_wall: float
) -> Object:
    """The status of a job that is hosted."""
    said, conditions = running.supervisor, Conditions(before, edited, now_wall)
    phase = str(said["phase"])
    state = PHASES.get(phase, "Pending")
    pods = _pods_condition(running)
    training = phase == "running"
    reason = str(pods[2]) if pods[0] == "False" and not training else _training_words(said)
    conditions.put("Training", "True" if training else "False", phase.capitalize(), _training_words(said))
    conditions.put("PodsReady", *pods)
    waits = differs(spec, running.run_spec)
    if running.problems:
        words = f"the run goes on with the spec that it began with: {'; '.join(running.problems)}"
        conditions.put("SpecApplied", "False", "Invalid", words)
    elif waits:
        words = f"{', '.join(waits)}: changed since the run began; they take effect when it is suspended and resumed"
        conditions.put("SpecApplied", "False", "WaitsForNextRun", words)
    else:
        conditions.put("SpecApplied", "True", "Applied", "the run has this spec")
    conditions.end("Complete", "Failed")
    started = before.get("startedAt") or iso(now_wall)
    status: Object = {
        **{name: before[name] for name in ("startedStep", "stagingBytes", "newestCheckpoint") if name in before},
        "observedGeneration": edited,
        "observedAt": iso(now_wall),
        "state": "Restarting" if state == "Pending" and "startedStep" in before else state,
        "reason": reason,
        "run": running.run,
        "selector": selector_of(job),
        "nodes": running.nodes,
        "worldSize": said["world_size"],
        "step": max(int(said["step"]), int(before.get("step") or 0)) if phase != "running" else int(said["step"]),
        "startedAt": started,
        "conditions": conditions.all(),
    }
    status |= _optional(before, said, running, started, now_wall)
    return status


def _optional(
    before: Mapping[str, Any], said: Mapping[str, Any], running: Running, started: str, now_wall: float
) -> Object:
    found: Object = {}
    for name, value in (
        ("generation", said["generation"]),
        ("until", said["until"] or before.get("until")),
        ("progress", None if said["progress"] is None else f"{100 * said['progress']:.1f} %"),
        ("eta", None if said["eta_seconds"] is None else duration(said["eta_seconds"])),
        ("newestCheckpoint", said["newest_committed"]),
        ("stepSeconds", said["step_seconds"] or before.get("stepSeconds")),
        ("stagingBytes", running.staging_bytes),
    ):
        if value is not None:
            found[name] = value
    age = said["commit_age_seconds"]
    if age is not None:
        found["committedAt"] = steady(before.get("committedAt"), now_wall - age)
    elif "committedAt" in before:
        found["committedAt"] = before["committedAt"]
    if said["phase"] == "running" and "startedStep" not in before:
        known = running.first_step if running.first_step is not None else said["newest_committed_step"]
        found["startedStep"] = int(known or 0)
    goodput = goodput_of({**before, **found, "step": said["step"], "startedAt": started}, now_wall)
    if goodput is not None:
        found["goodput"] = f"{100 * goodput:.0f} %"
    elif "goodput" in before:
        found["goodput"] = before["goodput"]
    return found


def goodput_of(status: Mapping[str, Any], now_wall: float) -> float | None:
    """The share of the time since the first start that went into steps which count; None: not known yet."""
    started, step_seconds = status.get("startedAt"), status.get("stepSeconds")
    if started is None or not step_seconds or "startedStep" not in status:
        return None
    elapsed = now_wall - datetime.fromisoformat(started).timestamp()
    useful = (int(status["step"]) - int(status["startedStep"])) * float(step_seconds)
    return min(max(useful / elapsed, 0.0), 1.0) if elapsed > 0 else None


def _training_words(said: Mapping[str, Any]) -> str:
    if said["hang"]:
        return f"no step for {duration(said['seconds_without_step'])}: {said['hang']}"
    if said["phase"] != "running":
        return f"{said['phase']}, with {counted(len(said['nodes']), 'node')}"
    going = [node["node"] for node in said["nodes"] if node["going"]]
    train = sum(bool(node["ranks"]) for node in said["nodes"])
    there = counted(len(said["nodes"]), "node")
    spare = "" if train == len(said["nodes"]) else f"{train} of "
    return f"training on {spare}{there}" + (f"; {', '.join(going)} will go" if going else "")


def _pods_condition(running: Running) -> tuple[str, str, str]:
    """Status, reason and message: what keeps pods from running, the gravest first."""
    refusal = running.refusal
    if refusal is not None:
        word = "QuotaExceeded" if "exceeded quota" in refusal.message else refusal.reason or "Unavailable"
        return "False", word, f"a pod could not be created: {refusal.message}; it is tried again"
    stuck = [pod for pod in running.waiting if pod.waiting]
    if stuck:
        return "False", stuck[0].waiting.partition(": ")[2].partition(":")[0] or "Waiting", stuck[0].waiting
    placeless = [pod for pod in running.waiting if pod.unschedulable]
    if placeless:
        words = f"{counted(len(placeless), 'pod finds', 'pods find')} no place: {placeless[0].unschedulable}"
        return "False", "Unschedulable", words
    if running.waiting:
        return "False", "Starting", f"{counted(len(running.waiting), 'pod starts', 'pods start')}"
    return "True", "Ready", f"{counted(running.nodes, 'pod is', 'pods are')} there"


def ended_status(
    before: Mapping[str, Any],
    *,
    state: str,
    reason: str,
    exit_code: int,
    edited: int,
    has_spec: bool,
    now_wall: float,
) -> Object:
    """The status after a run has ended. `has_spec`: it had the spec as it is now, but for what takes effect at once."""
    conditions = Conditions(before, edited, now_wall)
    conditions.put("Training", "False", state, reason)
    conditions.put("PodsReady", "False", "GivenBack", "no pod is needed")
    if state == "Done":
        conditions.put("Complete", "True", "Done", reason)
    if state == "Failed":
        conditions.put("Failed", "True", "Fenced" if exit_code == ExitCode.FENCED else "Failed", reason)
    gone = ("worldSize", "nodes", "eta", "generation", "run", "observedAt")
    return {
        **{name: value for name, value in before.items() if name not in gone},
        "observedGeneration": edited,
        "endedGeneration": edited if has_spec or state != "Failed" else OTHER_SPEC,
        "state": state,
        "reason": reason,
        "exitCode": exit_code,
        "nodes": 0,
        "worldSize": 0,
        "conditions": conditions.all(),
    }


def resting_status(before: Mapping[str, Any], decision: Decision, *, edited: int, now_wall: float) -> Object | None:
    """The status of a job of which nothing runs; None: as it is."""
    if decision.state is None:  # an end stands, whatever was edited; whoever waits for the edit sees that it was seen
        return None if not before or decision.act is not Act.NOTHING else {**before, "observedGeneration": edited}
    conditions = Conditions(before, edited, now_wall)
    conditions.put("Training", "False", decision.state, decision.reason)
    if decision.state == "Invalid":
        conditions.put("SpecApplied", "False", "Invalid", decision.reason)
    return {
        **before,
        "observedGeneration": edited,
        "state": decision.state,
        "reason": decision.reason,
        "nodes": 0,
        "worldSize": 0,
        "conditions": conditions.all(),
    }


class Conditions:
    """A status' conditions: a transition time changes only with the condition's status."""

    def __init__(self, before: Mapping[str, Any], edited: int, now_wall: float) -> None:
        self._found = {str(one.get("type")): dict(one) for one in before.get("conditions") or []}
        self._edited = edited
        self._now = iso(now_wall)

    def put(self, kind: str, status: str, reason: str, message: str) -> None:
        """Set one."""
        known = self._found.get(kind)
        since = known["lastTransitionTime"] if known and known.get("status") == status else self._now
        self._found[kind] = {
            "type": kind,
            "status": status,
            "reason": "".join(c for c in reason.title() if c.isalnum()) if " " in reason else reason,
            "message": message[:32000],
            "lastTransitionTime": since,
            "observedGeneration": self._edited,
        }

    def end(self, *kinds: str) -> None:
        """Of a run before this one: they hold no more."""
        for kind in kinds:
            if self._found.get(kind, {}).get("status") == "True":
                self.put(kind, "False", "RunsAgain", "it goes on")

    def all(self) -> list[Object]:
        """In order of their types."""
        return [self._found[kind] for kind in sorted(self._found)]


def iso(wall: float) -> str:
    """A time as the API writes it."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def steady(before: object, wall: float) -> str:
    """A time that is computed anew at every look: it stays as it was if it is the same but for rounding."""
    if isinstance(before, str) and abs(datetime.fromisoformat(before).timestamp() - wall) < 2.0:
        return before
    return iso(wall)


def duration(seconds: float) -> str:
    """A time span in two units at most."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 172800:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"

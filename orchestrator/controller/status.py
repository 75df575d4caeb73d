"""What a TrainingJob's status says of it. Pure: what was seen goes in, the object's new status comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.controller.crd import selector_of
from orchestrator.controller.reconcile import OTHER_SPEC, Act, Decision, differs
from orchestrator.core.wording import counted
from orchestrator.errors import ExitCode, KubernetesError
from orchestrator.schedulers.kubernetes.names import Object
from orchestrator.schedulers.kubernetes.pods import Pod


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
        "state": _since_trained(state, before),
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


def _since_trained(state: str, before: Mapping[str, Any]) -> str:
    """Of a job that has trained, what waits for the next time is told apart."""
    return "Restarting" if state == "Pending" and "startedStep" in before else state


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
        "state": _since_trained(state, before),
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

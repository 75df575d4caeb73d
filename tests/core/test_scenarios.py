"""Scenario transcripts: what `core.job.step` answers, event by event, as text that a person can read and review.

A file of `scenarios/` has one instruction a line; indented lines below an event are its outcome: the phase where it
changed, then the actions. Instructions:

    # …                      a comment; the first says what the scenario shows
    job field=value …        the JobSpec, first of all
    include other.txt        play another scenario's events first, without printing them
    12.5 Event(field=value)  an event at 12.5 s; fields that the scenario does not need have defaults (see `DEFAULTS`);
                             a value may be a part of a message in the same writing: returned=GangReturned(first_rank=0)
    expect name=value …      claims that a rewrite does not change: phase, exit_code, generation, base, committed, nodes

`ORCHESTRATOR_REWRITE=1 pytest tests/core/test_scenarios.py` writes the outcomes anew; review the difference.
"""

from __future__ import annotations

import ast
import os
import typing
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import messages
from orchestrator.core.job import Job, JobSpec, new_job, step
from orchestrator.core.messages import Action, CheckpointId, Event, Finish, Note, RankProgress

SCENARIOS = Path(__file__).parent / "scenarios"
REWRITE_VARIABLE = "ORCHESTRATOR_REWRITE"
EVENTS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(messages.Event)}
PARTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        messages.GangReturned,
        messages.StepDecided,
        messages.RankProgress,
        messages.RankLook,
        messages.CheckpointId,
    )
}
SPEC: dict[str, Any] = {"name": "job", "nodes_min": 1, "nodes_max": 2, "workers_per_node": 1, "save_every_steps": 10}
DEFAULTS: dict[str, Any] = {
    "workers": 1,
    "address": "10.0.0.1",
    "source": "cloud",
    "kind": "preempt",
    "remaining_seconds": 120.0,
    "base": None,
    "meeting_address": "10.0.0.1",
    "meeting_port": 29500,
    "rolled_forward": 0,
    "step": 0,
    "until": 100,
    "allowed_world_sizes": None,
    "size_bytes": 1 << 20,
    "unique_bytes": 4096,
    "seconds": 0.5,
    "attached": True,
    "verdict": "none",
    "ended_by_us": False,
    "evidence": "",
    "by": "a person",
    "world_size": 2,
    "count": 1,
    "ballot": 0,
    "proposed_step": None,
    "decided": (),
    "ended": False,
    "committed_step": None,
    "mode": "stay",
    "absent": (),
    "staged": (),
    "progress": (),
    "step_seconds": 0.5,
    "free_slots": 2,
    "state": "S",
    "traced": False,
    "busy_seconds": 0.0,
    "waits": None,
    "where": "",
    "awake_seconds": 1000.0,
    "value": 2.5,
    "usual": 2.5,
    "good_step": None,
    "problem": None,
    "rollback_to": None,
}


RARE = ("holders", "rollback_to", "claimed_through")
"""Fields that are shown only where they say something."""


@dataclass(frozen=True)
class Part:
    """A part of a message as it is written; what is left out is known once the message around it is."""

    kind: type
    given: dict[str, Any]


@dataclass
class Play:
    """One scenario in the course of being played."""

    job: Job
    exit_code: int | None = None
    broken_claims: list[str] = field(default_factory=list)

    def take(self, now_seconds: float, event: Event) -> list[str]:
        """Feed one event; its outcome as lines."""
        before = self.job.phase
        self.job, actions = step(self.job, event, now_seconds)
        for action in actions:
            if isinstance(action, Finish):
                self.exit_code = action.exit_code
        outcome = [str(self.job.phase)] if self.job.phase is not before else []
        return outcome + render(actions)

    def facts(self) -> dict[str, str]:
        """What `expect` can compare."""
        gang, base, committed = self.job.gang, self.job.base, self.job.newest_committed
        return {
            "phase": str(self.job.phase),
            "exit_code": str(self.exit_code),
            "generation": str(gang.generation if gang else None),
            "members": ",".join(gang.nodes) if gang else "None",
            "nodes": ",".join(self.job.nodes),
            "base": short(base),
            "committed": short(committed),
            "saves": ",".join(f"{short(save.id)}={save.state}" for save in self.job.saves.values()) or "none",
            "failures": str(self.job.failures),
        }


def short(checkpoint: CheckpointId | None) -> str:
    """generation:step."""
    return "None" if checkpoint is None else f"{checkpoint.generation}:{checkpoint.step}"


# ------------------------------------------------------------------------------------------------ writing


def render(actions: tuple[Action, ...]) -> list[str]:
    """Actions as lines; neighbours that differ in the node alone share one."""
    lines: list[tuple[str, list[str]]] = []
    for action in actions:
        node = "" if isinstance(action, Note) else str(getattr(action, "node", ""))
        text = note(action) if isinstance(action, Note) else call(action)
        if lines and node and lines[-1][0] == text:
            lines[-1][1].append(node)
        else:
            lines.append((text, [node]))
    return [text.replace("{node}", "|".join(nodes)) for text, nodes in lines]


def call(action: Action) -> str:
    """Name(field=value, …), with the node left open."""
    shown = (
        f"{name}=" + ("{node}" if name == "node" else value(getattr(action, name)))
        for name in names(action)
        if name not in RARE or getattr(action, name)
    )
    return f"{type(action).__name__}({', '.join(shown)})"


def names(message: Any) -> list[str]:
    """The fields' names of a message."""
    return [item.name for item in fields(message)]


def value(thing: object) -> str:
    """A field's value in short."""
    match thing:
        case CheckpointId():
            return short(thing)
        case StrEnum():
            return str(thing)
        case float():
            return f"{thing:.2f}"
        case str():
            return repr(thing) if " " in thing else thing
        case tuple():
            return "[" + ", ".join(value(item) for item in thing) + "]"
        case _:
            return str(thing)


def note(action: Note) -> str:
    """A note as `kind: reason`, with where and the numbers."""
    where = [(name, getattr(action, name)) for name in ("node", "step", "rank")] + list(action.facts.items())
    shown = " ".join(f"{name}={value(item)}" for name, item in where if item is not None)
    return f"· {action.kind}: {action.reason}" + (f"  ({shown})" if shown else "")


# ------------------------------------------------------------------------------------------------ reading


def parse_event(text: str, job: Job) -> Event:
    """An event from Name(field=value, …); bare words are strings."""
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.Call), text
    assert isinstance(tree.func, ast.Name), text
    kind = EVENTS[tree.func.id]
    given = {str(item.arg): literal(item.value) for item in tree.keywords}
    return make_event(kind, given, job)


def literal(tree: ast.expr) -> Any:
    """A Python literal in which bare words stand for themselves and 1:20 cannot be written: use (1, 20)."""
    match tree:
        case ast.Name(id=name):
            return name
        case ast.Call(func=ast.Name(id=name), keywords=keywords):
            return Part(PARTS[name], {str(item.arg): literal(item.value) for item in keywords})
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(literal(item) for item in items)
        case _:
            return ast.literal_eval(tree)


def make_event(kind: type, given: dict[str, Any], job: Job) -> Event:
    """Fill in defaults and turn words into enumeration members."""
    types = typing.get_type_hints(kind)
    gang = job.gang
    if "rank" in given and "node" not in given and gang is not None:
        given["node"] = gang.node_of(given["rank"])
    if "node" not in given and "node" in types:
        given["node"] = job.opener
    if kind is messages.Progress and gang is not None:
        ranks = gang.ranks_of(given["node"])
        given["ranks"] = tuple(
            RankProgress(
                rank=rank,
                step=given["step"],
                step_seconds=given.get("step_seconds", 0.5),
                free_slots=given.get("free_slots", 2),
            )
            for rank in ranks
        )
    values: dict[str, Any] = {}
    for item in fields(kind):
        name = item.name
        if name in given:
            values[name] = resolve(given[name], given.get("node"), job)
        elif name == "generation":
            values[name] = gang.generation if gang else 1
        elif name == "after":
            values[name] = job.own or 0
        elif name == "pid":
            values[name] = 1000 + given["rank"]
        elif name == "notice_id":
            values[name] = f"notice-{given['node']}"
        elif item.default is MISSING:
            values[name] = DEFAULTS[name]
        if name == "base" and values[name] is not None:
            values[name] = CheckpointId(generation=values[name][0], step=values[name][1])
        if isinstance(types[name], type) and issubclass(types[name], StrEnum):
            values[name] = types[name](values[name])
    event: Event = kind(**values)
    return event


def resolve(thing: Any, node: str | None, job: Job) -> Any:
    """Parts of a message become values; they are about its node."""
    match thing:
        case Part():
            return make_event(thing.kind, {**({"node": node} if node else {}), **thing.given}, job)
        case tuple():
            return tuple(resolve(item, None, job) for item in thing)
        case _:
            return thing


def parse_spec(text: str) -> JobSpec:
    """The JobSpec of a `job` line."""
    given = dict(word.split("=", 1) for word in text.split())
    return JobSpec(**{**SPEC, **{name: ast.literal_eval(word) for name, word in given.items()}})


def play(path: Path, run: Play | None = None) -> tuple[Play, list[str]]:
    """Play a scenario; the lines of the file as they should be."""
    lines: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith(" "):
            continue
        lines.append(line)
        first, _, rest = line.partition(" ")
        if not line or first == "#":
            continue
        if first == "job":
            run = run or Play(new_job(parse_spec(rest), 0.0))
        elif first == "include":
            run, _ = play(SCENARIOS / rest, run)
        elif first == "expect":
            assert run is not None
            for claim in rest.split():
                name, _, wanted = claim.partition("=")
                if run.facts()[name] != wanted:
                    run.broken_claims.append(f"{path.name}:{number}: {name} is {run.facts()[name]}, not {wanted}")
        else:
            assert run is not None, f"{path.name}:{number}: no job line"
            lines.extend(f"    {text}" for text in run.take(float(first), parse_event(rest, run.job)))
    assert run is not None, f"{path.name}: no job line"
    return run, lines


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_the_core_answers_as_the_transcript_says(path: Path) -> None:
    run, lines = play(path)
    text = "\n".join(lines) + "\n"
    if os.environ.get(REWRITE_VARIABLE) == "1":
        path.write_text(text, encoding="utf-8")
    assert run.broken_claims == []
    assert path.read_text(encoding="utf-8") == text, f"{path.name} differs; {REWRITE_VARIABLE}=1 writes it anew"


def test_every_event_and_every_action_occurs_in_some_transcript() -> None:
    told = "\n".join(path.read_text(encoding="utf-8") for path in SCENARIOS.glob("*.txt"))
    kinds = {kind.__name__ for kind in (*typing.get_args(messages.Event), *typing.get_args(messages.Action))}
    assert [name for name in sorted(kinds - {"Note"}) if f"{name}(" not in told] == []


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_job_value_never_changes_and_the_same_values_give_the_same_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Job, str]] = []

    real = step

    def watched(job: Job, event: Event, now_seconds: float) -> tuple[Job, tuple[Action, ...]]:
        before = repr(job)
        answer = real(job, event, now_seconds)
        assert real(job, event, now_seconds) == answer
        seen.append((job, before))
        return answer

    monkeypatch.setitem(globals(), "step", watched)
    play(path)
    assert [job for job, before in seen if repr(job) != before] == []

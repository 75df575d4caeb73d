"""The TrainingJob: what a user writes, what the controller answers, and the schema of both for the API server. Pure.

The settings are those of `orchestrator.toml`, spelt as Kubernetes spells: `workers_per_node` is `workersPerNode`. The
schema is made from the same models, so a field, its limits and its words exist once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from orchestrator.config import JobConfig, JobSettings
from orchestrator.errors import ConfigError
from orchestrator.schedulers.kubernetes.names import GROUP, JOB_LABEL, VERSION, Object
from orchestrator.schedulers.kubernetes.pods import merged, template_problems

KIND, PLURAL = "TrainingJob", "trainingjobs"
NAME_PATTERN = "[a-z]([-a-z0-9]{0,48}[a-z0-9])?"
"""Pods, Secrets and the Service are named after the job, with more behind it."""
NAME_PROBLEM = "a job's name has at most 50 lower-case letters, digits and '-', and begins with a letter"
FINALIZER = f"{GROUP}/save"
ROLLBACK_ANNOTATION = f"{GROUP}/rollback-to"


class Fallback(BaseModel):
    """Other terms for pods that find no place."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    template: dict[str, Any]
    """A part of a pod template that is merged over `template` (JSON merge patch: null removes, lists are replaced;
    plain `kubectl apply` drops null, with --server-side it stays)."""


class TrainingJobSpec(JobSettings):
    """What a training job is told."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=False)

    nodes_min: Annotated[int, Field(ge=1, le=4096)] = 1
    """With fewer pods than this the job waits."""
    nodes_max: Annotated[int, Field(ge=1, le=4096)] = 1
    """More pods than this it does not ask for. May be changed while it runs: it saves, and goes on with that many."""
    suspend: bool = False
    """True: save, give all pods back, and wait. False again: go on from there."""
    cancel: bool = False
    """True: end for good."""
    take_over: bool = False
    """Start a job that another owner has left without an end, that was cancelled, or is done. Be certain that nobody
    runs it."""
    patience_seconds: Annotated[float, Field(ge=0, le=86400)] = 600.0
    """A pod that found no place for longer than this is made again from `fallback`, if there is one."""
    template: dict[str, Any]
    """The pods' template. Its first container is where agent and workers run; its `command` is the Python interpreter
    (python3 if not given), `args` are not used."""
    fallback: Fallback | None = None
    """For pods that find no place on the first terms (spot), other ones (on demand)."""

    @model_validator(mode="after")
    def _least_is_least(self) -> Self:
        if self.nodes_min > self.nodes_max:
            raise ValueError(f"nodesMin ({self.nodes_min}) is more than nodesMax ({self.nodes_max})")
        return self

    @model_validator(mode="after")
    def _is_a_template(self) -> Self:
        found = [f"template.{problem}" for problem in template_problems(self.template)]
        if self.fallback is not None and not found:
            other = merged(self.template, self.fallback.template)
            found = [f"template with fallback.template: {problem}" for problem in template_problems(other)]
        if found:
            raise ValueError("; ".join(found))
        return self

    def config(self, name: str) -> JobConfig:
        """As the supervisor takes it."""
        settings = {field: getattr(self, field) for field in JobSettings.model_fields}
        return JobConfig(job=name, nodes=f"{self.nodes_min}:{self.nodes_max}", scheduler="kubernetes", **settings)


def spelt(name: str) -> str:
    """A setting's name as it is written in a TrainingJob."""
    return to_camel(name)


def read_spec(spec: object) -> TrainingJobSpec:
    """A TrainingJob's spec. Raises ConfigError with everything that is wrong with it, by the user's own names."""
    try:
        return TrainingJobSpec.model_validate(spec)
    except ValidationError as error:
        raise ConfigError(*(_problem(one) for one in error.errors())) from error


def _problem(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    text = str(problem["msg"]).removeprefix("Value error, ")
    return f"spec.{where}: {text}" if where else f"spec: {text}"


# ----------------------------------------------------------------------------------------------- the definition


def definition() -> Object:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "trainingjob",
                "shortNames": ["tj"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.nodesMax",
                            "statusReplicasPath": ".status.nodes",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [_column(*column) for column in COLUMNS],
                }
            ],
        },
    }


COLUMNS = (
    ("State", "string", ".status.state", 0),
    ("Step", "integer", ".status.step", 0),
    ("Progress", "string", ".status.progress", 0),
    ("ETA", "string", ".status.eta", 0),
    ("Ranks", "integer", ".status.worldSize", 0),
    ("Committed", "date", ".status.committedAt", 0),
    ("Goodput", "string", ".status.goodput", 0),
    ("Gen", "integer", ".status.generation", 1),
    ("Nodes", "integer", ".status.nodes", 1),
    ("Reason", "string", ".status.reason", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Name, type, path, and 1 for what `kubectl get -o wide` shows only."""


def _column(name: str, kind: str, path: str, priority: int) -> Object:
    return {"name": name, "type": kind, "jsonPath": path, "priority": priority}


def _schema() -> Object:
    spec = structural(TrainingJobSpec.model_json_schema(by_alias=True))
    for name in ("template", "fallback"):
        holder = spec["properties"][name] if name == "template" else spec["properties"][name]["properties"]["template"]
        holder.pop("additionalProperties", None)
        holder["x-kubernetes-preserve-unknown-fields"] = True
    spec["properties"]["command"] = {**spec["properties"]["command"], "minItems": 1}
    del spec["properties"]["command"]["default"]
    spec["required"] = ["store", "command", "template"]
    spec["x-kubernetes-validations"] = [
        {"rule": "self.nodesMin <= self.nodesMax", "message": "nodesMin is more than nodesMax"}
    ]
    return {
        "type": "object",
        "description": "A training job on pods that may be taken away at any time.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": _STATUS,
        },
        "x-kubernetes-validations": [
            {"rule": f"self.metadata.name.matches('^{NAME_PATTERN}$')", "message": NAME_PROBLEM}
        ],
    }


def structural(schema: Mapping[str, Any]) -> Object:
    """pydantic's JSON schema as a structural one: no references, no `anyOf`, limits as OpenAPI 3.0 writes them."""
    return _structural(schema, schema.get("$defs") or {})


def _structural(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Object:
    if "$ref" in schema:
        target = known[schema["$ref"].rpartition("/")[2]]
        return _structural({**target, **{key: value for key, value in schema.items() if key != "$ref"}}, known)
    if "anyOf" in schema:
        (one,) = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
        return {**_structural({**one, **rest}, known), "nullable": True}
    found: Object = {}
    for key, value in schema.items():
        match key:
            case "title" | "$defs" | "additionalProperties":
                continue
            case "description":
                found[key] = " ".join(str(value).split())
            case "properties":
                found[key] = {name: _structural(one, known) for name, one in value.items()}
            case "items":
                found[key] = _structural(value, known)
            case "exclusiveMinimum":
                found |= {"minimum": value, "exclusiveMinimum": True}
            case _:
                found[key] = value
    return found


def _text(words: str, **more: Any) -> Object:
    return {"type": "string", "description": words, **more}


_STATUS: Object = {
    "type": "object",
    "description": "What the controller says of the job.",
    "properties": {
        "observedGeneration": {"type": "integer", "format": "int64", "description": "Of the spec that it speaks of."},
        "state": _text("Pending, Running, Restarting, Saving, Suspended, Done, Failed, Cancelled or Invalid."),
        "observedAt": _text("When this was seen, of a job that runs: the figures are of then.", format="date-time"),
        "reason": _text("Why it is in this state, in words."),
        "exitCode": {"type": "integer", "description": "Of a job that has ended, as of `orchestrator run`."},
        "endedGeneration": {
            "type": "integer",
            "format": "int64",
            "description": "Of the spec with which it ended; 0: of an earlier one.",
        },
        "run": _text("Names the present run: the label of its pods, and its Secret."),
        "generation": {"type": "integer", "format": "int64", "description": "Of the gang: each forming has its own."},
        "step": {"type": "integer", "format": "int64", "description": "The highest completed step."},
        "until": {"type": "integer", "format": "int64", "description": "The step at which it is done."},
        "progress": _text("How much of it is done."),
        "eta": _text("How long it still takes at the present pace."),
        "worldSize": {"type": "integer", "description": "Ranks that train."},
        "nodes": {"type": "integer", "description": "Pods that there are."},
        "selector": _text("Of the job's pods, for the scale subresource."),
        "newestCheckpoint": _text("The newest committed one."),
        "committedAt": _text("When it was committed.", format="date-time"),
        "goodput": _text("The share of the time since the first start that went into steps which count."),
        "startedAt": _text("When the job was first started.", format="date-time"),
        "startedStep": {"type": "integer", "format": "int64", "description": "The step that it began at then."},
        "stepSeconds": {"type": "number", "description": "What a step takes."},
        "stagingBytes": {"type": "integer", "format": "int64", "description": "That all ranks stage together."},
        "conditions": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object",
                "required": ["type", "status", "lastTransitionTime", "reason", "message"],
                "properties": {
                    "type": _text("Training, PodsReady, SpecApplied, Complete or Failed."),
                    "status": _text("Whether it is so.", enum=["True", "False", "Unknown"]),
                    "observedGeneration": {"type": "integer", "format": "int64"},
                    "lastTransitionTime": _text("Since when.", format="date-time"),
                    "reason": _text("One word."),
                    "message": _text("In words, with what to do."),
                },
            },
        },
    },
}


def selector_of(job: str) -> str:
    """The label selector of a job's pods."""
    return f"{JOB_LABEL}={job}"

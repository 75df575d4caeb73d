"""A job's configuration: one model for flags and `orchestrator.toml`. All problems are reported at once, with paths.

Values given on the command line beat the file; nothing is read from the environment here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from orchestrator.core.deadline import MARGIN_SECONDS
from orchestrator.core.states import JobSpec
from orchestrator.errors import ConfigError

NOTICE_SOURCES = (
    "auto",
    "none",
    "aws",
    "gcp",
    "azure",
    "alibaba",
    "tencent",
    "volcengine",
    "byteplus",
    "oci",
    "webhook",
)
SCHEDULERS = ("local", "slurm", "kubernetes")
_LOOPBACK_URL = re.compile(r"http://(localhost|[0-9.]+|\[[0-9a-f:]+\])(?::([0-9]{1,5}))?/?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\Z")


class JobSettings(BaseModel):
    """What a job is told in the same words everywhere: here, in `orchestrator.toml`, in a TrainingJob of Kubernetes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    store: str
    """URL or path of the folder that holds the jobs' folders."""
    command: Annotated[tuple[str, ...], Field(validate_default=True)] = ()
    """The training command, the same on every rank."""
    workers_per_node: Annotated[int, Field(ge=1, le=1024)] = 1
    """Training processes per node, usually one per GPU."""
    save_every: Annotated[int, Field(ge=0)] = 1000
    """Steps between periodic checkpoints; 0: only on notice, on request and at the end."""
    keep_last: Annotated[int, Field(ge=0)] = 0
    """Newest committed checkpoints that are kept, older ones are deleted; 0: all are kept."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Besides, the first checkpoint of every so many steps is kept for good; 0: none. Needs keep_last."""
    notices: str = "auto"
    """What is watched beside signals: auto, none, or a list of clouds, webhook and file:/path, with commas.
    In a rehearsal a cloud, or auto, is CLOUD@http://127.0.0.1:PORT."""
    grace_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """Seconds that a signal, or a notice without a time, leaves (30: what most clouds give at least); more than 1."""
    max_failures: Annotated[int, Field(ge=0, le=1000)] = 3
    """Failures from one checkpoint before an older one is tried (as often); then the job stops. Not preemptions."""
    gather_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """How long the first start waits for more than MIN nodes, and any start for the replacement of a condemned one."""
    reform_seconds: Annotated[float, Field(ge=0, le=86400)] = 2.0
    """How long a restart waits for replacements that are about to come."""
    start_seconds: Annotated[float, Field(gt=0, le=86400)] = 1800.0
    """How long the workers of a start may take until every rank has called attach; longer is a failure."""
    hang_seconds: Annotated[float, Field(ge=0, le=86400)] = 60.0
    """Without a step for longer than this, ten steps and twice the longest pause, a hang is suspected; 0: never."""
    device_check_seconds: Annotated[float, Field(ge=0, le=3600)] = 60.0
    """How long each NVIDIA device of a node may take for the test before its first worker; 0: none is tested."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        meant = info.field_name is not None and cls.model_fields[info.field_name].annotation is bool
        if isinstance(value, bool) and not meant:  # true would count as 1
            raise ValueError(f"is neither true nor false, got {str(value).lower()}")
        return value

    @field_validator("notices")
    @classmethod
    def _known_notices(cls, value: str) -> str:
        parse_notices(value)
        return value

    @field_validator("grace_seconds")
    @classmethod
    def _grace_for_something(cls, value: float) -> float:
        if value <= MARGIN_SECONDS:
            raise ValueError(
                f"{value:g} s leave nothing: {MARGIN_SECONDS:g} s of every notice are kept as a margin, "
                "so that nothing could ever be saved on a signal"
            )
        return value

    @field_validator("store")
    @classmethod
    def _some_folder(cls, value: str) -> str:
        if not value:
            raise ValueError("a folder is needed")
        return value

    @field_validator("command", mode="before")
    @classmethod
    def _command_is_a_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"is a list of words, not one text: {value.split()}")
        return value

    @field_validator("command")
    @classmethod
    def _some_command(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("nothing to run; give it after --, or as a list in the file")
        return value

    @model_validator(mode="after")
    def _keep_every_of_what(self) -> Self:
        if self.keep_every and not self.keep_last:  # something else was meant: they would be kept anyway
            raise ValueError("keep_every: needs keep_last; without it all checkpoints are kept")
        return self


class JobConfig(JobSettings):
    """What `orchestrator run` needs to know."""

    job: str
    """The job's name, also its folder's in the store: lower-case letters, digits, '.', '_' and '-', at most 63."""
    scheduler: str = "local"
    """Where nodes come from: local (nodes are sessions of processes on this machine), slurm or kubernetes."""
    sbatch: tuple[str, ...] = ()
    """Slurm: options of sbatch for the submission, as `--partition=gpu`, `--gres=gpu:8`, `--time=24:00:00`."""
    srun: tuple[str, ...] = ()
    """Slurm: options of srun for each node's agent and its workers, as those that name a container."""
    template: str = ""
    """Kubernetes: a file with the pods' template (YAML): image, resources, tolerations, service account."""
    namespace: str = ""
    """Kubernetes: where the job is; the context's own if not given."""
    nodes: str = "1"
    """MIN:MAX or one number: with fewer than MIN nodes the job waits, more than MAX it does not ask for."""
    replacement_seconds: Annotated[float, Field(ge=0, le=86400)] = 0.0
    """Local scheduler: how long a replacement for a lost node takes to come (rehearsals)."""
    staging: str = "/dev/shm"
    """Folder in memory for staged shards."""

    @field_validator("job")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        if not _NAME.match(value):
            raise ValueError(
                "use 1 to 63 lower-case letters, digits, '.', '_' and '-', with a letter or digit at both ends"
            )
        return value

    @field_validator("scheduler")
    @classmethod
    def _known_scheduler(cls, value: str) -> str:
        if value not in SCHEDULERS:
            raise ValueError(f"this release knows the schedulers 'local', 'slurm' and 'kubernetes', not {value!r}")
        return value

    @field_validator("sbatch", "srun", mode="before")
    @classmethod
    def _options_are_a_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"is a list of options, not one text: {value.split()}")
        return value

    @field_validator("sbatch", "srun")
    @classmethod
    def _options_are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if not re.match(r"--?[a-zA-Z]", option) or "\n" in option:
                raise ValueError(f"{option!r} is no option; write it with its value, as --partition=gpu")
        return value

    @field_validator("nodes", mode="before")
    @classmethod
    def _one_number(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    @field_validator("nodes")
    @classmethod
    def _valid_nodes(cls, value: str) -> str:
        low, high = parse_nodes(value)
        if not 1 <= low <= high <= 4096:
            raise ValueError(f"needs 1 <= MIN <= MAX <= 4096, got {low}:{high}")
        return value

    @field_validator("staging")
    @classmethod
    def _some_staging(cls, value: str) -> str:
        if not value:
            raise ValueError("a folder is needed")
        return value

    @property
    def nodes_min(self) -> int:
        """Smallest number of nodes."""
        return parse_nodes(self.nodes)[0]

    @property
    def nodes_max(self) -> int:
        """Largest number of nodes."""
        return parse_nodes(self.nodes)[1]

    def spec(self) -> JobSpec:
        """What the core needs of it."""
        return JobSpec(
            name=self.job,
            nodes_min=self.nodes_min,
            nodes_max=self.nodes_max,
            workers_per_node=self.workers_per_node,
            save_every_steps=self.save_every,
            keep_last=self.keep_last,
            keep_every_steps=self.keep_every,
            grace_seconds=self.grace_seconds,
            failures_max=self.max_failures,
            gather_seconds=self.gather_seconds,
            reform_seconds=self.reform_seconds,
            start_seconds=self.start_seconds,
            hang_seconds=self.hang_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """What `notices` names."""

    names: tuple[str, ...]
    """auto, none, clouds, webhook, file:/path; `byteplus` is volcengine."""
    addresses: Mapping[str, str]
    """Cloud → URL that is watched in place of its real metadata service; auto → URL that all other clouds are at."""


def parse_notices(text: str) -> Notices:
    """The words of `notices`. Raises ValueError."""
    names: list[str] = []
    addresses: dict[str, str] = {}
    for word in (part.strip() for part in text.split(",")):
        if word.startswith("file:"):
            if not word.startswith("file:/"):
                raise ValueError(f"{word!r}: a file is named by its whole path: file:/run/leave")
            names.append(word)
            continue
        name, at, address = word.partition("@")
        if name not in NOTICE_SOURCES:
            raise ValueError(f"there is no source {name!r}; there are {', '.join(NOTICE_SOURCES)} and file:/path")
        names.append("volcengine" if name == "byteplus" else name)
        if at:
            addresses[names[-1]] = _rehearsal_address(name, address)
    if len(set(names)) < len(names):
        raise ValueError("one of the sources is named twice")
    if "none" in names and len(names) > 1:
        raise ValueError("none stands alone")
    return Notices(names=tuple(names), addresses=addresses)


def _rehearsal_address(name: str, text: str) -> str:
    if name in ("none", "webhook"):
        raise ValueError(f"{name} has no metadata service that could be at an address")
    match = _LOOPBACK_URL.fullmatch(text)
    if match is None or not _is_loopback(match[1]) or not 0 < int(match[2] or 80) < 65536:
        raise ValueError(
            f"{name}@{text}: an address is for rehearsals on this machine, as in {name}@http://127.0.0.1:8123; "
            f"{name} alone watches the real service"
        )
    return text.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_nodes(text: str) -> tuple[int, int]:
    """(MIN, MAX) of "MIN:MAX" or "N". Raises ValueError."""
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    if match is None:
        raise ValueError(f"expected MIN:MAX or one number, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> JobConfig:
    """The file's values (if there is a file) under the given ones. Raises ConfigError with every problem."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # ValueError: not TOML, not UTF-8, a number of 5000 digits
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
    values |= {name: value for name, value in overrides.items() if value is not None}
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        source = f"{path}: " if path is not None else ""
        raise ConfigError(*(f"{source}{_describe(problem)}" for problem in error.errors())) from error


def _describe(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    text = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{where}: there is no such setting"
    if problem["type"] == "missing":
        return f"{where}: is missing"
    return f"{where}: {text}" if where else text

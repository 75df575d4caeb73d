"""A job whose nodes are pods, as a controller hosts it: run, pods, supervisor, notices. Used by `controller.loop`.

A *run* is what lasts from one start of the job's pods until all of them are given back: its Secret holds what agents
are told, and with it everything that another controller needs to go on with the pods that are left running.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.settings import AgentSettings
from orchestrator.certificates import new_identity
from orchestrator.clock import Clock
from orchestrator.config import JobConfig
from orchestrator.core.messages import Finish, Request, Requested
from orchestrator.core.preflight import save_on_notice_seconds
from orchestrator.errors import ExitCode
from orchestrator.schedulers.kubernetes.allocation import KubernetesAllocation
from orchestrator.schedulers.kubernetes.client import KubernetesClient
from orchestrator.schedulers.kubernetes.names import JOB_LABEL, RUN_LABEL, Object
from orchestrator.schedulers.kubernetes.pods import (
    LOG_FOLDER,
    STAGING_FOLDER,
    Owner,
    Pod,
    PodPlan,
    read_pod,
)
from orchestrator.supervisor.kubernetes_notices import KubernetesNotices
from orchestrator.supervisor.loop import Server, Supervisor
from orchestrator.telemetry import EventLog, EventRecord, Sink

GRACE_SLACK = 1.5
"""A pod's grace is that much longer than a save takes by what was measured: the next one may meet a slower store."""
GRACE_SLACK_SECONDS = 15.0
GRACE_SECONDS_MAX = 600.0
STAGING_SLACK = 1.5
STAGING_SLACK_BYTES = 64 << 20
SETTINGS_KEY = "settings.json"
SPEC_KEY = "spec.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What lasts for a run."""

    name: str
    settings: AgentSettings
    """Of every agent of the run, but for what differs from pod to pod."""
    spec: Object
    """The TrainingJob's spec as it was when the run began; later edits of most of it wait for the next run."""

    @property
    def secret(self) -> str:
        """The name of its Secret."""
        return secret_name(self.settings.job, self.name)

    def finds(self, url: str, certificate: str) -> bool:
        """Whether its agents look for their supervisor there, and trust it. If not, they cannot be gone on with."""
        return (self.settings.supervisor_url, self.settings.supervisor_certificate) == (url, certificate)


def secret_name(job: str, run: str) -> str:
    """Of a run."""
    return f"{job}-{run}"


def owner_of(uid: str) -> str:
    """The owner id of a TrainingJob: one that is deleted and made again is another owner."""
    return f"kubernetes-{uid}"


def new_run(
    config: JobConfig, owner: Owner, spec: Object, *, job_url: str, url: str, certificate: str, take_over: bool
) -> Run:
    """A run that begins now; `url` and `certificate`: how its agents reach their supervisor."""
    return Run(
        name=secrets.token_hex(4),
        spec=spec,
        settings=AgentSettings(
            job=config.job,
            node="",
            workers=config.workers_per_node,
            command=config.command,
            store=job_url,
            owner=owner_of(owner.uid),
            claimant=secrets.token_hex(8),
            take_over=take_over,
            supervisor_url=url,
            token=secrets.token_urlsafe(32),
            identity=new_identity(),
            supervisor_certificate=certificate,
            staging=Path(STAGING_FOLDER, "orchestrator"),
            logs=Path(LOG_FOLDER),
            grace_seconds=config.grace_seconds,
            notices=config.notices,
            acknowledge_notices=False,  # others may have pods on the same host
            device_check_seconds=config.device_check_seconds,
        ),
    )


def render_secret(run: Run, owner: Owner) -> Object:
    """The Secret that keeps a run; it goes with its TrainingJob."""
    data = {SETTINGS_KEY: run.settings.model_dump_json(), SPEC_KEY: json.dumps(run.spec)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {
            "name": run.secret,
            "namespace": owner.namespace,
            "labels": {JOB_LABEL: owner.name, RUN_LABEL: run.name},
            "ownerReferences": [owner.reference()],
        },
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
    }


def read_run(secret: Mapping[str, Any]) -> Run | None:
    """The run that a Secret keeps; None: it keeps none that this release understands."""
    try:
        name = str(secret["metadata"]["labels"][RUN_LABEL])
        data = {key: base64.b64decode(secret["data"][key]) for key in (SETTINGS_KEY, SPEC_KEY)}
        settings = AgentSettings.model_validate_json(data[SETTINGS_KEY])
        spec = json.loads(data[SPEC_KEY])
    except (KeyError, TypeError, ValueError):
        return None
    return Run(name=name, settings=settings, spec=spec) if isinstance(spec, dict) else None


def run_to_go_on_with(runs: Iterable[Run], pods: Iterable[Pod]) -> Run | None:
    """The run some of whose pods still work: they train on, whoever supervises them. Pure."""
    living = {pod.run for pod in pods if works(pod)}
    return next((run for run in runs if run.name in living), None)


def works(pod: Pod) -> bool:
    """Whether something of the job may still work there. One that is being deleted saves until its grace is over."""
    return pod.lives and (not pod.deleting or pod.phase == "Running")


class KubernetesJob:
    """One run, supervised by this process."""

    def __init__(
        self,
        config: JobConfig,
        run: Run,
        plan: PodPlan,
        *,
        client: KubernetesClient,
        clock: Clock,
        patience_seconds: float,
        open_server: Callable[[Supervisor, str], Server],
        sinks: tuple[Sink, ...] = (),
    ) -> None:
        self._config = config
        self.run_name = run.name
        self.staging_bytes: int | None = None
        """That all ranks stage together, once it was measured."""
        self._save_seconds: float | None = None
        """That a save on notice takes, once it was measured."""
        self.first_step: int | None = None
        """That this run began at, as far as this process has seen its begin."""
        self.allocation = KubernetesAllocation(
            client=client,
            plan=plan,
            clock=clock,
            patience_seconds=patience_seconds,
            grace_seconds=self._grace_seconds,
            staging_bytes=self._staging_limit_bytes,
        )
        self.allocation.abandoned = True
        self.supervisor = Supervisor(
            config.spec(),
            self.allocation,
            clock,
            EventLog(self._on_event, *sinks),
            run.settings.token,
            open_server=open_server,
        )
        self._notices = KubernetesNotices(clock, self.supervisor.submit, grace_seconds=config.grace_seconds)

    async def run(self) -> Finish:
        """To the end of the run: then all pods are given back. When it ends otherwise, by a fault, they stay."""
        return await self.supervisor.run()

    def on_pod(self, found: Object, gone: bool) -> None:
        """A pod of the job has changed, or is gone."""
        if read_pod(found).run == self.run_name:
            self.allocation.observe(found, gone)
            self._notices.on_pod(found, gone)

    def on_host(self, found: Object, gone: bool) -> None:
        """A host of the cluster has changed, or is gone."""
        self._notices.on_host(found, gone)

    def drain(self, by: str) -> None:
        """Save, then give the pods back."""
        self.supervisor.drain(by)

    def cancel(self, by: str) -> None:
        """End for good."""
        self.supervisor.submit(Requested(request=Request.CANCEL, by=by))

    def resize(self, nodes: int, by: str) -> None:
        """Go on with that many nodes."""
        self.supervisor.submit(Requested(request=Request.RESIZE, by=by, nodes=nodes))

    def roll_back(self, step: int, by: str) -> None:
        """Go on from an older step."""
        self.supervisor.submit(Requested(request=Request.ROLLBACK, by=by, step=step))

    def _on_event(self, record: EventRecord) -> None:
        if record.kind == "ended" and record.facts.get("exit_code") != ExitCode.FENCED:
            self.allocation.abandoned = False  # of a job that another one has, its pods are not ours to end
        found = record.facts.get("staging_bytes")
        if record.kind == "preflight" and isinstance(found, int):
            self.staging_bytes = found
        if record.kind == "committed":
            self._save_seconds = save_on_notice_seconds(self.supervisor.job) or self._save_seconds
        if record.kind == "generation opened" and self.first_step is None:
            self.first_step = record.step
        if record.kind == "node joined" and record.node is not None:
            self._notices.on_joined(record.node)

    def _grace_seconds(self) -> float:
        if self._save_seconds is None:
            return 0.0
        return min(self._save_seconds * GRACE_SLACK + GRACE_SLACK_SECONDS, GRACE_SECONDS_MAX)

    def _staging_limit_bytes(self) -> int | None:
        """On the fewest nodes that the job may run on, each of them stages most."""
        if self.staging_bytes is None:
            return None
        return int(self.staging_bytes / self._config.nodes_min * STAGING_SLACK) + STAGING_SLACK_BYTES

"""Keeps one TrainingJob as it shall be: looks, does what `reconcile` says, and writes its status. One task per job.

A supervisor that this process hosts is a task beside it. Whatever goes wrong with one job stays with that job.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.clock import Clock
from orchestrator.controller.belongings import Belongings
from orchestrator.controller.crd import (
    FINALIZER,
    NAME_PATTERN,
    NAME_PROBLEM,
    PLURAL,
    ROLLBACK_ANNOTATION,
    TrainingJobSpec,
    read_spec,
)
from orchestrator.controller.events import EventPoster
from orchestrator.controller.port import ControllerPort
from orchestrator.controller.reconcile import (
    Act,
    Decision,
    Hosted,
    Seen,
    differs,
    may_take_over,
    reconcile,
    restart_seconds,
    state_after,
)
from orchestrator.controller.status import Running, ended_status, resting_status, running_status
from orchestrator.core.messages import Finish
from orchestrator.core.states import Phase
from orchestrator.errors import ConfigError, KubernetesError, OrchestratorError
from orchestrator.schedulers.kubernetes.client import KubernetesClient
from orchestrator.schedulers.kubernetes.names import RUN_LABEL, Key, Object, path_of
from orchestrator.schedulers.kubernetes.pods import QUEUE_LABELS, Owner, Pod, PodPlan, read_pod
from orchestrator.supervisor.kubernetes_job import (
    KubernetesJob,
    Run,
    new_run,
    read_run,
    run_to_go_on_with,
    works,
)
from orchestrator.telemetry import Sink

LOOK_SECONDS = 2.0
"""Between two looks at a job that nobody has touched: its step, its pace."""
FIGURES = {"step", "progress", "eta", "goodput", "stepSeconds", "committedAt", "newestCheckpoint"}
"""Of a status: what changes all the time."""
STATUS_SECONDS = 5.0
"""Between two writings of a status in which only figures have changed."""
PAUSE_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all jobs of a controller share."""

    client: KubernetesClient
    port: ControllerPort
    clock: Clock
    url: str
    """By which agents reach the port."""
    certificate: str
    """By which they know it."""
    job_url: Callable[[str, str], str]
    """(store, job) → URL of the job's folder."""
    pods: Callable[[Key], Iterable[Object]]
    """The pods of a job, as they were last seen."""
    hosts: Callable[[], Iterable[Object]]
    """The cluster's hosts, as they were last seen."""
    sinks: tuple[Sink, ...] = ()


@dataclass(kw_only=True)
class _Host:
    job: KubernetesJob
    run: Run
    task: asyncio.Task[Finish]
    wanted_nodes: int
    ending: bool = False
    cancelling: bool = False


class JobKeeper:
    """One TrainingJob."""

    def __init__(self, found: Object, around: Surroundings) -> None:
        self._object = found
        self._around = around
        self._host: _Host | None = None
        self._wake = asyncio.Event()
        self._gone = False
        self._crashes = 0
        self._not_before_seconds = 0.0
        self._ended_runs: set[str] = set()
        """A pod whose host does not answer stays for ever, and says that it runs."""
        self._unwritten: Object | None = None
        """How the last run has ended, while that does not stand in the object yet."""
        self._written_seconds = 0.0
        self._posted = EventPoster(around.client, found)
        self._belongings = Belongings(around.client, around.clock, self.owner, self._say)

    # ------------------------------------------------------------------------------------------ what is seen

    @property
    def key(self) -> Key:
        """Namespace and name."""
        metadata = self._object["metadata"]
        return metadata["namespace"], metadata["name"]

    @property
    def owner(self) -> Owner:
        """What everything that is made here belongs to."""
        namespace, name = self.key
        return Owner(namespace=namespace, name=name, uid=self._object["metadata"]["uid"])

    def on_object(self, found: Object, gone: bool) -> None:
        """The TrainingJob has changed, or is gone. A watch that lags tells what is older than our own writes."""
        if gone or not _older(found, self._object):
            self._object, self._gone = found, gone
        self._wake.set()

    def on_pod(self, found: Object, gone: bool) -> None:
        """A pod of it has changed, or is gone."""
        if self._host is not None:
            self._host.job.on_pod(found, gone)
        self._wake.set()

    def on_host(self, found: Object, gone: bool) -> None:
        """A host of the cluster has changed, or is gone."""
        if self._host is not None:
            self._host.job.on_host(found, gone)

    def _pods(self) -> list[Object]:
        """Pods of its runs. Others that have its label are somebody's own."""
        return [pod for pod in self._around.pods(self.key) if read_pod(pod).run]

    @property
    def _url(self) -> str:
        """By which its agents reach their supervisor."""
        return f"{self._around.url}/jobs/{'/'.join(self.key)}"

    # ------------------------------------------------------------------------------------------ the task

    async def run(self) -> None:
        """Until the TrainingJob is gone, or this is cancelled (another controller goes on then)."""
        pause = LOOK_SECONDS
        try:
            while not (self._gone and self._host is None):
                self._wake.clear()
                try:
                    await self._turn()
                    pause = LOOK_SECONDS
                except OrchestratorError as error:  # the API server: nothing is lost, it is looked at again
                    self._say(str(error))
                    pause = min(2 * pause, PAUSE_SECONDS_MAX)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        finally:
            await self._abandon()

    async def _turn(self) -> None:
        if self._host is not None and self._host.task.done():
            self._on_end(self._host)
        if self._unwritten is not None:  # before anything else: without it the run would be begun once more
            if not self._gone:
                await self._patch_status(self._unwritten)
            self._unwritten = None
        spec, problems = self._read_spec()
        decision = reconcile(self._seen(spec, problems))
        await self._do(decision, spec)
        await self._write_status(decision, problems)
        if self._host is not None:
            await self._mend(self._host)

    def _read_spec(self) -> tuple[TrainingJobSpec | None, tuple[str, ...]]:
        if re.fullmatch(NAME_PATTERN, self.key[1]) is None:
            return None, (NAME_PROBLEM,)
        try:
            spec = read_spec(self._object.get("spec") or {})
            spec.config(self.key[1])
            self._around.job_url(spec.store, self.key[1])
        except ConfigError as error:
            return None, error.problems
        return spec, ()

    def _seen(self, spec: TrainingJobSpec | None, problems: tuple[str, ...]) -> Seen:
        metadata, host = self._object["metadata"], self._host
        hosted = None
        if host is not None:
            hosted = Hosted(
                wanted_nodes=host.wanted_nodes,
                ending=host.ending,
                cancelling=host.cancelling,
                waits_for=differs(self._object.get("spec") or {}, host.run.spec),
                pods_run=host.job.allocation.runs(),
            )
        return Seen(
            spec=spec,
            problems=problems,
            suspend=(self._object.get("spec") or {}).get("suspend") is True,
            cancel=(self._object.get("spec") or {}).get("cancel") is True,
            edited=int(metadata.get("generation") or 1),
            deleting=metadata.get("deletionTimestamp") is not None or self._gone,
            status=self._object.get("status") or {},
            rollback_to=(metadata.get("annotations") or {}).get(ROLLBACK_ANNOTATION),
            hosted=hosted,
            pods_work=any(works(pod) for pod in self._unended()) and not self._gone,
        )

    def _unended(self) -> list[Pod]:
        """Pods of its runs, but for what stays of those that this process has seen to their end."""
        return [pod for pod in map(read_pod, self._pods()) if pod.run not in self._ended_runs]

    async def _do(self, decision: Decision, spec: TrainingJobSpec | None) -> None:
        host = self._host
        match decision.act:
            case Act.HOST:
                if self._around.clock.monotonic() >= self._not_before_seconds:
                    await self._start(spec, decision.reason)
            case Act.DRAIN if host is not None:
                host.ending = True
                host.job.drain(decision.reason)
            case Act.CANCEL if host is not None:
                host.ending = host.cancelling = True
                host.job.cancel(decision.reason)
            case Act.RESIZE if host is not None and decision.number is not None:
                host.wanted_nodes = decision.number
                host.job.resize(decision.number, decision.reason)
            case Act.ROLL_BACK if host is not None:
                await self._roll_back(host, decision)
            case Act.CLEAR:
                await self._belongings.delete_pods(self._pods(), keep=None)
            case Act.LET_GO:
                await self._let_go()
            case _:
                pass

    # ------------------------------------------------------------------------------------------ hosting

    async def _start(self, spec: TrainingJobSpec | None, reason: str) -> None:
        """Go on with a run whose pods live, or begin one."""
        belongings = self._belongings
        await self._add_finalizer()
        secrets = await belongings.secrets()
        known = [run for run in map(read_run, secrets) if run is not None]
        runs = [run for run in known if run.finds(self._url, self._around.certificate) and _is_understood(run)]
        pods = self._pods()
        run = run_to_go_on_with(runs, self._unended())
        if run is None and (spec is None or self._object["metadata"].get("deletionTimestamp") is not None):
            await belongings.delete_pods(pods, keep=None)  # nobody knows what they were told, and nothing shall begin
            return
        # first: a Secret that cannot be removed is not followed by more
        await belongings.remove_others(secrets, pods, run)
        if run is None:
            spec, _ = self._read_spec()  # as it is by now: settings and spec of a run are of one moment
            if spec is None:
                return
            run = self._new_run(spec)
            await belongings.create_secret(run)
        else:
            reason = f"{reason}; the run {run.name} is gone on with"
        await belongings.make_surroundings(run)
        self._host = self._host_run(run, self._pods())  # as they are by now: what has ended meanwhile, nobody tells
        self._posted.post("Normal", "Started", reason)

    def _new_run(self, spec: TrainingJobSpec) -> Run:
        status = self._object.get("status") or {}
        _, name = self.key
        return new_run(
            spec.config(name),
            self.owner,
            dict(self._object["spec"]),
            job_url=self._around.job_url(spec.store, name),
            url=self._url,
            certificate=self._around.certificate,
            take_over=may_take_over(spec, status),
        )

    def _host_run(self, run: Run, pods: list[Object]) -> _Host:
        """With the spec that the run began with, but for what takes effect at once."""
        spec = spec_now(run.spec, self._object.get("spec") or {})
        around, (namespace, name) = self._around, self.key
        job = KubernetesJob(
            spec.config(name),
            run,
            self._plan(spec, run),
            client=around.client,
            clock=around.clock,
            patience_seconds=spec.patience_seconds,
            open_server=lambda supervisor, token: around.port.job(self.key, self._url, supervisor, token),
            sinks=(*around.sinks, self._posted.sink, lambda _: self._wake.set()),
        )
        job.staging_bytes = (self._object.get("status") or {}).get("stagingBytes")
        for pod in pods:
            job.on_pod(pod, False)
        for host in around.hosts():
            job.on_host(host, False)
        task = asyncio.create_task(job.run(), name=f"supervisor of {namespace}/{name}")
        task.add_done_callback(lambda _: self._wake.set())
        return _Host(job=job, run=run, task=task, wanted_nodes=spec.nodes_max)

    def _plan(self, spec: TrainingJobSpec, run: Run) -> PodPlan:
        labels = self._object["metadata"].get("labels") or {}
        return PodPlan(
            owner=self.owner,
            run=run.name,
            secret=run.secret,
            template=spec.template,
            fallback=None if spec.fallback is None else spec.fallback.template,
            labels={name: value for name, value in labels.items() if name.startswith(QUEUE_LABELS)},
            grace_seconds=spec.grace_seconds,
        )

    async def _mend(self, host: _Host) -> None:
        """What another controller's last request has still made goes; what is missing around the pods is made again."""
        await self._belongings.delete_pods(self._pods(), keep=host.run.name)
        seen = {read_pod(pod).name for pod in self._pods()}
        counted_on = {node.node for node in host.job.allocation.nodes()}
        for name in await self._belongings.missing(counted_on, seen):
            host.job.on_pod({"metadata": {"name": name, "labels": {RUN_LABEL: host.run.name}}}, True)
        if not host.ending:
            pods_start = any(pod.host for pod in host.job.allocation.waiting())
            await self._belongings.mend(host.run, pods_start=pods_start)

    def _on_end(self, host: _Host) -> None:
        """A run has ended: by itself, or by a fault of ours."""
        self._host = None
        metadata = self._object["metadata"]
        try:
            finish = host.task.result()
        except Exception as error:
            self._crashes += 1
            pause = restart_seconds(self._crashes)
            self._not_before_seconds = self._around.clock.monotonic() + pause
            self._say(f"its supervisor has failed, which is a bug: {error!r}; started again in {pause:.0f} s")
            return
        self._ended_runs.add(host.run.name)
        ending = host.job.supervisor.job.ending
        spec = self._object.get("spec") or {}
        goes_on = not spec.get("suspend") and metadata.get("deletionTimestamp") is None
        state = state_after(None if ending is None else ending.outcome, finish.exit_code, goes_on=goes_on)
        status = ended_status(
            self._object.get("status") or {},
            state=state,
            reason=finish.reason,
            exit_code=finish.exit_code,
            edited=int(metadata.get("generation") or 1),
            has_spec=not differs(spec, host.run.spec),
            now_wall=self._around.clock.wall(),
        )
        self._posted.post("Normal" if state in ("Done", "Suspended", "Pending") else "Warning", state, finish.reason)
        self._unwritten = status

    async def _abandon(self) -> None:
        """This process goes, the job stays: pods and agents are left as they are, for the next controller."""
        if self._host is not None:
            self._host.task.cancel()
            await asyncio.gather(self._host.task, return_exceptions=True)
            self._host = None

    # ------------------------------------------------------------------------------------------ the object

    @property
    def _path(self) -> str:
        return path_of(PLURAL, *self.key)

    async def _add_finalizer(self) -> None:
        metadata = self._object["metadata"]
        finalizers = list(metadata.get("finalizers") or [])
        if FINALIZER in finalizers or metadata.get("deletionTimestamp") is not None:
            return
        body = {"metadata": {"finalizers": [*finalizers, FINALIZER], "resourceVersion": metadata["resourceVersion"]}}
        self._take(await asyncio.to_thread(self._around.client.patch, self._path, body))

    async def _let_go(self) -> None:
        metadata = self._object["metadata"]
        finalizers = list(metadata.get("finalizers") or [])
        if FINALIZER not in finalizers or self._gone:
            return
        rest = [one for one in finalizers if one != FINALIZER]
        body = {"metadata": {"finalizers": rest, "resourceVersion": metadata["resourceVersion"]}}
        await asyncio.to_thread(self._around.client.patch, self._path, body)

    async def _roll_back(self, host: _Host, decision: Decision) -> None:
        """The annotation goes first: a request is made once, and a person sees that it was taken."""
        body = {"metadata": {"annotations": {ROLLBACK_ANNOTATION: None}}}
        self._take(await asyncio.to_thread(self._around.client.patch, self._path, body))
        if decision.number is None:
            self._posted.post("Warning", "NotRolledBack", f"{decision.reason}: this is no step")
        else:
            host.job.roll_back(decision.number, "the annotation")

    async def _write_status(self, decision: Decision, problems: tuple[str, ...]) -> None:
        if self._gone or decision.act is Act.LET_GO:
            return
        now, before = self._around.clock.wall(), self._object.get("status") or {}
        edited = int(self._object["metadata"].get("generation") or 1)
        if self._host is None:
            status = resting_status(before, decision, edited=edited, now_wall=now)
        else:
            host = self._host
            if host.job.supervisor.job.phase is Phase.RUNNING:
                self._crashes = 0
            running = Running(
                supervisor=host.job.supervisor.status(),
                run=host.run.name,
                run_spec=host.run.spec,
                waiting=tuple(host.job.allocation.waiting()),
                refusal=host.job.allocation.refusal,
                staging_bytes=host.job.staging_bytes,
                nodes=len(host.job.allocation.nodes()),
                problems=problems,
                first_step=host.job.first_step,
            )
            spec: Mapping[str, Any] = self._object.get("spec") or {}
            status = running_status(before, running, spec, job=self.key[1], edited=edited, now_wall=now)
        if status is not None and self._is_news(before, status):
            await self._patch_status(status)

    def _is_news(self, before: Mapping[str, Any], status: Object) -> bool:
        changed = {name for name in {*before, *status} if before.get(name) != status.get(name)} - {"observedAt"}
        if not changed:
            return False
        if changed - FIGURES:
            return True
        return self._around.clock.monotonic() - self._written_seconds >= STATUS_SECONDS

    async def _patch_status(self, status: Object) -> None:
        gone = {name: None for name in self._object.get("status") or {} if name not in status}
        path = path_of(PLURAL, *self.key, "status")
        self._written_seconds = self._around.clock.monotonic()
        try:
            self._take(await asyncio.to_thread(self._around.client.patch, path, {"status": {**status, **gone}}))
        except KubernetesError as error:
            if not error.is_not_found:
                raise

    def _take(self, found: Object) -> None:
        """An answer to a write: newer than what the watch has told, unless that was quicker."""
        old = self._object["metadata"]
        if found["metadata"].get("uid") == old.get("uid") and not _older(found, self._object):
            self._object = found

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, a closed pipe: no job ends for that
            sys.stderr.write(f"{'/'.join(self.key)}: {text}\n")
            sys.stderr.flush()


def spec_now(run_spec: Mapping[str, Any], spec: Mapping[str, Any]) -> TrainingJobSpec:
    """A run's spec with what has taken effect since. A resize may go below the fewest nodes that the run began with."""
    begun = read_spec(run_spec)
    wanted = spec.get("nodesMax", begun.nodes_max)
    try:
        return read_spec({**run_spec, "nodesMin": min(begun.nodes_min, wanted), "nodesMax": wanted})
    except (ConfigError, TypeError):  # an edit that cannot be changes nothing of what runs
        return begun


def _is_understood(run: Run) -> bool:
    """Whether its spec is one to this release."""
    try:
        read_spec(run.spec)
    except ConfigError:
        return False
    return True


def _older(one: Object, other: Object) -> bool:
    """Whether a version is older; versions are opaque, but where both are numbers they rise."""
    versions = [str(found["metadata"].get("resourceVersion", "")) for found in (one, other)]
    return all(version.isdecimal() for version in versions) and int(versions[0]) < int(versions[1])

"""`orchestrator run --scheduler kubernetes`, and the other verbs for jobs in a cluster. No verb of its own.

A job there is a TrainingJob: `run` makes it, the verbs edit it, the controller does the work. What they say is what
`kubectl` would have said, so a job that somebody applied is driven in the same way: `--namespace` says where it is.
"""

from __future__ import annotations

import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.errors import ConfigError, KubernetesError, SupervisorError

if TYPE_CHECKING:
    from orchestrator.cli.run import Talk
    from orchestrator.config import JobConfig
    from orchestrator.schedulers.kubernetes.client import KubernetesClient
    from orchestrator.schedulers.kubernetes.names import Object

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Kubernetes: the namespace of the TrainingJob.")
]
POLL_SECONDS = 0.5
OLD_SECONDS, OLD_STEPS = 60.0, 10
"""Figures of a running job that nothing has renewed for longer than both are called old."""
REPLACE_TRIES = 5
TEMPLATE_BYTES_MAX = 1 << 20
LOCAL_ONLY = ("sbatch", "srun", "replacement_seconds", "staging")
"""Settings that mean nothing to pods."""
ENDED = ("Suspended", "Done", "Failed", "Cancelled", "Invalid")
_DEFINITION = "the cluster does not know TrainingJobs: the chart, or `orchestrator controller crd`, brings them"


# ------------------------------------------------------------------------------------------------- submitting


def run(settings: JobConfig, *, take_over: bool, dry_run: bool, as_json: bool, talk: Talk) -> int:
    """Make the TrainingJob, or edit the one that is there; the exit code. It goes on without this process."""
    from orchestrator.schedulers.kubernetes.client import connect
    from orchestrator.schedulers.kubernetes.names import path_of
    from orchestrator.supervisor.state_folder import StateFolder

    if dry_run:
        _print(render(settings, settings.namespace or _own_namespace(), take_over=take_over), as_json=as_json)
        talk.say("nothing was created")
        return 0
    client = connect()
    namespace = settings.namespace or client.namespace
    body = render(settings, namespace, take_over=take_over)
    path = path_of("trainingjobs", namespace, settings.job)
    known = _ask(lambda: client.find(path), client)
    if known is None:
        _ask(lambda: client.create(path_of("trainingjobs", namespace), body), client)
    else:
        _edit(client, path, known, body["spec"])
        if (known.get("status") or {}).get("state") == "Done" and not take_over:
            talk.say("it is done: --take-over trains on from its last checkpoint")
        if (known.get("status") or {}).get("state") == "Cancelled" and not take_over:
            talk.say("it was cancelled: only --take-over starts it again")
    state = StateFolder(settings.job, _job_url(settings))
    state.make()
    state.note_cluster_job(namespace)
    done = "created" if known is None else "changed, as this command says it"
    talk.say(
        f"TrainingJob {namespace}/{settings.job} {done}: `orchestrator status {settings.job}` shows it, "
        f"`kubectl -n {namespace} logs -l orchestrator.dev/job={settings.job}` what its workers print"
    )
    return 0


def _edit(client: KubernetesClient, path: str, known: Object, spec: Object) -> None:
    """Have it say `spec`. One that has failed is started again by that, also where the words are the same as before."""
    found = _ask(lambda: _replace_spec(client, path, known, spec), client)
    failed = (known.get("status") or {}).get("state") == "Failed"
    if failed and found["metadata"].get("generation") == known["metadata"].get("generation"):
        _ask(lambda: client.patch(path, {"spec": {"suspend": True}}), client)
        _ask(lambda: client.patch(path, {"spec": {"suspend": False}}), client)


def _replace_spec(client: KubernetesClient, path: str, known: Object, spec: Object) -> Object:
    """The controller may just have written its status: then what is there by now is edited."""
    for _ in range(REPLACE_TRIES):
        try:
            return client.replace(path, {**known, "spec": spec})
        except KubernetesError as error:
            if error.status != 409:
                raise
            known = client.get(path)
    return client.replace(path, {**known, "spec": spec})


def _own_namespace() -> str:
    """The context's, where there is one: nothing is asked."""
    from orchestrator.schedulers.kubernetes.client import connect

    try:
        return connect().namespace
    except ConfigError:
        return "default"


def _job_url(settings: JobConfig) -> str:
    from orchestrator.storage.opening import job_url

    return job_url(settings.store, settings.job)


def render(settings: JobConfig, namespace: str, *, take_over: bool) -> Object:
    """The TrainingJob of a configuration: what differs from the defaults, and the pods' template."""
    from orchestrator.config import JobSettings
    from orchestrator.controller.crd import NAME_PATTERN, NAME_PROBLEM, read_spec, spelt

    given = settings.model_fields_set
    usual = {name: type(settings).model_fields[name].default for name in LOCAL_ONLY}
    wrong = [f"{name}: means nothing to pods" for name in LOCAL_ONLY if getattr(settings, name) != usual[name]]
    if wrong:
        raise ConfigError(*wrong)
    if not settings.template:
        raise ConfigError("template: is missing; --template names a file with the pods' template (image, resources)")
    if re.fullmatch(NAME_PATTERN, settings.job) is None:
        raise ConfigError(f"job: {NAME_PROBLEM}, got {settings.job!r}")
    spec: dict[str, Any] = {spelt(name): getattr(settings, name) for name in JobSettings.model_fields if name in given}
    spec |= {"command": list(settings.command), "nodesMin": settings.nodes_min, "nodesMax": settings.nodes_max}
    if take_over:
        spec["takeOver"] = True
    spec["template"] = read_template(Path(settings.template))
    read_spec(spec)
    return {
        "apiVersion": "orchestrator.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": settings.job, "namespace": namespace},
        "spec": spec,
    }


def read_template(path: Path) -> Object:
    """A PodTemplateSpec, or a Pod, in YAML. Raises ConfigError."""
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(TEMPLATE_BYTES_MAX + 1)
        if len(text) > TEMPLATE_BYTES_MAX:
            raise ConfigError(f"template: {path} is larger than {TEMPLATE_BYTES_MAX >> 20} MiB")
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except OSError as error:
        raise ConfigError(f"template: {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"template: {path} is no YAML: {' '.join(str(error).split())}") from error
    if len(documents) != 1:
        raise ConfigError(
            f"template: {path} holds {len(documents)} documents; one is wanted, a Pod or the template of one"
        )
    found = documents[0]
    if isinstance(found, dict) and found.get("kind", "Pod") not in ("Pod", "PodTemplate", "PodTemplateSpec"):
        raise ConfigError(f"template: {path} is a {found['kind']}; a Pod, or the template of one, is wanted")
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise ConfigError(f"template: {path} is no pod template: it needs `spec` with `containers`")
    return {name: found[name] for name in ("metadata", "spec") if name in found}


def _print(body: Object, *, as_json: bool) -> None:
    from orchestrator.cli.terminal import print_json

    if as_json:
        print_json(body)
        return
    import yaml

    sys.stdout.write(yaml.safe_dump(body, sort_keys=False, width=120, allow_unicode=True))


# ------------------------------------------------------------------------------------------------ other verbs


class ClusterJob:
    """A TrainingJob, for the verbs."""

    def __init__(self, client: KubernetesClient, namespace: str, job: str) -> None:
        from orchestrator.schedulers.kubernetes.names import path_of

        self._client = client
        self._path = path_of("trainingjobs", namespace, job)
        self._asked_generation = 0
        """Of the spec, after the last request: a status of an earlier one says nothing about it."""
        self.namespace = namespace
        self.job = job

    def read(self) -> Object:
        """The object. Raises SupervisorError if there is none."""
        try:
            found: Object = _ask(lambda: self._client.get(self._path), self._client)
            return found
        except KubernetesError as error:
            if error.is_not_found:
                problem = f"there is no TrainingJob {self.job!r} in the namespace {self.namespace!r}"
                raise SupervisorError(f"{problem}: `orchestrator run --scheduler kubernetes` makes one") from error
            raise

    def request(self, what: str, nodes: int | None = None, step: int | None = None) -> None:
        """Drain, cancel, resize or rollback, as an edit of the object. Raises SupervisorError."""
        from orchestrator.controller.crd import ROLLBACK_ANNOTATION

        self.read()
        match what:
            case "drain":
                body: Object = {"spec": {"suspend": True}}
            case "cancel":
                body = {"spec": {"cancel": True}}
            case "resize":
                body = {"spec": {"nodesMax": nodes}}
            case "rollback":
                body = {"metadata": {"annotations": {ROLLBACK_ANNOTATION: str(step)}}}
            case _:
                raise AssertionError(f"no verb asks for {what!r}")
        edited = _ask(lambda: self._client.patch(self._path, body), self._client)
        self._asked_generation = int(edited["metadata"].get("generation") or 0)

    def _status_now(self) -> Object:
        """Empty while the API server is away: who waits waits on. Raises SupervisorError if there is no such job."""
        try:
            return self.read().get("status") or {}
        except KubernetesError as error:
            if error.is_permanent:
                raise
            return {}

    def wait_until_ended(self, timeout_seconds: float) -> str:
        """Wait until the request was seen, and for the end; the state. Raises SupervisorError when the time is over."""
        until = time.monotonic() + timeout_seconds
        while True:
            status = self._status_now()
            state, seen = str(status.get("state")), int(status.get("observedGeneration") or 0)
            if state in ENDED and seen >= self._asked_generation:
                return state
            if time.monotonic() > until:
                how = (
                    "it goes on ending" if seen >= self._asked_generation else "no controller has seen the request yet"
                )
                raise SupervisorError(
                    f"the job {self.job!r} is still {state} after {timeout_seconds:g} s; {how}, "
                    f"`orchestrator status {self.job} -n {self.namespace}` shows how far it is"
                )
            time.sleep(POLL_SECONDS)


def find(job: str, namespace: str | None) -> ClusterJob | None:
    """The job in a cluster: where `namespace` says, or where it was created from this machine; None: it is not there.

    Raises ConfigError if no cluster is configured, though one is meant.
    """
    from orchestrator.schedulers.kubernetes.client import connect
    from orchestrator.supervisor.state_folder import known_job

    if namespace is None:
        try:
            state = known_job(job)
        except ConfigError:
            return None
        if state.supervisor() is not None:
            return None
        namespace = state.cluster_job()
        if namespace is None:
            return None
    return ClusterJob(connect(), namespace, job)


def show(found: ClusterJob, *, as_json: bool) -> bool:
    """Print what is known of it; whether it goes on."""
    from orchestrator.cli.terminal import print_json

    one = found.read()
    status = one.get("status") or {}
    if as_json:
        print_json({"job": found.job, "namespace": found.namespace, **status})
    else:
        from orchestrator.cli.terminal import output

        output().print(describe(one))
    return status.get("state") not in ENDED


def describe(one: Object) -> Any:
    """The object as a table."""
    from rich.console import Group

    from orchestrator.cli.terminal import facts, table

    status, spec, metadata = one.get("status") or {}, one.get("spec") or {}, one["metadata"]
    until = f" of {status['until']} ({status.get('progress')})" if status.get("until") else ""
    committed = f", committed at {status['committedAt']}" if status.get("committedAt") else ""
    newest = status.get("newestCheckpoint")
    unseen = "state" in status and int(metadata.get("generation") or 0) > int(status.get("observedGeneration") or 0)
    rows = [
        ("job", f"{metadata.get('namespace')}/{metadata['name']}"),
        ("state", status.get("state", "not seen by a controller yet")),
        ("reason", status.get("reason")),
        *_age(status),
        *((("an edit", "was not seen by a controller yet: is one running?"),) if unseen else ()),
        ("generation", status.get("generation")),
        ("world size", status.get("worldSize")),
        ("nodes", f"{status.get('nodes', 0)} of {spec.get('nodesMin', 1)} to {spec.get('nodesMax', 1)}"),
        ("step", None if "step" not in status else f"{status['step']}{until}"),
        ("done in", status.get("eta")),
        ("newest checkpoint", f"{newest}{committed}" if newest else "none yet"),
        ("goodput", status.get("goodput")),
    ]
    columns = ("type", "status", "lastTransitionTime", "message")
    conditions = [tuple(one.get(column) for column in columns) for one in status.get("conditions") or []]
    return Group(facts(rows), table(("condition", "", "since", "why"), conditions))


def _age(status: Object) -> tuple[tuple[str, str], ...]:
    """A line that says so where the figures of a running job are old."""
    if status.get("state") != "Running" or not status.get("observedAt"):
        return ()
    age_seconds = time.time() - datetime.fromisoformat(status["observedAt"]).timestamp()
    if age_seconds < max(OLD_SECONDS, OLD_STEPS * float(status.get("stepSeconds") or 0.0)):
        return ()
    return (("these figures", f"are {age_seconds / 60:.0f} min old: no step since then, or no controller is there"),)


def _ask(request: Any, client: KubernetesClient) -> Any:
    """A request of a person's: what is wrong, in one sentence with what to do."""
    try:
        return request()
    except KubernetesError as error:
        if error.status is None:
            raise ConfigError(f"{error}; KUBECONFIG, and its current context, say which cluster is meant") from error
        if error.status == 404 and not error.is_not_found:
            raise ConfigError(f"{client.server}: {_DEFINITION}") from error
        if error.status == 404 and "namespaces" in error.message:
            raise ConfigError(f"{client.server}: {error.message}; --namespace names another one") from error
        if error.status == 403:
            raise ConfigError(f"{client.server} does not allow it: {error.message}") from error
        if error.status == 422:
            raise ConfigError(f"{client.server} refuses the TrainingJob: {error.message}") from error
        raise

"""The chart on a real API server: what an upgrade, a rollback and an uninstall leave, and what the controller may do.

There is no kubelet: pods stay as they are, which is enough to see that nobody touches them.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.schedulers.kubernetes.pods import merged
from tests.chart.chart import CHART, IMAGE, ROOT, helm
from tests.chart.test_examples import EXAMPLES
from tests.kubernetes.real_control_plane import CannotStartError, ControlPlane, running_control_plane, why_not
from tests.slurm_cluster import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.extended, pytest.mark.timeout(170)]

RELEASE, NAMESPACE, JOBS = "orchestrator", "chart-system", "chart-jobs"
LEASE = "orchestrator-controller"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.orchestrator.dev"
TRAINING_JOBS = f"/apis/orchestrator.dev/v1alpha1/namespaces/{JOBS}/trainingjobs"
COMMAND_SECONDS = 60


class Cluster:
    """The chart's releases, and the API."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.kubeconfig = plane.folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(plane.api.kubeconfig()))

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer; it has to be a good one."""
        status, answer = self.plane.api.request(method, path, body)
        assert 200 <= status < 300, (status, answer)
        return answer

    def there(self, path: str) -> bool:
        return self.plane.api.request("GET", path)[0] == 200

    def helm(self, *words: str) -> str:
        done = subprocess.run(
            [str(helm()), *words, f"--namespace={NAMESPACE}"],
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def chart(self, verb: str, *more: str) -> str:
        values = (f"--set=image.repository={IMAGE['image.repository']}", f"--set=watchNamespaces={{{JOBS}}}")
        return self.helm(verb, RELEASE, str(CHART), *values, *more)

    @contextmanager
    def installed(self, *more: str) -> Iterator[None]:
        self.chart("install", *more)
        try:
            yield
        finally:
            self.helm("uninstall", RELEASE)

    def may(self, verb: str, resource: str, namespace: str, *, name: str = "", group: str = "") -> bool:
        """Whether the controller's account may do it."""
        resource, _, part = resource.partition("/")
        about = {"verb": verb, "group": group, "resource": resource, "subresource": part, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{NAMESPACE}:orchestrator",
                "groups": ["system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated"],
                "resourceAttributes": about | {"name": name},
            },
        }
        answer = self.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    helm()
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    try:
        with running_control_plane(tmp_path_factory.mktemp("plane")) as plane:
            found = Cluster(plane)
            for name in (NAMESPACE, JOBS):
                found.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
            yield found
            assert plane.all_well()
    except CannotStartError as error:
        pytest.skip(f"Kubernetes does not start here: {error}")


def what_a_job_needs(cluster: Cluster) -> dict[str, str]:
    """Path → uid, of the objects that stand for a running job and for the controller's own."""
    job = cluster.ask("GET", f"{TRAINING_JOBS}/gpt")
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": "gpt", "uid": job["metadata"]["uid"]}
    labels = {"orchestrator.dev/job": "gpt"}
    pod = {"containers": [{"name": "trainer", "image": IMAGE["image.repository"]}]}
    ours = {"ownerReferences": [owner], "labels": labels}
    made: list[tuple[str, dict[str, Any]]] = [
        (f"/api/v1/namespaces/{JOBS}/pods", {"metadata": {"name": "gpt-a", **ours}, "spec": pod}),
        (f"/api/v1/namespaces/{JOBS}/secrets", {"metadata": {"name": "gpt-1", **ours}}),
        (
            f"/api/v1/namespaces/{JOBS}/services",
            {"metadata": {"name": "gpt", **ours}, "spec": {"clusterIP": "None", "selector": labels}},
        ),
        (
            f"/apis/policy/v1/namespaces/{JOBS}/poddisruptionbudgets",
            {"metadata": {"name": "gpt", **ours}, "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}}},
        ),
        (f"/api/v1/namespaces/{NAMESPACE}/secrets", {"metadata": {"name": LEASE}}),
        (f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases", {"metadata": {"name": LEASE}}),
    ]
    found = {f"{TRAINING_JOBS}/gpt": job["metadata"]["uid"], CRD: cluster.ask("GET", CRD)["metadata"]["uid"]}
    for path, body in made:
        answer = cluster.ask("POST", path, body)
        found[f"{path}/{answer['metadata']['name']}"] = answer["metadata"]["uid"]
    return found


def test_upgrade_rollback_and_uninstall_leave_jobs_alone(cluster: Cluster) -> None:
    notes = cluster.chart("install")
    assert JOBS in notes.partition("NOTES:")[2]
    example = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "trainingjob.yaml").read_text())
    (job,) = (one for one in example if one["kind"] == "TrainingJob")
    cluster.ask("POST", TRAINING_JOBS, job)
    needed = what_a_job_needs(cluster)

    def nothing_has_changed() -> None:
        assert {path: cluster.ask("GET", path)["metadata"]["uid"] for path in needed} == needed
        assert not any("deletionTimestamp" in cluster.ask("GET", path)["metadata"] for path in needed)

    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/orchestrator"
    cluster.chart("upgrade", "--set=terminationGraceSeconds=3")
    assert cluster.ask("GET", deployment)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 3
    nothing_has_changed()
    cluster.helm("rollback", RELEASE, "1")
    assert cluster.ask("GET", deployment)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 10
    nothing_has_changed()
    cluster.helm("uninstall", RELEASE)
    assert not cluster.there(deployment)
    nothing_has_changed()
    with cluster.installed():
        nothing_has_changed()
    for path in needed.keys() - {CRD}:
        cluster.ask("DELETE", f"{path}?gracePeriodSeconds=0")


def test_what_the_controller_may_do(cluster: Cluster) -> None:
    may = cluster.may
    with cluster.installed("--set=rbac.nodes=false"):
        assert may("create", "pods", JOBS)
        assert may("patch", "trainingjobs/status", JOBS, group="orchestrator.dev")
        assert may("update", "leases", NAMESPACE, name=LEASE, group="coordination.k8s.io")
        assert may("get", "secrets", NAMESPACE, name=LEASE)
        for verb, resource, namespace, name in (
            ("create", "pods", NAMESPACE, ""),
            ("list", "pods", "default", ""),
            ("create", "pods/exec", JOBS, ""),
            ("get", "secrets", NAMESPACE, "somebody-else-s"),
            ("list", "secrets", NAMESPACE, ""),
            ("delete", "secrets", NAMESPACE, LEASE),
            ("list", "nodes", "", ""),
        ):
            assert not may(verb, resource, namespace, name=name), (verb, resource, namespace)
        cluster.chart("upgrade")
        assert may("list", "nodes", "")
        assert not may("patch", "nodes", "")


def test_the_api_server_takes_everything(cluster: Cluster) -> None:
    """All that can be switched on, but for the ServiceMonitor, whose definition is Prometheus'."""
    with cluster.installed(
        *("--set=replicas=2", "--set=jobNetworkPolicy.enabled=true", "--set=metrics.dashboard.enabled=true"),
        *("--set=networkPolicy.metricsNamespaceLabels.name=monitoring", "--set=podLabels.a=b"),
    ):
        policies = cluster.ask("GET", f"/apis/networking.k8s.io/v1/namespaces/{JOBS}/networkpolicies")["items"]
        assert [one["metadata"]["name"] for one in policies] == [f"{NAMESPACE}-orchestrator-jobs"]


def test_the_api_server_takes_the_examples(cluster: Cluster) -> None:
    """With every field known, and the pods of template and fallback as well."""
    strictly = "dryRun=All&fieldValidation=Strict"
    with cluster.installed():
        for file in EXAMPLES:
            (job,) = (one for one in yaml.safe_load_all(file.read_text()) if one["kind"] == "TrainingJob")
            job["metadata"]["name"] = "another"
            cluster.ask("POST", f"{TRAINING_JOBS}?{strictly}", job)
            template = job["spec"]["template"]
            patch = job["spec"].get("fallback", {"template": {}})["template"]
            for pod in (template, merged(template, patch)):
                pod["metadata"] = {"name": "one"} | pod.get("metadata", {})
                pod["spec"].pop("serviceAccountName", None)  # it is made by the same file
                cluster.ask("POST", f"/api/v1/namespaces/{JOBS}/pods?{strictly}", pod)


# ---------------------------------------------------------------------------------------------- with a controller


def kubeconfig_of_the_account(cluster: Cluster, folder: Path) -> Path:
    """What a pod with the chart's ServiceAccount may do, for a process outside of the cluster."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/orchestrator/token"
    token = cluster.ask("POST", path, {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    file = folder / "kubeconfig"
    file.write_text(json.dumps(replace(cluster.plane.api, token=token).kubeconfig()))
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningController:
    """A process."""

    port: int
    said: Path
    process: subprocess.Popen[bytes]

    def eventually(self, condition: Callable[[], Any]) -> None:
        """Waits until it is true, while the process runs."""
        until = time.monotonic() + 40
        while not condition():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < until, self.said.read_text()
            time.sleep(0.1)

    def status_of(self, path: str) -> int:
        """HTTP status of its port, as the kubelet's probes see it; 0: nobody answers."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=5, context=context)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()


@contextmanager
def a_controller(cluster: Cluster, folder: Path) -> Iterator[RunningController]:
    """Started as the chart's Deployment says, with what it may do."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/orchestrator"
    container = cluster.ask("GET", path)["spec"]["template"]["spec"]["containers"][0]
    (port,) = free_ports(1)
    kept = [word for word in container["args"] if not word.startswith(("--listen", "--port"))]
    words = [sys.executable, *container["command"][1:], *kept, "--listen=127.0.0.1", f"--port={port}"]
    said = folder / "said"
    environment = os.environ | {"KUBECONFIG": str(kubeconfig_of_the_account(cluster, folder)), "PYTHONPATH": str(ROOT)}
    with said.open("wb") as log:
        process = subprocess.Popen(words, env=environment, cwd=folder, stdout=log, stderr=log)
    found = RunningController(port=port, said=said, process=process)
    try:
        found.eventually(lambda: found.status_of("/readyz") == 200)
        yield found
        process.terminate()
        assert process.wait(timeout=20) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_controller_gets_along_with_what_it_may_do(cluster: Cluster, tmp_path: Path) -> None:
    """The Deployment's own command, under the ServiceAccount's own token, keeps a job from its creation to its end."""
    example = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "trainingjob.yaml").read_text())
    (job,) = (one for one in example if one["kind"] == "TrainingJob")
    job["metadata"]["name"] = "kept"

    def of_the_job(path: str) -> list[str]:
        found = cluster.ask("GET", f"{path}?labelSelector=orchestrator.dev/job=kept")["items"]
        return [one["metadata"]["name"] for one in found]

    kinds = (
        *(f"/api/v1/namespaces/{JOBS}/{plural}" for plural in ("pods", "secrets", "services")),
        f"/apis/policy/v1/namespaces/{JOBS}/poddisruptionbudgets",
    )
    with cluster.installed(), a_controller(cluster, tmp_path) as controller:
        eventually = controller.eventually
        assert [controller.status_of(path) for path in ("/healthz", "/metrics")] == [200, 401]
        cluster.ask("POST", TRAINING_JOBS, job)
        eventually(lambda: len(of_the_job(kinds[0])) == job["spec"]["nodesMax"])
        eventually(lambda: all(of_the_job(path) for path in kinds))
        eventually(lambda: "state" in cluster.ask("GET", f"{TRAINING_JOBS}/kept").get("status", {}))
        cluster.ask("DELETE", f"{TRAINING_JOBS}/kept")
        eventually(lambda: not cluster.there(f"{TRAINING_JOBS}/kept"))
        eventually(lambda: not any(of_the_job(path) for path in kinds))
        assert "forbidden" not in controller.said.read_text()
        assert cluster.there(f"/api/v1/namespaces/{NAMESPACE}/secrets/{LEASE}")


def test_without_the_nodes_the_controller_says_so_and_works(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.installed("--set=rbac.nodes=false"), a_controller(cluster, tmp_path) as controller:
        controller.eventually(lambda: "nodes is forbidden" in controller.said.read_text())

"""The chart as a whole: it lints, belongs where it is put, and holds nothing that a running job needs."""

from __future__ import annotations

import yaml

import orchestrator
from tests.chart.chart import CHART, IMAGE, NAMESPACE, of_kind, refusal, render, run_helm

EVERYTHING = {
    "watchAllNamespaces": True,
    "replicas": 2,
    "jobNetworkPolicy": {"enabled": True, "namespaces": ["a", "b"]},
    "metrics.serviceMonitor.enabled": True,
    "metrics.dashboard.enabled": True,
    "networkPolicy.metricsNamespaceLabels": {"name": "monitoring"},
    "imagePullSecrets": ["one"],
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "serviceAccount.annotations": {"x": "y"},
}
CLUSTER_WIDE = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}


def test_lint() -> None:
    done = run_helm("lint", "--strict", str(CHART), f"--set=image.repository={IMAGE['image.repository']}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == orchestrator.__version__


def test_everything_at_once() -> None:
    kinds = sorted(one["kind"] for one in render(EVERYTHING))
    assert kinds == [
        "ClusterRole",
        "ClusterRole",
        "ClusterRole",
        "ClusterRole",
        "ClusterRoleBinding",
        "ClusterRoleBinding",
        "ConfigMap",
        "CustomResourceDefinition",
        "Deployment",
        "NetworkPolicy",
        "NetworkPolicy",
        "NetworkPolicy",
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
        "ServiceMonitor",
    ]


def test_every_object_says_where_it_belongs_and_no_two_are_one() -> None:
    objects = render({"watchNamespaces": ["a", "b"]})
    keys = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects]
    assert len(set(keys)) == len(keys)
    for kind, namespace, name in keys:
        assert (namespace is None) == (kind in CLUSTER_WIDE), (kind, name)


def test_a_release_holds_nothing_that_a_job_needs() -> None:
    """An upgrade or an uninstall must not take away what running jobs trust or live on."""
    kinds = {one["kind"] for one in render(EVERYTHING)}
    assert not kinds & {"Secret", "Lease", "PodDisruptionBudget", "TrainingJob", "Namespace", "Pod", "Job"}
    (service,) = of_kind(render(EVERYTHING), "Service").values()
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "controller"


def test_the_same_values_render_the_same_text() -> None:
    """No random values: an upgrade without a change restarts nothing."""
    words = ("template", "x", str(CHART), f"--set=image.repository={IMAGE['image.repository']}", "--set=replicas=2")
    assert run_helm(*words).stdout == run_helm(*words).stdout != ""


def test_the_flags_of_the_controller() -> None:
    (deployment,) = of_kind(render({"watchNamespaces": ["a", "b"]}), "Deployment").values()
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python3", "-m", "orchestrator"]
    assert container["args"] == [
        "controller",
        "run",
        "--namespace=a",
        "--namespace=b",
        f"--url=https://orchestrator.{NAMESPACE}.svc:8443",
        "--listen=0.0.0.0",
        "--port=8443",
        "--lease-name=orchestrator-controller",
        f"--lease-namespace={NAMESPACE}",
    ]
    (service,) = of_kind(render(), "Service").values()
    assert (service["metadata"]["name"], service["metadata"]["namespace"]) == ("orchestrator", NAMESPACE)
    assert service["spec"]["ports"][0]["port"] == 8443


def test_all_namespaces_is_no_flag() -> None:
    (deployment,) = of_kind(render({"watchAllNamespaces": True}), "Deployment").values()
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [one for one in args if one.startswith("--namespace")]


def test_a_rollout_does_not_wait_for_a_controller_that_waits_for_the_lease() -> None:
    (deployment,) = of_kind(render({"replicas": 2}), "Deployment").values()
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert (
        deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]["topologyKey"]
        == "kubernetes.io/hostname"
    )


def test_the_image() -> None:
    def image(values: dict[str, object]) -> str:
        (deployment,) = of_kind(render(values), "Deployment").values()
        return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])

    assert image({}) == f"{IMAGE['image.repository']}:{orchestrator.__version__}"
    assert image({"image.tag": "1.2.3"}).endswith(":1.2.3")
    assert image({"image.tag": "1.2.3", "image.digest": "sha256:" + "a" * 64}).endswith("controller@sha256:" + "a" * 64)
    assert "image.repository is required" in refusal({"image.repository": ""})


def test_notes_say_what_an_uninstall_leaves() -> None:
    done = run_helm(
        "install",
        "jobs",
        str(CHART),
        "--dry-run=client",
        f"--set=image.repository={IMAGE['image.repository']}",
        "--set=rbac.nodes=false",
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "delete secret,lease jobs-orchestrator-controller" in notes
    assert "rbac.nodes is false" in notes

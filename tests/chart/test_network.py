"""Who reaches whom."""

from __future__ import annotations

from typing import Any

from tests.chart.chart import NAMESPACE, Manifest, of_kind, refusal, render

A_JOB_S_PODS = {"matchExpressions": [{"key": "orchestrator.dev/job", "operator": "Exists"}]}


def policies(values: dict[str, Any] | None = None) -> dict[str, Manifest]:
    return {name: one["spec"] for name, one in of_kind(render(values), "NetworkPolicy").items()}


def peers(values: dict[str, Any] | None = None) -> list[Manifest]:
    """Who may reach the controller."""
    (rule,) = policies(values)[f"{NAMESPACE}/orchestrator"]["ingress"]
    assert rule["ports"] == [{"port": 8443, "protocol": "TCP"}]
    found: list[Manifest] = rule["from"]
    return found


def test_the_controller_is_reached_by_agents_where_it_looks_after_jobs() -> None:
    def namespaces(names: list[str]) -> Manifest:
        return {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": names}]}

    assert peers() == [{"podSelector": A_JOB_S_PODS, "namespaceSelector": namespaces([NAMESPACE])}]
    assert peers({"watchNamespaces": ["a", "b"]})[0]["namespaceSelector"] == namespaces(["a", "b"])
    assert peers({"watchAllNamespaces": True})[0]["namespaceSelector"] == {}


def test_metrics_are_read_from_one_namespace() -> None:
    labels = {"kubernetes.io/metadata.name": "monitoring"}
    assert peers({"networkPolicy.metricsNamespaceLabels": labels})[1:] == [
        {"namespaceSelector": {"matchLabels": labels}}
    ]


def test_the_controller_reaches_names_and_the_api_server() -> None:
    policy = policies({"networkPolicy.apiServer": {"cidrs": ["10.0.0.1/32"], "ports": [6443]}})[
        f"{NAMESPACE}/orchestrator"
    ]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    names, api_server = policy["egress"]
    assert {(one["port"], one["protocol"]) for one in names["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert api_server == {"ports": [{"port": 6443, "protocol": "TCP"}], "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}


def test_the_policy_selects_the_controller_s_pods() -> None:
    objects = render()
    (deployment,) = of_kind(objects, "Deployment").values()
    (service,) = of_kind(objects, "Service").values()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selected = policies()[f"{NAMESPACE}/orchestrator"]["podSelector"]["matchLabels"]
    assert selected == service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert selected.items() <= labels.items()


def test_no_policy_unless_wanted() -> None:
    assert policies({"networkPolicy.enabled": False}) == {}
    assert set(policies()) == {f"{NAMESPACE}/orchestrator"}


def test_jobs_pods_reach_each_other() -> None:
    name = f"{NAMESPACE}-orchestrator-jobs"
    found = policies({"jobNetworkPolicy.enabled": True, "watchNamespaces": ["a", "b"], "networkPolicy.enabled": False})
    assert set(found) == {f"a/{name}", f"b/{name}"}
    assert found[f"a/{name}"] == {
        "podSelector": A_JOB_S_PODS,
        "policyTypes": ["Ingress"],  # what they reach (store, data, metadata services) is not ours to know
        "ingress": [{"from": [{"podSelector": A_JOB_S_PODS}]}],
    }
    assert "jobNetworkPolicy.namespaces is required" in refusal(
        {"jobNetworkPolicy.enabled": True, "watchAllNamespaces": True}
    )

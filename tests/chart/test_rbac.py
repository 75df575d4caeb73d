"""What the controller and its users may do: exactly this, and where."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.chart import NAMESPACE, Manifest, of_kind, refusal, render

LEASE = "orchestrator-controller"
JOBS = {
    ("orchestrator.dev", "trainingjobs"): {"list", "watch", "patch"},
    ("orchestrator.dev", "trainingjobs/status"): {"patch"},
    ("orchestrator.dev", "trainingjobs/finalizers"): {"update"},
    ("", "pods"): {"create", "list", "watch", "delete"},
    ("", "secrets"): {"create", "list", "delete"},
    ("", "services"): {"create", "get"},
    ("policy", "poddisruptionbudgets"): {"create", "get", "patch"},
    ("", "events"): {"create"},
}
ROLES = ("Role", "ClusterRole")


def allowed(role: Manifest) -> dict[tuple[str, str], set[str]]:
    """(Group, resource) → verbs, of rules without names."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                if "resourceNames" not in rule:
                    found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def test_by_default_jobs_are_looked_after_in_the_release_s_namespace_only() -> None:
    objects = render()
    assert set(of_kind(objects, "Role")) == {
        f"{NAMESPACE}/orchestrator-itself",
        f"{NAMESPACE}/{NAMESPACE}-orchestrator-jobs",
    }
    assert allowed(of_kind(objects, "Role")[f"{NAMESPACE}/{NAMESPACE}-orchestrator-jobs"]) == JOBS
    assert set(of_kind(objects, "ClusterRoleBinding")) == {f"{NAMESPACE}-orchestrator-nodes"}


def test_named_namespaces() -> None:
    roles = of_kind(render({"watchNamespaces": ["a", "b"]}), "Role")
    name = f"{NAMESPACE}-orchestrator-jobs"
    assert set(roles) == {f"{NAMESPACE}/orchestrator-itself", f"a/{name}", f"b/{name}"}
    assert allowed(roles[f"a/{name}"]) == allowed(roles[f"b/{name}"]) == JOBS


def test_all_namespaces() -> None:
    objects = render({"watchAllNamespaces": True})
    assert set(of_kind(objects, "Role")) == {f"{NAMESPACE}/orchestrator-itself"}
    assert allowed(of_kind(objects, "ClusterRole")[f"{NAMESPACE}-orchestrator-jobs"]) == JOBS
    assert "exclude each other" in refusal({"watchAllNamespaces": True, "watchNamespaces": ["a"]})


def test_its_own_lease_and_secret() -> None:
    """Only `create` has no name: the API does not know it yet when it asks whether that is allowed."""
    role = of_kind(render(), "Role")[f"{NAMESPACE}/orchestrator-itself"]
    assert allowed(role) == {("coordination.k8s.io", "leases"): {"create"}, ("", "secrets"): {"create"}}
    named = {rule["resources"][0]: rule for rule in role["rules"] if "resourceNames" in rule}
    assert {kind: (rule["resourceNames"], rule["verbs"]) for kind, rule in named.items()} == {
        "leases": ([LEASE], ["get", "update"]),
        "secrets": ([LEASE], ["get"]),
    }


def test_nodes_are_read_only_and_optional() -> None:
    assert allowed(of_kind(render(), "ClusterRole")[f"{NAMESPACE}-orchestrator-nodes"]) == {
        ("", "nodes"): {"get", "list", "watch"}
    }
    objects = render({"rbac.nodes": False})
    assert not of_kind(objects, "ClusterRoleBinding")
    assert all(name.startswith(f"{NAMESPACE}-orchestrator-trainingjobs-") for name in of_kind(objects, "ClusterRole"))


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a"]}, {"watchAllNamespaces": True}])
def test_every_role_is_bound_to_the_controller_alone(values: dict[str, Any]) -> None:
    objects = render(values)
    subject = {"kind": "ServiceAccount", "name": "orchestrator", "namespace": NAMESPACE}
    for kind in ROLES:
        roles = {name for name in of_kind(objects, kind) if "-trainingjobs-" not in name}
        bindings = of_kind(objects, f"{kind}Binding")
        assert set(bindings) == roles
        for binding in bindings.values():
            assert binding["roleRef"] == {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": kind,
                "name": binding["metadata"]["name"],
            }
            assert binding["subjects"] == [subject]


@pytest.mark.parametrize("values", [{}, {"watchAllNamespaces": True}])
def test_nobody_may_do_everything(values: dict[str, Any]) -> None:
    for kind in ROLES:
        for role in of_kind(render(values), kind).values():
            assert "*" not in str(role["rules"])
            for forbidden in (
                "escalate",
                "bind",
                "impersonate",
                "pods/exec",
                "pods/eviction",
                "serviceaccounts",
                "roles",
            ):
                assert f"'{forbidden}'" not in str(role["rules"])


def test_users_with_edit_manage_and_users_with_view_see() -> None:
    roles = of_kind(render(), "ClusterRole")
    edit = roles[f"{NAMESPACE}-orchestrator-trainingjobs-edit"]
    view = roles[f"{NAMESPACE}-orchestrator-trainingjobs-view"]
    label = "rbac.authorization.k8s.io/aggregate-to-"
    assert {name for name in edit["metadata"]["labels"] if name.startswith(label)} == {f"{label}edit", f"{label}admin"}
    assert {name for name in view["metadata"]["labels"] if name.startswith(label)} == {f"{label}view"}
    assert allowed(edit)["orchestrator.dev", "trainingjobs"] >= {"create", "delete", "patch", "update", "watch"}
    assert allowed(edit)["orchestrator.dev", "trainingjobs/status"] == {"get"}
    assert set().union(*allowed(view).values()) == {"get", "list", "watch"}
    assert not [name for name in of_kind(render({"rbac.aggregate": False}), "ClusterRole") if "trainingjobs" in name]


def test_no_roles_and_an_account_of_somebody_else() -> None:
    objects = render(
        {"rbac.create": False, "rbac.aggregate": False, "serviceAccount.create": False, "serviceAccount.name": "ours"}
    )
    assert not {one["kind"] for one in objects} & {
        "Role",
        "RoleBinding",
        *ROLES,
        "ClusterRoleBinding",
        "ServiceAccount",
    }
    (deployment,) = of_kind(objects, "Deployment").values()
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "ours"

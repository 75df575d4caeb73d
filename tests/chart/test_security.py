"""The pod of the controller: as little as a process can have (Pod Security Standard "restricted", a read-only root)."""

from __future__ import annotations

from typing import Any

from tests.chart.chart import of_kind, render


def pod(values: dict[str, Any] | None = None) -> dict[str, Any]:
    (deployment,) = of_kind(render(values), "Deployment").values()
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def test_not_root_and_no_capability() -> None:
    assert pod()["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = pod()["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_nothing_of_the_host() -> None:
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod())
    assert pod()["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}]
    assert pod()["containers"][0]["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]


def test_the_token_is_asked_for_by_the_pod_only() -> None:
    (account,) = of_kind(render(), "ServiceAccount").values()
    assert account["automountServiceAccountToken"] is False
    assert pod()["automountServiceAccountToken"] is True


def test_probes_ask_the_one_port_over_tls() -> None:
    (container,) = pod()["containers"]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "https", "scheme": "HTTPS"}
    assert container["ports"] == [{"name": "https", "containerPort": 8443, "protocol": "TCP"}]


def test_it_may_die_at_any_time_and_is_bounded() -> None:
    assert pod()["terminationGracePeriodSeconds"] == 10
    assert "lifecycle" not in pod()["containers"][0]
    assert set(pod()["containers"][0]["resources"]["requests"]) == {"cpu", "memory"}
    assert "memory" in pod()["containers"][0]["resources"]["limits"]
    assert pod({"priorityClassName": "high"})["priorityClassName"] == "high"

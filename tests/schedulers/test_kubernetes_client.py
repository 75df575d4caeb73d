"""Which cluster is meant, and what is said where the file that tells it is odd. Never its secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError, KubernetesError
from orchestrator.schedulers.kubernetes.client import connect

SECRET = "a-secret"


def kubeconfig(*, user: Any = None, cluster: Any = None, **changes: Any) -> str:
    """One of nowhere."""
    found = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:9"} if cluster is None else cluster}],
        "users": [{"name": "u", "user": {"token": SECRET} if user is None else user}],
    }
    return json.dumps({**found, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [b",
        "[1, 2]",
        "words",
        "\x00\x01",
        kubeconfig(contexts=None),
        kubeconfig(contexts=["x"]),
        kubeconfig(clusters=[]),
        kubeconfig(user="x"),
        kubeconfig(cluster={"server": 7}),
        kubeconfig(cluster={}),
        kubeconfig(cluster={"server": "localhost:9"}),
        kubeconfig(**{"current-context": "other"}),
    ],
)
def test_a_kubeconfig_that_is_none_is_told_in_a_sentence(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match="no Kubernetes cluster is configured here: ") as raised:
        connect()
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("token", [f"{SECRET}\nx", f"{SECRET}\u20ac"])
def test_a_token_that_is_none_is_not_told(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    path.write_text(kubeconfig(user={"token": token}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(KubernetesError, match="does not answer GET /api/v1/nodes") as raised:
        connect().get("/api/v1/nodes")
    assert SECRET not in str(raised.value)

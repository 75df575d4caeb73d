"""The real control plane comes up, and its parts act: what the other tests take for granted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.real_control_plane import (
    ASSETS_VARIABLE,
    CONTEXT_VARIABLE,
    PROGRAMS,
    ControlPlane,
    running_control_plane,
    why_not,
)

WAIT_SECONDS = 30.0


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    with running_control_plane(tmp_path / "plane") as found:
        yield found
        assert found.all_well()


def eventually(condition: Callable[[], Any]) -> Any:
    """What `condition` says once it is true."""
    until = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, "it never became true"
        time.sleep(0.05)
    return found


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_it_starts_and_its_scheduler_finds_no_node_for_a_pod(plane: ControlPlane) -> None:
    request = plane.api.request
    namespace = f"test-{secrets.token_hex(4)}"
    body: dict[str, Any] = {"metadata": {"name": namespace}}
    assert request("POST", "/api/v1/namespaces", body)[0] == 201
    eventually(lambda: request("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts/default")[0] == 200)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": "nowhere"},
        "containers": [{"name": "main", "image": "none", "command": ["true"]}],
    }
    status, created = request("POST", pods, {"metadata": {"name": "one"}, "spec": spec})
    assert status == 201, created
    assert created["status"] == {"phase": "Pending", "qosClass": "BestEffort"}

    def conditions() -> list[tuple[str, str, str | None]]:
        found = request("GET", f"{pods}/one")[1]["status"].get("conditions", [])
        return [(one["type"], one["status"], one.get("reason")) for one in found]

    eventually(lambda: conditions() == [("PodScheduled", "False", "Unschedulable")])
    assert request("DELETE", f"{pods}/one")[0] == 200
    assert request("GET", f"{pods}/one")[0] == 404, "a pod without a node goes at once"
    assert request("DELETE", f"/api/v1/namespaces/{namespace}")[0] == 200
    eventually(lambda: request("GET", f"/api/v1/namespaces/{namespace}")[0] == 404)


def test_without_the_programs_the_reason_says_which_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTEXT_VARIABLE, raising=False)
    monkeypatch.setenv(ASSETS_VARIABLE, str(tmp_path))
    (tmp_path / "etcd").touch(mode=0o755)
    reason = why_not()
    assert reason == f"no {', '.join(PROGRAMS[1:])} in {tmp_path} (KUBE_ASSETS names another folder)"

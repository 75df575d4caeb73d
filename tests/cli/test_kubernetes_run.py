"""`orchestrator run --scheduler kubernetes` for a TrainingJob that is there already."""

from __future__ import annotations

from typing import Any, cast

import pytest

from orchestrator.cli import kubernetes
from orchestrator.errors import KubernetesError
from orchestrator.schedulers.kubernetes.client import KubernetesClient


class Written:
    """Stands for the API server: takes writes, and counts edits of the spec."""

    def __init__(self, spec: dict[str, Any], state: str) -> None:
        self.object: dict[str, Any] = {"metadata": {"generation": 1}, "spec": spec, "status": {"state": state}}
        self.edits: list[dict[str, Any]] = []
        self.conflicts = 0
        """How often somebody else is quicker."""

    def get(self, path: str) -> dict[str, Any]:
        return self.object

    def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.conflicts:
            self.conflicts -= 1
            self.object = {**self.object, "status": {**self.object["status"], "step": self.conflicts}}
        if body["status"] != self.object["status"]:
            raise KubernetesError("it has been modified", status=409, reason="Conflict")
        return self._take(body["spec"])

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._take({**self.object["spec"], **body["spec"]})

    def _take(self, spec: dict[str, Any]) -> dict[str, Any]:
        if spec != self.object["spec"]:
            self.edits.append(spec)
            generation = self.object["metadata"]["generation"] + 1
            self.object = {**self.object, "spec": spec, "metadata": {"generation": generation}}
        return self.object


@pytest.mark.parametrize(
    ("state", "spec", "edits"),
    [("Failed", {"nodesMax": 2, "suspend": False}, 2), ("Failed", {"nodesMax": 3}, 1), ("Running", {"nodesMax": 3}, 1)],
)
def test_the_same_words_start_a_job_again_that_has_failed(state: str, spec: dict[str, Any], edits: int) -> None:
    server = Written({"nodesMax": 2, "suspend": False}, state)
    kubernetes._edit(cast("KubernetesClient", server), "/path", server.object, spec)
    assert len(server.edits) == edits
    assert server.object["spec"] == spec


def test_the_same_words_change_nothing_of_a_job_that_runs() -> None:
    server = Written({"nodesMax": 2}, "Running")
    kubernetes._edit(cast("KubernetesClient", server), "/path", server.object, {"nodesMax": 2})
    assert server.edits == []


class Answers:
    """Stands for the API server: each look shows the next status."""

    def __init__(self, *statuses: dict[str, Any]) -> None:
        self.left = list(statuses)

    def get(self, path: str) -> dict[str, Any]:
        status = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return {"metadata": {"generation": 3}, "spec": {}, "status": status}

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"generation": 3}}


def test_who_waits_for_the_end_is_not_told_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "POLL_SECONDS", 0.0)
    old, new = {"state": "Failed", "observedGeneration": 2}, {"state": "Cancelled", "observedGeneration": 3}
    server = Answers(old, old, {"state": "Running", "observedGeneration": 3}, new)
    job = kubernetes.ClusterJob(cast("KubernetesClient", server), "default", "small")
    job.request("cancel")
    assert job.wait_until_ended(10) == "Cancelled"


def test_a_status_that_is_written_meanwhile_does_not_refuse_the_edit() -> None:
    server = Written({"nodesMax": 2}, "Running")
    server.conflicts = 2
    kubernetes._edit(cast("KubernetesClient", server), "/path", server.object, {"nodesMax": 3})
    assert server.object["spec"] == {"nodesMax": 3}
    server.conflicts = 99
    with pytest.raises(KubernetesError):
        kubernetes._edit(cast("KubernetesClient", server), "/path", server.object, {"nodesMax": 4})

"""`orchestrator run --scheduler kubernetes` for a TrainingJob that is there already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.cli import kubernetes
from orchestrator.cli.terminal import output
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


TEMPLATE = "spec: {containers: [{name: trainer, image: 'trainer:1'}]}\n"


def dry_run(folder: Path, *flags: str, template: str | None = TEMPLATE) -> subprocess.CompletedProcess[str]:
    """`run --scheduler kubernetes --dry-run` as a person types it; no cluster is configured."""
    words = ["--scheduler=kubernetes", "--job=gpt", "--store=gs://bucket/jobs", "--nodes=2:8", *flags, "--dry-run"]
    if template is not None:
        (folder / "pod.yaml").write_text(template)
        words.append("--template=pod.yaml")
    return subprocess.run(
        (sys.executable, "-m", "orchestrator", "run", *words, "--", "python3", "/work/train.py"),
        cwd=folder,
        env={**os.environ, "KUBECONFIG": str(folder / "none"), "XDG_STATE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_becomes_a_training_job(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "--workers-per-node=8", "--save-every=500", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["metadata"] == {"name": "gpt", "namespace": "default"}
    assert made["spec"] == {
        "store": "gs://bucket/jobs",
        "command": ["python3", "/work/train.py"],
        "nodesMin": 2,
        "nodesMax": 8,
        "workersPerNode": 8,
        "saveEvery": 500,
        "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}},
    }


@pytest.mark.parametrize(
    ("flags", "template", "problem"),
    [
        ((), None, "template: is missing"),
        (("--template=none.yaml",), None, "template: none.yaml: No such file"),
        ((), "a: [", "is no YAML"),
        ((), TEMPLATE + "---\n" + TEMPLATE, "holds 2 documents"),
        ((), "kind: Deployment\n" + TEMPLATE, "is a Deployment; a Pod"),
        ((), "metadata: {}\n", "is no pod template"),
        ((), "spec: {}\n", "one container is needed"),
        (("--staging=/tmp",), TEMPLATE, "staging: means nothing to pods"),
        (("--sbatch=--gres=gpu:8",), TEMPLATE, "sbatch: means nothing to pods"),
        (("--job=gpt.v2",), TEMPLATE, "a job's name has at most 50"),
        (("--scheduler=local",), TEMPLATE, "are for --scheduler kubernetes"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    flags: tuple[str, ...], template: str | None, problem: str, tmp_path: Path
) -> None:
    done = dry_run(tmp_path, *flags, template=template)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert problem in line
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("state", "age_seconds", "step_seconds", "told"),
    [
        ("Running", 300, 1.0, True),
        ("Running", 30, 1.0, False),
        ("Running", 300, 60.0, False),
        ("Done", 300, 1.0, False),
    ],
)
def test_old_figures_of_a_running_job_are_told(
    state: str, age_seconds: int, step_seconds: float, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """No controller is there: the job trains on, and nobody writes how far it is."""
    seen = datetime.now(UTC) - timedelta(seconds=age_seconds)
    status = {"state": state, "step": 7, "stepSeconds": step_seconds, "observedAt": seen.strftime("%Y-%m-%dT%H:%M:%SZ")}
    output().print(kubernetes.describe({"metadata": {"name": "small"}, "status": status}))
    assert ("are 5 min old: no step since then" in capsys.readouterr().out) is told

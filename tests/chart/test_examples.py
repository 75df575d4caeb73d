"""The example manifests: they parse, use settings of the CRD, and volumes, accounts and fallbacks fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.schedulers.kubernetes.pods import merged
from tests.chart.chart import CHART, ROOT

EXAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
CRD = yaml.safe_load((CHART / "files" / "trainingjob-crd.yaml").read_text())
SPEC = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def objects(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def job(file: Path) -> dict[str, Any]:
    (found,) = (one for one in objects(file) if one["kind"] == "TrainingJob")
    spec: dict[str, Any] = found["spec"]
    return spec


def named(file: Path, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in objects(file) if one["kind"] == kind}


@pytest.fixture(params=EXAMPLES, ids=lambda file: file.name)
def example(request: pytest.FixtureRequest) -> Path:
    file: Path = request.param
    return file


def test_there_are_some() -> None:
    assert {file.name for file in EXAMPLES} == {"trainingjob.yaml", "spot-aks.yaml", "spot-eks.yaml", "spot-gke.yaml"}


def test_every_object_has_a_kind_and_a_name(example: Path) -> None:
    for one in objects(example):
        assert one["apiVersion"]
        assert one["kind"]
        assert one["metadata"]["name"]


def test_settings_are_those_of_the_crd(example: Path) -> None:
    assert set(SPEC["required"]) <= set(job(example)) <= set(SPEC["properties"])
    assert 1 <= job(example)["nodesMin"] <= job(example)["nodesMax"]
    assert job(example)["graceSeconds"] > 1


def test_the_pod_s_parts_fit(example: Path) -> None:
    spec = job(example)["template"]["spec"]
    claims = {
        one["persistentVolumeClaim"]["claimName"] for one in spec.get("volumes", []) if "persistentVolumeClaim" in one
    }
    assert claims <= named(example, "PersistentVolumeClaim")
    mounts = {one["name"] for one in spec["containers"][0].get("volumeMounts", [])}
    assert mounts == {one["name"] for one in spec.get("volumes", [])}
    assert {spec.get("serviceAccountName", "")} - {""} <= named(example, "ServiceAccount")
    assert spec["containers"][0]["command"] == ["tini", "--", "python3"]  # the controller adds the agent
    assert "args" not in spec["containers"][0]
    if job(example)["store"].startswith("/"):
        assert job(example)["store"] in {one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}


def test_a_fallback_changes_the_nodes_and_nothing_else(example: Path) -> None:
    if "fallback" not in job(example):
        assert "patienceSeconds" not in job(example)
        return
    patch = job(example)["fallback"]["template"]
    assert "null" not in yaml.dump(patch)
    template = job(example)["template"]
    other = merged(template, patch)
    assert other != template
    for key in ("affinity", "nodeSelector"):
        other["spec"].pop(key, None)
        template["spec"].pop(key, None)
    assert other == template


def test_the_script_of_the_small_job_is_in_the_worker_s_image() -> None:
    script = job(ROOT / "examples" / "kubernetes" / "trainingjob.yaml")["command"][1]
    assert (ROOT / script.removeprefix("/opt/orchestrator/")).exists()
    assert "COPY examples /opt/orchestrator/examples" in (ROOT / "deploy" / "docker" / "worker.Dockerfile").read_text()

"""CI's workflows, as far as they can be read: they pin what they use, have limits, and name files that there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import orchestrator
from tests.chart.chart import CHART, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


@pytest.fixture(params=WORKFLOWS, ids=lambda file: file.name)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    file: Path = request.param
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_some() -> None:
    assert [file.name for file in WORKFLOWS] == ["ci.yaml", "kind.yaml"]


def test_it_reads_only_and_ends(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert not job["runs-on"].endswith("-latest")


def test_actions_are_pinned_to_commits(workflow: dict[str, Any]) -> None:
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])


def test_every_script_is_bash(workflow: dict[str, Any]) -> None:
    for step in steps(workflow):
        done = subprocess.run(
            ["bash", "-n"], input=step.get("run", ""), capture_output=True, text=True, check=False, timeout=10
        )
        assert done.returncode == 0, done.stderr


def test_files_that_are_named_exist(workflow: dict[str, Any]) -> None:
    text = "\n".join(step.get("run", "") for step in steps(workflow))
    for name in re.findall(r"(?:deploy|charts|examples|scripts)/[\w./-]+", text):
        assert (ROOT / name).exists(), name


def test_images_have_the_tag_that_chart_and_example_ask_for() -> None:
    text = (ROOT / ".github" / "workflows" / "kind.yaml").read_text()
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert version == orchestrator.__version__
    assert set(re.findall(r"(?:orchestrator-controller|orchestrator-worker):(\S+)", text)) == {version}
    assert (
        f"image: orchestrator-worker:{version}" in (ROOT / "examples" / "kubernetes" / "trainingjob.yaml").read_text()
    )

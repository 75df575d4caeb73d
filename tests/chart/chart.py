"""The chart as helm renders it.

Helm is what HELM names, `helm` on the PATH, build/helm/helm (from scripts/get-helm), or ~/.cache/kube-assets/helm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "orchestrator"
COMMAND_SECONDS = 30
RELEASE, NAMESPACE = "orchestrator", "system"
IMAGE = {"image.repository": "registry.invalid/team/controller"}
"""The one value that has no default."""

Manifest = dict[str, Any]


@cache
def helm() -> Path:
    """The program; skips the test where there is none."""
    places = (ROOT / "build" / "helm" / "helm", Path.home() / ".cache" / "kube-assets" / "helm")
    found = (
        os.environ.get("HELM")
        or shutil.which("helm")
        or next(filter(lambda one: os.access(one, os.X_OK), places), None)
    )
    if found is None:
        pytest.skip("no helm here (scripts/get-helm gets one; HELM says where one is)")
    return Path(found)


def run_helm(*words: str) -> subprocess.CompletedProcess[str]:
    """What it said."""
    return subprocess.run(
        [str(helm()), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_SECONDS,
        stdin=subprocess.DEVNULL,
    )


def template(values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """`helm template` with these values (dotted paths) beside the image's."""
    return _template(*(f"--set-json={name}={json.dumps(value)}" for name, value in (IMAGE | (values or {})).items()))


@cache
def _template(*words: str) -> subprocess.CompletedProcess[str]:
    return run_helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *words)


def render(values: dict[str, Any] | None = None) -> list[Manifest]:
    """Every object of the release."""
    done = template(values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def refusal(values: dict[str, Any]) -> str:
    """What helm says against these values."""
    done = template(values)
    assert done.returncode != 0, done.stdout
    return done.stderr


def of_kind(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Namespace/name (or name) → object, of one kind."""
    found = {}
    for one in objects:
        if one["kind"] == kind:
            place = one["metadata"].get("namespace")
            found[f"{place}/{one['metadata']['name']}" if place else one["metadata"]["name"]] = one
    return found

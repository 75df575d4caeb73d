"""Values: each documented where it stands, and nonsense refused with its name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.chart.chart import CHART, refusal, render

VALUES = CHART / "values.yaml"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
SELF_EXPLAINING = {"image", "rbac", "serviceAccount", "crd", "networkPolicy", "jobNetworkPolicy", "metrics"}
"""Groups whose values have their own comments."""


def leaves(schema: dict[str, Any], values: Any, path: str = "") -> None:
    """Asserts that schema and values have the same keys, where the schema says which."""
    if "properties" not in schema:
        return
    assert schema["additionalProperties"] is False, path
    assert set(values) <= set(schema["properties"]), path
    for name, part in schema["properties"].items():
        if name in values:
            leaves(part, values[name], f"{path}.{name}")
        else:
            assert f"{path}.{name}" in (".global", ".resources.claims"), f"{path}.{name} has no default"


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    leaves(SCHEMA, yaml.safe_load(VALUES.read_text()))


def test_every_value_is_documented_in_place() -> None:
    """A comment above it, above the first line of a run of values without blank lines, or at its group."""
    lines = VALUES.read_text().splitlines()
    bare = []
    for number, line in enumerate(lines):
        if re.match(r"\w+:", line):
            block = lines[:number]
            while block and re.match(r"\w+: \S", block[-1]):
                block.pop()
            if not (block and block[-1].startswith("#")) and line.partition(":")[0] not in SELF_EXPLAINING:
                bare.append(line)
    assert [one for one in bare if not one.startswith(("nameOverride", "podAnnotations", "podLabels"))] == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"image.repo": "x"}, "repo"),
        ({"replicas": "two"}, "replicas"),
        ({"replicas": -1}, "replicas"),
        ({"image.tag": "latest"}, "tag"),
        ({"image.digest": "abc"}, "digest"),
        ({"image.repository": "https://registry.invalid/x"}, "repository"),
        ({"image.pullPolicy": "always"}, "pullPolicy"),
        ({"watchNamespaces": "a"}, "watchNamespaces"),
        ({"watchNamespaces": ["Not A Namespace"]}, "watchNamespaces"),
        ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
        ({"rbac.nodes": "yes"}, "nodes"),
        ({"terminationGraceSeconds": 86400}, "terminationGraceSeconds"),
        ({"networkPolicy.apiServer.ports": []}, "ports"),
        ({"networkPolicy.apiServer.cidrs": ["10.0.0.1"]}, "cidrs"),
        ({"metrics.serviceMonitor.interval": "30s"}, "interval"),
        ({"podLabels": {"a": 1}}, "podLabels"),
        ({"extraEnv": [{"value": "x"}]}, "extraEnv"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    said = refusal(values)
    assert "schema" in said
    assert named in said


def test_values_of_a_parent_chart_do_no_harm() -> None:
    assert render({"global": {"anything": 1}})

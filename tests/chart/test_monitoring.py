"""Prometheus and Grafana: off until wanted, with token and certificate of the controller, and metrics that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from orchestrator.supervisor.metrics import GAUGES
from tests.chart.chart import CHART, NAMESPACE, of_kind, render

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
METRICS = {*GAUGES, "orchestrator_events_total"}


def queries(value: Any) -> list[str]:
    """Every PromQL expression in a dashboard."""
    match value:
        case {"expr": str(expression)}:
            return [expression]
        case dict():
            return [found for one in value.values() for found in queries(one)]
        case list():
            return [found for one in value for found in queries(one)]
    return []


def test_off_by_default() -> None:
    assert not {one["kind"] for one in render()} & {"ServiceMonitor", "ConfigMap"}


def test_the_service_monitor() -> None:
    values = {"metrics.serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "intervalSeconds": 15}}
    objects = render(values)
    (monitor,) = of_kind(objects, "ServiceMonitor").values()
    (service,) = of_kind(objects, "Service").values()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"] == [
        {
            "port": "https",
            "scheme": "https",
            "path": "/metrics",
            "interval": "15s",
            "honorLabels": True,
            "authorization": {
                "type": "Bearer",
                "credentials": {"name": "orchestrator-controller", "key": "metrics-token"},
            },
            "tlsConfig": {
                "ca": {"secret": {"name": "orchestrator-controller", "key": "tls.crt"}},
                "serverName": f"orchestrator.{NAMESPACE}.svc",
            },
        }
    ]
    assert service["spec"]["ports"][0]["name"] == "https"


def test_the_dashboards_are_in_a_config_map() -> None:
    (found,) = of_kind(render({"metrics.dashboard.enabled": True}), "ConfigMap").values()
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in found["data"].items()} == {
        file.name: json.loads(file.read_text()) for file in DASHBOARDS
    }


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.name)
def test_a_dashboard_asks_for_metrics_that_there_are(file: Any) -> None:
    asked = queries(json.loads(file.read_text()))
    assert all('job=~"$job"' in one for one in asked)
    assert {name for one in asked for name in re.findall(r"orchestrator_\w+", one)} == METRICS


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.name)
def test_the_panels_of_a_dashboard_lie_beside_each_other(file: Any) -> None:
    panels = json.loads(file.read_text())["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (one["gridPos"] for one in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24

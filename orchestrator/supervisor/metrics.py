"""What Prometheus is told of a job: gauges, read off its status when somebody asks, and a counter of its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

Status = dict[str, Any]
"""As `loop.describe` makes it."""


def _troubled_losses(status: Status) -> float:
    trouble = status["loss_trouble"]
    return 0 if trouble is None else trouble["ranks"]


GAUGES: Mapping[str, tuple[str, Callable[[Status], float | None]]] = MappingProxyType(
    {
        "orchestrator_step": ("Highest completed step", lambda status: status["step"]),
        "orchestrator_world_size": ("Ranks of the present generation", lambda status: status["world_size"]),
        "orchestrator_blind_watchers": (
            "Sources of notices that cannot be read, on all nodes",
            lambda status: sum(len(node["blind"]) for node in status["nodes"]),
        ),
        "orchestrator_condemned_nodes": (
            "Nodes with a device that is done for, which train on",
            lambda status: sum(bool(node["condemned"]) for node in status["nodes"]),
        ),
        "orchestrator_commit_age_seconds": (
            "Age of the newest committed checkpoint",
            lambda status: status["commit_age_seconds"],
        ),
        "orchestrator_seconds_without_step": (
            "Time since the last step, but for announced pauses; 0 while no step is to be expected",
            lambda status: status["seconds_without_step"] or 0.0,
        ),
        "orchestrator_troubled_losses": (
            "Ranks whose loss, as the script tells it, is not finite or has spiked",
            _troubled_losses,
        ),
    }
)
"""Name → what it is, and its value; None: not known yet, so nothing is set."""


class Metrics:
    """Those of one port, apart from every other's in this process: of one job, or of all that a controller has."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counted: set[tuple[str, str]] = set()
        self._events = Counter("orchestrator_events", "Events by kind", ["job", "kind"], registry=self._registry)
        self._gauges = {name: Gauge(name, what, ["job"], registry=self._registry) for name, (what, _) in GAUGES.items()}

    def count(self, job: str, kind: str) -> None:
        """Count an event."""
        self._counted.add((job, kind))
        self._events.labels(job, kind).inc()

    def forget(self, job: str) -> None:
        """A job that does not exist any more: its counters go."""
        for one in [one for one in self._counted if one[0] == job]:
            self._counted.remove(one)
            self._events.remove(*one)

    def text(self, *statuses: Status) -> bytes:
        """All of them in Prometheus' format, as the jobs are now; one that is not named any more has no gauges."""
        for name, (_, value_of) in GAUGES.items():
            self._gauges[name].clear()
            for status in statuses:
                value = value_of(status)
                if value is not None:
                    self._gauges[name].labels(status["job"]).set(value)
        return generate_latest(self._registry)

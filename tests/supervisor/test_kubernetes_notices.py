"""What the API says of pods and hosts, as notices and places: each told once, to whom it concerns."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.messages import Event, NodePlaced, NoticeKind, NoticeReceived
from orchestrator.preemption.base import rfc3339_seconds
from orchestrator.supervisor.kubernetes_notices import KubernetesNotices

WALL = rfc3339_seconds("2026-01-01T00:00:00Z")
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
SPOT = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}


class FixedClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0

    def monotonic(self) -> float:
        return self.now_seconds

    def wall(self) -> float:
        return WALL + self.now_seconds - 1000.0


class Scene:
    """Notices, and what they submit."""

    def __init__(self) -> None:
        self.clock = FixedClock()
        self.events: list[Event] = []
        self.found = KubernetesNotices(self.clock, self.events.append, grace_seconds=30.0)

    def notices(self) -> list[tuple[str, NoticeKind, float | None]]:
        """What was told since the last call."""
        told = [event for event in self.events if isinstance(event, NoticeReceived)]
        self.events.clear()
        return [(event.node, event.kind, event.remaining_seconds) for event in told]

    def places(self) -> list[tuple[str, str]]:
        """Places that were told since the last call."""
        told = [event for event in self.events if isinstance(event, NodePlaced)]
        self.events.clear()
        return [(event.node, event.place) for event in told]


@pytest.fixture
def scene() -> Scene:
    """Nothing told."""
    return Scene()


def pod(name: str = "p", host: str = "h", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"orchestrator.dev/run": "r"}, **more.pop("metadata", {})}
    return {"metadata": metadata, "spec": {"nodeName": host}, "status": {"phase": "Running", **more}}


def host(name: str = "h", *taints: dict[str, str], zone: str = "") -> dict[str, Any]:
    labels = {"topology.kubernetes.io/zone": zone} if zone else {}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": list(taints)}}


def test_a_healthy_pod_says_nothing(scene: Scene) -> None:
    scene.found.on_host(host(), False)
    scene.found.on_pod(pod(), False)
    assert scene.events == []


def test_a_pod_that_is_deleted_leaves_its_grace_once(scene: Scene) -> None:
    deleted = {"deletionTimestamp": "2026-01-01T00:00:20Z", "deletionGracePeriodSeconds": 25}
    scene.found.on_pod(pod(), False)
    scene.found.on_pod(pod(metadata=deleted), False)
    ((node, kind, left),) = scene.notices()
    assert (node, kind) == ("p", NoticeKind.PREEMPT)
    assert left == pytest.approx(20, abs=6)
    scene.clock.now_seconds += 5
    scene.found.on_pod(pod(metadata=deleted, message="changed"), False)
    assert scene.notices() == []


def test_a_disruption_is_told_with_the_usual_grace_and_taken_back(scene: Scene) -> None:
    scene.found.on_pod(pod(conditions=[DISRUPTED]), False)
    assert scene.notices() == [("p", NoticeKind.PREEMPT, 30.0)]
    scene.found.on_pod(pod(conditions=[{**DISRUPTED, "status": "False"}]), False)
    assert [(node, kind) for node, kind, _ in scene.notices()] == [("p", NoticeKind.CANCEL)]


def test_a_taint_concerns_all_pods_of_the_host_and_no_other(scene: Scene) -> None:
    for name, where in (("p", "h"), ("q", "h"), ("r", "g")):
        scene.found.on_pod(pod(name, where), False)
    scene.found.on_host(host("h", SPOT), False)
    assert [(node, kind) for node, kind, _ in scene.notices()] == [
        ("p", NoticeKind.PREEMPT),
        ("q", NoticeKind.PREEMPT),
    ]
    scene.found.on_host(host("h", SPOT), False)
    assert scene.notices() == []
    scene.found.on_host(host("h"), False)
    assert [(node, kind) for node, kind, _ in scene.notices()] == [
        ("p", NoticeKind.CANCEL),
        ("q", NoticeKind.CANCEL),
    ]


def test_a_host_that_cannot_be_seen_is_a_hint_only(scene: Scene) -> None:
    scene.found.on_pod(pod(), False)
    scene.found.on_host(host("h", UNREACHABLE), False)
    assert [(node, kind) for node, kind, _ in scene.notices()] == [("p", NoticeKind.HINT)]


def test_a_pod_that_comes_to_a_host_that_will_go_is_told_so(scene: Scene) -> None:
    """Whichever is seen first."""
    scene.found.on_host(host("h", SPOT), False)
    scene.found.on_pod(pod(host=""), False)
    assert scene.notices() == []
    scene.found.on_pod(pod(), False)
    assert [(node, kind) for node, kind, _ in scene.notices()] == [("p", NoticeKind.PREEMPT)]


def test_a_pod_and_its_host_are_two_sources(scene: Scene) -> None:
    """A taint that goes away does not take a deletion back."""
    scene.found.on_pod(pod(), False)
    scene.found.on_host(host("h", SPOT), False)
    scene.found.on_pod(pod(conditions=[DISRUPTED]), False)
    assert len(scene.notices()) == 2
    scene.found.on_host(host("h"), False)
    (withdrawn,) = [event for event in scene.events if isinstance(event, NoticeReceived)]
    assert withdrawn.kind is NoticeKind.CANCEL
    assert "kubernetes host" in withdrawn.notice_id


def test_of_what_has_ended_nothing_is_told_any_more(scene: Scene) -> None:
    for gone in (True, False):
        scene.found.on_pod(pod(), False)
        scene.found.on_pod(pod(phase="Running" if gone else "Failed"), gone)
        scene.found.on_host(host("h", SPOT), False)
        scene.found.on_host(host("h"), False)
        assert scene.events == []


def test_a_host_that_is_gone_withdraws_nothing(scene: Scene) -> None:
    scene.found.on_pod(pod(), False)
    scene.found.on_host(host("h", SPOT), False)
    scene.notices()
    scene.found.on_host(host("h", SPOT), True)
    assert scene.events == []


def test_what_cannot_be_read_withdraws_nothing(scene: Scene) -> None:
    scene.found.on_pod(pod(conditions=[DISRUPTED]), False)
    scene.notices()
    scene.found.on_pod(pod(conditions="odd"), False)
    assert scene.notices() == []


def test_places_are_told_once_and_again_when_they_change(scene: Scene) -> None:
    scene.found.on_pod(pod(), False)
    scene.found.on_host(host(zone="a"), False)
    assert [(node, place.partition("/")[0]) for node, place in scene.places()] == [("p", "a")]
    scene.found.on_host(host(zone="a"), False)
    assert scene.places() == []
    scene.found.on_pod(pod("q"), False)
    assert [(node, place.partition("/")[0]) for node, place in scene.places()] == [("q", "a")]
    scene.found.on_host(host(zone="b"), False)
    assert [(node, place.partition("/")[0]) for node, place in scene.places()] == [("p", "b"), ("q", "b")]


def test_who_joins_later_is_told_again(scene: Scene) -> None:
    """A supervisor passes over what concerns a node that it does not know yet: a pod that starts, a controller, too."""
    deleted = {"deletionTimestamp": "2026-01-01T00:00:20Z", "deletionGracePeriodSeconds": 25}
    scene.found.on_host(host("h", SPOT), False)
    scene.found.on_pod(pod(metadata=deleted, conditions=[DISRUPTED]), False)
    first = scene.notices()
    assert len(first) == 3
    scene.found.on_joined("p")
    assert scene.notices() == first
    scene.found.on_joined("nobody")
    assert scene.notices() == []
    scene.found.on_pod(pod(), True)
    scene.found.on_joined("p")
    assert scene.notices() == []

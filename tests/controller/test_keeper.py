"""What one JobKeeper makes of what it sees: late, odd and contradictory things, and answers that do not come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller import keeper as keeper_module
from orchestrator.controller.crd import ROLLBACK_ANNOTATION
from orchestrator.schedulers.kubernetes.watching import path_of
from orchestrator.supervisor.kubernetes_job import KubernetesJob
from tests.controller.keeper_scene import PATH, TEMPLATE, KeeperScene
from tests.kubernetes.servers import bare_cluster

PODS = path_of("pods", "default")


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KeeperScene]:
    """A cluster without hosts."""
    monkeypatch.setattr(keeper_module, "LOOK_SECONDS", 0.1)
    with bare_cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        found = KeeperScene(cluster)
        yield found
        await found.end()


async def test_a_watch_that_lags_does_not_begin_an_ended_job_again(scene: KeeperScene) -> None:
    """What it tells late is older than what the keeper has written itself."""
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    before = await scene.job()
    await scene.edit(cancel=True)
    await scene.until_state("Cancelled")
    made = scene.count("POST", PODS, 201)
    assert before["status"]["state"] == "Pending"
    await scene.tell({**before, "spec": {**before["spec"], "cancel": False}})
    await scene.until(lambda: scene.keeper is not None and not scene.keeper._wake.is_set(), "it has looked")
    await scene.tell()
    assert (await scene.status())["state"] == "Cancelled"
    assert scene.count("POST", PODS, 201) == made


async def test_a_watch_that_lags_does_not_roll_back_twice(scene: KeeperScene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    asked: list[int] = []
    monkeypatch.setattr(KubernetesJob, "roll_back", lambda _, step, by: asked.append(step))
    await scene.ask("PATCH", PATH, {"metadata": {"annotations": {ROLLBACK_ANNOTATION: "20"}}})
    annotated = await scene.job()
    await scene.tell(annotated)
    await scene.until(lambda: asked, "it rolls back")
    await scene.tell(annotated)
    await scene.until(lambda: scene.keeper is not None and not scene.keeper._wake.is_set(), "it has looked")
    await scene.edit(nodesMax=2)
    await scene.until(lambda: scene.count("POST", PODS, 201) == 2, "the next act")
    assert asked == [20]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"spec": {"containers": [{"name": "t"}], "volumes": {"a": {}}}}, "template.spec.volumes: is no list"),
        ({"spec": {"containers": [{"name": "t", "env": [None]}]}}, "template.spec.containers[0].env: is no list"),
    ],
)
async def test_a_template_of_which_no_pod_can_be_made_is_told(
    scene: KeeperScene, template: dict[str, Any], words: str
) -> None:
    await scene.begin(template=template)
    await scene.until_state("Invalid")
    assert words in (await scene.status())["reason"]
    mended = {"spec": {**TEMPLATE["spec"], "volumes": None}}
    await scene.edit(template=mended, fallback={"template": {"spec": {"volumes": "x"}}})
    await scene.until(lambda: scene.said("fallback"), "that no pod can be made of the fallback either")
    await scene.edit(fallback=None)
    await scene.until(scene.runs, "a pod")

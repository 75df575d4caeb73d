"""What one JobKeeper makes of what it sees: late, odd and contradictory things, and answers that do not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller import belongings
from orchestrator.controller import keeper as keeper_module
from orchestrator.controller.crd import ROLLBACK_ANNOTATION
from orchestrator.controller.objects import render_service
from orchestrator.schedulers.kubernetes.names import JOB_LABEL, RUN_LABEL, path_of
from orchestrator.schedulers.kubernetes.pods import Owner
from orchestrator.supervisor.kubernetes_job import KubernetesJob, read_run
from tests.controller.keeper_scene import JOB, PATH, TEMPLATE, KeeperScene
from tests.kubernetes.servers import bare_cluster

PODS, SECRETS = path_of("pods", "default"), path_of("secrets", "default")


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


async def test_secrets_that_cannot_be_removed_are_not_followed_by_more(scene: KeeperScene) -> None:
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    await scene.stop_keeper()
    for _, name in list(scene.pods.objects):
        await scene.ask("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
    await scene.until(lambda: not scene.runs(), "nothing runs")
    scene.server.fail_next("DELETE", "/secrets/", 403, 3)
    await scene.start_keeper()
    await scene.until(scene.runs, "it runs again")
    assert scene.count("DELETE", f"{SECRETS}/{(await scene.secrets())[0]}") == 0
    assert len(await scene.secrets()) == 1
    assert scene.count("POST", SECRETS, 201) == 2


async def test_what_pods_need_to_start_is_made_again(scene: KeeperScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes the run's Secret, the Service and the budget: replacements could never start."""
    monkeypatch.setattr(belongings, "MEND_SECONDS", 0.2)
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    (secret,) = await scene.secrets()
    paths = [
        f"{SECRETS}/{secret}",
        path_of("services", "default", JOB),
        path_of("poddisruptionbudgets", "default", JOB),
    ]
    before = (await scene.ask("GET", paths[0]))[1]["data"]
    for path in paths:
        assert (await scene.ask("DELETE", path))[0] == 200
    ((_, pod),) = scene.pods.objects
    await scene.ask("POST", f"{PODS}/{pod}/binding", {"target": {"kind": "Node", "name": "node-0"}})
    await scene.until(lambda: scene.count("POST", paths[2].rpartition("/")[0], 201) == 2, "the budget is there again")
    answers = [await scene.ask("GET", path) for path in paths]
    assert [status for status, _ in answers] == [200, 200, 200]
    assert answers[0][1]["data"] == before


async def test_a_service_of_a_job_that_was_deleted_is_made_again_when_it_has_gone(
    scene: KeeperScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of the same name is made before the collector has come by."""
    monkeypatch.setattr(belongings, "MEND_SECONDS", 0.1)
    path = path_of("services", "default", JOB)
    stale = render_service(Owner(namespace="default", name=JOB, uid="of-another"))
    assert (await scene.ask("POST", path.rpartition("/")[0], stale))[0] == 201
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    assert (await scene.ask("DELETE", path))[0] == 200

    async def there() -> bool:
        return (await scene.ask("GET", path))[0] == 200

    await scene.until(there, "it has a Service")


async def test_a_pod_that_another_controllers_last_request_has_made_goes(scene: KeeperScene) -> None:
    """Its run is over, so it would wait for its Secret for ever, on a host that others need. Somebody's own stays."""
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    ((_, name),) = scene.pods.objects
    _, pod = await scene.ask("GET", f"{PODS}/{name}")
    for late, run in (("late", "0f0f"), ("own", None)):
        labels = {JOB_LABEL: JOB, **({} if run is None else {RUN_LABEL: run})}
        body = {**pod, "metadata": {"name": late, "labels": labels}}
        assert (await scene.ask("POST", PODS, body))[0] == 201
    await scene.until(lambda: ("default", "late") not in scene.pods.objects and len(scene.runs()) == 2, "it has gone")
    assert {key for _, key in scene.pods.objects} == {name, "own"}


async def test_a_job_that_is_being_deleted_begins_nothing(scene: KeeperScene) -> None:
    """Its pods are left, but not its Secret, and the controller is new: they are given back, and it goes."""
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    await scene.stop_keeper()
    for name in await scene.secrets():
        await scene.ask("DELETE", f"{SECRETS}/{name}")
    assert (await scene.ask("DELETE", PATH))[0] == 200
    await scene.start_keeper()
    await scene.until(lambda: not scene.runs(), "its pods have gone")

    async def gone() -> bool:
        await scene.tell_if_there()
        return (await scene.ask("GET", PATH))[0] == 404

    await scene.until(gone, "it has gone")
    assert scene.count("POST", SECRETS, 201) == 1
    assert scene.count("POST", PODS, 201) == 1


async def test_settings_and_spec_of_a_run_are_of_one_moment(
    scene: KeeperScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit that comes between the look and the begin is in both of them."""
    loop, listed = asyncio.get_running_loop(), scene.client.list

    def edit_and_list(path: str, selector: str = "") -> Any:
        if path == SECRETS:
            _, found = scene.cluster.request("PATCH", PATH, {"spec": {"command": ["y"]}})
            asyncio.run_coroutine_threadsafe(scene.tell(found), loop).result(10)
        return listed(path, selector)

    monkeypatch.setattr(scene.client, "list", edit_and_list)
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    (name,) = await scene.secrets()
    run = read_run((await scene.ask("GET", f"{SECRETS}/{name}"))[1])
    assert run is not None
    assert tuple(run.spec["command"]) == run.settings.command == ("y",)


async def test_an_edit_that_cannot_be_does_not_keep_the_next_controller_away(scene: KeeperScene) -> None:
    """Also where the API server lets it pass, by an older definition."""
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    await scene.stop_keeper()
    found = await scene.job()
    await scene.start_keeper()
    for nodes in (0, -1, "x", None):
        await scene.tell({**found, "spec": {**found["spec"], "nodesMax": nodes}})
        await scene.stop_keeper()
        await scene.start_keeper()
        await scene.tell({**found, "spec": {**found["spec"], "nodesMax": nodes}})
        assert scene.keeper is not None
        await scene.until(lambda: scene.keeper and scene.keeper._host, f"it is gone on with, {nodes!r}")
    assert len(scene.runs()) == 1


async def test_a_pod_that_goes_while_its_run_is_taken_over_is_not_waited_for(
    scene: KeeperScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for a place, so the next controller would take it for the node that it wants."""
    await scene.begin()
    await scene.until(scene.runs, "a pod")
    await scene.stop_keeper()
    ((_, first),) = scene.pods.objects
    find, left = scene.client.find, [first]

    def remove_and_find(path: str) -> Any:
        while left:
            scene.cluster.request("DELETE", f"{PODS}/{left.pop()}", {"gracePeriodSeconds": 0})
            scene.cluster.until(lambda: not scene.pods.objects, "the pod is seen to be gone")
        return find(path)

    monkeypatch.setattr(scene.client, "find", remove_and_find)
    await scene.start_keeper()
    await scene.until(lambda: ("default", first) not in scene.pods.objects, "it is gone")
    await scene.until(scene.runs, "another pod")


STEPS = (
    ("PATCH", "/trainingjobs/small$"),
    ("GET", "/secrets"),
    ("POST", "/secrets$"),
    ("POST", "/services$"),
    ("POST", "/poddisruptionbudgets$"),
    ("POST", "/pods$"),
    ("PATCH", "/trainingjobs/small/status$"),
)
"""What the begin of a run asks of the API server, in order."""


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(("method", "path"), STEPS)
async def test_a_begin_that_is_cut_off_is_begun_once(scene: KeeperScene, method: str, path: str, dies: bool) -> None:
    """Its request was done, but the answer is lost; or the controller dies before it could come."""
    scene.server.lose_answers(method, path)
    await scene.begin()
    await scene.until(lambda: not scene.server.loses_answers, "the answer was lost")
    if dies:
        await scene.stop_keeper()
        await scene.start_keeper()
    else:
        await scene.tell()
    await scene.until_state("Pending")
    await scene.until(scene.runs, "a pod")
    await scene.until(lambda: scene.keeper and scene.keeper._host, "it is hosted")
    (run,) = scene.runs()
    assert await scene.secrets() == [f"{JOB}-{run}"]
    await scene.edit(suspend=True)
    await scene.until_state("Suspended")
    await scene.until(lambda: not scene.runs(), "no pod is left")


async def test_a_pod_that_was_made_and_gone_unseen_is_not_waited_for(
    scene: KeeperScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch was broken for longer than the server remembers. One that is there, unseen, is not taken for lost."""
    monkeypatch.setattr(belongings, "UNSEEN_SECONDS", 0.3)
    scene.blind = True
    await scene.begin(nodesMax=2)
    await scene.until(lambda: len(scene.runs()) == 1 and len(scene.pods.objects) == 2, "two pods")
    (_, first), (_, second) = sorted(scene.pods.objects)
    lists = scene.count("GET", PODS)
    await scene.until(lambda: scene.count("GET", PODS) > lists, "they are asked for")
    assert len(scene.pods.objects) == 2
    assert (await scene.ask("DELETE", f"{PODS}/{first}", {"gracePeriodSeconds": 0}))[0] == 200
    await scene.until(lambda: len(scene.pods.objects) == 2 and ("default", first) not in scene.pods.objects, "another")
    assert ("default", second) in scene.pods.objects

"""A collection that is listed and watched, against the API server double: nothing is missed, nothing is made up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.schedulers.kubernetes import watching
from orchestrator.schedulers.kubernetes.client import KubernetesClient, Watch, connect
from orchestrator.schedulers.kubernetes.names import Object, key_of, path_of
from orchestrator.schedulers.kubernetes.watching import Collection
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.servers import bare_cluster

PATH = path_of("secrets", "default")
WAIT_SECONDS = 15.0


class Scene:
    """A collection of Secrets that is looked at."""

    def __init__(self, cluster: Cluster, client: KubernetesClient) -> None:
        assert cluster.server is not None
        self.cluster = cluster
        self.server: ApiServer = cluster.server
        self.told: list[tuple[str, str, bool]] = []
        """Name, value, gone."""
        self.collection = Collection(
            client, "secrets", namespace="default", selector="mine", on_change=self._on_change, draw=lambda: 0.0
        )

    def _on_change(self, found: Object, gone: bool) -> None:
        self.told.append((found["metadata"]["name"], value_of(found), gone))

    def put(self, name: str, value: str, **labels: str) -> None:
        """Create it, or change it."""
        labels = labels or {"mine": ""}
        body = {"metadata": {"name": name, "labels": labels}, "stringData": {"v": value}}
        status, _ = self.cluster.request("POST", PATH, body)
        if status == 409:
            self.cluster.request("PATCH", f"{PATH}/{name}", {"stringData": {"v": value}})

    def remove(self, name: str) -> None:
        """Delete it."""
        self.cluster.request("DELETE", f"{PATH}/{name}")

    def values(self) -> dict[str, str]:
        """As they were last seen."""
        return {name: value_of(found) for (_, name), found in self.collection.objects.items()}

    def lists(self) -> int:
        """How often it has listed."""
        return sum(seen.path.startswith(f"{PATH}?limit") for seen in self.server.requests)

    def watches(self) -> int:
        """How often it has begun to watch."""
        return sum("watch=1" in seen.path for seen in self.server.requests)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for it."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"{what}; told {self.told}, problem {self.collection.problem}"
            await asyncio.sleep(0.005)

    async def until_values(self, **values: str) -> None:
        """Wait until it has come to that."""
        await self.until(lambda: self.values() == values, f"{values}")

    async def until_watching(self, count: int) -> None:
        """Wait until it has begun to watch so often, and hears."""
        await self.until(lambda: self.watches() >= count and self.collection.problem is None, f"{count} watches")


def value_of(found: Object) -> str:
    return str((found.get("data") or {}).get("v", ""))


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """With two Secrets in it, and one of somebody else; it was listed."""
    monkeypatch.setattr(watching, "PAUSE_SECONDS_FIRST", 0.02)
    with bare_cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        found = Scene(cluster, connect())
        found.put("a", "1")
        found.put("b", "1")
        found.put("other", "1", theirs="")
        found.collection.start()
        await asyncio.wait_for(found.collection.listed(), WAIT_SECONDS)
        await found.until_watching(1)
        yield found
        found.collection.stop()


ONE, TWO = "MQ==", "Mg=="


async def test_what_is_there_and_what_changes_is_told_once(scene: Scene) -> None:
    assert scene.values() == {"a": ONE, "b": ONE}
    scene.put("a", "2")
    scene.remove("b")
    scene.put("c", "1")
    await scene.until_values(a=TWO, c=ONE)
    assert scene.told[:2] == [("a", ONE, False), ("b", ONE, False)]
    assert scene.told[2:] == [("a", TWO, False), ("b", ONE, True), ("c", ONE, False)]
    assert scene.lists() == 1
    assert scene.collection.problem is None


async def test_a_broken_watch_goes_on_where_it_was(scene: Scene) -> None:
    for number in range(3):
        scene.server.break_watches()
        scene.put(f"n{number}", "1")
        await scene.until(lambda number=number: f"n{number}" in scene.values(), "seen")  # type: ignore[misc]
    assert scene.lists() == 1
    assert len(scene.told) == 5


async def test_a_version_that_is_forgotten_is_listed_anew(scene: Scene) -> None:
    """410: what went meanwhile is told as gone, what came as new, the rest not at all."""
    scene.server.stop()
    store = scene.server.store
    await scene.until(lambda: scene.collection.problem is not None, "it says that it sees nothing")
    assert scene.values() == {"a": ONE, "b": ONE}
    scene.server.start()
    scene.server.fail_next("GET", "watch=1", 500, 1000)
    scene.remove("b")
    scene.put("c", "1")
    scene.server.compact()
    assert store.compacted > 0
    scene.server._faults.clear()
    await scene.until_values(a=ONE, c=ONE)
    assert scene.told[2:] == [("b", ONE, True), ("c", ONE, False)]
    assert scene.lists() == 2


async def test_an_object_that_was_made_again_is_another_one(scene: Scene) -> None:
    """Between two looks: the old one is told as gone before the new one is told."""
    scene.server.fail_next("GET", "watch=1", 500, 1000)
    scene.server.break_watches()
    scene.remove("a")
    scene.put("a", "2")
    scene.server.compact()
    scene.server._faults.clear()
    await scene.until_values(a=TWO, b=ONE)
    assert scene.told[2:] == [("a", ONE, True), ("a", TWO, False)]


async def test_what_is_told_again_is_passed_over(scene: Scene) -> None:
    """A server may replay; nothing is told twice, and nothing old after something new."""
    (found,) = [one for one in scene.collection.objects.values() if one["metadata"]["name"] == "a"]
    scene.collection._on_object(found, False)
    assert len(scene.told) == 2


async def test_the_end_of_an_old_one_does_not_end_the_new_one(scene: Scene) -> None:
    """A replay of the deletion of an object whose name another one has by now."""
    (old,) = [one for one in scene.collection.objects.values() if one["metadata"]["name"] == "a"]
    scene.remove("a")
    scene.put("a", "2")
    await scene.until_values(a=TWO, b=ONE)
    count = len(scene.told)
    scene.collection._on_object(old, True)
    assert scene.values() == {"a": TWO, "b": ONE}
    assert len(scene.told) == count


async def test_what_leaves_the_selection_is_gone(scene: Scene) -> None:
    scene.cluster.request("PATCH", f"{PATH}/a", {"metadata": {"labels": {"mine": None}}})
    await scene.until_values(b=ONE)
    assert scene.told[-1] == ("a", ONE, True)


@pytest.mark.parametrize(("status", "words"), [(500, "500"), (403, "403"), (429, "429"), (0, "")])
async def test_a_server_that_refuses_is_told_and_asked_again(scene: Scene, status: int, words: str) -> None:
    scene.server.fail_next("GET", "watch=1", status, 3)
    scene.server.break_watches()
    problems: list[Any] = []

    def seen() -> bool:
        problems.append(scene.collection.problem)
        return scene.watches() >= 2 and scene.collection.problem is None and any(problems)

    await scene.until(seen, "well again")
    assert any(words in problem for problem in problems if problem)
    assert scene.values() == {"a": ONE, "b": ONE}
    assert len(scene.told) == 2
    assert scene.lists() == 1


async def test_a_watch_that_is_ended_at_once_is_not_asked_for_without_a_pause(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a proxy does that allows no long answers: it would be asked some hundred times a second."""
    monkeypatch.setattr(watching, "PAUSE_SECONDS_FIRST", 0.2)

    class Ended:
        def __iter__(self) -> Iterator[tuple[str, Object]]:
            return iter(())

        def close(self) -> None:
            return

    def ended(_: object, path: str, version: str, selector: str = "") -> Ended:
        asked.append(path)
        return Ended()

    asked: list[str] = []
    monkeypatch.setattr(KubernetesClient, "watch", ended)
    scene.server.break_watches()
    await scene.until(lambda: len(asked) >= 2, "it is asked for again")
    began, before = time.monotonic(), len(asked)
    await scene.until(lambda: len(asked) >= before + 2, "and again")
    assert time.monotonic() - began > 0.1


@pytest.mark.parametrize("odd", [ValueError("no header"), KeyError("metadata"), RecursionError()])
async def test_what_nobody_has_thought_of_does_not_end_the_look(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, odd: Exception
) -> None:
    watch = KubernetesClient.watch
    left = [odd]

    def once(client: KubernetesClient, path: str, version: str, selector: str = "") -> Watch:
        if left:
            raise left.pop()
        return watch(client, path, version, selector)

    monkeypatch.setattr(KubernetesClient, "watch", once)
    scene.server.break_watches()
    await scene.until(lambda: not left, "it has come")
    scene.put("c", "1")
    await scene.until_values(a=ONE, b=ONE, c=ONE)


async def test_a_version_that_the_server_never_comes_to_is_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was restored from a backup: 504, Too large resource version, for ever."""
    monkeypatch.setattr(watching, "PAUSE_SECONDS_MAX", 0.08)
    scene.server.fail_next("GET", "watch=1", 504, 5)
    lists = scene.lists()
    scene.server.break_watches()
    await scene.until(lambda: scene.lists() > lists, "it lists")
    scene.put("c", "1")
    await scene.until_values(a=ONE, b=ONE, c=ONE)


async def test_after_its_end_nothing_is_told(scene: Scene) -> None:
    scene.collection.stop()
    scene.put("a", "2")
    await asyncio.sleep(0.1)
    assert len(scene.told) == 2


async def test_long_lists_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [
        {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "x", "resourceVersion": "5"}},
        {"items": [{"metadata": {"name": "b"}}], "metadata": {"resourceVersion": "5"}},
    ]
    asked: list[dict[str, str]] = []

    def answer(method: str, path: str, query: dict[str, str]) -> Object:
        asked.append(query)
        return pages[len(asked) - 1]

    with bare_cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        client = connect()
        monkeypatch.setattr(client, "_ask", answer)
        found, version = client.list(PATH, "mine")
    assert [key_of(one)[1] for one in found] == ["a", "b"]
    assert version == "5"
    assert [query.get("continue") for query in asked] == [None, "x"]
    assert all(query["labelSelector"] == "mine" for query in asked)


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("pods",), "/api/v1/pods"),
        (("pods", "ns", "p"), "/api/v1/namespaces/ns/pods/p"),
        (("nodes",), "/api/v1/nodes"),
        (("leases", "ns", "l"), "/apis/coordination.k8s.io/v1/namespaces/ns/leases/l"),
        (
            ("trainingjobs", "ns", "j", "status"),
            "/apis/orchestrator.dev/v1alpha1/namespaces/ns/trainingjobs/j/status",
        ),
    ],
)
def test_paths(words: tuple[str, ...], path: str) -> None:
    assert path_of(*words) == path


class EmptyWatch:
    """One that ends at once."""

    def __iter__(self) -> Iterator[tuple[str, Object]]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""


class Scripted:
    """Stands for the client: an empty list, and watches that fail as told, then end at once."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.watches = 0

    def list(self, path: str, selector: str) -> tuple[list[Object], str]:
        return [], "1"

    def watch(self, path: str, version: str, selector: str) -> EmptyWatch:
        self.watches += 1
        if self.failures:
            raise self.failures.pop(0)
        return EmptyWatch()


def through(client: Scripted) -> Collection:
    """A collection that looks through it."""
    return Collection(cast("KubernetesClient", client), "pods", on_change=lambda found, gone: None, draw=lambda: 0.0)


async def test_watches_that_end_at_once_come_ever_later() -> None:
    """A proxy that cuts them must not be asked thousands of times a second."""
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        time.sleep(0.001)
        return False

    found = through(Scripted())
    found._stopped.wait = wait  # type: ignore[method-assign, assignment]
    found.start()
    end = time.monotonic() + WAIT_SECONDS
    while len(waits) < 9:
        assert time.monotonic() < end
        await asyncio.sleep(0.001)
    found.stop()
    first = watching.PAUSE_SECONDS_FIRST / 2
    assert waits[:6] == [first * 2**number for number in range(6)]
    assert max(waits) <= watching.PAUSE_SECONDS_MAX


async def test_a_fault_of_ours_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has ended would say nothing, and the controller would be blind for good."""
    monkeypatch.setattr(watching, "PAUSE_SECONDS_FIRST", 0.001)
    client = Scripted(RuntimeError("of the SDK's"), ValueError("another"))
    found = through(client)
    found.start()
    end = time.monotonic() + WAIT_SECONDS
    while client.watches < 4:
        assert time.monotonic() < end
        await asyncio.sleep(0.002)
    found.stop()
    assert found.problem is None

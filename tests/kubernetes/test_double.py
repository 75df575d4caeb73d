"""What the orchestrator relies on in a Kubernetes API: true of the double and of a real control plane.

What only the double can do is tested at the end.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.real_control_plane import running_control_plane, why_not
from tests.kubernetes.rest import JSON_PATCH, STRATEGIC, Api, Object

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LEASES = "/apis/coordination.k8s.io/v1"


@pytest.fixture(
    scope="module", params=["double", pytest.param("real", marks=[pytest.mark.processes, pytest.mark.timeout(120)])]
)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    if request.param == "real":
        missing = why_not()
        if missing is not None:
            pytest.skip(missing)
        with running_control_plane(tmp_path_factory.mktemp("plane")) as plane:
            yield plane.api
        return
    server = ApiServer(token="secret-token", bookmark_seconds=0.2)
    server.start()
    yield Api(url=server.url, token="secret-token")
    server.close()


class Space:
    """A namespace of its own."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.name = f"t-{uuid4().hex[:8]}"
        self.path = f"/api/v1/namespaces/{self.name}"
        assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.name}})[0] == 201
        end = time.monotonic() + 20
        while api.request("GET", f"{self.path}/serviceaccounts/default")[0] != 200:
            assert time.monotonic() < end, "a real cluster's controllers make the account that pods need"
            time.sleep(0.02)

    def path_of(self, where: str) -> str:
        """`pods/x` here, or `/apis/…` with {ns} filled in."""
        return where.format(ns=self.name) if where.startswith("/") else f"{self.path}/{where}"

    def create(self, where: str, body: Object) -> Any:
        """POST that succeeds."""
        status, answer = self.api.request("POST", self.path_of(where), body)
        assert status == 201, answer
        return answer

    def ask(self, method: str, where: str, body: object = None, content_type: str | None = None) -> Any:
        """Any request that succeeds."""
        status, answer = self.api.request(method, self.path_of(where), body, content_type)
        assert 200 <= status < 300, answer
        return answer

    def refused(self, method: str, where: str, body: object = None, content_type: str | None = None) -> Any:
        """A request that is refused: its Status."""
        status, answer = self.api.request(method, self.path_of(where), body, content_type)
        assert status >= 400, answer
        assert answer["kind"] == "Status"
        assert answer["apiVersion"] == "v1"
        assert answer["status"] == "Failure"
        assert answer["code"] == status
        return answer


@pytest.fixture
def space(api: Api) -> Iterator[Space]:
    made = Space(api)
    yield made
    api.request("DELETE", made.path)


def pod(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "busybox"}], **spec}}


def config(name: str, **metadata: Any) -> Object:
    return {"metadata": {"name": name, **metadata}, "data": {"key": "value"}}


def fields(status: Object) -> list[str]:
    return sorted(cause["field"] for cause in status["details"]["causes"])


# -- objects -------------------------------------------------------------------------------------------------


def test_an_object_is_made_read_listed_and_deleted(space: Space) -> None:
    made = space.create("configmaps", config("a"))
    assert (made["kind"], made["apiVersion"]) == ("ConfigMap", "v1")
    assert made["metadata"]["namespace"] == space.name
    assert {"uid", "resourceVersion", "creationTimestamp"} <= made["metadata"].keys()
    assert space.ask("GET", "configmaps/a")["data"] == {"key": "value"}
    listed = space.ask("GET", "configmaps")
    assert listed["kind"] == "ConfigMapList"
    assert int(listed["metadata"]["resourceVersion"]) >= int(made["metadata"]["resourceVersion"])
    assert "kind" not in next(one for one in listed["items"] if one["metadata"]["name"] == "a")
    done = space.ask("DELETE", "configmaps/a")
    assert (done["kind"], done["status"], done["details"]["uid"]) == ("Status", "Success", made["metadata"]["uid"])
    gone = space.refused("GET", "configmaps/a")
    assert (gone["code"], gone["reason"], gone["details"]) == (404, "NotFound", {"name": "a", "kind": "configmaps"})
    assert gone["message"] == 'configmaps "a" not found'


def test_a_name_is_taken_once_and_may_be_left_to_the_server(space: Space) -> None:
    space.create("configmaps", config("a"))
    taken = space.refused("POST", "configmaps", config("a"))
    assert (taken["code"], taken["reason"]) == (409, "AlreadyExists")
    assert taken["message"] == 'configmaps "a" already exists'
    names = {space.create("configmaps", {"metadata": {"generateName": "g-"}})["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("g-") and len(name) == 7 for name in names)


@pytest.mark.parametrize("name", ["A", "a_b", "-a", "a" * 254])
def test_a_bad_name_is_invalid(space: Space, name: str) -> None:
    refused = space.refused("POST", "configmaps", config(name))
    assert (refused["code"], refused["reason"]) == (422, "Invalid")
    assert set(fields(refused)) == {"metadata.name"}
    assert refused["message"].startswith(f'ConfigMap "{name}" is invalid: ')


def test_a_service_s_name_is_a_label(space: Space) -> None:
    service: Object = {"metadata": {"name": "a.b"}, "spec": {"clusterIP": "None"}}
    assert fields(space.refused("POST", "services", service)) == ["metadata.name"]
    service["metadata"] = {"name": "a"}
    assert space.create("services", service)["spec"]["clusterIP"] == "None"


def test_in_a_namespace_that_is_not_there_nothing_can_be_made(api: Api) -> None:
    status, answer = api.request("POST", "/api/v1/namespaces/not-there/configmaps", config("a"))
    assert (status, answer["reason"], answer["message"]) == (404, "NotFound", 'namespaces "not-there" not found')


def test_a_stale_update_is_a_conflict(space: Space) -> None:
    old = space.create("configmaps", config("a"))
    space.ask("PUT", "configmaps/a", {**old, "data": {"key": "new"}})
    conflict = space.refused("PUT", "configmaps/a", {**old, "data": {"key": "other"}})
    assert (conflict["code"], conflict["reason"]) == (409, "Conflict")
    assert "the object has been modified" in conflict["message"]
    version = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}, "data": {"key": "other"}}
    assert space.refused("PATCH", "configmaps/a", version)["code"] == 409
    assert space.ask("GET", "configmaps/a")["data"] == {"key": "new"}


def test_patches(space: Space) -> None:
    first = space.create("configmaps", config("a", labels={"x": "1", "y": "2"}))
    patched = space.ask("PATCH", "configmaps/a", {"metadata": {"labels": {"x": None, "z": "3"}}})
    assert patched["metadata"]["labels"] == {"y": "2", "z": "3"}
    assert int(patched["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    again = space.ask("PATCH", "configmaps/a", {"metadata": {"labels": {"z": "3"}}})
    assert again["metadata"]["resourceVersion"] == patched["metadata"]["resourceVersion"], "nothing changed"
    steps = [{"op": "test", "path": "/data/key", "value": "value"}, {"op": "add", "path": "/data/b", "value": "1"}]
    assert space.ask("PATCH", "configmaps/a", steps, JSON_PATCH)["data"] == {"key": "value", "b": "1"}
    steps = [{"op": "test", "path": "/data/key", "value": "else"}, {"op": "remove", "path": "/data/b"}]
    assert space.refused("PATCH", "configmaps/a", steps, JSON_PATCH)["code"] == 422
    assert space.refused("PATCH", "configmaps/a", {}, "application/json")["code"] == 415


def test_a_deletion_may_have_preconditions(space: Space) -> None:
    made = space.create("configmaps", config("a"))
    wrong = space.refused("DELETE", "configmaps/a", {"preconditions": {"uid": "another"}})
    assert (wrong["code"], wrong["reason"]) == (409, "Conflict")
    space.ask("DELETE", "configmaps/a", {"preconditions": {"uid": made["metadata"]["uid"]}})


def test_finalizers_hold_an_object(space: Space) -> None:
    space.create("configmaps", config("a", finalizers=["example.org/save"]))
    held = space.ask("DELETE", "configmaps/a")
    assert held["metadata"]["deletionTimestamp"]
    more = {"metadata": {"finalizers": ["example.org/save", "example.org/more"]}}
    assert space.refused("PATCH", "configmaps/a", more)["code"] == 422
    assert space.ask("PATCH", "configmaps/a", {"data": {"key": "still there"}})["data"] == {"key": "still there"}
    space.ask("PATCH", "configmaps/a", {"metadata": {"finalizers": None}})
    assert space.refused("GET", "configmaps/a")["code"] == 404


def test_selectors(space: Space) -> None:
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "2", "y": ""}), ("c", {"y": "3"})):
        space.create("configmaps", config(name, labels={**labels, "own": "yes"}))

    def names(query: str) -> str:
        return "".join(one["metadata"]["name"] for one in space.ask("GET", f"configmaps?{query}")["items"])

    assert names("labelSelector=x%3D1") == "a"
    assert names("labelSelector=own,x%21%3D1") == "bc"
    assert names("labelSelector=x+in+(1,2),y") == "b"
    assert names("labelSelector=own,x+notin+(2)") == "ac"
    assert names("labelSelector=own,%21y") == "a"
    assert names("labelSelector=own&fieldSelector=metadata.name%3Dc") == "c"
    assert space.refused("GET", "configmaps?labelSelector=x+like+y")["code"] == 400
    assert space.refused("GET", "configmaps?fieldSelector=data.key%3Dx")["code"] == 400
    everywhere = space.api.request("GET", f"/api/v1/configmaps?fieldSelector=metadata.namespace%3D{space.name}")[1]
    assert {one["metadata"]["name"] for one in everywhere["items"]} >= {"a", "b", "c"}


def test_secrets_hold_base64(space: Space) -> None:
    made = space.create("secrets", {"metadata": {"name": "a"}, "stringData": {"key": "word"}})
    assert made["type"] == "Opaque"
    assert base64.b64decode(made["data"]["key"]) == b"word"
    assert "stringData" not in made
    assert space.refused("POST", "secrets", {"metadata": {"name": "b"}, "data": {"key": "not base64!"}})["code"] == 400
    assert space.refused("POST", "secrets", {"metadata": {"name": "b"}, "data": {"a/b": ""}})["code"] == 422


def test_a_lease_s_times_have_microseconds(space: Space) -> None:
    leases = LEASES + "/namespaces/{ns}/leases"
    spec = {"holderIdentity": "me", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    made = space.create(leases, {"metadata": {"name": "a"}, "spec": spec})
    assert made["spec"] == spec
    short = {"spec": {"renewTime": "2026-01-01T00:00:00Z"}}
    assert space.refused("PATCH", f"{leases}/a", short)["code"] in (400, 422)
    assert space.refused("PATCH", f"{leases}/a", {"spec": {"leaseDurationSeconds": 0}})["code"] == 422
    without = {"metadata": {"name": "a"}, "spec": spec}
    assert space.refused("PUT", f"{leases}/a", without)["code"] == 422


def test_an_event_lies_in_the_namespace_of_what_it_is_about(space: Space) -> None:
    about = {"kind": "ConfigMap", "name": "a", "namespace": space.name, "uid": "1"}
    event = {
        "metadata": {"generateName": "a-"},
        "involvedObject": about,
        "reason": "Tried",
        "message": "it",
        "type": "Normal",
    }
    space.create("events", event)
    assert space.refused("POST", "events", {**event, "involvedObject": {**about, "namespace": "other"}})["code"] == 422


# -- watches -------------------------------------------------------------------------------------------------


def watch(space: Space, where: str, seconds: int = 1) -> list[Object]:
    """All events until the watch ends by its timeoutSeconds."""
    path = space.path_of(where)
    url = f"{space.api.url}{path}{'&' if '?' in path else '?'}watch=1&timeoutSeconds={seconds}"
    request = urllib.request.Request(url, headers=space.api.headers("test"))
    with urllib.request.urlopen(request, timeout=20, context=space.api.context()) as answer:
        return [json.loads(line) for line in answer]


def kinds(events: list[Object]) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"]["name"]) for event in events if event["type"] != "BOOKMARK"]


def test_a_watch_goes_on_from_a_version(space: Space) -> None:
    space.create("secrets", {"metadata": {"name": "a"}})
    version = space.ask("GET", "secrets")["metadata"]["resourceVersion"]
    space.create("secrets", {"metadata": {"name": "b"}})
    space.ask("PATCH", "secrets/a", {"metadata": {"labels": {"x": "1"}}})
    gone = space.ask("GET", "secrets/b")
    space.ask("DELETE", "secrets/b")
    events = watch(space, f"secrets?resourceVersion={version}")
    assert kinds(events) == [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]
    assert int(events[-1]["object"]["metadata"]["resourceVersion"]) > int(gone["metadata"]["resourceVersion"])
    assert events[0]["object"]["kind"] == "Secret"
    assert kinds(watch(space, "secrets")) == [("ADDED", "a")], "without a version: what there is"


def test_what_enters_or_leaves_a_selection_is_added_or_deleted(space: Space) -> None:
    version = space.create("secrets", {"metadata": {"name": "a"}})["metadata"]["resourceVersion"]
    for labels in ({"x": "1"}, {"y": "2"}, {"x": "2"}):
        space.ask("PATCH", "secrets/a", {"metadata": {"labels": labels}})
    events = watch(space, f"secrets?resourceVersion={version}&labelSelector=x%3D1")
    assert kinds(events) == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
    assert events[-1]["object"]["metadata"]["labels"]["x"] == "1", "as it was last in the selection"


def test_a_running_watch_hears_of_changes(space: Space) -> None:
    version = space.ask("GET", "secrets")["metadata"]["resourceVersion"]
    found: list[Object] = []
    thread = threading.Thread(target=lambda: found.extend(watch(space, f"secrets?resourceVersion={version}", 2)))
    thread.start()
    space.create("secrets", {"metadata": {"name": "a"}})
    thread.join(20)
    assert kinds(found) == [("ADDED", "a")]


# -- pods ----------------------------------------------------------------------------------------------------


def test_a_pod_has_defaults(space: Space) -> None:
    made = space.create("pods", pod("a"))
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"], spec["dnsPolicy"]) == (
        "Always",
        30,
        "ClusterFirst",
    )
    tolerated = {(one["key"], one["effect"], one["tolerationSeconds"]) for one in spec["tolerations"]}
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    assert tolerated == {(key, "NoExecute", 300) for key in keys}
    assert made["status"]["phase"] == "Pending"
    assert made["status"]["qosClass"] == "BestEffort"


MAIN = {"name": "main", "image": "busybox"}
BAD_PODS: list[tuple[Object, str]] = [
    ({"containers": []}, "spec.containers"),
    ({"containers": [{"name": "main"}]}, "spec.containers[0].image"),
    ({"containers": [{"name": "Main", "image": "x"}]}, "spec.containers[0].name"),
    ({"containers": [MAIN, MAIN]}, "spec.containers[1].name"),
    ({"restartPolicy": "Sometimes"}, "spec.restartPolicy"),
    ({"dnsPolicy": "Never"}, "spec.dnsPolicy"),
    ({"hostname": "a.b"}, "spec.hostname"),
    ({"volumes": [{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}]}, "spec.volumes[1].name"),
    (
        {"containers": [{**MAIN, "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
        "spec.containers[0].volumeMounts[0].name",
    ),
    ({"tolerations": [{"key": "k", "operator": "Exists", "effect": "Now"}]}, "spec.tolerations[0].effect"),
]


@pytest.mark.parametrize(("spec", "field"), BAD_PODS, ids=[field for _, field in BAD_PODS])
def test_a_bad_pod_is_invalid(space: Space, spec: Object, field: str) -> None:
    refused = space.refused("POST", "pods", pod("a", **spec))
    assert (refused["code"], refused["reason"]) == (422, "Invalid")
    assert field in fields(refused)


def test_a_grace_below_zero_is_a_second(space: Space) -> None:
    assert (
        space.create("pods", pod("a", terminationGracePeriodSeconds=-1))["spec"]["terminationGracePeriodSeconds"] == 1
    )


def test_an_environment_s_value_is_a_text(space: Space) -> None:
    bad = pod("a", containers=[{**MAIN, "env": [{"name": "N", "value": 1}]}])
    assert space.refused("POST", "pods", bad)["code"] == 400


def test_labels_have_rules(space: Space) -> None:
    bad = pod("a")
    bad["metadata"]["labels"] = {"x": "a b", "y": "a" * 64}
    assert set(fields(space.refused("POST", "pods", bad))) == {"metadata.labels"}


def test_a_pod_s_spec_stays(space: Space) -> None:
    space.create("pods", pod("a"))
    refused = space.refused("PATCH", "pods/a", {"spec": {"terminationGracePeriodSeconds": 5, "hostname": "b"}})
    assert refused["code"] == 422
    assert fields(refused) == ["spec"]


def test_the_status_has_its_own_end_point(space: Space) -> None:
    space.create("pods", pod("a"))
    space.ask("PATCH", "pods/a", {"status": {"phase": "Running"}, "metadata": {"labels": {"x": "1"}}})
    assert space.ask("GET", "pods/a")["status"]["phase"] == "Pending"
    condition = {"type": "Ready", "status": "True"}
    other = {"type": "example.org/Own", "status": "False"}
    space.ask("PATCH", "pods/a/status", {"status": {"phase": "Running", "conditions": [condition]}}, STRATEGIC)
    space.ask("PATCH", "pods/a/status", {"status": {"conditions": [other]}}, STRATEGIC)
    status = space.ask("GET", "pods/a/status")["status"]
    assert status["phase"] == "Running"
    assert {one["type"] for one in status["conditions"]} >= {"Ready", "example.org/Own"}


def bind(space: Space, name: str) -> None:
    body = {"metadata": {"name": name}, "target": {"kind": "Node", "name": "no-such-node"}}
    space.create(f"pods/{name}/binding", {"kind": "Binding", "apiVersion": "v1", **body})


def test_a_pod_without_a_node_is_deleted_at_once(space: Space) -> None:
    space.create("pods", pod("a"))
    assert space.ask("DELETE", "pods/a")["kind"] == "Pod"
    assert space.refused("GET", "pods/a")["code"] == 404


def test_a_pod_on_a_node_is_deleted_by_its_kubelet(space: Space) -> None:
    space.create("pods", pod("a", terminationGracePeriodSeconds=20))
    bind(space, "a")
    assert space.refused("POST", "pods/a/binding", {"metadata": {"name": "a"}, "target": {"name": "x"}})["code"] == 409
    assert [
        one["metadata"]["name"] for one in space.ask("GET", "pods?fieldSelector=spec.nodeName%3Dno-such-node")["items"]
    ] == ["a"]
    first = space.ask("DELETE", "pods/a")["metadata"]
    assert first["deletionGracePeriodSeconds"] == 20
    assert space.ask("DELETE", "pods/a")["metadata"] == first
    assert space.ask("DELETE", "pods/a?gracePeriodSeconds=60")["metadata"] == first
    shorter = space.ask("DELETE", "pods/a", {"gracePeriodSeconds": 5})["metadata"]
    assert shorter["deletionGracePeriodSeconds"] == 5
    assert shorter["deletionTimestamp"] < first["deletionTimestamp"]
    space.ask("DELETE", "pods/a", {"gracePeriodSeconds": 0})
    assert space.refused("GET", "pods/a")["code"] == 404


def test_a_pod_that_is_over_is_deleted_at_once(space: Space) -> None:
    space.create("pods", pod("a"))
    bind(space, "a")
    space.ask("PATCH", "pods/a/status", {"status": {"phase": "Failed"}})
    space.ask("DELETE", "pods/a")
    assert space.refused("GET", "pods/a")["code"] == 404


def test_an_eviction_says_so(space: Space) -> None:
    space.create("pods", pod("a"))
    bind(space, "a")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a", "namespace": space.name}}
    space.create("pods/a/eviction", eviction)
    evicted = space.ask("GET", "pods/a")
    assert evicted["metadata"]["deletionTimestamp"]
    (condition,) = (one for one in evicted["status"]["conditions"] if one["type"] == "DisruptionTarget")
    assert (condition["status"], condition["reason"]) == ("True", "EvictionByEvictionAPI")


def test_a_patch_of_an_object_of_another_uid_is_invalid_and_a_put_a_conflict(space: Space) -> None:
    made = space.create("pods", pod("a"))
    other = {"metadata": {"uid": str(uuid4())}}
    assert space.refused("PATCH", "pods/a", other)["reason"] == "Invalid"
    assert space.refused("PATCH", "pods/a/status", other)["reason"] == "Invalid"
    made["metadata"] = {"name": "a", "uid": str(uuid4())}
    assert space.refused("PUT", "pods/a", made)["reason"] == "Conflict"


def test_a_pod_s_grace_stays_and_its_service_account_exists(space: Space) -> None:
    space.create("pods", pod("a"))
    assert space.refused("PATCH", "pods/a", {"spec": {"terminationGracePeriodSeconds": 7}})["reason"] == "Invalid"
    refused = space.refused("POST", "pods", pod("b", serviceAccountName="nobody"))
    assert (refused["reason"], 'serviceaccount "nobody" not found' in refused["message"]) == ("Forbidden", True)


def test_nothing_is_kept_of_a_dry_run(space: Space) -> None:
    space.create("pods?dryRun=All", pod("a"))
    assert space.refused("GET", "pods/a")["code"] == 404


def test_where_no_definition_is_installed_the_answer_is_no_status(space: Space) -> None:
    path = f"/apis/none.test/v1/namespaces/{space.name}/things"
    assert space.api.request("GET", path) == (404, "404 page not found\n")


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"maxUnavailable": 1}, "does not allow evicting pods currently"),
        ({"minAvailable": "50%"}, "does not allow evicting pods currently"),
        ({"minAvailable": 1}, "needs 1 healthy pods and has 1 currently"),
        ({"minAvailable": 0}, None),
    ],
    ids=str,
)
def test_a_budget_over_bare_pods(space: Space, budget: Object, reason: str | None) -> None:
    """Of pods without a controller only a number of `minAvailable` can be counted: all else forbids every eviction."""
    budgets = "/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets"
    space.create(budgets, {"metadata": {"name": "b"}, "spec": {**budget, "selector": {"matchLabels": {"of": "b"}}}})
    space.create("pods", {**pod("a"), "metadata": {"name": "a", "labels": {"of": "b"}}})
    bind(space, "a")
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    space.ask("PATCH", "pods/a/status", {"status": ready}, STRATEGIC)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a", "namespace": space.name}}
    end = time.monotonic() + 20  # the real controller counts a moment later
    while True:
        code, answer = space.api.request("POST", space.path_of("pods/a/eviction"), eviction)
        texts = [cause["message"] for cause in (answer.get("details") or {}).get("causes", [])]
        if code == 201 if reason is None else f"The disruption budget b {reason}" in texts:
            break
        assert time.monotonic() < end, answer
        time.sleep(0.05)


# -- custom resources ----------------------------------------------------------------------------------------

SPEC = {
    "type": "object",
    "required": ["store"],
    "properties": {
        "store": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8},
        "nodes": {"type": "integer", "minimum": 1, "maximum": 8, "default": 1},
        "mode": {"type": "string", "enum": ["fast", "safe"]},
        "words": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
}
STATUS = {"type": "object", "properties": {"nodes": {"type": "integer"}, "selector": {"type": "string"}}}


def definition(group: str, spec: Object) -> Object:
    scale = {
        "specReplicasPath": ".spec.nodes",
        "statusReplicasPath": ".status.nodes",
        "labelSelectorPath": ".status.selector",
    }
    schema = {"type": "object", "properties": {"spec": spec, "status": STATUS}, "required": ["spec"]}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "widgets", "kind": "Widget", "singular": "widget", "listKind": "WidgetList"}
    versions = [{**version, "subresources": {"status": {}, "scale": scale}}]
    return {
        **{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"},
        "metadata": {"name": f"widgets.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": versions},
    }


@pytest.fixture(scope="module")
def group(api: Api) -> Iterator[str]:
    name = f"g{uuid4().hex[:8]}.example.org"
    status, answer = api.request("POST", CRDS, definition(name, SPEC))
    assert status == 201, answer
    end = time.monotonic() + 20
    while api.request("GET", f"/apis/{name}/v1/widgets")[0] != 200:
        assert time.monotonic() < end, "the new resource is not served"
        time.sleep(0.05)
    yield name
    api.request("DELETE", f"{CRDS}/widgets.{name}")


def widget(group: str, name: str = "a", **spec: Any) -> Object:
    return {"apiVersion": f"{group}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"store": "abc", **spec}}


def test_a_custom_object_is_pruned_and_has_defaults(space: Space, group: str) -> None:
    widgets = f"/apis/{group}/v1/namespaces/{{ns}}/widgets"
    template = {"spec": {"anything": [1, {"x": None}]}}
    body = {**widget(group, unknown=1, template=template, mode=None), "status": {"nodes": 4}, "more": 1}
    made = space.create(widgets, body)
    assert made["spec"] == {"store": "abc", "nodes": 1, "template": template}
    assert "status" not in made
    assert "more" not in made
    assert made["metadata"]["generation"] == 1
    assert space.ask("GET", widgets)["items"][0]["kind"] == "Widget"


BAD_WIDGETS: list[tuple[Object, str]] = [
    ({"store": None}, "spec.store"),
    ({"store": "ABC"}, "spec.store"),
    ({"store": "abcdefghi"}, "spec.store"),
    ({"nodes": 0}, "spec.nodes"),
    ({"nodes": "two"}, "spec.nodes"),
    ({"nodes": 1.5}, "spec.nodes"),
    ({"mode": "slow"}, "spec.mode"),
    ({"words": []}, "spec.words"),
    ({"words": ["a", 1]}, "spec.words[1]"),
    ({"template": "text"}, "spec.template"),
]


@pytest.mark.parametrize(("spec", "field"), BAD_WIDGETS, ids=[str(spec) for spec, _ in BAD_WIDGETS])
def test_a_bad_custom_object_is_invalid(space: Space, group: str, spec: Object, field: str) -> None:
    refused = space.refused("POST", f"/apis/{group}/v1/namespaces/{{ns}}/widgets", widget(group, **spec))
    assert (refused["code"], refused["reason"]) == (422, "Invalid")
    assert field in fields(refused)
    assert refused["message"].startswith(f'Widget.{group} "a" is invalid: ')
    assert f"{field}: " in refused["message"]
    assert (refused["details"]["group"], refused["details"]["kind"]) == (group, "Widget")


def test_generations_count_changes_of_the_spec(space: Space, group: str) -> None:
    widgets = f"/apis/{group}/v1/namespaces/{{ns}}/widgets"
    space.create(widgets, widget(group))

    def generation(answer: Object) -> int:
        return int(answer["metadata"]["generation"])

    assert generation(space.ask("PATCH", f"{widgets}/a", {"metadata": {"labels": {"x": "1"}}})) == 1
    assert generation(space.ask("PATCH", f"{widgets}/a", {"spec": {"nodes": 2}, "status": {"nodes": 9}})) == 2
    done = space.ask("PATCH", f"{widgets}/a/status", {"spec": {"nodes": 3}, "status": {"nodes": 7, "selector": "x=1"}})
    assert (generation(done), done["spec"]["nodes"], done["status"]) == (2, 2, {"nodes": 7, "selector": "x=1"})
    assert space.refused("PATCH", f"{widgets}/a/status", {"status": {"nodes": "many"}})["code"] == 422
    scale = space.ask("GET", f"{widgets}/a/scale")
    assert (scale["kind"], scale["spec"], scale["status"]) == (
        "Scale",
        {"replicas": 2},
        {"replicas": 7, "selector": "x=1"},
    )
    assert space.ask("PATCH", f"{widgets}/a/scale", {"spec": {"replicas": 5}})["spec"] == {"replicas": 5}
    assert space.ask("GET", f"{widgets}/a")["spec"]["nodes"] == 5
    without = {key: value for key, value in widget(group).items() if key != "status"}
    assert space.refused("PUT", f"{widgets}/a", without)["code"] in (409, 422), "a PUT must bring a resourceVersion"
    assert space.refused("PATCH", f"{widgets}/a", {}, STRATEGIC)["code"] == 415


@pytest.mark.parametrize(
    "bad",
    [{"properties": {"x": {}}}, {"type": "object", "properties": {"x": {"type": "null"}}}, {"type": "array"}],
    ids=["no type", "null", "array without items"],
)
def test_a_schema_that_is_not_structural_is_refused(space: Space, bad: Object) -> None:
    assert space.api.request("POST", CRDS, definition("bad.example.org", bad))[0] == 422


# -- only the double -----------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    server.start()
    yield server
    server.close()


def own(server: ApiServer) -> Space:
    return Space(Api(url=server.url))


def test_who_has_no_token_is_told_so() -> None:
    server = ApiServer(token="right")
    server.start()
    try:
        status, answer = Api(url=server.url, token="wrong").request("GET", "/api/v1/pods")
        assert (status, answer["reason"]) == (401, "Unauthorized")
    finally:
        server.close()


def test_requests_fail_as_the_test_asks(server: ApiServer) -> None:
    space = own(server)
    server.fail_next("POST", r"/configmaps$", 429, retry_after=3)
    server.fail_next("GET", r"/configmaps", 500, count=2)
    refused = space.refused("POST", "configmaps", config("a"))
    assert (refused["code"], refused["details"]) == (429, {"retryAfterSeconds": 3})
    space.create("configmaps", config("a"))
    assert [space.api.request("GET", f"{space.path}/configmaps")[0] for _ in range(3)] == [500, 500, 200]
    codes = [seen.code for seen in server.requests if seen.path.endswith("configmaps")]
    assert codes == [429, 201, 500, 500, 200]


def test_a_version_that_is_too_old_is_gone(server: ApiServer) -> None:
    space = own(server)
    version = space.create("secrets", {"metadata": {"name": "a"}})["metadata"]["resourceVersion"]
    server.compact()
    (event,) = watch(space, f"secrets?resourceVersion={version}")
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    version = space.ask("GET", "secrets")["metadata"]["resourceVersion"]
    assert watch(space, f"secrets?resourceVersion={version}") == []


def test_bookmarks_tell_the_version() -> None:
    server = ApiServer(bookmark_seconds=0.1)
    server.start()
    try:
        space = own(server)
        version = space.ask("GET", "secrets")["metadata"]["resourceVersion"]
        space.create("configmaps", config("a"))
        events = watch(space, f"secrets?resourceVersion={version}&allowWatchBookmarks=true")
        assert {event["type"] for event in events} == {"BOOKMARK"}
        assert int(events[-1]["object"]["metadata"]["resourceVersion"]) > int(version)
    finally:
        server.close()


def test_watches_break_and_the_server_comes_back_with_its_data(server: ApiServer) -> None:
    space = own(server)
    space.create("secrets", {"metadata": {"name": "a"}})
    ended = threading.Event()

    def follow() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            watch(space, "secrets", 60)
        ended.set()

    for stop in (server.break_watches, server.stop):
        ended.clear()
        before = len(server.requests)
        thread = threading.Thread(target=follow)
        thread.start()
        while len(server.requests) == before:
            time.sleep(0.01)
        stop()
        assert ended.wait(10)
        thread.join(10)
    with pytest.raises(OSError, match="refused"):
        space.ask("GET", "secrets")
    server.start()
    assert space.ask("GET", "secrets/a")["kind"] == "Secret"


def test_a_quota_limits_pods(server: ApiServer) -> None:
    space = own(server)
    space.create("resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}})
    space.create("pods", pod("a"))
    refused = space.refused("POST", "pods", pod("b"))
    assert (refused["code"], refused["reason"]) == (403, "Forbidden")
    assert (
        refused["message"]
        == 'pods "b" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
    )

"""The TrainingJob's schema, what an API server makes of objects with it, and what is said of a spec that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.config import JobSettings
from orchestrator.controller.crd import COLUMNS, TrainingJobSpec, definition, read_spec
from orchestrator.errors import ConfigError
from orchestrator.schedulers.kubernetes.names import path_of
from tests.kubernetes.api_schema import schema_causes
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.servers import bare_cluster

JOBS = path_of("trainingjobs", "default")
TEMPLATE = {"spec": {"containers": [{"name": "t", "image": "i", "odd": [1, {"two": None}]}], "hostIPC": True}}
SPEC: dict[str, Any] = {"store": "s3://b/jobs", "command": ["python", "train.py"], "template": TEMPLATE}


def schema() -> dict[str, Any]:
    (version,) = definition()["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server that knows the definition."""
    with bare_cluster(tmp_path_factory.mktemp("api")) as found:
        found.create_crd(definition())
        yield found


def post(cluster: Cluster, name: str, **fields: Any) -> tuple[int, Any]:
    spec = {key: value for key, value in {**SPEC, **fields}.items() if value is not ...}
    body = {
        "apiVersion": "orchestrator.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    }
    return cluster.request("POST", JOBS, body)


def test_the_schema_is_structural() -> None:
    assert schema_causes(schema(), "schema") == []


def test_every_field_is_there_and_described() -> None:
    properties = schema()["properties"]["spec"]["properties"]
    fields = {field.alias for field in TrainingJobSpec.model_fields.values()}
    assert properties.keys() == fields
    assert len(fields) > len(JobSettings.model_fields)
    for name, one in properties.items():
        assert one.get("description"), name
    assert properties["fallback"]["properties"]["template"]["description"]
    for name, one in schema()["properties"]["status"]["properties"].items():
        assert one.get("description") or name == "conditions", name


def test_columns_show_fields_that_there_are() -> None:
    for _, _, path, _ in COLUMNS:
        found: Any = schema()
        for word in path.strip(".").split("."):
            if word == "creationTimestamp":
                break
            found = found["properties"][word] if word != "metadata" else found
        else:
            assert found["type"]


def test_templates_are_kept_as_they_are(cluster: Cluster) -> None:
    status, found = post(cluster, "kept", fallback={"template": {"spec": {"odd": {"three": 3}}}})
    assert status == 201, found
    assert found["spec"]["template"] == TEMPLATE
    assert found["spec"]["fallback"] == {"template": {"spec": {"odd": {"three": 3}}}}


def test_defaults_are_filled_in(cluster: Cluster) -> None:
    """So that a change of a default is no edit of jobs that there are."""
    status, found = post(cluster, "defaults")
    assert status == 201, found
    spec = found["spec"]
    assert (spec["nodesMin"], spec["nodesMax"], spec["suspend"], spec["patienceSeconds"]) == (1, 1, False, 600)
    assert read_spec(spec) == read_spec(SPEC)
    assert "fallback" not in spec


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"store": ...}, "spec.store"),
        ({"command": ...}, "spec.command"),
        ({"command": []}, "spec.command"),
        ({"command": "python train.py"}, "spec.command"),
        ({"template": ...}, "spec.template"),
        ({"template": "x"}, "spec.template"),
        ({"nodesMin": 0}, "spec.nodesMin"),
        ({"nodesMax": 4097}, "spec.nodesMax"),
        ({"nodesMax": "2"}, "spec.nodesMax"),
        ({"suspend": "yes"}, "spec.suspend"),
        ({"graceSeconds": 0}, "spec.graceSeconds"),
        ({"patienceSeconds": -1}, "spec.patienceSeconds"),
        ({"fallback": {}}, "spec.fallback.template"),
    ],
)
def test_what_the_api_server_refuses(cluster: Cluster, fields: dict[str, Any], field: str) -> None:
    status, found = post(cluster, "refused", **fields)
    assert status == 422, found
    assert field in found["message"]


def test_a_field_that_is_not_known_is_dropped_by_the_server_and_refused_by_us(cluster: Cluster) -> None:
    """As for every custom resource, unless the client asks for strict validation (kubectl does)."""
    status, found = post(cluster, "unknown", nodesmax=2)
    assert status == 201
    assert "nodesmax" not in found["spec"]
    with pytest.raises(ConfigError, match="nodesmax"):
        read_spec({**SPEC, "nodesmax": 2})


def test_the_status_and_the_scale_are_of_their_own(cluster: Cluster) -> None:
    post(cluster, "parts")
    _, found = cluster.request("PATCH", f"{JOBS}/parts", {"status": {"nodes": 1}, "spec": {"nodesMax": 3}})
    assert "status" not in found
    assert found["metadata"]["generation"] == 2
    status = {"nodes": 1, "selector": "a=b", "state": "Running", "committedAt": "2026-01-01T00:00:00Z"}
    code, found = cluster.request("PATCH", f"{JOBS}/parts/status", {"status": status, "spec": {"nodesMax": 9}})
    assert code == 200, found
    assert (found["status"], found["spec"]["nodesMax"], found["metadata"]["generation"]) == (status, 3, 2)
    _, scale = cluster.request("GET", f"{JOBS}/parts/scale")
    assert (scale["spec"]["replicas"], scale["status"]) == (3, {"replicas": 1, "selector": "a=b"})
    assert cluster.request("PATCH", f"{JOBS}/parts/status", {"status": {"nodes": "one"}})[0] == 422


# ------------------------------------------------------------------------------------------- what we read ourselves


def test_a_spec_is_read() -> None:
    spec = read_spec({**SPEC, "nodesMin": 2, "nodesMax": 4, "workersPerNode": 8, "saveEvery": 50, "keepLast": 3})
    config = spec.config("small")
    assert (config.job, config.nodes, config.scheduler) == ("small", "2:4", "kubernetes")
    assert (config.workers_per_node, config.save_every, config.keep_last) == (8, 50, 3)
    assert config.command == ("python", "train.py")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodesMin": 3, "nodesMax": 2}, "nodesMin (3) is more than nodesMax (2)"),
        ({"template": {}}, "template.spec.containers"),
        ({"template": {"spec": {"containers": []}}}, "template.spec.containers"),
        ({"template": {"spec": {"containers": "x"}}}, "template.spec.containers"),
        ({"template": {"spec": {"containers": ["x"]}}}, "template.spec.containers"),
        ({"store": ""}, "spec.store"),
        ({"notices": "moon"}, "spec.notices"),
        ({"keepEvery": 5}, "keep"),
        ({"graceSeconds": 1}, "spec.graceSeconds"),
        ({"save_every": 5}, "spec.save_every"),
    ],
)
def test_what_is_wrong_is_said_in_the_users_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_spec({**SPEC, **fields})
    assert words in str(error.value)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        read_spec({"nodesMin": 0, "workersPerNode": "many"})
    problems = error.value.problems
    assert {problem.partition(":")[0] for problem in problems} >= {
        "spec.nodesMin",
        "spec.workersPerNode",
        "spec.store",
        "spec.template",
    }


@pytest.mark.parametrize("spec", [None, [], "x", 3])
def test_what_is_no_spec(spec: object) -> None:
    with pytest.raises(ConfigError):
        read_spec(spec)

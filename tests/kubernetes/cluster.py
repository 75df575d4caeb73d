"""A Kubernetes cluster for tests: an API server, its controllers and nodes whose containers are processes of this host.

`running_cluster` puts the double, the simulated controllers and process kubelets together. The three are separate: a
real control plane takes the place of the first two with the same `Cluster`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.kubernetes import real_control_plane
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.cluster_controllers import ClusterControllers, Delays
from tests.kubernetes.process_kubelet import ProcessKubelet
from tests.kubernetes.real_control_plane import running_control_plane
from tests.kubernetes.rest import Api, Object

Kind = Literal["double", "real"]
UNTIL_SECONDS = 20.0


def why_not(kind: Kind = "double") -> str | None:
    """What is missing here for such a cluster; None: nothing."""
    if shutil.which("setpriv") is None:
        return "no setpriv here (util-linux)"
    return real_control_plane.why_not() if kind == "real" else None


@dataclass(kw_only=True)
class Cluster:
    """A cluster that runs; `server` and `controllers` are None where they are real ones."""

    folder: Path
    api: Api
    server: ApiServer | None = None
    controllers: ClusterControllers | None = None
    nodes: dict[str, ProcessKubelet] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the API is."""
        return self.api.url

    @property
    def token(self) -> str | None:
        """What its bearer may do everything with."""
        return self.api.token

    @property
    def kubeconfig(self) -> Path:
        """The path of a kubeconfig for any client."""
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(self.api.kubeconfig(), indent=1))
        path.chmod(0o600)
        return path

    # -- asking it -----------------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: object = None, content_type: str | None = None) -> tuple[int, Any]:
        """One request: its status and its answer."""
        return self.api.request(method, path, body, content_type)

    def create(self, path: str, body: Object) -> Object:
        """POST that has to succeed."""
        status, answer = self.request("POST", path, body)
        assert status == 201, f"POST {path}: {status}: {answer}"
        return answer

    def create_crd(self, definition: Object) -> None:
        """Create a CustomResourceDefinition and wait until its resources are served."""
        self.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        spec = definition["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        self.until(lambda: self.request("GET", path)[0] == 200, f"{path} is served")

    def pod(self, name: str, namespace: str = "default") -> Object | None:
        """A pod; None: there is none of that name."""
        status, answer = self.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        return answer if status == 200 else None

    def until(self, condition: Callable[[], object], what: str, seconds: float = UNTIL_SECONDS) -> None:
        """Wait for that."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"after {seconds:g} s still not so: {what}"
            time.sleep(0.02)

    def until_phase(
        self, name: str, *phases: str, namespace: str = "default", seconds: float = UNTIL_SECONDS
    ) -> Object:
        """Wait until a pod is in one of the phases; the pod."""
        found: list[Object] = []

        def there() -> bool:
            pod = self.pod(name, namespace)
            found[:] = [pod] if pod is not None else []
            return pod is not None and pod["status"].get("phase") in phases

        try:
            self.until(there, f"pod {name} is {' or '.join(phases)}", seconds)
        except AssertionError as error:
            raise AssertionError(
                f"{error}: {json.dumps(found and found[0].get('status'))}; log: {self.logs(name, namespace)}"
            ) from None
        return found[0]

    def logs(self, pod: str, namespace: str = "default") -> str:
        """What the pods of that name have written so far, on whichever node; also after their deletion."""
        paths = sorted(
            self.folder.glob(f"kubelets/*/logs/{namespace}_{pod}_*.log"), key=lambda path: path.stat().st_mtime
        )
        return "".join(path.read_text(errors="replace") for path in paths)

    # -- changing it ---------------------------------------------------------------------------------------

    def add_node(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        taints: list[Object] | None = None,
        capacity: Mapping[str, str] | None = None,
        renew_seconds: float = 0.5,
    ) -> ProcessKubelet:
        """A node more."""
        kubelet = ProcessKubelet(
            self.api,
            name,
            self.folder / "kubelets" / name,
            labels=labels,
            taints=taints,
            capacity=capacity,
            subnet=f"127.{1 + os.getpid() % 250}.{len(self.nodes)}",
            renew_seconds=renew_seconds,
        )
        self.nodes[name] = kubelet
        kubelet.start()
        return kubelet

    def delete_node(self, name: str) -> None:
        """Only the object, as a cloud does when a machine is gone; its kubelet goes on."""
        self.request("DELETE", f"/api/v1/nodes/{name}")

    def taint(self, name: str, key: str, value: str = "", effect: str = "NoExecute") -> None:
        """Taint a node."""
        _, node = self.request("GET", f"/api/v1/nodes/{name}")
        taints = [one for one in node["spec"].get("taints") or [] if (one["key"], one["effect"]) != (key, effect)]
        self._set_taints(node, [*taints, {"key": key, "value": value, "effect": effect}])

    def untaint(self, name: str, key: str) -> None:
        """Take the taints of that key away."""
        _, node = self.request("GET", f"/api/v1/nodes/{name}")
        self._set_taints(node, [one for one in node["spec"].get("taints") or [] if one["key"] != key])

    def _set_taints(self, node: Object, taints: list[Object]) -> None:
        name = node["metadata"]["name"]
        version = node["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints or None}}
        status, answer = self.request("PATCH", f"/api/v1/nodes/{name}", body)
        assert status == 200, answer

    def evict(self, namespace: str, pod: str, grace_seconds: int | None = None) -> tuple[int, Any]:
        """Ask for a pod's eviction: the status and the answer."""
        options = {} if grace_seconds is None else {"deleteOptions": {"gracePeriodSeconds": grace_seconds}}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
            **options,
        }
        return self.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", body)

    def remove_nodes(self) -> None:
        """Delete the stopped nodes and what is bound to them, in a cluster that is not the test's own."""
        for name in self.nodes:
            _, bound = self.request("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={name}")
            for pod in bound["items"]:
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
                self.request("DELETE", path, {"gracePeriodSeconds": 0})
            self.request("DELETE", f"/api/v1/nodes/{name}")
            self.request("DELETE", f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}")

    def stop_nodes(self) -> None:
        """End all nodes and their processes."""
        for kubelet in self.nodes.values():
            kubelet.stop()

    def problems(self) -> list[BaseException]:
        """What went wrong in the simulated components themselves."""
        of_nodes = [problem for kubelet in self.nodes.values() for problem in kubelet.problems]
        return of_nodes + (self.controllers.problems if self.controllers else [])


@contextmanager
def running_cluster(
    folder: Path,
    nodes: int = 0,
    *,
    kind: Kind = "double",
    capacity: Mapping[str, str] | None = None,
    delays: Delays | None = None,
    token: str | None = "a-token-of-the-tests",
) -> Iterator[Cluster]:
    """An API with its controllers and nodes `node-0`, `node-1`, …; all of it ends with the block.

    `delays` and `token` are the double's; the real ones have their own.
    """
    with _double(folder, delays, token) if kind == "double" else _real(folder) as cluster:
        try:
            for number in range(nodes):
                cluster.add_node(f"node-{number}", capacity=capacity)
            yield cluster
            assert not cluster.problems(), cluster.problems()
        finally:
            cluster.stop_nodes()


@contextmanager
def _double(folder: Path, delays: Delays | None, token: str | None) -> Iterator[Cluster]:
    server = ApiServer(token=token, log_folder=folder / "kubelets")
    server.start()
    api = Api(url=server.url, token=token)
    controllers = ClusterControllers(api, delays)
    try:
        controllers.start()
        yield Cluster(folder=folder, api=api, server=server, controllers=controllers)
    finally:
        controllers.stop()
        server.close()


@contextmanager
def _real(folder: Path) -> Iterator[Cluster]:
    with running_control_plane(folder / "control-plane") as plane:
        cluster = Cluster(folder=folder, api=plane.api)
        yield cluster
        assert plane.all_well(), "a process of the control plane has ended"
        if not plane.ours:
            cluster.remove_nodes()

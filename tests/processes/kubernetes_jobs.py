"""TrainingJobs in a cluster for tests: a controller as a process of its own, pods as processes, a folder as store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from orchestrator.controller.crd import definition
from orchestrator.schedulers.kubernetes.names import JOB_LABEL, path_of
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import open_store
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.rest import Loop
from tests.processes.harness import TRAINING
from tests.slurm_cluster import free_ports

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 90.0
JOB = "small"
IDLE = """
import os, time
folder, name = os.environ["FOLDER"], os.environ["HOSTNAME"]
with open(os.path.join(folder, name), "w") as file:
    file.write(os.environ["RANK"])
os.rename(os.path.join(folder, name), os.path.join(folder, name + ".rank"))
while not os.path.exists(os.path.join(folder, "end")):
    time.sleep(0.05)
"""


@dataclass(kw_only=True)
class Jobs:
    """A cluster with our controller, and one job in it."""

    cluster: Cluster
    folder: Path
    namespace: str = "default"
    port: int = field(default_factory=lambda: free_ports(1)[0])
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    """Of the controllers."""

    def __post_init__(self) -> None:
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "PYTHONWARNINGS": "ignore",
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "XDG_STATE_HOME": str(self.folder / "home"),
        }

    # -- the controller ------------------------------------------------------------------------------------

    def start_controller(self, *flags: str, port: int | None = None) -> subprocess.Popen[bytes]:
        """One more; it acts once it has the lease."""
        url = f"https://127.0.0.1:{self.port}"
        command = (
            *(sys.executable, "-m", "orchestrator", "controller", "run", f"--url={url}", "--listen=127.0.0.1"),
            *(f"--port={self.port if port is None else port}", f"--namespace={self.namespace}"),
            *(f"--lease-namespace={self.namespace}", *flags),
        )
        with (self.folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        self.controllers.append(process)
        self.ports.append(self.port if port is None else port)
        return process

    @contextmanager
    def service(self) -> Iterator[None]:
        """What a Service does: whoever connects to our port comes to the controller that is ready."""
        loop = Loop("service")
        server = loop.run(asyncio.start_server(self._forward, "127.0.0.1", self.port))
        try:
            yield
        finally:
            server.close()
            loop.run(server.wait_closed())
            loop.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for controller, port in zip(self.controllers, self.ports, strict=True):
            if controller.poll() is None and await _is_ready(port):
                there, back = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_pump(reader, back), _pump(there, writer))
                return
        writer.close()

    def stop(self) -> None:
        """End every controller; pods are the cluster's."""
        for process in self.controllers:
            if process.poll() is None:
                process.terminate()
        for process in self.controllers:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def output(self) -> str:
        """What the controllers have printed."""
        path = self.folder / "controller.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind."""
        lines = (line for line in self.output().splitlines(keepends=True) if line.startswith("{"))
        return [found for found in (json.loads(line) for line in lines if line[-1] == "\n") if found["kind"] == kind]

    def until_event(self, kind: str, count: int = 1, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Wait until there are that many records of a kind; the last of these."""
        self.until(lambda: len(self.events(kind)) >= count, f"{count} x {kind}", seconds)
        return self.events(kind)[count - 1]

    def kill_controller(self) -> None:
        """SIGKILL to the newest. Its lease is taken away, so that the next one need not wait for it to run out."""
        self.controllers[-1].kill()
        self.controllers[-1].wait()
        self.cluster.request("DELETE", path_of("leases", self.namespace, "orchestrator-controller"))

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A verb, as a person with this kubeconfig gives it."""
        return subprocess.run(
            (sys.executable, "-m", "orchestrator", *words),
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    # -- the job -------------------------------------------------------------------------------------------

    def manifest(self, *, env: Mapping[str, object] | None = None, template: Any = None, **spec: Any) -> dict[str, Any]:
        """A TrainingJob of small_training."""
        variables = {"PYTHONPATH": self.environment["PYTHONPATH"], "PYTHONWARNINGS": "ignore", "STEP_SECONDS": 0.05}
        variables |= {"LOG": self.folder / "log", "FOLDER": self.folder / "idle"}
        variables |= dict(env or {})
        container = {
            "name": "trainer",
            "image": "trainer:1",
            "command": [sys.executable],
            "env": [{"name": name, "value": str(value)} for name, value in variables.items()],
            "resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
        }
        return {
            "apiVersion": "orchestrator.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": JOB, "namespace": self.namespace},
            "spec": {
                "store": str(self.folder / "store"),
                "command": [sys.executable, str(TRAINING)],
                "nodesMin": 1,
                "nodesMax": 2,
                "saveEvery": 10,
                "notices": "none",
                "gatherSeconds": 15,
                "template": template or {"spec": {"containers": [container]}},
                **spec,
            },
        }

    def create(self, *, labels: Mapping[str, str] | None = None, **settings: Any) -> None:
        """Create it."""
        manifest = self.manifest(**settings)
        manifest["metadata"]["labels"] = dict(labels or {})
        self.cluster.create(path_of("trainingjobs", self.namespace), manifest)

    def create_idle(self, *, pod: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Create it with workers that train nothing: they write their rank under their pod's name, and wait to end.

        `pod`: more of the pods' spec.
        """
        (self.folder / "idle").mkdir(exist_ok=True)
        settings = {"command": [sys.executable, "-c", IDLE], **settings}
        if pod is not None:
            template = self.manifest()["spec"]["template"]
            template["spec"] |= pod
            settings["template"] = template
        self.create(**settings)

    def idle_ranks(self) -> dict[str, int]:
        """Pod → rank, of all idle workers so far."""
        paths = [path for path in (self.folder / "idle").iterdir() if path.suffix == ".rank"]
        return {path.stem: int(path.read_text()) for path in paths}

    def end_idle(self) -> None:
        """Idle workers are done."""
        (self.folder / "idle" / "end").touch()

    def job(self) -> dict[str, Any]:
        """The TrainingJob as it is."""
        status, found = self.cluster.request("GET", path_of("trainingjobs", self.namespace, JOB))
        assert status == 200, found
        return dict(found)

    @property
    def status(self) -> dict[str, Any]:
        """What the controller says of it."""
        return dict(self.job().get("status") or {})

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of it; empty: it is not set."""
        return next((one for one in self.status.get("conditions", []) if one["type"] == kind), {})

    def edit(self, **spec: Any) -> None:
        """A merge patch of the spec."""
        path = path_of("trainingjobs", self.namespace, JOB)
        status, answer = self.cluster.request("PATCH", path, {"spec": spec})
        assert status == 200, answer

    def pods(self) -> dict[str, dict[str, Any]]:
        """The job's pods that have not ended."""
        path = f"{path_of('pods', self.namespace)}?labelSelector={JOB_LABEL}={JOB}"
        _, found = self.cluster.request("GET", path)
        living = [pod for pod in found["items"] if pod["status"].get("phase") in ("Pending", "Running")]
        return {pod["metadata"]["name"]: pod for pod in living}

    def until_no_pods(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait until none of its pods lives."""
        self.until(lambda: not self.pods(), "no pod is left", seconds)

    def host_of(self, pod: str) -> str:
        """The node that a pod is on."""
        return str(self.pods()[pod]["spec"]["nodeName"])

    def trained(self) -> list[dict[str, Any]]:
        """What its ranks have logged: a line for each step, with generation and pid."""
        paths = sorted((self.folder / "log").glob("rank-*.jsonl"))
        lines = (line for path in paths for line in path.read_text().splitlines(keepends=True))
        return [json.loads(line) for line in lines if line[-1] == "\n"]

    def until_trained(self, step: int, generation: int = 1, seconds: float = WAIT_SECONDS) -> None:
        """Wait until a rank of a generation (or a later one) has logged a step."""
        self.until(
            lambda: any(line["step"] >= step and line["generation"] >= generation for line in self.trained()),
            f"step {step} of generation {generation}",
            seconds,
        )

    def worker_pids(self) -> set[int]:
        """Of all workers so far."""
        return {line["pid"] for line in self.trained()}

    @property
    def store(self) -> ObjectStore:
        """The job's folder."""
        return open_store(str(self.folder / "store" / JOB))

    def until(self, condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait for that."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{self.status}\n{self.output()[-6000:]}"
            time.sleep(0.05)

    def until_state(self, state: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until the job is in a state."""
        self.until(lambda: self.status.get("state") == state, f"the job is {state}", seconds)

    def until_step(self, step: int, seconds: float = WAIT_SECONDS) -> None:
        """Wait until it has trained to there."""
        self.until(lambda: self.status.get("step", 0) >= step, f"step {step}", seconds)


def prepared(cluster: Cluster) -> None:
    """The cluster knows what a TrainingJob is."""
    cluster.create_crd(definition())


async def _is_ready(port: int) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1)) as session,
            session.get(f"https://127.0.0.1:{port}/readyz", ssl=False) as answer,
        ):
            return answer.status == 200
    except (OSError, TimeoutError):  # as a probe that fails
        return False


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one of both ends is closed."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()

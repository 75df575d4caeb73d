"""A kubelet whose containers are processes on this host: one for each node, through the REST API only.

It works against the double as against a real API server: registers its Node, renews its Lease, runs the first container
of the pods bound to it, reports their status and ends them with their grace. As it cannot mount, every mountPath that
begins a path in command, args and environment is replaced by the folder that stands for it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes.api_store import timestamp
from tests.kubernetes.rest import STRATEGIC, Api, Client, Followed, Loop, Object

MARK = "PROCESS_KUBELET_POD"
"""A variable that every process of a pod inherits: what a container's cgroup is to the real kubelet."""
LEFT_OUT = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
SERVICE_ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
RETRY_SECONDS = 0.2
RESTART_SECONDS = 1.0
FORCED_GRACE_SECONDS = 1.0


class NotYet(Exception):
    """A container that cannot start yet: the reason and the message of its waiting state."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class ProcessKubelet:
    """One node. The methods without an underscore are called from a test's thread."""

    def __init__(
        self,
        api: Api,
        name: str,
        folder: Path,
        *,
        labels: Mapping[str, str] | None = None,
        taints: list[Object] | None = None,
        capacity: Mapping[str, str] | None = None,
        subnet: str = "127.200.0",
        renew_seconds: float = 0.5,
    ) -> None:
        self.name, self.folder, self.subnet, self.renew_seconds = name, folder, subnet, renew_seconds
        self.labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}
        self.taints = taints or []
        self.capacity = {"cpu": "8", "memory": "32Gi", "pods": "110", **(capacity or {})}
        self.boot = secrets.token_hex(4)
        self._loop = Loop(f"kubelet-{name}")
        self._client = Client(api, f"simulated-kubelet/{name}")
        self._reachable = asyncio.Event()
        self._pods = Followed(
            self._client, "/api/v1/pods", f"fieldSelector=spec.nodeName={name}", on_change=self._changed
        )
        self._workers: dict[str, _Worker] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None
        self._last_address = 1
        self.problems: list[BaseException] = []
        """What went wrong in itself: there should be nothing."""

    # -- what a test does with it --------------------------------------------------------------------------

    def start(self) -> None:
        """Boot the machine: register it and run what is bound to it."""
        self._loop.run(self._start())

    def stop(self) -> None:
        """End everything that it started, telling the API nothing."""
        self._loop.run(self._lose())
        self._loop.run(self._client.close())
        self._loop.close()

    def lose(self) -> None:
        """Power failure: its processes, memory and disks are gone, and nobody reports it. `start()` boots it again."""
        self._loop.run(self._lose())

    def partition(self) -> None:
        """The network is gone between it and the API server: its pods live on, nothing is reported nor heard."""
        self._loop.run(self._partition())

    def heal(self) -> None:
        """The network is back."""
        self._loop.run(self._heal())

    def freeze(self) -> None:
        """A machine that hangs: partitioned, and all its processes stopped."""
        self.partition()
        until, before = time.monotonic() + 10, None
        while True:  # twice the same: one that was forked during a look is not seen by it
            found = signal_all(self._mark(""), signal.SIGSTOP)
            if found == before and all(_state(one) in "TZ" for one in found):
                return
            assert time.monotonic() < until, f"processes of {self.name} do not stop"
            before = found
            time.sleep(0.005)

    def thaw(self) -> None:
        """It goes on where it was."""
        signal_all(self._mark(""), signal.SIGCONT)
        self.heal()

    def processes(self, uid: str = "") -> list[int]:
        """The ids of the living processes of a pod, or of all its pods."""
        return marked(self._mark(uid))

    # -- the machine ---------------------------------------------------------------------------------------

    def _mark(self, uid: str) -> str:
        return f"{self.boot}/{self.name}/{uid}"

    def next_address(self) -> str:
        """An address on loopback for a pod."""
        self._last_address = self._last_address % 253 + 1
        return f"{self.subnet}.{self._last_address}"

    async def _start(self) -> None:
        self.boot = secrets.token_hex(4)
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._reachable.set()
        await self._register()
        self._tasks = [asyncio.create_task(self._beat())]
        self._following = asyncio.create_task(self._pods.follow())

    async def _lose(self) -> None:
        self._reachable.clear()
        workers, self._workers = list(self._workers.values()), {}
        tasks = [*self._tasks, *([self._following] if self._following else []), *(worker.task for worker in workers)]
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(kill_all, self._mark(""))
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in workers:
            worker.remove_folders()
        self._tasks, self._following = [], None
        self._pods.things = {}

    async def _partition(self) -> None:
        self._reachable.clear()
        if self._following is not None:
            self._following.cancel()

    async def _heal(self) -> None:
        self._reachable.set()
        self._following = asyncio.create_task(self._pods.follow())

    async def ask(
        self, method: str, path: str, body: object = None, content_type: str | None = None
    ) -> tuple[int, Object]:
        """A request, once there is a network, until it is answered."""
        while True:
            await self._reachable.wait()
            status, answer = await self._client.request(method, path, body, content_type)
            if status not in (0, 429, 500, 503, 504):
                return status, answer
            await asyncio.sleep(RETRY_SECONDS)

    async def _register(self) -> None:
        metadata = {"name": self.name, "labels": self.labels}
        node = {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": metadata,
            "spec": {"taints": self.taints},
            "status": self._status(),
        }
        status, answer = await self.ask("POST", "/api/v1/nodes", node)
        assert status in (201, 409), answer
        await self._patch_node()
        body = {"metadata": {"name": self.name, "namespace": "kube-node-lease"}, "spec": self._lease()}
        await self.ask("POST", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", body)

    def _lease(self) -> Object:
        now = time.time()
        renewed = f"{timestamp(now)[:-1]}.{int(now % 1 * 1e6):06d}Z"
        return {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": renewed}

    def _status(self) -> Object:
        beat = timestamp(time.time() // 10 * 10)  # unchanged most of the time: a heartbeat is no change to watchers
        conditions = [
            {
                "type": "MemoryPressure",
                "status": "False",
                "reason": "KubeletHasSufficientMemory",
                "lastHeartbeatTime": beat,
            },
            {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": beat},
        ]
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self.name}]
        info = {
            "bootID": self.boot,
            "machineID": self.name,
            "systemUUID": self.name,
            "kubeletVersion": "v1.36.0-process",
        }
        amounts = {"capacity": self.capacity, "allocatable": self.capacity}
        return {**amounts, "conditions": conditions, "addresses": addresses, "nodeInfo": {**NODE_INFO, **info}}

    async def _patch_node(self) -> None:
        await self.ask("PATCH", f"/api/v1/nodes/{self.name}/status", {"status": self._status()}, STRATEGIC)

    async def _beat(self) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self.name}"
        while True:
            await self.ask("PATCH", path, {"spec": self._lease()})
            await self._patch_node()
            await asyncio.sleep(self.renew_seconds)

    def ended(self, task: asyncio.Task[None]) -> None:
        """A worker's task is over."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.problems.append(error)

    def _changed(self) -> None:
        """Every pod bound here gets a worker; every worker sees the newest of its pod, or that it is gone."""
        for uid, pod in self._pods.things.items():
            over = pod["status"]["phase"] in ("Succeeded", "Failed")
            if uid not in self._workers and not (over and "deletionTimestamp" not in pod["metadata"]):
                self._workers[uid] = _Worker(self, pod)
        for uid, worker in list(self._workers.items()):
            worker.see(self._pods.things.get(uid))
            if worker.task.done() and uid not in self._pods.things:
                del self._workers[uid]


NODE_INFO = {
    **{"architecture": "amd64", "operatingSystem": "linux", "kernelVersion": "6", "osImage": "process"},
    **{"containerRuntimeVersion": "process://1", "kubeProxyVersion": ""},
}


@dataclass
class _Run:
    """A container's process, ended once `exited` is done."""

    process: subprocess.Popen[bytes]
    exited: asyncio.Future[None]
    started_at: str


@dataclass
class _Mounts:
    """Which folder stands for which mountPath."""

    folders: dict[str, str] = field(default_factory=dict)

    def replace(self, text: str) -> str:
        """With every mountPath that begins a path replaced."""
        if not self.folders:
            return text
        paths = "|".join(re.escape(path) for path in sorted(self.folders, key=len, reverse=True))
        pattern = rf"(?:(?<=://)|(?<![\w./-]))(?:{paths})(?![\w.-])"
        return re.sub(pattern, lambda found: self.folders[found[0]], text)


class _Worker:
    """One pod from its binding to the end."""

    def __init__(self, kubelet: ProcessKubelet, pod: Object) -> None:
        self.kubelet, self.pod = kubelet, pod
        self.namespace, self.name, self.uid = (pod["metadata"][word] for word in ("namespace", "name", "uid"))
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.mark = kubelet._mark(self.uid)
        self.folder = kubelet.folder / "pods" / self.uid
        self.memory = Path(f"/dev/shm/process-kubelet-{kubelet.boot}-{self.uid}")
        self.address = "127.0.0.1" if pod["spec"].get("hostNetwork") else kubelet.next_address()
        self.started_at = timestamp()
        self.restarts = 0
        self.gone = False
        self.deleted_at: float | None = None
        self.seen = asyncio.Event()
        self.task = asyncio.create_task(self._work())
        self.task.add_done_callback(kubelet.ended)

    def see(self, pod: Object | None) -> None:
        """The newest of the pod; None: it was deleted without grace."""
        self.gone = pod is None
        if pod is not None:
            self.pod = pod
        if self.deleted_at is None and (self.gone or "deletionTimestamp" in self.pod["metadata"]):
            self.deleted_at = time.monotonic()
        self.seen.set()

    def remove_folders(self) -> None:
        """What was the pod's on disk and in memory."""
        for folder in (self.folder, self.memory):
            shutil.rmtree(folder, ignore_errors=True)

    def _deadline(self) -> float | None:
        """When the processes are killed; None: the pod is not being deleted."""
        if self.deleted_at is None:
            return None
        grace = FORCED_GRACE_SECONDS if self.gone else self.pod["metadata"].get("deletionGracePeriodSeconds", 0)
        return self.deleted_at + max(grace, FORCED_GRACE_SECONDS)

    async def _work(self) -> None:
        try:
            if self.pod["status"]["phase"] == "Running":  # from before a power failure
                await self._report("Failed", _terminated(137, self.started_at, "ContainerStatusUnknown"))
            elif self.pod["status"]["phase"] == "Pending":
                await self._run_containers()
            await self._until(lambda: self.deleted_at is not None)
            if not self.gone:
                await self.kubelet.ask(
                    "DELETE", self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
                )
        finally:
            self.remove_folders()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.seen.clear()
            await self.seen.wait()

    async def _run_containers(self) -> None:
        spec = self.pod["spec"]
        always = spec["restartPolicy"]
        for container in spec.get("initContainers") or []:
            run = await self._start(container)
            code = await self._finish(run)
            if code != 0 or self.deleted_at is not None:
                await self._report("Failed", _terminated(code, run.started_at if run else self.started_at))
                return
        while True:
            run = await self._start(spec["containers"][0])
            if run is not None:
                await self._report("Running", {"running": {"startedAt": run.started_at}}, ready=True)
            code = await self._finish(run)
            state = _terminated(code, run.started_at if run else self.started_at)
            if self.deleted_at is not None or always == "Never" or (always == "OnFailure" and code == 0):
                await self._report("Succeeded" if code == 0 else "Failed", state)
                return
            self.restarts += 1
            await self._report(
                "Running", {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting"}}, last=state
            )
            await asyncio.sleep(RESTART_SECONDS)

    # -- starting ------------------------------------------------------------------------------------------

    async def _start(self, container: Object) -> _Run | None:
        """Start a container as soon as that is possible; None: the pod was to be deleted before."""
        reported: tuple[str, str] | None = None
        while self.deleted_at is None:
            try:
                return await self._spawn(container)
            except NotYet as reason:
                if reported != (reason.reason, reason.message):
                    reported = (reason.reason, reason.message)
                    await self._report("Pending", {"waiting": {"reason": reason.reason, "message": reason.message}})
                    if reason.reason == "ErrImagePull":
                        text = f'Back-off pulling image "{container["image"]}"'
                        await self._report("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": text}})
                        await self._until(lambda: self.deleted_at is not None)
                self.seen.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.seen.wait(), RETRY_SECONDS)
        return None

    async def _spawn(self, container: Object) -> _Run:
        if container["image"].startswith("missing/"):
            text = f'failed to pull and unpack image "{container["image"]}": not found'
            raise NotYet("ErrImagePull", text)
        self.folder.mkdir(parents=True, exist_ok=True)
        mounts = await self._mount(container)
        variables = await self._variables(container)
        words = [
            expanded(word, variables) for word in [*(container.get("command") or []), *(container.get("args") or [])]
        ]
        if not words:
            raise NotYet(
                "CreateContainerError", "a process kubelet knows no image's own command: the pod must name one"
            )
        words = [mounts.replace(word) for word in words]
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        image = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
        environment = {**image, "PATH": path, "HOSTNAME": self.pod["spec"].get("hostname") or self.name}
        environment |= {key: mounts.replace(value) for key, value in variables.items()}
        environment[MARK] = self.mark
        log = self.kubelet.folder / "logs" / f"{self.namespace}_{self.name}_{self.uid}.log"
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", "--", *words],
                    env=environment,
                    cwd=mounts.replace(container.get("workingDir") or str(self.folder)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise NotYet("CreateContainerError", str(error)) from error
        return _Run(process, _exit(process), timestamp())

    async def _mount(self, container: Object) -> _Mounts:
        volumes = {volume["name"]: volume for volume in self.pod["spec"].get("volumes") or []}
        mounts = _Mounts()
        for mount in container.get("volumeMounts") or []:
            if mount["mountPath"] == SERVICE_ACCOUNT_PATH:
                continue  # a path that SDKs know by heart; it cannot be made here
            folder = await self._volume(volumes[mount["name"]])
            below = Path(folder, mount["subPath"]) if mount.get("subPath") else Path(folder)
            mounts.folders[mount["mountPath"].rstrip("/")] = str(below)
        return mounts

    async def _volume(self, volume: Object) -> str:
        name = volume["name"]
        folder = self.folder / "volumes" / name
        match {key: value for key, value in volume.items() if key != "name"}:
            case {"hostPath": {"path": str(path)}}:
                return path
            case {"emptyDir": dict(options)}:
                if options.get("medium") == "Memory":
                    folder = self.memory / name
                folder.mkdir(parents=True, exist_ok=True)
            case {"secret": dict(source)}:
                await self._files(folder, "secrets", source["secretName"], source)
            case {"configMap": dict(source)}:
                await self._files(folder, "configmaps", source["name"], source)
            case other:
                raise NotYet("ContainerCreating", f"a process kubelet knows no such volume: {name}: {', '.join(other)}")
        return str(folder)

    async def _files(self, folder: Path, plural: str, name: str, source: Object) -> None:
        data = await self._data(plural, name)
        if data is None and not source.get("optional"):
            raise NotYet("ContainerCreating", f'MountVolume.SetUp failed: {plural[:-1]} "{name}" not found')
        items = source.get("items") or [{"key": key, "path": key} for key in data or {}]
        for item in items:
            if item["key"] not in (data or {}):
                raise NotYet("ContainerCreating", f"references non-existent {plural[:-1]} key: {item['key']}")
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_bytes((data or {})[item["key"]])
            mode = item.get("mode", source.get("defaultMode"))
            path.chmod(0o644 if mode is None else mode)
        folder.mkdir(parents=True, exist_ok=True)

    async def _data(self, plural: str, name: str) -> dict[str, bytes] | None:
        status, answer = await self.kubelet.ask("GET", f"/api/v1/namespaces/{self.namespace}/{plural}/{name}")
        if status != 200:
            return None
        if plural == "secrets":
            return {key: base64.b64decode(value) for key, value in (answer.get("data") or {}).items()}
        return {key: value.encode() for key, value in (answer.get("data") or {}).items()}

    # -- the environment -----------------------------------------------------------------------------------

    async def _variables(self, container: Object) -> dict[str, str]:
        variables: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            plural, reference = (
                ("secrets", source["secretRef"]) if "secretRef" in source else ("configmaps", source["configMapRef"])
            )
            data = await self._data(plural, reference["name"])
            if data is None and not reference.get("optional"):
                raise NotYet("CreateContainerConfigError", f'{plural[:-1]} "{reference["name"]}" not found')
            variables |= {source.get("prefix", "") + key: value.decode() for key, value in (data or {}).items()}
        for entry in container.get("env") or []:
            value = (
                await self._value(entry["valueFrom"])
                if "valueFrom" in entry
                else expanded(entry.get("value", ""), variables)
            )
            if value is not None:
                variables[entry["name"]] = value
        return variables

    async def _value(self, source: Object) -> str | None:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        plural = "secrets" if "secretKeyRef" in source else "configmaps"
        reference = source.get("secretKeyRef") or source.get("configMapKeyRef") or {}
        data = await self._data(plural, reference.get("name", ""))
        if data is None or reference.get("key") not in data:
            if reference.get("optional"):
                return None
            what = "not found" if data is None else f"has no key {reference.get('key')}"
            raise NotYet("CreateContainerConfigError", f'{plural[:-1]} "{reference.get("name")}" {what}')
        return data[reference["key"]].decode()

    def _field(self, path: str) -> str:
        here = {"status.podIP": self.address, "status.podIPs": self.address, "status.hostIP": "127.0.0.1"}
        if path in here:
            return here[path]
        found = re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path)
        if found is not None:
            return str((self.pod["metadata"].get(found[1]) or {}).get(found[2], ""))
        value: Any = self.pod
        for step in path.split("."):
            value = value.get(step, "")
        return str(value)

    # -- ending and reporting ------------------------------------------------------------------------------

    async def _finish(self, run: _Run | None) -> int:
        """Until the container is over, by itself or because its pod is deleted; its exit code as a container's."""
        if run is None:
            return 137
        asked = False
        try:
            while not run.exited.done():
                deadline = self._deadline()
                if deadline is not None and not asked:
                    asked = True
                    with contextlib.suppress(ProcessLookupError):
                        run.process.send_signal(signal.SIGTERM)
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self.seen.clear()
                seen = asyncio.ensure_future(self.seen.wait())
                wait = None if deadline is None else deadline - time.monotonic()
                try:
                    await asyncio.wait((run.exited, seen), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    seen.cancel()
        finally:
            kill_all(self.mark)  # with its first process a container's others go
        await run.exited
        code = run.process.wait()
        return code if code >= 0 else 128 - code

    async def _report(self, phase: str, state: Object, *, ready: bool = False, last: Object | None = None) -> None:
        if self.gone:
            return
        kinds = [
            ("PodReadyToStartContainers", True),
            ("Initialized", phase != "Pending"),
            ("Ready", ready),
            ("ContainersReady", ready),
        ]
        old = {one["type"]: one for one in self.pod["status"].get("conditions") or []}
        conditions = []
        for kind, true in kinds:
            value = "True" if true else "False"
            same = old.get(kind, {}).get("status") == value
            since = old[kind].get("lastTransitionTime") if same else timestamp()
            conditions.append({"type": kind, "status": value, "lastTransitionTime": since})
        container = self.pod["spec"]["containers"][0]
        entry = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": self.restarts}
        entry |= {"ready": ready, "started": ready, "state": state, "lastState": last or {}}
        addresses = {
            "hostIP": "127.0.0.1",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self.started_at,
        }
        status = {"phase": phase, "conditions": conditions, "containerStatuses": [entry], **addresses}
        body = {"metadata": {"uid": self.uid}, "status": status}
        await self.kubelet.ask("PATCH", f"{self.path}/status", body, STRATEGIC)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) replaced as Kubernetes does: unknown names stay, $$ is one $."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^()]+)\)", value, text)


def _terminated(code: int, started_at: str, reason: str = "") -> Object:
    reason = reason or ("Completed" if code == 0 else "Error")
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": started_at, "finishedAt": timestamp()}}


def _exit(process: subprocess.Popen[bytes]) -> asyncio.Future[None]:
    """Done once the process is over."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    handle = os.pidfd_open(process.pid)

    def over() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        process.poll()
        if not future.done():
            future.set_result(None)

    loop.add_reader(handle, over)
    return future


# -- all processes of a pod ------------------------------------------------------------------------------------


def marked(mark: str) -> list[int]:
    """The ids of the living processes whose mark begins so."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                environment = Path("/proc", entry, "environ").read_bytes()
                if any(one.startswith(wanted) for one in environment.split(b"\0")):
                    found.append(int(entry))
    return found


def _state(process: int) -> str:
    """Its letter in /proc; Z where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def signal_all(mark: str, number: signal.Signals) -> list[int]:
    """Send it to all of them."""
    ids = marked(mark)
    for one in ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)
    return ids


def kill_all(mark: str) -> None:
    """Until none of them is left."""
    until = time.monotonic() + 10
    while signal_all(mark, signal.SIGKILL):
        assert time.monotonic() < until, f"processes of {mark} survive SIGKILL"
        time.sleep(0.005)

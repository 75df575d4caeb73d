"""A real Kubernetes control plane for tests: etcd, kube-apiserver, kube-scheduler and kube-controller-manager.

They run as processes on loopback, without a kubelet: a node is there once a test makes it. The programs lie in
$KUBE_ASSETS, or in ~/.cache/kube-assets; where one is missing, tests are skipped and say so. Where KUBE_TEST_CONTEXT
names a context of the kubeconfig (kind, k3s), that cluster is used and nothing is started.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.kubernetes.rest import Api
from tests.slurm_cluster import free_ports

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ASSETS_VARIABLE, CONTEXT_VARIABLE = "KUBE_ASSETS", "KUBE_TEST_CONTEXT"
READY_SECONDS = 50.0
NODE_GRACE_SECONDS = 8
"""A node whose Lease is older is lost. 50 by default: a test would wait long."""
CONTROLLERS = (
    *("namespace", "serviceaccount", "root-ca-certificate-publisher", "garbage-collector", "pod-garbage-collector"),
    *("node-lifecycle", "taint-eviction", "disruption", "resourcequota", "endpointslice", "clusterrole-aggregation"),
    *("job", "deployment", "replicaset"),
)
USERS = {
    "admin": ("test-admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
}
"""Name of the token → user and group; Kubernetes itself gives the last two what they need."""


def assets() -> Path:
    """Where the programs are looked for."""
    return Path(os.environ.get(ASSETS_VARIABLE) or Path.home() / ".cache" / "kube-assets")


def why_not() -> str | None:
    """What is missing here for a real control plane; None: nothing."""
    if os.environ.get(CONTEXT_VARIABLE):
        return None
    missing = [program for program in PROGRAMS if not os.access(assets() / program, os.X_OK)]
    return f"no {', '.join(missing)} in {assets()} ({ASSETS_VARIABLE} names another folder)" if missing else None


class CannotStartError(Exception):
    """The programs are there, and do not come up on this machine: why."""


@dataclass(kw_only=True)
class ControlPlane:
    """A running control plane. `folder` holds its logs, its data and its certificates."""

    folder: Path
    api: Api
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it ends with us, and everything in it."""
        return bool(self.processes)

    def all_well(self) -> bool:
        """Whether every process still runs."""
        return all(process.poll() is None for process in self.processes.values())

    def log(self, name: str) -> str:
        """A process's last words."""
        return (self.folder / "logs" / name).read_text(errors="replace")[-2000:]

    def memory_bytes(self) -> dict[str, int]:
        """What each process has in memory just now."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return {
            name: int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * page_bytes
            for name, process in self.processes.items()
        }

    # -- starting and stopping ---------------------------------------------------------------------------

    def start(self, etcd_ports: tuple[int, int], tokens: dict[str, str]) -> None:
        """Start everything; wait until the API server is ready and pods can be created in `default`."""
        until = time.monotonic() + READY_SECONDS
        self._spawn("etcd", *_etcd(self.folder / "etcd", *etcd_ports))
        self._spawn("kube-apiserver", *_api_server(self.folder, self.api.url, etcd_ports[0]))
        self._wait_for("/readyz", until)
        for name in ("kube-controller-manager", "kube-scheduler"):
            config = replace(self.api, token=tokens[name]).kubeconfig()
            _write_secret(self.folder / f"{name}.kubeconfig", json.dumps(config))
        self._spawn("kube-controller-manager", *_controller_manager(self.folder))
        self._spawn("kube-scheduler", *_scheduler(self.folder))
        self._wait_for("/api/v1/namespaces/default/serviceaccounts/default", until)

    def _wait_for(self, path: str, until: float) -> None:
        while not self._answers(path):
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise CannotStartError(f"{name} ended with {process.returncode}: {self.log(name)}")
            if time.monotonic() > until:
                raise CannotStartError(f"no answer to {path}: {self.log('kube-apiserver')}")
            time.sleep(0.05)

    def _answers(self, path: str) -> bool:
        try:
            return self.api.request("GET", path)[0] == 200
        except OSError:
            return False

    def _spawn(self, name: str, *flags: str) -> None:
        """It ends with the thread that called this."""
        end_with_us = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        with (self.folder / "logs" / name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*end_with_us, str(assets() / name), *flags],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends what uses it first
            )

    def kill(self, name: str) -> None:
        """End one of the processes at once."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End all at once: nothing of it is kept."""
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)


@contextmanager
def running_control_plane(folder: Path) -> Iterator[ControlPlane]:
    """A control plane for as long as the block lasts, or the cluster that KUBE_TEST_CONTEXT names.

    Raises CannotStartError.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    context = os.environ.get(CONTEXT_VARIABLE)
    if context:
        yield ControlPlane(folder=folder, api=_api_by_kubeconfig(context))
        return
    port, *etcd_ports = free_ports(3)
    tokens = {name: secrets.token_hex(16) for name in USERS}
    lines = [f'{tokens[name]},{user},{user},"{group}"' for name, (user, group) in USERS.items()]
    _write_secret(folder / "tokens.csv", "\n".join(lines) + "\n")
    ca = _write_certificates(folder)
    api = Api(url=f"https://127.0.0.1:{port}", ca=ca, token=tokens["admin"])
    plane = ControlPlane(folder=folder, api=api)
    try:
        try:
            plane.start((etcd_ports[0], etcd_ports[1]), tokens)
        except OSError as error:
            raise CannotStartError(str(error)) from error
        yield plane
    finally:
        plane.stop()


def _api_by_kubeconfig(context: str) -> Api:
    """The user's own cluster, with whatever the kubeconfig says (tokens, certificates, programs to run)."""
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(context=context, client_configuration=settings)
    words = settings.get_api_key_with_prefix("BearerToken") or settings.get_api_key_with_prefix("authorization") or ""
    return Api(
        url=settings.host,
        ca=Path(settings.ssl_ca_cert) if settings.ssl_ca_cert else None,
        token=words.removeprefix("Bearer ") or None,
        certificate=(Path(settings.cert_file), Path(settings.key_file)) if settings.cert_file else None,
    )


# -- flags -----------------------------------------------------------------------------------------------


def _etcd(data: Path, port: int, peer_port: int) -> list[str]:
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        *("--name=test", f"--data-dir={data}", "--unsafe-no-fsync", "--log-level=warn"),
        # An etcd before 3.5.13 cannot be asked how far it is; watches without a version would wait for it to say so.
        "--experimental-watch-progress-notify-interval=100ms",
        *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
        *(f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"),
        f"--initial-cluster=test={peer_url}",
    ]


def _api_server(folder: Path, url: str, etcd_port: int) -> list[str]:
    key = folder / "service-accounts.key"
    return [
        *(f"--etcd-servers=http://127.0.0.1:{etcd_port}", "--bind-address=127.0.0.1"),
        f"--secure-port={urllib.parse.urlsplit(url).port}",
        *("--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none"),  # nobody reaches it by its Service
        *(f"--tls-cert-file={folder}/server.crt", f"--tls-private-key-file={folder}/server.key"),
        *(f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC"),
        *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
        *("--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24"),
        *("--allow-privileged=true", "--profiling=false", f"--cert-dir={folder}"),
    ]


def _controller_manager(folder: Path) -> list[str]:
    return [
        *(f"--kubeconfig={folder}/kube-controller-manager.kubeconfig", "--leader-elect=false", "--secure-port=0"),
        # Without it Jobs create no pods, and nothing says so.
        "--use-service-account-credentials=true",
        *(f"--service-account-private-key-file={folder}/service-accounts.key", f"--root-ca-file={folder}/ca.crt"),
        f"--controllers={','.join(f'{name}-controller' for name in CONTROLLERS)}",
        *(f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s", "--node-monitor-period=1s"),
        *("--resource-quota-sync-period=5s", "--profiling=false"),
    ]


def _scheduler(folder: Path) -> list[str]:
    return [
        *(f"--kubeconfig={folder}/kube-scheduler.kubeconfig", "--leader-elect=false", "--secure-port=0"),
        "--profiling=false",
    ]


# -- certificates ----------------------------------------------------------------------------------------


def _write_certificates(folder: Path) -> Path:
    """An authority, the API server's certificate by it, a key for service accounts' tokens; the authority's path."""
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("test-ca", authority_key.public_key(), None, authority_key)
    server = _certificate("kube-apiserver", server_key.public_key(), authority, authority_key)
    (folder / "ca.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    for name, key in (("server", server_key), ("service-accounts", ec.generate_private_key(ec.SECP256R1()))):
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        _write_secret(folder / f"{name}.key", pem.decode())
    return folder / "ca.crt"


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, by: x509.Certificate | None, by_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """For 127.0.0.1 and the names of the Service; an authority's own, if `by` is None."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if by is None else by.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
    )
    if by is not None:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(
            x509.SubjectAlternativeName([*map(x509.DNSName, names), address]), critical=False
        )
    return builder.sign(by_key, hashes.SHA256())


def _write_secret(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)

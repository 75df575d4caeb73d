"""The API server of a cluster: JSON objects by path. The only module that uses the official client.

That finds the server and keeps the credentials fresh (kubeconfig with its plugins, a pod's service account); its
models are not used, since everything here passes objects on that it does not know in full. Every request has a time
limit and is made once; who calls decides whether to try again. Blocking: called in threads.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import urllib3
from kubernetes import client as sdk
from kubernetes import config as sdk_config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from orchestrator.clock import SystemClock
from orchestrator.errors import ConfigError, KubernetesError
from orchestrator.schedulers.kubernetes.names import Object

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 20.0
WATCH_SECONDS = 60
"""After that long the server ends a watch, and it is asked anew: one that is silently cut is noticed."""
WATCH_SLACK_SECONDS = 15.0
SAME_SECONDS = 5.0
"""Clocks that differ by less are the same: an answer's time is rounded, and it has taken a while."""
CONNECTIONS_MAX = 64
LISTED_AT_ONCE = 500
OBJECT_BYTES_MAX = 64 << 20
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ServerClock(SystemClock):
    """The API server's wall clock: when a pod's grace is over is said by that. The monotonic one is this host's."""

    def __init__(self) -> None:
        self._ahead_seconds = 0.0

    def wall(self) -> float:
        """As the server has it, as far as it is not nearly the same as ours."""
        return super().wall() + self._ahead_seconds

    def hear(self, date: str | None) -> None:
        """What an answer says, in whole seconds."""
        try:
            ahead = parsedate_to_datetime(date or "").timestamp() - super().wall()
        except (ValueError, OverflowError):
            return
        self._ahead_seconds = ahead if abs(ahead) > SAME_SECONDS else 0.0


class KubernetesClient:
    """Asks one API server, as one user. Threads may share it."""

    def __init__(
        self,
        api: sdk.ApiClient,
        *,
        namespace: str,
        may_write: Callable[[], bool] = lambda: True,
        clock: ServerClock | None = None,
    ) -> None:
        self._api = api
        self.namespace = namespace
        """Where this user works if nothing else is said."""
        self._may_write = may_write
        self.clock = clock or ServerClock()
        """What its answers tell of the server's time."""

    def writing_while(self, may_write: Callable[[], bool]) -> KubernetesClient:
        """One that asks the same server, and refuses by itself to write anything while that is not so."""
        return KubernetesClient(self._api, namespace=self.namespace, may_write=may_write, clock=self.clock)

    @property
    def server(self) -> str:
        """The server's URL, for messages."""
        return str(self._api.configuration.host)

    def get(self, path: str) -> Object:
        """One object. Raises KubernetesError."""
        return self._ask("GET", path)

    def find(self, path: str) -> Object | None:
        """One object; None if there is none. Raises KubernetesError."""
        try:
            return self.get(path)
        except KubernetesError as error:
            if error.is_not_found:
                return None
            raise

    def list(self, path: str, selector: str = "") -> tuple[list[Object], str]:
        """All objects of a collection, in pages, and the version that a watch goes on from. Raises KubernetesError."""
        found: list[Object] = []
        query = {"limit": str(LISTED_AT_ONCE), **({"labelSelector": selector} if selector else {})}
        while True:
            page = self._ask("GET", path, query)
            found += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            query = {**query, "continue": metadata["continue"]}

    def create(self, path: str, body: Object) -> Object:
        """A new object of a collection. Raises KubernetesError."""
        return self._ask("POST", path, body=body)

    def replace(self, path: str, body: Object) -> Object:
        """An object as it now shall be; refused (409) if it has changed since it was read. Raises KubernetesError."""
        return self._ask("PUT", path, body=body)

    def patch(self, path: str, body: Object) -> Object:
        """Change a part of an object: a merge patch, None removes. Raises KubernetesError."""
        return self._ask("PATCH", path, body=body, content_type="application/merge-patch+json")

    def delete(self, path: str, *, grace_seconds: int | None = None, uid: str | None = None) -> None:
        """Delete an object (of that uid); one that is not there is no error. Raises KubernetesError."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._ask("DELETE", path, body=options)
        except KubernetesError as error:
            if not error.is_not_found and not (uid is not None and error.status == 409):
                raise

    def watch(self, path: str, version: str, selector: str = "") -> Watch:
        """What changes in a collection from that version on. Raises KubernetesError."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            **({"labelSelector": selector} if selector else {}),
        }
        answer = self._open("GET", path, query, None, "", seconds=WATCH_SECONDS + WATCH_SLACK_SECONDS)
        return Watch(answer, self.server)

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        if method != "GET" and not self._may_write():
            raise KubernetesError(f"{method} {path} is not sent: another controller may hold the lease by now")
        answer = self._open(method, path, query or {}, body, content_type, seconds=ANSWER_SECONDS)
        try:
            text = answer.read(OBJECT_BYTES_MAX + 1)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise KubernetesError(f"{self.server} broke off its answer to {method} {path}") from error
        finally:
            answer.release_conn()
        if len(text) > OBJECT_BYTES_MAX:
            raise KubernetesError(f"{self.server} answers {method} {path} with more than {OBJECT_BYTES_MAX >> 20} MiB")
        found = _json(text)
        if found is None:
            raise KubernetesError(f"{self.server} does not answer {method} {path} with a JSON object")
        return found

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        *,
        seconds: float,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            found: urllib3.BaseHTTPResponse = self._api.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=(CONNECT_SECONDS, seconds),
            )
        except ApiException as error:
            raise self._refused(method, path, error) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:  # ValueError: a token that is none
            raise KubernetesError(f"{self.server} does not answer {method} {path} ({type(error).__name__})") from error
        except ConfigException as error:  # a credential plugin, when a token is to be renewed
            raise KubernetesError(f"no credentials for {self.server}: {error}") from error
        self.clock.hear(found.headers.get("Date"))
        return found

    def _refused(self, method: str, path: str, error: ApiException) -> KubernetesError:
        status = int(error.status or 0)
        said = _json(error.body or b"") or {}
        message = str(said.get("message") or error.reason or "no reason is given")
        after = (error.headers or {}).get("Retry-After", "")
        return KubernetesError(
            f"{self.server} refuses {method} {path} ({status or 'no status'}): {message}",
            status=status or None,
            reason=str(said.get("reason") or ""),
            message=message,
            retry_after_seconds=float(after) if after.isdecimal() else None,
        )


class Watch:
    """An open watch: changes as they come. `close` may be called by another thread."""

    def __init__(self, answer: urllib3.BaseHTTPResponse, server: str) -> None:
        self._answer = answer
        self._server = server
        self._closed = False

    def __iter__(self) -> Iterator[tuple[str, Object]]:
        """(ADDED | MODIFIED | DELETED | BOOKMARK, object), until the server ends it. Raises KubernetesError."""
        try:
            for line in self._lines():
                change = _json(line)
                if change is None or not isinstance(change.get("object"), dict):
                    raise KubernetesError(f"{self._server} sends a watch what is no change of an object")
                if change.get("type") == "ERROR":
                    said = change["object"]
                    raise KubernetesError(
                        f"{self._server} ends a watch: {said.get('message')}",
                        status=said.get("code"),
                        reason=str(said.get("reason") or ""),
                    )
                yield str(change.get("type")), change["object"]
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            if not self._closed:
                raise KubernetesError(f"{self._server} broke off a watch ({type(error).__name__})") from error
        finally:
            self._answer.close()

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        for piece in self._answer.stream(amt=None, decode_content=False):
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line for line in lines if line.strip())
            if len(rest) > OBJECT_BYTES_MAX:
                size = f"{OBJECT_BYTES_MAX >> 20} MiB"
                raise KubernetesError(f"{self._server} sends a watch an object of more than {size}")

    def close(self) -> None:
        """Ends the iteration."""
        self._closed = True
        with contextlib.suppress(Exception):  # it may just be ending by itself
            self._answer.shutdown()


def connect(context: str | None = None) -> KubernetesClient:
    """The cluster that this process runs in, else the kubeconfig's (KUBECONFIG, ~/.kube/config). Raises ConfigError."""
    settings = sdk.Configuration()
    settings.retries = False
    settings.connection_pool_maxsize = CONNECTIONS_MAX
    inside = context is None and (SERVICE_ACCOUNT / "token").exists()
    try:
        if inside:
            sdk_config.load_incluster_config(client_configuration=settings)
            namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
        else:
            where = os.environ.get("KUBECONFIG")  # the official client has read it when it was imported
            sdk_config.load_kube_config(config_file=where, context=context, client_configuration=settings)
            namespace = _namespace_of(where, context)
        if urlsplit(settings.host).scheme not in ("http", "https"):
            raise ConfigException(f"the server's address is {settings.host!r}, which is no URL")
    except Exception as error:  # a file may say anything; the official client looks at little of it
        said = " ".join(str(error).split())
        what = said if isinstance(error, ConfigException | OSError) else f"it is not understood ({said})"
        raise ConfigError(
            f"no Kubernetes cluster is configured here: {what}; "
            "KUBECONFIG, or ~/.kube/config, says which one is meant (`kubectl config get-contexts`)"
        ) from error
    return KubernetesClient(sdk.ApiClient(settings), namespace=namespace or "default")


def _namespace_of(where: str | None, context: str | None) -> str:
    contexts, active = sdk_config.list_kube_config_contexts(config_file=where)
    chosen = active if context is None else next(one for one in contexts if one["name"] == context)
    return str(chosen["context"].get("namespace") or "default")


def _json(text: bytes | str) -> Object | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

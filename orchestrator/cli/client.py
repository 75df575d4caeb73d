"""The verbs' connection to a running supervisor: a few small requests over HTTP, with its token.

The standard library's `http.client` and not a client that looks at proxy variables: the token never leaves this
machine, or goes over TLS to a host whose certificate stands beside it. It is in no message and in no error. Used by
`status`, `drain`, `resize`, `rollback`, `cancel` and `drill`.
"""

from __future__ import annotations

import http.client
import json
import os
import pwd
import time
from typing import Any
from urllib.parse import urlsplit

from orchestrator.certificates import client_context
from orchestrator.cli.terminal import say
from orchestrator.errors import SupervisorError
from orchestrator.supervisor.state_folder import SupervisorAddress, find_supervisor, is_running

ANSWER_SECONDS_MAX = 10.0
ANSWER_BYTES_MAX = 1 << 28
POLL_SECONDS = 0.2
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class SupervisorClient:
    """Asks one supervisor."""

    def __init__(self, address: SupervisorAddress) -> None:
        self.address = address
        parts = urlsplit(address.url)
        self._tls = client_context(address.certificate)
        near = parts.scheme == "http" and parts.hostname in _LOOPBACK
        if parts.hostname is None or parts.port is None or not (near or (parts.scheme == "https" and self._tls)):
            raise SupervisorError(f"the supervisor of {address.job!r} is not on this machine: {address.url}")
        self._host, self._port = parts.hostname, parts.port

    def status(self) -> dict[str, Any]:
        """What the job is doing. Raises SupervisorError."""
        return self._ask("GET", "/status", None)

    def request(self, what: str, nodes: int | None = None, step: int | None = None) -> None:
        """Ask for drain, cancel, resize or rollback; returns when it is accepted. Raises SupervisorError."""
        body: dict[str, Any] = {"request": what, "by": this_user()}
        if nodes is not None:
            body["nodes"] = nodes
        if step is not None:
            body["step"] = step
        self._ask("POST", "/requests", body)

    def notice(self, node: str, seconds: float) -> None:
        """Tell the job that a node goes after that time; it really does. Raises SupervisorError."""
        self._ask("POST", "/notices", {"node": node, "seconds": seconds})

    def wait_until_gone(self, timeout_seconds: float) -> None:
        """Wait for the supervisor's end. Raises SupervisorError when the time is over."""
        until = time.monotonic() + timeout_seconds
        while is_running(self.address):
            if time.monotonic() > until:
                raise SupervisorError(
                    f"the job {self.address.job!r} has not ended within {timeout_seconds:g} s; it goes on ending, "
                    f"`orchestrator status {self.address.job}` shows how far it is"
                )
            time.sleep(POLL_SECONDS)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        status, answer = self._exchange(method, path, body)
        if status == 200:
            return answer
        if status == 401:
            raise SupervisorError(
                f"the supervisor of {self.address.job!r} refused the token: it was started anew just now; try again"
            )
        raise SupervisorError(f"the supervisor of {self.address.job!r} refused: {answer.get('error', status)}")

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        connection = self._connection()
        headers = {"Authorization": f"Bearer {self.address.token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                answer = json.loads(response.read(ANSWER_BYTES_MAX))
        except TimeoutError as error:
            problem = f"did not answer within {ANSWER_SECONDS_MAX:.0f} s; it may be overloaded or stopped: try again"
            raise self._unreachable(problem) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable("cannot be reached; it may have ended just now: try again") from error
        except ValueError as error:
            raise self._unreachable("did not answer with JSON; is it an orchestrator?") from error
        finally:
            connection.close()
        return response.status, answer if isinstance(answer, dict) else {}

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS_MAX)
        return http.client.HTTPSConnection(self._host, self._port, timeout=ANSWER_SECONDS_MAX, context=self._tls)

    def _unreachable(self, problem: str) -> SupervisorError:
        return SupervisorError(f"the supervisor of {self.address.job!r} (process {self.address.pid}) {problem}")


def connect(job: str) -> SupervisorClient:
    """The supervisor of a running job. Raises SupervisorError with what to do.

    Of a job that does not run: why, or how it ended, as far as Slurm or the store can say it.
    """
    try:
        return SupervisorClient(find_supervisor(job))
    except SupervisorError as error:
        from orchestrator.cli.absent import absence_of

        absence = absence_of(job)
        if absence is None:
            raise
        raise SupervisorError(absence.words) from error


def ask_to_end(job: str, request: str, what_happens: str, *, wait_seconds: float | None, namespace: str | None) -> None:
    """Send a request after which the job ends; wait for its end for a limited time, or not at all (None)."""
    from orchestrator.cli import kubernetes

    found = kubernetes.find(job, namespace)
    if found is not None:
        found.request(request)
        say(f"accepted: the job {job!r} {what_happens}")
        if wait_seconds is not None:
            say(f"the job {job!r} has ended: {found.wait_until_ended(wait_seconds)}")
        return
    client = connect(job)
    client.request(request)
    say(f"accepted: the job {job!r} {what_happens}")
    if wait_seconds is not None:
        client.wait_until_gone(wait_seconds)
        say(f"the job {job!r} has ended")


def this_user() -> str:
    """Who asks, for the events."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"

"""Stores that no job can save to: `check` and `run` say which, why and what to do, before anything is started.

Each within 10 s, whatever an SDK would wait for; and no secret is ever printed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.cli.small_job import JOB
from tests.s3_servers import (
    ACCESS_KEY,
    BUCKET,
    READ_ONLY_KEY,
    READ_ONLY_SECRET,
    SECRET_KEY,
    S3Server,
    S3Servers,
    free_ports,
)

SECONDS_MAX = 10
WRONG_SECRET = "not-the-right-secret"
SECRETS = (SECRET_KEY, READ_ONLY_SECRET, WRONG_SECRET)
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A store, the variables under which it is bad, and what must be said: cause and remedy."""

    url: str
    says: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    run_code: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a case is made of."""

    folder: Path
    servers: S3Servers

    def seaweedfs(self) -> S3Server:
        return self.servers.shared("seaweedfs")


# ------------------------------------------------------------------------------------------------- buckets


@contextmanager
def no_bucket(place: Place) -> Iterator[Bad]:
    says = ("there is no bucket 'no-such-bucket'", "make it, or correct the store's URL")
    yield Bad(url="s3://no-such-bucket/jobs", says=says, variables=place.seaweedfs().variables())


@contextmanager
def unknown_access_key(place: Place) -> Iterator[Bad]:
    variables = place.seaweedfs().variables("nobody000000", WRONG_SECRET)
    says = ("does not know the access key that was given", "give credentials that may")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=variables)


@contextmanager
def wrong_secret(place: Place) -> Iterator[Bad]:
    variables = place.seaweedfs().variables(ACCESS_KEY, WRONG_SECRET)
    says = ("the secret key is not that of the access key", "give credentials that may")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=variables)


@contextmanager
def read_only_credentials(place: Place) -> Iterator[Bad]:
    variables = place.seaweedfs().variables(READ_ONLY_KEY, READ_ONLY_SECRET)
    says = ("do not allow PutObject on s3://bucket", "give credentials that may")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=variables)


NO_CREDENTIALS = ("no usable credentials for s3://bucket", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


@contextmanager
def no_credentials(place: Place) -> Iterator[Bad]:
    """The machine has no role: nobody listens where roles come from."""
    server, (port,) = place.seaweedfs(), free_ports(1)
    variables = {"AWS_ENDPOINT_URL": server.url, "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}"}
    yield Bad(url=f"s3://{BUCKET}/jobs", says=NO_CREDENTIALS, variables=variables)


@contextmanager
def silent_metadata(place: Place) -> Iterator[Bad]:
    with silent() as url:
        variables = {"AWS_ENDPOINT_URL": place.seaweedfs().url, "AWS_EC2_METADATA_SERVICE_ENDPOINT": url}
        yield Bad(url=f"s3://{BUCKET}/jobs", says=NO_CREDENTIALS, variables=variables)


@contextmanager
def patient_with_silent_metadata(place: Place) -> Iterator[Bad]:
    with silent() as url:
        variables = {
            "AWS_ENDPOINT_URL": place.seaweedfs().url,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": url,
            "AWS_METADATA_SERVICE_TIMEOUT": "60",
            "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "5",
        }
        yield Bad(url=f"s3://{BUCKET}/jobs", says=("has not answered within", "credentials"), variables=variables)


@contextmanager
def wrong_region(place: Place) -> Iterator[Bad]:
    with answering(400, "AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>") as url:
        says = ("is in another region than the one asked", "set AWS_REGION=eu-west-3")
        yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials(url))


@contextmanager
def redirected(place: Place) -> Iterator[Bad]:
    """By a proxy, say: whatever is asked is elsewhere, and where, does it not say."""
    with answering(301, "PermanentRedirect", "") as url:
        says = ("it redirects without an end", "its endpoint is the right one")
        yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials(url))


@contextmanager
def no_scheme(place: Place) -> Iterator[Bad]:
    says = ("Invalid endpoint: localhost:9000", "its endpoint is the right one")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials("localhost:9000"))


@contextmanager
def password_in_the_endpoint(place: Place) -> Iterator[Bad]:
    says = ("holds a user or password", "credentials have variables")
    variables = credentials(f"http://user:{WRONG_SECRET}@127.0.0.1:1")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=variables)


@contextmanager
def no_endpoint_at_all(place: Place) -> Iterator[Bad]:
    says = ("the endpoint's address holds a user or password", "its endpoint is the right one")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials(f"user:{WRONG_SECRET}@host"))


@contextmanager
def nobody_listens(place: Place) -> Iterator[Bad]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    says = (f"{url} cannot be reached", "its endpoint is the right one (AWS_ENDPOINT_URL")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials(url))


@contextmanager
def silent_endpoint(place: Place) -> Iterator[Bad]:
    with silent() as url:
        says = ("has not answered within", "its endpoint is the right one (AWS_ENDPOINT_URL")
        yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials(url))


@contextmanager
def busy_endpoint(place: Place) -> Iterator[Bad]:
    with answering(503, "SlowDown", "") as url:
        says = (f"{url} could not do it now: SlowDown (503)", "its endpoint is the right one")
        yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials(url))


@contextmanager
def no_s3_server(place: Place) -> Iterator[Bad]:
    """Some other web server."""
    with answering(404, "", "") as url:
        says = ("knows neither bucket nor objects", "its endpoint is the right one")
        yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=credentials(url))


@contextmanager
def nanio(place: Place) -> Iterator[Bad]:
    variables = place.servers.shared("nanio").variables()
    says = ("silently ignores If-None-Match", "use a server that honours it")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=variables)


@contextmanager
def rclone(place: Place) -> Iterator[Bad]:
    variables = place.servers.shared("rclone").variables()
    says = ("silently ignores If-None-Match", "use a server that honours it")
    yield Bad(url=f"s3://{BUCKET}/jobs", says=says, variables=variables)


@contextmanager
def other_things_in_the_bucket(place: Place) -> Iterator[Bad]:
    server, prefix = place.seaweedfs(), f"test-{secrets.token_hex(6)}"
    with server.client() as client:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{JOB}/thesis.txt", Body=b"do not touch")
        says = ("holds thesis.txt, which is not of a job of this project", "another")
        yield Bad(url=f"s3://{BUCKET}/{prefix}", says=says, variables=server.variables(), run_code=3)
        (found,) = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
        assert found["Key"] == f"{prefix}/{JOB}/thesis.txt"


# ------------------------------------------------------------------------------------------------- folders


@contextmanager
def a_file(place: Place) -> Iterator[Bad]:
    (place.folder / "file").write_text("")
    yield Bad(url=str(place.folder / "file"), says=("there is a file where the folder", "use a folder"))


@contextmanager
def below_a_file(place: Place) -> Iterator[Bad]:
    (place.folder / "file").write_text("")
    yield Bad(url=str(place.folder / "file" / "jobs"), says=("there is a file where the folder", "use a folder"))


@contextmanager
def read_only(place: Place) -> Iterator[Bad]:
    with mounted(place.folder / "jobs", "ro,size=1m") as folder:
        yield Bad(url=str(folder), says=("Read-only file system", "use a folder"))


@contextmanager
def full(place: Place) -> Iterator[Bad]:
    with mounted(place.folder / "jobs", "size=64k") as folder:
        with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        yield Bad(url=str(folder), says=("no space is left", "make room"))


@contextmanager
def other_things_in_the_folder(place: Place) -> Iterator[Bad]:
    foreign = place.folder / "jobs" / JOB / "thesis.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("do not touch")
    says = ("holds thesis.txt, which is not of a job of this project", "another")
    yield Bad(url=str(place.folder / "jobs"), says=says, run_code=3)
    assert list(foreign.parent.iterdir()) == [foreign]


CASES: tuple[Callable[[Place], AbstractContextManager[Bad]], ...] = (
    no_bucket,
    unknown_access_key,
    wrong_secret,
    read_only_credentials,
    no_credentials,
    silent_metadata,
    patient_with_silent_metadata,
    wrong_region,
    redirected,
    no_scheme,
    password_in_the_endpoint,
    no_endpoint_at_all,
    nobody_listens,
    silent_endpoint,
    busy_endpoint,
    no_s3_server,
    nanio,
    rclone,
    other_things_in_the_bucket,
    a_file,
    below_a_file,
    read_only,
    full,
    other_things_in_the_folder,
)


@pytest.fixture(params=CASES, ids=[case.__name__ for case in CASES])
def bad(
    request: pytest.FixtureRequest, tmp_path: Path, s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bad]:
    """Each bad store, and the variables of this process that make it one."""
    with request.param(Place(folder=tmp_path, servers=s3_servers)) as case:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))  # and nothing from ~/.aws
        for name, value in case.variables.items():
            monkeypatch.setenv(name, value)
        yield case


@pytest.mark.timeout(SECONDS_MAX, func_only=True)
def test_check_says_it(bad: Bad, command: Command, tmp_path: Path) -> None:
    result = command("check", "--store", bad.url, "--job", JOB, "--staging", str(tmp_path), "--json")
    assert result.exit_code == 1
    for words in (bad.url, *bad.says):
        assert words in result.stdout
    assert_no_secret(result.output)


@pytest.mark.timeout(SECONDS_MAX, func_only=True)
def test_run_says_it_and_starts_nothing(bad: Bad, command: Command, tmp_path: Path) -> None:
    words = ("run", "--job", JOB, "--store", bad.url, "--staging", str(tmp_path))
    result = command(*words, "--", sys.executable, "-c", f"open({str(tmp_path / 'started')!r}, 'w')")
    assert result.exit_code == bad.run_code, result.stderr
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    for part in ("error: ", bad.url, *bad.says):
        assert part in sentence
    assert_no_secret(sentence)
    assert not (tmp_path / "started").exists()


# ------------------------------------------------------------------------------------------- what makes them


def assert_no_secret(text: str) -> None:
    """Not one of those that were given."""
    assert not [secret for secret in SECRETS if secret in text]


def credentials(endpoint: str) -> dict[str, str]:
    """For an endpoint that never looks at them."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that takes connections, and never says anything."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def answering(status: int, code: str, more: str) -> Iterator[str]:
    """The address of a server that gives everybody the same answer, as S3 words errors."""
    body = f"<Error><Code>{code}</Code><Message>No.</Message>{more}</Error>".encode() if code else b"not here"

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# ------------------------------------------------------------------------------------------ as processes


@pytest.mark.processes
@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_silent_endpoint_does_not_keep_the_process_from_ending(verb: str, tmp_path: Path) -> None:
    """Whatever a thread still waits for. The limit is longer than the promise: others share these cores."""
    with silent() as url:
        done = orchestrator(verb, f"s3://{BUCKET}/jobs", tmp_path, variables=credentials(url))
    assert done.returncode == {"check": 1, "run": 2}[verb], done.stderr
    assert "has not answered within" in done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_folder_that_this_user_may_not_write(verb: str, tmp_path: Path) -> None:
    """Root may write everywhere, unless it is without that capability."""
    folder = tmp_path / "jobs"
    folder.mkdir(mode=0o555)
    as_anybody: tuple[str, ...] = ()
    if os.geteuid() == 0:
        as_anybody = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
        tried = subprocess.run([*as_anybody, "touch", str(folder / "file")], capture_output=True, check=False)
        if b"Permission denied" not in tried.stderr:
            pytest.skip("root can do everything here")
    done = orchestrator(verb, str(folder), tmp_path, before=as_anybody)
    assert done.returncode == {"check": 1, "run": 2}[verb], done.stderr
    told = " ".join((done.stdout + done.stderr).split())
    for words in (str(folder), "Permission denied", "use a folder or file system that this user may write"):
        assert words in told
    assert "Traceback" not in told


def orchestrator(
    verb: str, store: str, folder: Path, *, before: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`check` or `run` as a person types it, without this process's credentials."""
    command = {"check": ("--json",), "run": ("--", sys.executable, "-c", "")}[verb]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    words = [sys.executable, "-m", "orchestrator", verb, "--job", JOB, "--store", store, "--staging", str(folder)]
    return subprocess.run(
        [*before, *words, *command],
        env={**kept, "XDG_STATE_HOME": str(folder / "state"), **(variables or {})},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )

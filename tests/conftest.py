"""What all tests share: one random seed, printed at the top of the run and given to whoever draws numbers.

`ORCHESTRATOR_TEST_SEED=<number> pytest …` replays a run.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.no_metadata import sitecustomize

if TYPE_CHECKING:
    from tests.gcs_server import GCSServers
    from tests.s3_servers import S3Servers
    from tests.slurm_cluster import SlurmCluster

SEED_VARIABLE = "ORCHESTRATOR_TEST_SEED"
SEED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Fixes the seed for the whole run; gives signals back that a shell's `&` or nohup has made ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    text = os.environ.get(SEED_VARIABLE)
    try:
        config.stash[SEED] = secrets.randbits(32) if text is None else int(text)
    except ValueError:
        raise pytest.UsageError(f"{SEED_VARIABLE} must be a whole number, not {text!r}") from None
    os.environ[SEED_VARIABLE] = str(config.stash[SEED])  # for the processes among which the tests are shared out

    _forbid_metadata_services()


LONG = ("processes", "simulation", "benchmarks", "contracts", "storage")
"""Folders of tests that take minutes: they come first, so that at the end nobody waits for one file of them alone."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the order of files; within one it stays."""
    folder = Path(__file__).parent
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.relative_to(folder).parts[0], len(LONG)))


def _forbid_metadata_services() -> None:
    """See `tests/no_metadata`; the processes among which tests are shared out write to the same file."""
    if sitecustomize.STRAYS_VARIABLE not in os.environ:
        handle, path = tempfile.mkstemp(prefix="orchestrator-test-strays-")
        os.close(handle)
        os.environ[sitecustomize.STRAYS_VARIABLE] = path
        folder = str(Path(sitecustomize.__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    sitecustomize.install()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which anybody asked a real metadata service has failed."""
    if hasattr(session.config, "workerinput"):
        return
    path = Path(os.environ[sitecustomize.STRAYS_VARIABLE])
    strays = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    if strays:
        raise pytest.UsageError(f"a cloud's metadata service was asked:\n{strays}")


def pytest_report_header(config: pytest.Config) -> str:
    """Says how to replay the run."""
    return f"random seed: {SEED_VARIABLE}={config.stash[SEED]}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed; a test makes its own `random.Random(seed)` of it."""
    return request.config.stash[SEED]


@pytest.fixture(scope="session")
def s3_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Servers]:
    """Real S3 servers, started when a test asks for one, ended with the run."""
    from tests.s3_servers import S3Servers

    servers = S3Servers(tmp_path_factory.mktemp("s3"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def gcs_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GCSServers]:
    """fake-gcs-server, started when a test asks for one, ended with the run."""
    from tests.gcs_server import GCSServers

    servers = GCSServers(tmp_path_factory.mktemp("gcs"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm of three nodes of two processors; skips where it cannot be had."""
    from tests.slurm_cluster import CannotStartError, running_cluster, why_not

    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    try:
        with running_cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as found:
            yield found
            assert found.all_well(), found.log("slurmctld")
    except CannotStartError as error:
        pytest.skip(f"Slurm is installed, and does not start here: {error}")

"""Every test here starts real processes; state and staging folders are its own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.harness import final_digests, run_job


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.timeout(150))


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a test see no other job's state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the last checkpoint of an uninterrupted run at world size 2."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        result = asyncio.run(run_job(folder, nodes="2", replacement_seconds=0))
    assert result.finish.exit_code == 0, result.output()
    return final_digests(result.store)


@pytest.fixture
def staging() -> Iterator[str]:
    """A staging folder in memory."""
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="orchestrator-test-", dir=base)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)

"""A job whose store is a bucket on fake-gcs-server: a node is lost, and the job ends as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.checkpoint.opened import open_checkpoint
from tests.gcs_server import GCSServers
from tests.processes.harness import check_store, final_digests, run_job


async def test_a_node_lost_after_a_commit(
    tmp_path: Path,
    staging: str,
    reference: dict[str, str],
    gcs_servers: GCSServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lost node's memory is gone, so that its shard is read from the bucket."""
    server = gcs_servers.shared()
    for variable, value in server.variables().items():
        monkeypatch.setenv(variable, value)
    marker = tmp_path / "fault"
    agent = (sys.executable, "-m", "orchestrator.testing.faulty_agent", str(marker), "after-index step=20")
    store = server.bucket().url
    result = await run_job(tmp_path, store=store, nodes="2", staging=staging, agent_command=agent)
    assert marker.exists(), "the fault never happened"
    assert result.finish.exit_code == 0, result.output()
    assert result.store.url == f"{store}/small"
    (opened,) = (record for record in result.kinds("generation opened") if record.generation == 2)
    assert opened.step == 20
    assert final_digests(result.store) == reference
    check_store(result.store)
    assert open_checkpoint(result.store.url).step == 40
    assert not (tmp_path / "store").exists()

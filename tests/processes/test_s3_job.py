"""A job whose store is a bucket on a real server: a node is lost, and the job ends as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.checkpoint.opened import open_checkpoint
from tests.processes.harness import check_store, final_digests, run_job
from tests.s3_servers import S3Servers


async def test_a_node_lost_after_a_commit(
    tmp_path: Path,
    staging: str,
    reference: dict[str, str],
    s3_servers: S3Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lost node's memory is gone, so that its shard is read from the bucket. The URL says where the server is."""
    server = s3_servers.shared("seaweedfs")
    for variable, value in server.variables().items():
        if variable not in ("AWS_ENDPOINT_URL", "AWS_REGION"):
            monkeypatch.setenv(variable, value)
    marker = tmp_path / "fault"
    agent = (sys.executable, "-m", "orchestrator.testing.faulty_agent", str(marker), "after-index step=20")
    bucket, settings = server.bucket().url, f"?endpoint={server.url}&region=us-east-1"
    result = await run_job(tmp_path, store=bucket + settings, nodes="2", staging=staging, agent_command=agent)
    assert marker.exists(), "the fault never happened"
    assert result.finish.exit_code == 0, result.output()
    assert result.store.url == f"{bucket}/small{settings}"
    (opened,) = (record for record in result.kinds("generation opened") if record.generation == 2)
    assert opened.step == 20
    assert final_digests(result.store) == reference
    check_store(result.store)
    assert open_checkpoint(result.store.url).step == 40
    assert not (tmp_path / "store").exists()

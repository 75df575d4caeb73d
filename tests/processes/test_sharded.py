"""FSDP, HSDP, tensor parallelism and DDP, with real process groups: what one saves, another restores, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.sharded_jobs import JOBS

ROOT = Path(__file__).parents[2]
JOBS_SECONDS_MAX = 280

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each job; one interpreter runs them all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.sharded_jobs", str(tmp_path_factory.mktemp("jobs"))],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        timeout=JOBS_SECONDS_MAX,
        text=True,
        check=False,
    )
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.timeout(JOBS_SECONDS_MAX + 20)
@pytest.mark.parametrize("job", JOBS)
def test_what_one_kind_of_parallelism_saves_another_restores(answers: dict[str, str], job: str) -> None:
    """F57–F61, F113: each rank's part is compared with `full_tensor()`, uneven and strided ones included."""
    assert answers.get(job) == "ok"

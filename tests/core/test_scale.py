"""Large jobs: the benchmark's own drive, small enough for a test. No time is judged, but a quadratic core would be cut
off by the test's time limit: before events stopped scanning the gang, a thousand nodes took a minute."""

from __future__ import annotations

import pytest

from benchmarks.supervisor_scale import Drive, save, start


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (3, 2), (1024, 1), (128, 8)])
def test_a_whole_save_of_a_large_job_is_committed(nodes: int, workers: int) -> None:
    drive = Drive(nodes, workers)
    start(drive)
    save(drive)
    assert drive.job.newest_committed is not None

"""The event log's file: what cannot be written there ends no job."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.telemetry import EventRecord, json_lines_sink

RECORD = EventRecord(wall_seconds=1.0, monotonic_seconds=2.0, job="small", kind="staged", reason="a test")


@pytest.mark.parametrize("full", [True, False])
def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    path = Path("/dev/full") if full else tmp_path  # a folder
    write = json_lines_sink(path)
    write(RECORD)
    write(RECORD)
    problem = "No space left on device" if full else "Is a directory"
    assert capsys.readouterr().err == f"{path}: {problem}; events are not written there any more\n"

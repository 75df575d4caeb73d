"""A command beside a SeaweedFS of its own: what it finds, its exit code, and that nothing stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.s3_servers import BUCKET, seaweedfs

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 40
pytestmark = pytest.mark.processes

WRITES = """
import json, os, sys
from orchestrator.storage.opening import open_store
open_store("s3://bucket/demo").create("key", [b"x"])
print(json.dumps({"endpoint": os.environ["AWS_ENDPOINT_URL"], "profile": os.environ.get("AWS_PROFILE")}))
sys.exit(7)
"""
WAITS = """
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path(sys.argv[1], "ended").write_text(str(number))
    sys.exit(5)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
pathlib.Path(sys.argv[1], "started").touch()
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> None:
    """Skips where there is no SeaweedFS."""
    (tmp_path / "unused").mkdir()
    seaweedfs(tmp_path / "unused")


def beside(folder: Path, program: str) -> subprocess.Popen[str]:
    """The program beside a server that keeps its data in `folder`."""
    (folder / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.beside_seaweedfs", sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder / "temporary"), "AWS_PROFILE": "somebody-elses"},
        stdout=subprocess.PIPE,
        text=True,
    )


def left_of(folder: Path) -> list[str]:
    """Files, and command lines of processes, that have to do with the folder."""
    lines = [
        path.read_bytes().decode(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
    ]
    return [*map(str, (folder / "temporary").iterdir()), *(line for line in lines if str(folder / "temporary") in line)]


def test_the_command_finds_a_bucket_and_its_exit_code_counts(tmp_path: Path) -> None:
    with beside(tmp_path, WRITES) as process:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 7
    found = json.loads(output)
    assert found["endpoint"].startswith("http://127.0.0.1:")
    assert found["profile"] is None
    assert BUCKET == "bucket"
    assert left_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    with beside(tmp_path, WAITS) as process:
        until = time.monotonic() + LIMIT_SECONDS
        while not (tmp_path / "started").exists() and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number
    assert (tmp_path / "ended").read_text() == str(int(number))
    assert left_of(tmp_path) == []


def test_no_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.beside_seaweedfs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")

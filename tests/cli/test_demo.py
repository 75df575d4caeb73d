"""`orchestrator demo` at its edges: bad stores, and a signal. `make demo` runs all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.schedulers.leftovers import StartedNode
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 40


def nodes_of(state: Path) -> list[StartedNode]:
    """Those that the demo's run has started."""
    return [
        StartedNode(**node)
        for path in state.glob("orchestrator/demo-*/nodes.json")
        for node in json.loads(path.read_text())["nodes"]
    ]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_it_has_started(number: signal.Signals, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "demo", "--output", str(tmp_path / "output")],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "node joined" not in process.stderr.readline():
            assert process.poll() is None
        nodes = nodes_of(state)
        process.send_signal(number)
        _, talk = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode != 0
    assert nodes
    assert not [node for node in nodes if node.is_alive()]
    assert "Traceback" not in talk
    assert number != signal.SIGTERM or "ended by SIGTERM; nothing of the demo runs any more" in talk
    until = time.monotonic() + LIMIT_SECONDS
    while [node for node in nodes if Path(node.staging).exists()] and time.monotonic() < until:
        time.sleep(0.02)


def test_a_bad_store_is_refused_before_the_first_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("")
    result = command("demo", "--store", str(tmp_path / "file"), "--output", str(tmp_path / "output"))
    assert result.exit_code == 2
    assert "there is a file where the folder" in result.stderr
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("store", ["gcs", "folder"])
def test_make_demo_knows_its_stores(store: str) -> None:
    done = subprocess.run(
        ["make", "demo", f"STORE={store}", "VENV=/nosuch"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"make demo knows no STORE={store}: STORE=s3 puts the checkpoints into a bucket")

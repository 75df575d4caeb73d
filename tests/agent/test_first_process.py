"""An agent as process 1 of a container: orphans are collected, signals arrive, its exit status is the container's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, subprocess, sys, time
from orchestrator.agent.first_process import stand_before
assert os.getpid() == 1
stand_before()
folder = sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
orphan = "import os, time\\nif os.fork() == 0:\\n time.sleep(0.1)\\nelse:\\n os._exit(0)"
subprocess.run([sys.executable, "-c", orphan], check=True)
open(folder + "/up", "w").write(str(os.getpid()))
while True:
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    states = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] for pid in pids]
    open(folder + "/states.draft", "w").write(" ".join(states))
    os.rename(folder + "/states.draft", folder + "/states")
    time.sleep(0.05)
"""


def in_a_namespace(folder: Path) -> subprocess.Popen[bytes]:
    command = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", PROGRAM, str(folder))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ("unshare", "--pid", "--fork", "--mount-proc", "true")
    return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="no process namespace of our own can be had here")
def test_orphans_are_collected_and_signals_arrive(tmp_path: Path) -> None:
    process = in_a_namespace(tmp_path)
    try:
        until = time.monotonic() + 20
        states = tmp_path / "states"
        while not states.exists() or len(states.read_text().split()) != 2 or "Z" in states.read_text():
            assert time.monotonic() < until, states.exists() and states.read_text()
            time.sleep(0.02)
        assert (tmp_path / "up").read_text() == "2"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)  # process 1 of the namespace
        assert process.wait(10) == 7
    finally:
        process.kill()
        process.wait()

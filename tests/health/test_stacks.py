"""A process's stacks, asked for by a signal: written while it waits, never sent to one that does not listen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.health import stacks
from orchestrator.health.progress import GONE, read_processes
from orchestrator.health.stacks import Place, main_thread

LISTENS = """
import sys, threading
from pathlib import Path
from orchestrator.health import stacks
lock = threading.Lock()
def forever():
    lock.acquire()
    lock.acquire()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(stacks.offer(Path(sys.argv[1])), flush=True)
forever()
"""
DOES_NOT = "print('ready', flush=True)\nimport threading\nthreading.Event().wait()"
TAKEN = """
import signal, sys
from pathlib import Path
from orchestrator.health import stacks
signal.signal(stacks.SIGNAL, signal.SIG_IGN)
print(stacks.offer(Path(sys.argv[1])), flush=True)
"""


class Child:
    """A python process that has said its first line."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()
        self.pidfd = os.pidfd_open(self.process.pid)

    def end(self) -> None:
        os.close(self.pidfd)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Ended at the end."""
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


def ask_until(child: Child, path: Path, wanted: str) -> str:
    """What it writes once it is where it shall be."""
    until = time.monotonic() + 20
    while wanted not in stacks.read(path):
        assert time.monotonic() < until
        assert stacks.ask(child.process.pid, child.pidfd, path)
        time.sleep(0.05)
    return stacks.read(path)


def test_a_thread_that_waits_for_ever_says_where(tmp_path: Path, children: list[Child]) -> None:
    path = tmp_path / "stacks"
    child = Child(LISTENS, str(path))
    children.append(child)
    place = main_thread(ask_until(child, path, "in forever"), int(child.said))
    assert place == Place(waits=False, words="<string>:8 in forever")
    path.write_text("of an earlier time\n")
    assert "earlier" not in ask_until(child, path, "in forever"), "each answer stands alone"


def test_nothing_is_sent_to_one_that_does_not_listen(tmp_path: Path, children: list[Child]) -> None:
    """The signal's default would end it."""
    path = tmp_path / "stacks"
    path.touch()
    child = Child(DOES_NOT)
    children.append(child)
    assert not stacks.ask(child.process.pid, child.pidfd, path)
    assert child.process.poll() is None


def test_a_signal_that_the_script_has_taken_stays_its_own(tmp_path: Path, children: list[Child]) -> None:
    child = Child(TAKEN, str(tmp_path / "stacks"))
    children.append(child)
    assert child.said == "None"
    assert not (tmp_path / "stacks").exists()


TEXT = """Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/app/loader.py", line 3 in fetch

Current thread 0x00007f0000000001 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/{file}", line 979 in {function}
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward
  File "/app/train.py", line 71 in main
"""


@pytest.mark.parametrize(
    ("file", "function", "waits"),
    [
        ("autograd/graph.py", "_engine_run_backward", True),
        ("distributed/distributed_c10d.py", "all_reduce", True),
        ("nn/parallel/distributed.py", "_sync_buffers", True),
        ("nn/functional.py", "linear", False),
    ],
)
def test_who_waits_for_others(file: str, function: str, waits: bool) -> None:
    place = main_thread(TEXT.format(file=file, function=function), 0x7F0000000001)
    assert place is not None
    assert place.waits is waits
    assert place.words == f"{Path(file).name}:979 in {function}, called at train.py:71 in main"


@pytest.mark.parametrize("text", ["", "Thread 0x1 (most recent call first):\n", "nonsense\n  File nowhere\n"])
def test_what_is_not_told_is_not_known(text: str) -> None:
    assert main_thread(text, 1) is None


def test_a_process_is_read_with_all_that_it_started(children: list[Child]) -> None:
    code = (
        "import subprocess, sys\n"
        "one = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "print(one.pid, flush=True)\none.wait()"
    )
    child = Child(code)
    children.append(child)
    try:
        first = read_processes([child.process.pid])[0]
        until = time.monotonic() + 20
        while read_processes([child.process.pid])[0].processor_seconds < first.processor_seconds + 0.05:
            assert time.monotonic() < until
        assert first.state in "SR"
        assert not first.traced
    finally:
        os.kill(int(child.said), 9)
    assert read_processes([1 << 30]) == [GONE]

"""Where a process's Python is: asked for by a signal, written by `faulthandler` without the interpreter's lock.

The worker offers it (`offer`), its agent asks (`ask`) and reads the file (`main_thread`). It works while the main
thread is inside C code or waits for a lock for ever, but not while the process is stopped.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 5
"""Real-time signals have no use of their own, and libraries hardly take them. Its default would end the process, so it
is sent only to one whose kernel mask says that it is caught."""
FILE_BYTES_MAX = 1 << 20
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_WAITING_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
_WAITING_FUNCTIONS = ("_engine_run_backward",)
"""Where a rank is in Python while gradients are summed over all ranks: inside the backward pass."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a thread is."""

    waits: bool
    """In a call that waits for other ranks."""
    words: str


def offer(path: Path) -> int | None:
    """From now on this process writes its threads' stacks to the file when it gets SIGNAL: the main thread's number.

    None: the script has taken the signal; it keeps it.
    """
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL or listens(os.getpid()):
        return None
    file = path.open("ab", buffering=0)  # appending: the agent empties it before it asks
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    return threading.main_thread().ident


def listens(pid: int) -> bool:
    """Whether the process catches SIGNAL, as the kernel sees it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> SIGNAL - 1 & 1)


def ask(pid: int, pidfd: int, path: Path) -> bool:
    """Have the process write its stacks; whether it can be expected to."""
    if pidfd < 0 or not path.exists() or not listens(pid):
        return False
    path.open("wb").close()
    signal.pidfd_send_signal(pidfd, SIGNAL)
    return True


def read(path: Path) -> str:
    """What has been written."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""


def main_thread(text: str, ident: int) -> Place | None:
    """Where the thread with this number is; None if it is not told."""
    frames: list[tuple[str, str, str]] = []
    wanted = False
    for line in text.splitlines():
        thread = _THREAD.match(line)
        if thread is not None:
            wanted = int(thread[1], 16) == ident
            continue
        frame = _FRAME.match(line)
        if wanted and frame is not None:
            frames.append((frame[1], frame[2], frame[3]))
    return _place(frames) if frames else None


def _place(frames: list[tuple[str, str, str]]) -> Place:
    """By the innermost frame; outer ones of a library may well be around the script's own code."""
    file, _, function = frames[0]
    waits = any(part in file for part in _WAITING_FILES) or function in _WAITING_FUNCTIONS
    own = next((frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)), frames[0])
    words = _words(frames[0]) if own is frames[0] else f"{_words(frames[0])}, called at {_words(own)}"
    return Place(waits=waits, words=words)


def _words(frame: tuple[str, str, str]) -> str:
    file, line, function = frame
    return f"{Path(file).name}:{line} in {function}"

"""Where staged state lives: a folder in memory that is this user's alone. No torch.

Used by agents, `supervisor` and `training.attached`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

from orchestrator.errors import ConfigError


def private_name() -> str:
    """Of this user's folder under a memory folder that everybody may write to."""
    return f"orchestrator-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Make a staging folder that was named elsewhere, on another host maybe: private if it is in this user's folder."""
    root = next((parent for parent in folder.parents if parent.name == private_name()), None)
    if root is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        private_folder(root.parent, *folder.relative_to(root).parts)


def private_folder(memory: Path, *names: str) -> Path:
    """Our folder under a memory folder that everybody may write to: `<memory>/orchestrator-<uid>/<names>`, mode 0700.

    Raises ConfigError if somebody else made it first: what stands there would not be ours.
    """
    root = memory / private_name()
    try:
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{root} cannot be made: {error.strerror}; name another staging folder") from error
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{root} belongs to user {found.st_uid}; remove it, or name another staging folder")
    folder = root.joinpath(*names)
    try:
        root.chmod(0o700)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; name another staging folder") from error
    return folder


def make_locked(folder: Path) -> int:
    """Make a node's staging folder, and hold a lock on it for as long as this process lives; the lock."""
    while True:
        make_private(folder)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), folder.lstat()):
                return lock
        os.close(lock)  # somebody took it for a dead one's in the meantime, and has removed it


def remove_dead(root: Path, runs: str) -> list[Path]:
    """Remove the nodes' folders in the runs' folders of this pattern on which nobody holds a lock; which those were."""
    removed = []
    for folder in sorted(root.glob(f"{runs}/*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone already, or no folder
            continue
        with contextlib.suppress(OSError):  # its agent lives
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        os.close(lock)
        with contextlib.suppress(OSError):  # another node's is left
            folder.parent.rmdir()
    return removed

"""The kernel's log from now on, read without waiting: for errors that a driver writes nowhere else.

Readable for root and, unless `dmesg_restrict` forbids it, for everybody; in containers it mostly is not there. It is
the whole machine's: whoever reads it has to know which lines are about devices of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
RECORD_BYTES_MAX = 8192
RECORDS_MAX = 10_000
"""In one look: a kernel that logs without end must not hold its reader up."""


class KernelLog:
    """Opened at its end. Raises OSError where it may not be read."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._file, 0, os.SEEK_END)

    def new_lines(self) -> list[str]:
        """What has been written since the last call; each record of the kernel's is read at once."""
        lines: list[str] = []
        for _ in range(RECORDS_MAX):
            try:
                record = os.read(self._file, RECORD_BYTES_MAX)
            except BrokenPipeError:  # records were overwritten before they were read: the next one is the oldest left
                continue
            except OSError:  # nothing more for now
                break
            if not record:
                break
            lines += record.decode(errors="replace").splitlines()
        return lines

    def close(self) -> None:
        """Not read any more."""
        os.close(self._file)

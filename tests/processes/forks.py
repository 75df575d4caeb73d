"""Processes that are forks of this one: what it has imported, they need not import again."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork(act: Callable[[], object]) -> int:
    """A process that acts and ends, with 1 if it fails; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        act()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)

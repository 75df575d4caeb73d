"""Signals as notices: the handler records the number and returns; whoever looks at the record acts.

Installed in workers by `training.session`. Nothing is saved inside a handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from orchestrator.errors import ConfigError

NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def record_signals(record: Callable[[int], None]) -> None:
    """Call `record(number)` when this process gets one of NOTICE_SIGNALS. Raises ConfigError off the main thread.

    A handler that the script installed before is called after ours. Children made by fork (DataLoader workers)
    inherit the handler: in them it does nothing, so that a signal to the whole group does not end them early.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("call orchestrator.attach() in the main thread: signals are handled there")
    process = os.getpid()
    for number in NOTICE_SIGNALS:
        earlier = signal.getsignal(number)

        def handler(number: int, frame: FrameType | None, earlier: object = earlier) -> None:
            if os.getpid() != process:
                return
            record(number)
            if callable(earlier) and earlier is not signal.default_int_handler:
                earlier(number, frame)

        signal.signal(number, handler)

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

    A handler that the script installed before is called after ours. Children made by fork get back what was there
    before: they are the script's own affair (DataLoader workers are shielded by `training.loaders`).
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("call orchestrator.attach() in the main thread: signals are handled there")
    earlier_handlers = {number: signal.getsignal(number) for number in NOTICE_SIGNALS}
    for number in NOTICE_SIGNALS:
        earlier = earlier_handlers[number]

        def handler(number: int, frame: FrameType | None, earlier: object = earlier) -> None:
            record(number)
            if callable(earlier) and earlier is not signal.default_int_handler:
                earlier(number, frame)

        signal.signal(number, handler)

    def give_back() -> None:
        for number, earlier in earlier_handlers.items():
            signal.signal(number, earlier)

    os.register_at_fork(after_in_child=give_back)

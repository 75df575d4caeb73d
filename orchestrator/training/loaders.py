"""Keep DataLoader workers alive while the job leaves on a signal.

A signal sent to the whole process group (Slurm, shells) would end forked DataLoader workers first; the main process
would then fail in `next()` before it could save (torch resets their SIGTERM handler when they start).
"""

from __future__ import annotations

import signal
from typing import Any

import torch.utils.data._utils.signal_handling

from orchestrator.preemption.process import NOTICE_SIGNALS

_shielded = False


def shield_workers() -> None:
    """From now on, forked DataLoader workers ignore the signals that mean a notice; they end with their parent."""
    global _shielded  # noqa: PLW0603 (patched once per process)
    if _shielded:
        return
    _shielded = True
    module: Any = torch.utils.data._utils.signal_handling
    original = module._set_worker_signal_handlers

    def set_handlers(*arguments: Any) -> Any:
        result = original(*arguments)
        for number in NOTICE_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        return result

    module._set_worker_signal_handlers = set_handlers

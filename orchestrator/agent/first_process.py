"""What an agent does that is the first process of a container: a process of its own stands before it.

Linux gives orphans to process 1, and gives it no signal that it does not handle. The agent waits for its own children
only; so process 1 collects whoever ends, passes signals on to the agent, and ends as the agent ends.
"""

from __future__ import annotations

import os
import signal

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def stand_before() -> None:
    """Goes on in a child; this process never returns. Call it before there are threads."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # process 1 is not given what it does not handle yet
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return
    for number in PASSED_ON:
        signal.signal(number, lambda which, _: _pass_on(agent, which))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    while True:
        ended, status = os.wait()
        if ended == agent:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _pass_on(agent: int, number: int) -> None:
    try:
        os.kill(agent, number)
    except ProcessLookupError:
        return  # it has just ended, and is about to be collected

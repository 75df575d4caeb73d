"""What stands between an agent and the user's command for a moment: `python -I -S exec_worker.py AGENT_PID CMD…`.

It puts the worker into a process group of its own (so that the worker can be ended with everything it started),
asks the kernel to kill it when its agent dies (nobody would watch it), and becomes the command. Standard library
only: it must start in milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command; exit 127 with one sentence if that is not possible."""
    agent, command = int(sys.argv[1]), sys.argv[2:]
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        sys.exit("the agent is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]!r}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()

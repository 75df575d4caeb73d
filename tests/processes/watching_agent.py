"""`python -m tests.processes.watching_agent < settings`: an agent that looks at its devices all the time."""

from __future__ import annotations

import sys

from orchestrator.agent import hostwatch
from orchestrator.agent.__main__ import main

if __name__ == "__main__":
    hostwatch.DEVICE_LOOK_SECONDS = 0.2
    sys.exit(main())

"""`python -m tests.processes.stopping_run MARKER POINT …`: `orchestrator …`; its agents stand still there."""

from __future__ import annotations

import sys

from orchestrator.schedulers import local

if __name__ == "__main__":
    local.AGENT_COMMAND = (sys.executable, "-m", "tests.processes.stopping_agent", sys.argv[1], sys.argv[2])  # type: ignore[assignment]
    del sys.argv[1:3]
    from orchestrator.cli import main

    main()

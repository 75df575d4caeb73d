"""`python -m tests.processes.stopping_agent MARKER "POINT [rank=R] [step=S]" < settings`: stands still at the point."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.agent.__main__ import main
from orchestrator.testing.faults import parse

if __name__ == "__main__":
    parse(sys.argv[2]).stop(once=Path(sys.argv[1]))
    sys.exit(main())

"""`python -m orchestrator`: the command line, for where the console script is not on the PATH."""

from __future__ import annotations

from orchestrator.cli import main

if __name__ == "__main__":
    main()

"""The words that begin a real run of a job in the tests."""

from __future__ import annotations

import sys

RUN = (sys.executable, "-m", "orchestrator", "run", "--notices", "none")
"""No test listens to the cloud that it may run on."""

"""docs/protocol.md shows the transition table that the code has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_part_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "protocol-doc"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr

"""How a finding about a rank's loss stands in its control block: its numbers and their crc32c, in a cell of fixed size.

The worker writes it and the agent reads it at any time; one that is not whole yet is told by its digest.
"""

from __future__ import annotations

import math
import struct

import crc32c

from orchestrator.health.loss import Finding, LossState

CELL_BYTES = 56
_BODY = struct.Struct("<QQQddd")  # state, step, good step + 1 (0: None), value, usual, bound (not a number: None)
_DIGEST = struct.Struct("<I")


def pack(finding: Finding) -> bytes:
    """What is written into a cell; a little shorter than that."""
    body = _BODY.pack(
        finding.state,
        finding.step,
        0 if finding.good_step is None else finding.good_step + 1,
        finding.value,
        math.nan if finding.usual is None else finding.usual,
        math.nan if finding.bound is None else finding.bound,
    )
    return body + _DIGEST.pack(crc32c.crc32c(body))


def unpack(cell: bytes | memoryview) -> Finding | None:
    """The finding in a cell; None: it is not whole yet."""
    body = bytes(cell[: _BODY.size])
    if _DIGEST.unpack_from(cell, _BODY.size)[0] != crc32c.crc32c(body):
        return None
    state, step, good, value, usual, bound = _BODY.unpack(body)
    return Finding(
        state=LossState(state),
        step=step,
        value=value,
        usual=None if math.isnan(usual) else usual,
        bound=None if math.isnan(bound) else bound,
        good_step=None if good == 0 else good - 1,
    )

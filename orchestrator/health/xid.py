"""Errors that NVIDIA's driver writes into the kernel's log ("Xid"), and what they say of a device. Pure.

The codes are those of NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, for A100 and newer). Those that it
answers with a reset of the device or of the machine condemn the node, which nobody here may reset; what it calls the
application's is told by the worker's own end. All others are told. Written from that documentation, without a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.health.trouble import Trouble

FALLEN_OFF = 79
RECOVERY_ACTION = 154
WORDS_MAX = 200

CONDEMNING: Mapping[int, str] = MappingProxyType(
    {
        46: "it stopped processing",
        48: "an uncorrectable error of its memory",
        62: "its micro-controller halted",
        64: "a row of its memory could not be replaced",
        74: "an error of NVLink",
        FALLEN_OFF: "it has fallen off the bus",
        94: "an uncorrectable error of its memory, contained to one process",
        95: "an uncorrectable error of its memory, not contained",
        110: "a security fault",
        119: "its firmware does not answer",
        120: "an error of its firmware",
        136: "a link of NVLink could not be trained",
        140: "an uncorrectable error of its memory that nobody could be told of",
        143: "it could not be initialised",
        158: "a fatal time-out",
    }
)
"""The catalogue: reset the device (RESET_GPU), or the machine (79), or, by its work flow, one of them (48, 74).

94 asks for a restart of the process only, but it is the error that nvidia-smi counts as uncorrected (`gpu`). Not here,
though RESET_GPU: 155 (also said of a link that sleeps), 156 (a part is retired, as by 63) and 109 (the application's,
for NVIDIA's device plugin for Kubernetes). Where they need a reset all the same, drivers since R565 add a 154.
"""

OF_THE_APPLICATION = frozenset({11, 13, 25, 31, 32, 37, 43, 45, 68, 69, 80})
"""The catalogue: look at the application; 43, 45: what the end of one leaves; 68: as NVIDIA's device plugin has it.

Never told: the worker's own end tells it better, and each end by SIGKILL leaves a 45.
"""

_BUS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f])?")
_ADDRESS = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_XID = re.compile(rf"NVRM: Xid \({_ADDRESS}[^)]*\): ([0-9]{{1,9}})(?:,\s*(.*))?$")
_FALLEN_OFF = re.compile(rf"NVRM: GPU (?:at )?{_ADDRESS}(?:\.\d)?:? (?:GPU )?has fallen off the bus")
_CHANGED_TO = re.compile(r"changed from .* to \S+ \(([^)]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One error, as the driver wrote it."""

    code: int
    address: str
    """Of the device on the bus, see `bus_address`."""
    words: str


def bus_address(text: str) -> str | None:
    """One spelling for 0000:3B:00, 00000000:3B:00.0 and 0000:3b:00.0: "0000:3b:00"; None: it is no address."""
    found = _BUS.fullmatch(text.strip().lower())
    return None if found is None else f"{int(found[1], 16):04x}:{found[2]}:{found[3]}"


def parse(lines: Iterable[str]) -> list[Xid]:
    """The errors among lines of the kernel's log."""
    return [xid for line in lines if (xid := _parse_line(line)) is not None]


def _parse_line(line: str) -> Xid | None:
    found = _XID.search(line)
    if found is not None:
        words = (found[3] or "").strip()[:WORDS_MAX]
        return Xid(code=int(found[2]), address=bus_address(found[1]) or "", words=words)
    fallen = _FALLEN_OFF.search(line)
    return None if fallen is None else Xid(code=FALLEN_OFF, address=bus_address(fallen[1]) or "", words="")


def judge(xid: Xid) -> Trouble | None:
    """What follows from an error; None: nothing that a node can be blamed for."""
    what = f"device {xid.address}: Xid {xid.code}"
    said = f" ({xid.words})" if xid.words else ""
    if xid.code == RECOVERY_ACTION:
        return _judge_action(what, xid)
    if xid.code in CONDEMNING:
        return Trouble(words=f"{what}, {CONDEMNING[xid.code]}{said}", condemns=True)
    if xid.code in OF_THE_APPLICATION:
        return None
    return Trouble(words=f"{what}{said}")


def _judge_action(what: str, xid: Xid) -> Trouble | None:
    """154 sums up what the driver asks for after other errors."""
    found = _CHANGED_TO.search(xid.words)
    action = found[1] if found is not None else ""
    if action.lower() == "none":
        return None
    return Trouble(words=f"{what}: the driver asks for {action or xid.words}", condemns=needs_reset(action))


def needs_reset(action: str) -> bool:
    """Whether a recovery action, in the driver's words, resets the device or restarts the machine."""
    return any(word in action.lower() for word in ("reset", "reboot"))

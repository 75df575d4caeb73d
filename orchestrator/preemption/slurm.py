"""What `scontrol show` says of a node and of a job, as notices. Parsers only: the Slurm scheduler asks.

A preempted job gets SIGTERM at once and is ended when its grace is over; `EndTime` says when, in the cluster's zone.
"""

from __future__ import annotations

import re

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption.base import NOTHING, Found, Reading, rfc3339_seconds, short, time_left

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=(\S*)")
_REASON = re.compile(r"(?:^|\s)Reason=(.*?)(?:\s\[[^\[\]]*@[^\[\]]*\])?\s*$", re.MULTILINE)
GONE = ("DOWN", "FAIL", "FAILING", "POWERING_DOWN", "POWER_DOWN", "REBOOT_ISSUED")
"""States and flags after which the node goes, or has gone."""
LEAVING = ("DRAIN", "DRAINING", "DRAINED", "REBOOT_REQUESTED")
"""What runs may end by itself; nothing new starts."""
UNSEEN = ("NOT_RESPONDING", "UNKNOWN")
PREEMPTING_REASONS = ("k8s: cordon:", "k8s: pod terminated: cordon:")
"""CoreWeave's SUNK: the node is taken away at the end of a window."""
_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
}
_LEAD_SECONDS_MAX = 30 * 86400.0


def parse_node(text: str) -> Reading:
    """`scontrol show node NAME`, in one line or several. Raises SourceError."""
    state = dict(_PAIR.findall(text)).get("State", "")
    if not re.fullmatch(r"[A-Z_]+[*~#!%$@^-]?(\+[A-Z_]+[*~#!%$@^-]?)*", state):
        raise SourceError(f"no node's state: {short(text)!r:.80}")
    words = {word.rstrip("*~#!%$@^-") for word in state.split("+")}
    words |= {_SUFFIXES[word[-1]] for word in state.split("+") if word[-1] in _SUFFIXES}
    matched = _REASON.search(text)
    reason = short(matched[1]) if matched else ""
    said = f"{state}" + (f" ({reason})" if reason else "")
    if reason.startswith(PREEMPTING_REASONS):
        return Reading(found=(Found(event_id="cordon", kind=NoticeKind.PREEMPT, words=said),))
    for event_id, names, kind in (
        ("gone", GONE, NoticeKind.MAINTENANCE),
        ("drain", LEAVING, NoticeKind.MAINTENANCE),
        ("unseen", UNSEEN, NoticeKind.HINT),
    ):
        if words & set(names):
            return Reading(found=(Found(event_id=event_id, kind=kind, words=said),))
    return NOTHING


def parse_job(text: str, now_wall_seconds: float, zone_hours: float) -> Reading:
    """`scontrol show job ID`: whether Slurm has chosen it to make room. Raises SourceError.

    `zone_hours`: the cluster's offset from UTC, because Slurm writes its times without one.
    """
    fields = dict(_PAIR.findall(text))
    state = fields.get("JobState", "")
    if not re.fullmatch(r"[A-Z_]+", state):
        raise SourceError(f"no job's state: {short(text)!r:.80}")
    when = fields.get("PreemptTime", "None")
    if state != "PREEMPTED" and when in ("None", "Unknown", "N/A", ""):
        return NOTHING
    left: float | None = None
    remark, end = "", fields.get("EndTime", "Unknown")
    if end not in ("Unknown", "None", "N/A"):
        ends = rfc3339_seconds(end, unmarked_hours=zone_hours)
        left, remark = time_left(ends, now_wall_seconds, _LEAD_SECONDS_MAX)
    words = f"preempted at {when}, ends at {end}{remark}"
    found = Found(event_id="preempted", kind=NoticeKind.PREEMPT, words=words, remaining_seconds=left, version=end)
    return Reading(found=(found,))

"""Notices that somebody sends or writes down: the small JSON of ours, and two clouds' events as they are.

    {"kind": "preempt", "seconds": 120, "id": "maintenance-7", "reason": "rack 7 is moved"}

`kind` is preempt (if it is left out), maintenance, hint or cancel; `seconds` or `deadline` (RFC 3339) or neither; `id`
makes two sendings one notice, and is what a cancel names. Also taken: an EventBridge event of AWS and the preemption
event of Oracle's cloud, which name a machine: they count only where that is this one. Pure; the agent's port and
`preemption.watched_file` hand the bytes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption.base import Found, digest_id, json_of, rfc3339_seconds, short, time_left, word_of

BODY_BYTES_MAX = 64 << 10
LEAD_SECONDS_MAX = 30 * 86400.0
CLOUD_LEAD_SECONDS = 120.0
"""What AWS and Oracle's cloud announce ahead; their events do not say when the machine goes."""
_FIELDS = {"kind", "seconds", "deadline", "id", "reason"}
_OCI_EVENT = "com.oraclecloud.computeapi.instancepreemptionaction"


def parse_pushed(body: bytes, now_wall_seconds: float, own_id: str | None) -> Found | None:
    """The notice of a request's body; its kind may be CANCEL. None: it is about something else.

    `own_id` is this machine's id at its cloud, if it is known. Raises SourceError for what is no such body, and for an
    event that names a machine where it is not known which one this is.
    """
    record = json_of(body)
    if not isinstance(record, dict):
        raise SourceError("the body is no JSON object")
    if "detail-type" in record:
        return _eventbridge(record, now_wall_seconds, own_id)
    if "eventType" in record:
        return _oci(record, now_wall_seconds, own_id)
    return parse_own(record, now_wall_seconds)


def parse_own(record: Mapping[str, Any], now_wall_seconds: float) -> Found:
    """Our own JSON. Raises SourceError; a field that is not known is one, too."""
    unknown = sorted(record.keys() - _FIELDS)
    if unknown:
        raise SourceError(f"there is no field {short(unknown[0])!r}; there are {', '.join(sorted(_FIELDS))}")
    texts = {name: word_of(record, name) for name in _FIELDS - {"seconds"} if name in record}
    try:
        kind = NoticeKind(texts.get("kind", "preempt"))
    except ValueError as error:
        raise SourceError(f"kind: {texts['kind']!r} is none of {', '.join(NoticeKind)}") from error
    if kind is NoticeKind.CANCEL and "id" not in texts:
        raise SourceError("id: a cancel has to name the notice that it withdraws")
    left, remark = _time(record, texts, now_wall_seconds)
    said = texts.get("reason", "a notice")
    event_id = texts.get("id") or digest_id(*(f"{name}={record[name]}" for name in sorted(record)))
    return Found(event_id=event_id, kind=kind, words=said + remark, remaining_seconds=left)


def _time(record: Mapping[str, Any], texts: Mapping[str, str], now_wall_seconds: float) -> tuple[float | None, str]:
    if "seconds" in record and "deadline" in record:
        raise SourceError("seconds and deadline: give one of them")
    if "deadline" in texts:
        return time_left(rfc3339_seconds(texts["deadline"]), now_wall_seconds, LEAD_SECONDS_MAX)
    if "seconds" not in record:
        return None, ""
    seconds = record["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LEAD_SECONDS_MAX:
        raise SourceError(f"seconds: a number from 0 to {LEAD_SECONDS_MAX:.0f}")
    return float(seconds), ""


def _eventbridge(record: Mapping[str, Any], now_wall_seconds: float, own_id: str | None) -> Found | None:
    kind, source = word_of(record, "detail-type"), word_of(record, "source")
    detail = record.get("detail")
    if (source, kind) == ("aws.ec2", "EC2 Spot Instance Interruption Warning"):
        if not _is_own(word_of(detail, "instance-id"), own_id):
            return None
        action, time = word_of(detail, "instance-action"), word_of(record, "time")
        left, remark = time_left(rfc3339_seconds(time) + CLOUD_LEAD_SECONDS, now_wall_seconds, CLOUD_LEAD_SECONDS)
        if action == "hibernate":
            left, remark = 0.0, ": hibernation begins at once"
        found, words, seconds = NoticeKind.PREEMPT, f"AWS: {action}, warned at {time}{remark}", left
    elif (source, kind) == ("aws.ec2", "EC2 Instance Rebalance Recommendation"):
        if not _is_own(word_of(detail, "instance-id"), own_id):
            return None
        found, words, seconds = NoticeKind.HINT, "AWS: rebalance recommended", None
    elif (source, kind) == ("aws.autoscaling", "EC2 Instance-terminate Lifecycle Action"):
        if not _is_own(word_of(detail, "EC2InstanceId"), own_id):
            return None
        found, words, seconds = NoticeKind.MAINTENANCE, "AWS: Auto Scaling terminates it", None
    else:
        return None
    return Found(event_id=word_of(record, "id"), kind=found, words=words, remaining_seconds=seconds)


def _oci(record: Mapping[str, Any], now_wall_seconds: float, own_id: str | None) -> Found | None:
    if word_of(record, "eventType").lower() != _OCI_EVENT:
        return None
    data = record.get("data")
    if not _is_own(word_of(data, "resourceId"), own_id):
        return None
    details = data.get("additionalDetails") if isinstance(data, dict) else None
    action, time = word_of(details, "preemptionAction"), word_of(record, "eventTime")
    left, remark = time_left(rfc3339_seconds(time) + CLOUD_LEAD_SECONDS, now_wall_seconds, CLOUD_LEAD_SECONDS)
    return Found(
        event_id=word_of(record, "eventID"),
        kind=NoticeKind.PREEMPT,
        words=f"OCI: {action}, said at {time}{remark}",
        remaining_seconds=left,
    )


def _is_own(named: str, own_id: str | None) -> bool:
    if own_id is None:
        raise SourceError(f"the event is about {named}, and this node does not know its own id")
    return named == own_id

"""Notices of AWS, from the instance's metadata (IMDSv2): spot, rebalance, scheduled events, Auto Scaling.

Read at https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and in
aws-node-termination-handler. Only Auto Scaling's lifecycle hooks are acknowledged (`preemption.autoscaling`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption import autoscaling
from orchestrator.preemption.base import (
    EVENTS_MAX,
    NOTHING,
    Found,
    Reading,
    Source,
    digest_id,
    http_date_seconds,
    json_of,
    rfc3339_seconds,
    text_of,
    time_left,
    word_of,
)
from orchestrator.preemption.metadata import Metadata, TokenKeys

ADDRESS = "http://169.254.169.254"
EVERY_SECONDS = 2.0
LEAD_SECONDS = 120.0
"""What a spot interruption is announced ahead; never more."""
SCHEDULED_SECONDS_MAX = 400 * 86400.0
TOKEN_HEADER = "X-aws-ec2-metadata-token"
KEYS = "/latest/meta-data/"

_SPOT_ACTIONS = ("terminate", "stop", "hibernate")
_LEAVING_CODES = ("instance-stop", "system-reboot", "instance-reboot", "instance-retirement")
_LIFECYCLE = re.compile(r"[A-Za-z]+(:[A-Za-z]+)*")


def sources(
    metadata: Metadata, wall: Callable[[], float], monotonic: Callable[[], float], every_seconds: float = EVERY_SECONDS
) -> list[Source]:
    """What is looked at."""
    instance = TokenKeys(metadata, monotonic, TOKEN_HEADER)

    async def complete(_: str) -> None:
        """The hooks of the group that terminates this instance. In a rehearsal the same service stands for the API."""
        instance_id, region = await _word(instance, "instance-id"), await _word(instance, "placement/region")
        rehearsal = None if metadata.base_url == ADDRESS else metadata.base_url
        await asyncio.to_thread(autoscaling.complete, instance_id, region, rehearsal)

    def source(
        key: str,
        parse: Callable[[bytes, float], Reading],
        *,
        withdraws: bool,
        acknowledge: Callable[[str], Awaitable[None]] | None = None,
    ) -> Source:
        async def look() -> Reading:
            body = await instance.read(KEYS + key)
            return NOTHING if body is None else parse(body, wall())

        return Source(
            cloud="aws",
            key=key,
            look=look,
            every_seconds=every_seconds,
            withdraws=withdraws,
            acknowledge=acknowledge,
        )

    return [
        source("spot/instance-action", parse_instance_action, withdraws=False),
        source("events/recommendations/rebalance", parse_rebalance, withdraws=False),
        source("events/maintenance/scheduled", parse_scheduled, withdraws=True),
        source("autoscaling/target-lifecycle-state", parse_lifecycle_state, withdraws=False, acknowledge=complete),
    ]


async def _word(keys: TokenKeys, key: str) -> str:
    """A key that every instance has. Raises SourceError."""
    body = await keys.read(KEYS + key)
    text = "" if body is None else text_of(body)
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", text):
        raise SourceError(f"{KEYS}{key}: no word: {text!r:.80}")
    return text


# ----------------------------------------------------------------------------------------------------- parsers


def parse_instance_action(body: bytes, now_wall_seconds: float) -> Reading:
    """`{"action":"terminate","time":"2017-09-18T08:22:00Z"}`. Hibernation begins at once. Raises SourceError."""
    record = json_of(body)
    action, time = word_of(record, "action"), word_of(record, "time")
    if action not in _SPOT_ACTIONS:
        raise SourceError(f"an action that is not known: {action!r}")
    left, remark = time_left(rfc3339_seconds(time), now_wall_seconds, LEAD_SECONDS)
    if action == "hibernate":
        left, remark = 0.0, ": hibernation begins at once"
    return Reading(
        found=(
            Found(
                event_id=digest_id(action, time),
                kind=NoticeKind.PREEMPT,
                words=f"{action} at {time}{remark}",
                remaining_seconds=left,
            ),
        )
    )


def parse_rebalance(body: bytes, _: float) -> Reading:
    """`{"noticeTime":"2020-10-26T14:14:14Z"}`: the risk of an interruption has risen. Raises SourceError."""
    time = word_of(json_of(body), "noticeTime")
    rfc3339_seconds(time)
    words = f"rebalance recommended at {time}"
    return Reading(found=(Found(event_id=digest_id(time), kind=NoticeKind.HINT, words=words),))


def parse_scheduled(body: bytes, now_wall_seconds: float) -> Reading:
    """An array of scheduled events; those in the state completed or canceled stand no longer. Raises SourceError."""
    records = json_of(body)
    if not isinstance(records, list) or len(records) > EVENTS_MAX:
        raise SourceError("the scheduled events are no list, or too many")
    found, problems = [], []
    for record in records:
        try:
            event = _scheduled(record, now_wall_seconds)
        except SourceError as error:
            problems.append(str(error))
            continue
        if event is not None:
            found.append(event)
    return Reading(found=tuple(found), problems=tuple(problems))


def _scheduled(record: object, now_wall_seconds: float) -> Found | None:
    state, code, event_id = (word_of(record, name) for name in ("State", "Code", "EventId"))
    if state in ("completed", "canceled"):
        return None
    if state != "active":
        raise SourceError(f"a state that is not known: {state!r}")
    time = word_of(record, "NotBefore")
    left, remark = time_left(http_date_seconds(time), now_wall_seconds, SCHEDULED_SECONDS_MAX)
    return Found(
        event_id=event_id,
        kind=NoticeKind.MAINTENANCE if code in _LEAVING_CODES else NoticeKind.HINT,
        words=f"{code} not before {time}{remark}",
        remaining_seconds=left,
        version=time,
    )


def parse_lifecycle_state(body: bytes, _: float) -> Reading:
    """The state that Auto Scaling will bring the instance to; `Terminated` is a notice. Raises SourceError."""
    state = text_of(body)
    if not _LIFECYCLE.fullmatch(state):
        raise SourceError(f"not a lifecycle state: {state!r}")
    if state != "Terminated":
        return NOTHING
    return Reading(
        found=(Found(event_id="terminated", kind=NoticeKind.MAINTENANCE, words="Auto Scaling terminates it"),)
    )

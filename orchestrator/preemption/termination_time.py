"""Notices of clouds whose metadata have one key for it, a time: Alibaba, Tencent, Volcengine and BytePlus.

A key that is not there (404) or is empty means that nothing is announced. Nothing is withdrawn or acknowledged.
Read at the clouds' pages on spot instances; none of them could be run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from orchestrator.core.messages import NoticeKind
from orchestrator.preemption.base import NOTHING, Found, Reading, Source, digest_id, rfc3339_seconds, text_of, time_left
from orchestrator.preemption.metadata import Metadata, TokenKeys

ALIBABA_ADDRESS = "http://100.100.100.200"
ALIBABA_KEY = "/latest/meta-data/instance/spot/termination-time"
ALIBABA_TOKEN_HEADER = "X-aliyun-ecs-metadata-token"
TENCENT_ADDRESS = "http://metadata.tencentyun.com"
TENCENT_KEY = "/latest/meta-data/spot/termination-time"
VOLCENGINE_ADDRESS = "http://100.96.0.96"
VOLCENGINE_KEY = "/latest/spot_instance_termination_time"
EVERY_SECONDS = 2.0

Look = Callable[[], Awaitable[Reading]]


def alibaba(
    metadata: Metadata, wall: Callable[[], float], monotonic: Callable[[], float], every_seconds: float
) -> list[Source]:
    """Five minutes ahead, in UTC."""
    keys = TokenKeys(metadata, monotonic, ALIBABA_TOKEN_HEADER)

    async def look() -> Reading:
        body = await keys.read(ALIBABA_KEY)
        return NOTHING if body is None else parse_alibaba(body, wall())

    return [
        Source(cloud="alibaba", key="spot/termination-time", look=look, every_seconds=every_seconds, withdraws=False)
    ]


def tencent(metadata: Metadata, wall: Callable[[], float], every_seconds: float) -> list[Source]:
    """Two minutes ahead, in China's time and without a mark."""
    look = _plain(metadata, TENCENT_KEY, parse_tencent, wall)
    return [
        Source(cloud="tencent", key="spot/termination-time", look=look, every_seconds=every_seconds, withdraws=False)
    ]


def volcengine(metadata: Metadata, wall: Callable[[], float], every_seconds: float) -> list[Source]:
    """Five minutes ahead, in UTC; BytePlus is the same service."""
    look = _plain(metadata, VOLCENGINE_KEY, parse_volcengine, wall)
    key = "spot_instance_termination_time"
    return [Source(cloud="volcengine", key=key, look=look, every_seconds=every_seconds, withdraws=False)]


def _plain(metadata: Metadata, path: str, parse: Callable[[bytes, float], Reading], wall: Callable[[], float]) -> Look:
    async def look() -> Reading:
        answer = await metadata.get(path)
        if answer.status == HTTPStatus.NOT_FOUND:
            return NOTHING
        if answer.status != HTTPStatus.OK:
            raise metadata.refused(path, answer)
        return parse(answer.body, wall())

    return look


# ----------------------------------------------------------------------------------------------------- parsers


def parse_alibaba(body: bytes, now_wall_seconds: float) -> Reading:
    """`2015-01-05T18:02:00Z`, or empty. Raises SourceError."""
    return _reading(body, now_wall_seconds, lead_seconds=300.0, unmarked_hours=None)


def parse_tencent(body: bytes, now_wall_seconds: float) -> Reading:
    """`2018-08-18 12:05:33`, which is UTC+8 without saying so, or empty. Raises SourceError."""
    return _reading(body, now_wall_seconds, lead_seconds=120.0, unmarked_hours=8.0)


def parse_volcengine(body: bytes, now_wall_seconds: float) -> Reading:
    """A time in UTC, marked or not, or empty. Raises SourceError."""
    return _reading(body, now_wall_seconds, lead_seconds=300.0, unmarked_hours=0.0)


def _reading(body: bytes, now_wall_seconds: float, *, lead_seconds: float, unmarked_hours: float | None) -> Reading:
    time = text_of(body)
    if not time:
        return NOTHING
    left, remark = time_left(rfc3339_seconds(time, unmarked_hours=unmarked_hours), now_wall_seconds, lead_seconds)
    words = f"released at {time}{remark}"
    found = Found(event_id=digest_id(time), kind=NoticeKind.PREEMPT, words=words, remaining_seconds=left)
    return Reading(found=(found,))

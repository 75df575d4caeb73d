"""Alibaba, Tencent, Volcengine and BytePlus: one key, one time, three ways to write it. With a service: `table`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.core.messages import NoticeKind
from orchestrator.errors import SourceError
from orchestrator.preemption import termination_time
from orchestrator.preemption.base import Reading, rfc3339_seconds

NOW = rfc3339_seconds("2018-08-18T04:04:33Z")
ALIBABA = termination_time.parse_alibaba
TENCENT = termination_time.parse_tencent
VOLCENGINE = termination_time.parse_volcengine


@pytest.mark.parametrize(
    ("parse", "body", "left"),
    [
        (ALIBABA, b"2018-08-18T04:09:33Z", 300.0),
        (TENCENT, b"2018-08-18 12:05:33", 60.0),  # UTC+8: taken as UTC it would be eight hours away
        (TENCENT, b"2018-08-18 04:05:33", None),  # eight hours ago
        (VOLCENGINE, b"2018-08-18T04:06:33Z\n", 120.0),
        (VOLCENGINE, b"2018-08-18 04:06:33", 120.0),
        (ALIBABA, b"2019-08-18T04:09:33Z", 300.0),
    ],
)
def test_times(parse: Callable[[bytes, float], Reading], body: bytes, left: float | None) -> None:
    (found,) = parse(body, NOW).found
    assert (found.kind, found.remaining_seconds) == (NoticeKind.PREEMPT, left)


@pytest.mark.parametrize("parse", [ALIBABA, TENCENT, VOLCENGINE])
def test_an_empty_answer_means_that_nothing_is_announced(parse: Callable[[bytes, float], Reading]) -> None:
    assert parse(b"", NOW) == Reading()


@pytest.mark.parametrize("body", [b"soon", b"<html>", b"\xff", b"2018-08-18", b"2018-13-18T04:04:33Z", b"1534565073"])
@pytest.mark.parametrize("parse", [ALIBABA, TENCENT, VOLCENGINE])
def test_garbage_is_a_trouble(parse: Callable[[bytes, float], Reading], body: bytes) -> None:
    with pytest.raises(SourceError):
        parse(body, NOW)


def test_an_unmarked_time_of_alibaba_is_a_trouble() -> None:
    with pytest.raises(SourceError):
        ALIBABA(b"2018-08-18 04:09:33", NOW)

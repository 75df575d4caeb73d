"""What is told of a reading, decided purely; and a watcher that nothing ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from orchestrator.core.messages import NoticeKind, NoticeReceived
from orchestrator.errors import SourceError
from orchestrator.preemption.base import Found, Reading, Source, http_date_seconds, rfc3339_seconds
from orchestrator.preemption.watching import AHEAD_SECONDS, NOTHING_TOLD, Teller, Told, changes
from tests.preemption.listening import listening, until

TELLER = Teller(node="node-1", source="cloud key", withdraws=True, grace_seconds=25.0)


def event(
    left: float | None = 60.0, version: str = "", kind: NoticeKind = NoticeKind.PREEMPT, event_id: str = "e"
) -> Reading:
    return Reading(found=(Found(event_id=event_id, kind=kind, words="words", remaining_seconds=left, version=version),))


def play(*readings: tuple[float, Reading], teller: Teller = TELLER) -> list[tuple[str, str, float | None]]:
    """(kind, id, seconds left) of everything that is told."""
    told: Mapping[str, Told] = NOTHING_TOLD
    notices: list[NoticeReceived] = []
    for now, reading in readings:
        told, more = changes(told, reading, teller, now)
        notices += more
    return [(str(one.kind), one.notice_id.removeprefix("cloud key "), one.remaining_seconds) for one in notices]


def test_an_event_is_told_once_however_the_clock_of_the_source_jumps() -> None:
    assert play((0, event(60)), (1, event(20)), (2, event(100))) == [("preempt", "e", 60)]


def test_a_time_that_was_changed_is_told_before_the_earlier_telling_is_withdrawn() -> None:
    assert play((0, event(60, "a")), (10, event(20, "b")), (11, event(19, "b"))) == [
        ("preempt", "e", 60),
        ("preempt", "e #2", 20),
        ("cancel", "e", None),
    ]


def test_an_event_that_begins_keeps_its_time() -> None:
    assert play((0, event(60, "a")), (10, event(None, "started"))) == [("preempt", "e", 60)]


def test_without_a_time_the_grace_is_taken() -> None:
    assert play((0, event(None))) == [("preempt", "e", 25.0)]


def test_what_disappears_is_withdrawn_and_may_come_again() -> None:
    assert play((0, event(60)), (1, Reading()), (2, event(58)), (3, Reading())) == [
        ("preempt", "e", 60),
        ("cancel", "e", None),
        ("preempt", "e", 58),
        ("cancel", "e", None),
    ]


def test_what_a_source_does_not_withdraw_stands() -> None:
    teller = Teller(node="node-1", source="cloud key", withdraws=False, grace_seconds=25.0)
    assert play((0, event(60)), (1, Reading()), (2, event(58)), teller=teller) == [("preempt", "e", 60)]


def test_nothing_is_withdrawn_where_something_could_not_be_read() -> None:
    assert play((0, event(60)), (1, Reading(problems=("?",))), (2, event(58))) == [("preempt", "e", 60)]


def test_one_of_two_is_withdrawn() -> None:
    both = Reading(found=event(60).found + event(90, event_id="f").found)
    assert play((0, both), (1, event(89, event_id="f"))) == [
        ("preempt", "e", 60),
        ("preempt", "f", 90),
        ("cancel", "e", None),
    ]


def test_maintenance_of_next_week_is_a_hint_until_it_is_near() -> None:
    far = event(AHEAD_SECONDS + 100, "a", NoticeKind.MAINTENANCE)
    assert play((0, far), (50, far), (101, far), (102, far)) == [
        ("hint", "e", AHEAD_SECONDS + 100),
        ("maintenance", "e #2", AHEAD_SECONDS - 1),
        ("cancel", "e", None),
    ]


def test_a_preemption_is_never_put_off() -> None:
    assert play((0, event(AHEAD_SECONDS + 100)))[0][0] == "preempt"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:10Z", 10),
        ("1970-01-01T00:00:10.999z", 10),
        ("1970-01-01T02:00:10+02:00", 10),
        ("1969-12-31T22:30:10-01:30", 10),
    ],
)
def test_rfc3339(text: str, seconds: float) -> None:
    assert rfc3339_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["1970-01-01T00:00:10", "1970-02-30T00:00:00Z", "1970-01-01T00:00:10+99:99", "", "1970-01-01", "\u0661970"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(SourceError):
        rfc3339_seconds(text)


@pytest.mark.parametrize("text", ["1 Jan 1970 00:00:10 GMT", "Thu, 01 Jan 1970 00:00:10 GMT"])
def test_http_date(text: str) -> None:
    assert http_date_seconds(text) == 10


@pytest.mark.parametrize("text", ["1 Xyz 1970 00:00:10 GMT", "1 Jan 1970 00:00:10", "1 Jan 1970 25:00:10 GMT", ""])
def test_what_is_no_http_date(text: str) -> None:
    with pytest.raises(SourceError):
        http_date_seconds(text)


# ------------------------------------------------------------------------------------------------ the tasks


async def test_a_source_with_a_bug_is_a_blind_one_and_the_others_go_on() -> None:
    async def broken() -> Reading:
        raise ZeroDivisionError("a bug")

    async def good() -> Reading:
        return event(60)

    sources = [
        Source(cloud="one", key="key", look=broken, every_seconds=0.01, withdraws=True),
        Source(cloud="two", key="key", look=good, every_seconds=0.01, withdraws=True),
    ]
    async with listening(sources) as listener:
        await until(lambda: listener.heard)
        await until(lambda: listener.reports)
    (report,) = listener.reports
    assert (report.source, report.problem) == ("one", "key: ZeroDivisionError: a bug")


async def test_an_alarm_is_one_line_however_much_an_answer_says() -> None:
    """The HTTP client quotes a first line that is none, whole."""

    async def look() -> Reading:
        raise SourceError("Bad status line:\n  " + "x" * 128_000)

    async with listening([Source(cloud="one", key="key", look=look, every_seconds=0.01, withdraws=True)]) as listener:
        await until(lambda: listener.reports)
    assert listener.reports[0].problem == "key: Bad status line:   " + "x" * 181 + "…"


async def test_one_alarm_for_all_sources_of_a_cloud() -> None:
    fails = {"a": True, "b": True}

    def source(key: str) -> Source:
        async def look() -> Reading:
            if fails[key]:
                raise SourceError("cannot")
            return Reading()

        return Source(cloud="one", key=key, look=look, every_seconds=0.01, withdraws=True)

    async with listening([source("a"), source("b")]) as listener:
        await until(lambda: listener.reports)
        fails["a"] = False
        await until(lambda: len(listener.watcher.failing) == 1)
        assert len(listener.reports) == 1
        fails["b"] = False
        await until(lambda: len(listener.reports) == 2)
    assert listener.problems[1] is None

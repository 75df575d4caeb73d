"""Disks that fill and memory that is short: told at a limit, and well again only by a margin."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.health.host import MEMORY, HostReading, Room, judge, read_host

GIB = 1 << 30


def reading(free: float = 500, total: float = 1000, stalled: float | None = 0.0) -> HostReading:
    room = Room(free_bytes=int(free * GIB), total_bytes=int(total * GIB))
    return HostReading(rooms={"/store": room}, stalled_percent=stalled)


@pytest.mark.parametrize(
    ("seen", "troubled", "what"),
    [
        (reading(), (), set()),
        (reading(free=19), (), {"/store"}),
        (reading(free=21, total=10000), (), set()),
        (reading(free=4, total=100), (), {"/store"}),
        (reading(free=6, total=100), (), set()),
        (reading(free=6, total=100), ("/store",), {"/store"}),
        (reading(free=11, total=100), ("/store",), set()),
        (reading(free=0, total=0), (), set()),
        (reading(stalled=11), (), {MEMORY}),
        (reading(stalled=9), (), set()),
        (reading(stalled=9), (MEMORY,), {MEMORY}),
        (reading(stalled=4), (MEMORY,), set()),
        (reading(stalled=None), (MEMORY,), set()),
    ],
)
def test_what_is_wrong(seen: HostReading, troubled: tuple[str, ...], what: set[str]) -> None:
    problems = judge(seen, troubled)
    assert problems.keys() == what
    assert all(trouble.words and not trouble.condemns for trouble in problems.values())


def test_the_words_say_how_much() -> None:
    (trouble,) = judge(reading(free=4, total=100), ()).values()
    assert trouble.words == "/store is nearly full: 4.0 GiB are free (4.0 %)"


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    pressure = tmp_path / "memory"
    pressure.write_text("some avg10=1.00 avg60=30.00 avg300=0 total=9\nfull avg10=0 avg60=12.50 avg300=0 total=5\n")
    seen = read_host([tmp_path, tmp_path / "not there"], pressure)
    assert seen.stalled_percent == 12.5
    assert list(seen.rooms) == [str(tmp_path)]
    assert read_host([], tmp_path / "none").stalled_percent is None


@pytest.mark.parametrize("words", [b"\xff\xfe", b"full avg60=", b"full avg60=nan", b"full avg60=1e9", b"full avg60=x"])
def test_pressure_that_is_none_stops_no_agent(tmp_path: Path, words: bytes) -> None:
    pressure = tmp_path / "memory"
    pressure.write_bytes(words)
    assert read_host([], pressure).stalled_percent is None

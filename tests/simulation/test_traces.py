"""Both formats of traces, and what is refused, with the number of the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.simulation import traces
from orchestrator.simulation.traces import Change, parse_trace, read_trace, removal_times

COUNTS = "2024-02-28, 23:59:00, 2\n2024-02-29, 00:00:40, 3\n\n2024-02-29, 00:01:00, 1\n2024-02-29, 00:02:00, 1\n"


def test_events_begin_at_zero_and_keep_their_order() -> None:
    trace = parse_trace("5000,add,a\n5000,add,b\n7500,remove,a\r\n\n 15000 , remove , b\n", name="t")
    assert trace.changes == (
        Change(at_us=0, node="a", appears=True),
        Change(at_us=0, node="b", appears=True),
        Change(at_us=2_500_000, node="a", appears=False),
        Change(at_us=10_000_000, node="b", appears=False),
    )
    assert trace.duration_us == 10_000_000
    assert (trace.losses, trace.loss_instants, trace.peak_nodes) == (2, 2, 2)
    assert trace.mean_seconds_between_losses == 5.0
    assert trace.node_us(2) == (2 * 2_500_000) + 7_500_000
    assert trace.node_us(1) == 10_000_000


def test_losses_of_one_instant_are_one_interruption() -> None:
    trace = parse_trace("0,add,a\n0,add,b\n10000,remove,a\n10000,remove,b\n20000,add,c\n", name="t")
    assert (trace.losses, trace.loss_instants, trace.mean_seconds_between_losses) == (2, 1, 20.0)


def test_counts_make_up_nodes_and_take_the_oldest() -> None:
    trace = parse_trace(COUNTS, name="t")
    assert [(change.at_us // 1_000_000, change.node, change.appears) for change in trace.changes] == [
        (0, "node1", True),
        (0, "node2", True),
        (100, "node3", True),
        (120, "node1", False),
        (120, "node2", False),
    ]
    assert trace.duration_us == 180_000_000


def test_a_trace_without_losses_has_no_mean() -> None:
    assert parse_trace("0,add,a\n1000,add,b\n", name="t").mean_seconds_between_losses is None


def test_a_name_that_comes_back_is_another_node() -> None:
    trace = parse_trace("0,add,a\n1000,remove,a\n2000,add,a\n9000,remove,a\n", name="t")
    assert removal_times(trace.changes) == {0: 1_000_000, 2: 9_000_000}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no lines"),
        ("0,add,a\n0,add,b\n", "covers no time"),
        ("0,add,a\n1,add\n", "line 2: expected ms,add|remove,node"),
        ("0,add,a\n\n-1,add,b\n", "line 3: '-1' is no time in whole milliseconds"),
        ("0,add,a\n1.5,add,b\n", "line 2: '1.5' is no time"),
        ("0,add,a\n9999999999999999,add,b\n", "line 2: '9999999999999999' is no time"),
        ("0,add,a\n\u0663,add,b\n", "is no time"),
        ("0,add,a\n1,join,b\n", "line 2: 'join' is neither add nor remove"),
        ("0,add,a\n1,add,\n", "line 2: a node's name"),
        ("0,add,a\n1,add,b\x1b\n", "line 2: a node's name"),
        (f"0,add,a\n1,add,{'b' * 201}\n", "line 2: a node's name"),
        ("0,add,a\n1,add,a\n", "line 2: a is already there"),
        ("0,add,a\n1,remove,b\n", "line 2: b is not there"),
        ("5,add,a\n1,add,b\n", "line 2: goes back in time"),
        ("0,add,a\n99999999999,remove,a\n", "line 2: more than 366 days"),
        ("2024-02-28, 23:59:00, 2\n2024-02-30, 23:59:00, 2\n", "line 2: there is no such date"),
        ("2024-02-28, 23:59:00, 2\n2024-02-28, 23:58:00, 2\n", "line 2: goes back in time"),
        ("2024-02-28, 23:59:00, 2\n2024-02-28 23:59:10 2\n", "line 2: expected date, time, nodes"),
        ("2024-02-28, 23:59:00, 2\n2024-02-28, 23:59:10, 5000\n", "line 2: 5000 nodes"),
        ("2024-02-28, 23:59:00, 999999999\n", "line 1: 999999999 nodes"),
        ("not a trace", "line 1: expected ms,add|remove,node"),
    ],
)
def test_bad_traces_are_refused_in_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_trace(text, name="t")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nosuch.csv")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"0,add,a\n\xff\xfe")
    with pytest.raises(ConfigError, match=r"not text in UTF-8 \(byte 8\)"):
        read_trace(tmp_path / "binary")
    monkeypatch.setattr(traces, "SIZE_BYTES_MAX", 4)
    (tmp_path / "large").write_text("0,add,a\n")
    with pytest.raises(ConfigError, match="is larger than"):
        read_trace(tmp_path / "large")


def test_a_file_is_named_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "counts.txt").write_text("\ufeff" + COUNTS, encoding="utf-8")
    assert read_trace(tmp_path / "counts.txt").name == "counts.txt"
    (tmp_path / "bad.csv").write_text("0,add,a\nx,add,b\n")
    with pytest.raises(ConfigError, match=r"bad\.csv: line 2: 'x' is no time"):
        read_trace(tmp_path / "bad.csv")


def test_too_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LINES_MAX", 1)
    with pytest.raises(ConfigError, match="holds 2 lines"):
        parse_trace("0,add,a\n1,remove,a\n", name="t")

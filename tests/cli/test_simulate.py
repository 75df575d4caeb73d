"""`orchestrator simulate`: table, JSON, page, and what it refuses."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from orchestrator.cli.simulate import percentages, sparkline
from tests.cli.conftest import Command

TRACE = "0,add,a\n0,add,b\n200000,add,<c>\n400000,remove,a\n900000,remove,b\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A small trace of three nodes."""
    file = tmp_path / "small & <odd>.csv"
    file.write_text(TRACE)
    return file


def test_json(command: Command, trace: Path) -> None:
    result = command("simulate", "--trace", str(trace), "--save-every", "50", "--state-bytes", "1e9", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["trace"]["available_node_seconds"] == 2 * 200 + 3 * 200 + 2 * 500
    assert found["theory"]["mean_seconds_between_losses"] == 450
    replayed = [row for row in found["rows"] if "causes" in row]
    assert [row["name"] for row in replayed] == ["ours, 120 s of notice", "ours, no notice", "periodic, restart all"]
    for row in replayed:
        assert sum(row["causes"].values()) == pytest.approx(1, abs=1e-12)
        assert sum(row["node_seconds"].values()) == pytest.approx(2000)
        assert row["causes"]["useful"] == row["goodput"]
        assert 0.4 < row["goodput"] < row["wall_goodput"] < 1


def test_table_and_chart(command: Command, trace: Path) -> None:
    result = command("simulate", "--trace", str(trace), "--nodes", "1:2", "--notice-seconds", "0")
    assert result.exit_code == 0
    for words in ("goodput", "Young", "Daly", "ours, no notice", "bound, no notice", "nodes training │", "of 2"):
        assert words in result.stdout
    assert "120 s of notice" not in result.stdout
    assert "points of goodput over periodic restarts" in result.stderr


def test_counts_are_read_as_well(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "counts.txt"
    file.write_text("2024-01-01, 10:00:00, 3\n2024-01-01, 10:05:00, 2\n2024-01-01, 10:15:00, 2\n")
    result = command("simulate", "--trace", str(file), "--json")
    assert json.loads(result.stdout)["trace"]["losses"] == 1


class _Page(HTMLParser):
    """Open elements and words."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_page(command: Command, trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = command("simulate", "--trace", str(trace), "--html", str(page), "--json")
    assert (result.exit_code, result.stderr) == (0, f"wrote {page}\n")
    text = page.read_text(encoding="utf-8")
    assert "&lt;odd&gt;" in text
    assert "<odd>" not in text
    parsed = _Page()
    parsed.feed(text)
    assert parsed.tags.count("figure") == 4
    assert "script" not in parsed.tags
    assert any("orchestrator simulate" in words for words in parsed.words)


def test_a_page_that_cannot_be_written(command: Command, trace: Path, tmp_path: Path) -> None:
    result = command("simulate", "--trace", str(trace), "--html", str(tmp_path / "nosuch" / "page.html"))
    assert result.exit_code == 2
    assert "No such file or directory" in result.stderr


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (("--step-seconds", "0"), ["--step-seconds: must be at least 0.0001"]),
        (("--bandwidth", "0", "--stall-seconds", "-1"), ["--bandwidth: must be at least 1", "--stall-seconds: needs"]),
        (("--restart-seconds", "nan"), ["--restart-seconds: needs a number from 0 to 86400, got nan"]),
        (("--state-bytes", "inf"), ["--state-bytes: needs"]),
        (("--nodes", "3:2"), ["--nodes: needs 1 <= MIN <= MAX <= 4096, got 3:2"]),
        (("--nodes", "many", "--notice-seconds", "1e9"), ["--nodes: expected MIN:MAX", "--notice-seconds: needs"]),
        (("--save-every", "often"), ["--save-every: needs a whole number of steps, or auto"]),
        (("--save-every", "1", "--step-seconds", "0.0001"), ["give a larger number of steps"]),
    ],
)
def test_bad_options(command: Command, trace: Path, words: tuple[str, ...], problems: list[str]) -> None:
    result = command("simulate", "--trace", str(trace), *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("error: ") == len(problems)
    for problem in problems:
        assert problem in result.stderr


def test_a_bad_line_is_named(command: Command, trace: Path) -> None:
    trace.write_text("0,add,a\n1000,add,a\n")
    result = command("simulate", "--trace", str(trace))
    assert result.exit_code == 2
    assert "line 2: a is already there" in result.stderr


def test_percentages_add_up() -> None:
    assert percentages([1, 1, 1]) == [33.34, 33.33, 33.33]
    assert percentages([0, 0]) == [0.0, 0.0]
    assert sum(percentages([7, 11, 13, 17, 1])) == pytest.approx(100)


def test_sparkline() -> None:
    assert sparkline([0, 0.01, 4, 8], 8) == " ▁▄█"
    assert sparkline([0, 0], 0) == "  "

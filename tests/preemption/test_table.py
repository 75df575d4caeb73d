"""Every source in every case, and that docs/notices.md has the same table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preemption.table import CASES, ROWS, heard_of, markdown

CELLS = [(row, case) for row in ROWS for case in CASES if CASES[case].without(ROWS[row]) is None]


@pytest.mark.parametrize(("row", "case"), CELLS)
async def test_a_source_in_a_case(row: str, case: str, tmp_path: Path) -> None:
    source, played = ROWS[row], CASES[case]
    async with source.serve(tmp_path) as server, heard_of(source, server, played.patience_seconds) as listener:
        await played.play(source, server, listener)


def test_the_docs_have_this_table() -> None:
    docs = Path(__file__).parents[2] / "docs" / "notices.md"
    assert markdown() in docs.read_text(), "put what `python -m tests.preemption` prints into docs/notices.md"

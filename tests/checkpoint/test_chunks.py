"""Exact cover, against a set of elements."""

from __future__ import annotations

import random

import pytest

from orchestrator.checkpoint.chunks import Cover, Series, parse_series


def test_a_cover_knows_what_a_set_of_elements_knows(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        total, cover = draw.randrange(1, 60), Cover()
        seen: set[int] = set()
        for _ in range(draw.randrange(40)):
            start = draw.randrange(total)
            stop = min(total, start + draw.choice([1, 1, 2, 5]))
            if seen & set(range(start, stop)):
                with pytest.raises(ValueError, match="written twice") as caught:
                    cover.add(start, stop)
                named = str(caught.value).split()
                assert set(range(int(named[1]), int(named[3]))) <= seen & set(range(start, stop))
                continue
            cover.add(start, stop)
            seen |= set(range(start, stop))
        missing = cover.missing(total)
        absent = sorted(set(range(total)) - seen)
        if missing is None:
            assert not absent
        else:
            first = absent[0]
            end = next((one for one in range(first, total) if one in seen), total)
            assert missing == (first, end)


def test_a_series_comes_back_from_its_text() -> None:
    both = [Series(0, 4096, 0, 250, 0, 250), Series(4096, 1, 1_024_000, 17, 1 << 40, 17)]
    assert list(parse_series(" ".join(one.text() for one in both))) == both
    assert both[0].text() == "0*4096:0+250@0"
    assert both[0].stop == 1_024_000

"""Which checkpoints stay: the newest by number, the first of every so many steps, the base; nothing by a guess."""

from __future__ import annotations

import random

import pytest

from orchestrator.checkpoint.catalog import CatalogEntry, Standing
from orchestrator.checkpoint.retention import Keep, choose, obstacle
from orchestrator.core.messages import CheckpointId
from tests.checkpoint.shards import checkpoint_id

Rows = list[tuple[int, int, Standing]]
COMMITTED, ABANDONED, UNDECIDED = Standing.COMMITTED, Standing.ABANDONED, Standing.UNDECIDED


def entries(rows: Rows) -> list[CatalogEntry]:
    """Newest first, as a catalog has them."""
    return [
        CatalogEntry(id=checkpoint_id(generation, step), standing=standing, size_bytes=1, world_size=1)
        for generation, step, standing in sorted(rows, reverse=True)
    ]


def committed(*steps: int, generation: int = 1) -> Rows:
    return [(generation, step, COMMITTED) for step in steps]


def kept(rows: Rows, last: int, every: int = 0, base: CheckpointId | None = None) -> list[str]:
    """`generation.step` of all that are kept, oldest first."""
    fates = choose(entries(rows), Keep(last=last, every_steps=every), base)
    return [f"{one.id.generation}.{one.id.step}" for one in reversed(fates) if one.keep]


@pytest.mark.parametrize(
    ("last", "every", "expected"),
    [
        (0, 0, ["1.0", "1.100", "1.200", "1.300", "1.400", "1.500"]),
        (1, 0, ["1.500"]),
        (2, 0, ["1.400", "1.500"]),
        (9, 0, ["1.0", "1.100", "1.200", "1.300", "1.400", "1.500"]),
        (1, 200, ["1.0", "1.200", "1.400", "1.500"]),
        (2, 300, ["1.0", "1.300", "1.400", "1.500"]),
        (1, 1000, ["1.0", "1.500"]),
    ],
)
def test_the_newest_and_the_first_of_every_window(last: int, every: int, expected: list[str]) -> None:
    assert kept(committed(0, 100, 200, 300, 400, 500), last, every) == expected


def test_numbers_are_compared_as_numbers() -> None:
    """Not as text, by which 9 comes after 10, which would delete the newest."""
    assert kept(committed(9, 10, 11, 99, 100), 2) == ["1.99", "1.100"]
    assert kept([*committed(900), *committed(20, 100, generation=2), *committed(5, generation=10)], 2) == [
        "2.100",
        "10.5",
    ]


def test_steps_that_no_window_begins_with_are_kept_where_they_are_the_first_in_one() -> None:
    """Emergency saves come at any step."""
    assert kept(committed(7, 130, 160, 255, 290, 301), 1, 100) == ["1.7", "1.130", "1.255", "1.301"]


def test_of_one_step_in_two_generations_the_newer_one_is_the_first() -> None:
    rows = [*committed(100, 200), *committed(100, 300, 400, generation=2)]
    assert kept(rows, 1, 100) == ["1.200", "2.100", "2.300", "2.400"]


def test_only_committed_ones_count() -> None:
    rows = [*committed(100, 200), (1, 300, ABANDONED), (1, 400, UNDECIDED), (1, 500, Standing.RETIRED)]
    assert kept(rows, 1) == ["1.200"]
    assert kept(rows, 2) == ["1.100", "1.200"]
    fates = choose(entries(rows), Keep(last=1), None)
    assert {str(one.id) for one in fates} == {str(checkpoint_id(1, 100)), str(checkpoint_id(1, 200))}


@pytest.mark.parametrize("standing", [Standing.ROLLED_BACK, Standing.QUARANTINED])
def test_what_is_out_of_use_stays_until_enough_newer_ones_are_there(standing: Standing) -> None:
    rows: Rows = [*committed(100), (1, 200, standing)]
    assert kept(rows, 1) == ["1.100", "1.200"]
    assert kept([*rows, *committed(150, generation=2)], 2) == ["1.100", "1.200", "2.150"]
    assert kept([*rows, *committed(150, 160, generation=2)], 2) == ["2.150", "2.160"]
    assert kept([*rows, *committed(150, generation=2)], 1, 100) == ["1.100", "2.150"]


def test_the_base_stays() -> None:
    assert kept(committed(100, 200, 300), 1, base=checkpoint_id(1, 100)) == ["1.100", "1.300"]


@pytest.mark.parametrize("standing", [Standing.DAMAGED, Standing.NEWER_FORMAT])
def test_what_cannot_be_read_is_an_obstacle(standing: Standing) -> None:
    rows: Rows = [*committed(100, 300), (1, 200, standing)]
    assert str(checkpoint_id(1, 200)) in (obstacle(entries(rows)) or "")
    assert obstacle(entries(committed(100, 300))) is None


def test_each_fate_has_its_reason() -> None:
    fates = choose(entries(committed(100, 200, 300, 400)), Keep(last=1, every_steps=200), checkpoint_id(1, 300))
    assert [(one.id.step, one.keep, one.reason) for one in fates] == [
        (400, True, "one of the newest 1"),
        (300, True, "the present generation started from it"),
        (200, True, "the first of steps 200 to 399"),
        (100, True, "the first of steps 0 to 199"),
    ]
    assert choose(entries(committed(1, 2)), Keep(last=1), None)[1].reason == "older than the newest 1"


def test_any_catalog(seed: int) -> None:
    """The newest K committed are kept, whatever else is there; deciding again after deleting changes nothing more."""
    draw = random.Random(seed)
    for _ in range(300):
        rows = {
            (draw.randint(1, 4), draw.randint(0, 40)): draw.choice([COMMITTED, *Standing])
            for _ in range(draw.randint(0, 30))
        }
        found = entries([(generation, step, standing) for (generation, step), standing in rows.items()])
        keep = Keep(last=draw.randint(1, 4), every_steps=draw.choice([0, 1, 7, 100]))
        base = draw.choice([None, *(one.id for one in found)])
        fates = choose(found, keep, base)
        usable = [one.id for one in found if one.standing is COMMITTED]
        staying = {one.id for one in fates if one.keep}
        assert set(usable[: keep.last]) <= staying
        assert base is None or base in staying or base not in {one.id for one in fates}
        for window in {one.step // keep.every_steps for one in usable} if keep.every_steps else ():
            assert any(one.step // keep.every_steps == window for one in staying & set(usable))
        left = [one for one in found if one.id in staying or one.id not in {fate.id for fate in fates}]
        assert all(one.keep for one in choose(left, keep, base))

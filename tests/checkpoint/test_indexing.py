"""From receipts to an index: what makes none, the same bytes whoever makes it, and any layout comes back exactly."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.boxes import box_at, corner
from orchestrator.checkpoint.chunks import POSITION_MAX, Chunk
from orchestrator.checkpoint.indexing import IndexBuilder
from orchestrator.checkpoint.meshes import Cut, share
from orchestrator.errors import FormatError
from tests.checkpoint.receipts import CHECKPOINT, HEADER_BYTES, Row, full, index_of, read, receipt, table, two
from tests.checkpoint.sharded import plain_mesh, random_cuts


def even(ranks: int, tensors: int = 1, length: int = 3) -> list[fmt.Receipt]:
    """Receipts of tensors that are sharded evenly."""
    return [
        receipt(
            rank,
            ranks,
            rows=[(f"t{number}", "F16", (ranks, length), rank * length, length) for number in range(tensors)],
        )
        for rank in range(ranks)
    ]


# ------------------------------------------------------------------------------------------------ what makes none


@pytest.mark.parametrize(
    ("field", "value"), [("job", "other"), ("generation", 2), ("step", 3), ("world_size", 4), ("absent", (1,))]
)
def test_receipts_that_do_not_belong_together_are_refused(field: str, value: Any) -> None:
    """W2, W8: what another attempt left is never counted."""
    with pytest.raises(FormatError, match=f"rank 1's receipt differs from rank 0's in .*{field}"):
        index_of([receipt(0), receipt(1, elements=(4, 8), **{field: value})])


@pytest.mark.parametrize("row", [("t", "I32", (8,), 4, 4), ("t", "F32", (9,), 4, 4), ("t", "F32", (8, 1), 4, 4)])
def test_ranks_that_disagree_on_a_tensor_are_refused(row: Row) -> None:
    with pytest.raises(FormatError, match="t: the ranks disagree"):
        index_of([receipt(0), receipt(1, rows=[row])])


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([(0, 4), (5, 8)], "elements 4 to 5 of 8 are missing"),
        ([(0, 4), (3, 8)], "elements 3 to 4 are written twice"),
        ([(0, 4), (0, 4)], "elements 0 to 4 are written twice"),
        ([(4, 8), (4, 8)], "elements 4 to 8 are written twice"),
        ([(0, 8), (2, 3)], "elements 2 to 3 are written twice"),
        ([(2, 3), (0, 8)], "elements 2 to 3 are written twice"),
        ([(0, 4), (4, 7)], "elements 7 to 8 of 8 are missing"),
        ([(0, 4), (4, 9)], "ends at element 9 of 8"),
        ([(1, 4), (4, 8)], "elements 0 to 1 of 8 are missing"),
        ([(0, 4), (4, 4)], "rank 1 has an empty chunk"),
        ([(0, 4), (POSITION_MAX, POSITION_MAX + 4)], "ends at element"),
    ],
)
def test_every_element_must_be_there_once(parts: list[tuple[int, int]], word: str) -> None:
    """W2, F116: a shard of another attempt, or one that is lost, never makes a tensor of the wrong size."""
    with pytest.raises(FormatError, match=word):
        index_of([receipt(rank, elements=elements) for rank, elements in enumerate(parts)])


@pytest.mark.parametrize("ranks", [[0, 0], [1, 0], [0, 2], [2]])
def test_ranks_come_once_in_their_order_and_within_the_world(ranks: list[int]) -> None:
    with pytest.raises(FormatError, match=rf"ranks \[{', '.join(map(str, ranks))}\] of 2"):
        index_of(
            [
                receipt(rank, 2, elements=(4 * at, 4 * at + 4), values=None)
                if rank
                else receipt(0, 2, elements=(4 * at, 4 * at + 4))
                for at, rank in enumerate(ranks)
            ]
        )


ROW: Row = ("t", "F32", (8,), 0, 4)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"size_bytes": HEADER_BYTES + 12}, "16 bytes after 4096 of header; the shard has 4108"),
        ({"size_bytes": HEADER_BYTES + 20}, "the shard has 4116"),
        ({"header_bytes": 0}, "16 bytes after 0 of header"),
        ({"tensors": table(("t", "F64", (8,), 0, 4))}, "32 bytes after"),
        ({"tensors": table(("t", "F4", (8,), 0, 4))}, "t: its dtype 'F4' is unknown"),
        ({"tensors": table(("t", "F32", (8,), 0, 1 << 50))}, "4503599627370496 bytes after"),
        ({"tensors": table(("t", "F32", (1 << 40, 1 << 40), 0, 4))}, "t: no tensor is so large"),
        ({"tensors": table(ROW, ROW), "size_bytes": HEADER_BYTES + 32}, "names a tensor twice"),
        ({"tensors": table(ROW).model_copy(update={"lengths": ()})}, r"columns .* have \[1, 1, 1, 1, 0, 1\]"),
        ({"tensors": table(ROW).model_copy(update={"names": ("t", "u")})}, r"columns .* have \[2, 1, 1, 1, 1, 1\]"),
        ({"values": None}, "rank 0 has the job's values, no other; this one lacks them"),
        ({"values": {"objects": {"a": 1}}}, "its objects do not have the digests"),
        ({"values": {"objects": [1]}}, "its objects do not have the digests"),
        ({"values": {"objects": {}, "more": float("nan")}}, "JSON cannot hold"),
        ({"objects": {"a": 1}}, "its objects do not have the digests"),
    ],
)
def test_a_receipt_that_is_not_of_its_shard_is_refused(fields: dict[str, Any], word: str) -> None:
    """A table that would overlap, leave a hole or point outside its shard cannot even be written."""
    bad = receipt(0).model_copy(update=fields)
    with pytest.raises(FormatError, match=word):
        index_of([bad, receipt(1, elements=(4, 8))])


def test_values_of_a_rank_that_is_not_the_first_are_refused() -> None:
    with pytest.raises(FormatError, match="this one has them"):
        index_of([receipt(0), receipt(1, elements=(4, 8), values={"objects": {}})])


def raw(**columns: Any) -> bytes:
    """A receipt's bytes with other columns in its table."""
    fields = json.loads(fmt.dump(receipt(0)))
    fields["tensors"].update(columns)
    return fmt.canonical_json(fields)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (raw(lengths=[-4]), "tensors.lengths.0"),
        (raw(lengths=[4.0]), "tensors.lengths.0"),
        (raw(lengths=["4"]), "tensors.lengths.0"),
        (raw(lengths=[True]), "tensors.lengths.0"),
        (raw(starts=[1 << 62]), "tensors.starts.0"),
        (raw(starts=[10**400]), "tensors.starts.0"),
        (raw(shapes=[8]), "tensors.shapes.0"),
        (raw(shapes=[[-1]]), "tensors.shapes.0.0"),
        (raw(names=[1]), "tensors.names.0"),
        (raw(boxes=[[-1]]), "tensors.boxes"),
    ],
)
def test_columns_of_another_kind_are_refused_by_name(data: bytes, word: str) -> None:
    with pytest.raises(FormatError, match=f"not a valid Receipt: {word}"):
        fmt.load_receipt("receipt", data, fmt.Receipt)


@pytest.mark.parametrize("world_size", [0, (1 << 20) + 1, 1 << 60])
def test_a_world_that_nobody_could_count_is_refused(world_size: int) -> None:
    fields = json.loads(fmt.dump(receipt(0)))
    with pytest.raises(FormatError, match="world_size"):
        fmt.load_receipt("receipt", fmt.canonical_json({**fields, "world_size": world_size}), fmt.Receipt)


# ----------------------------------------------------------------------------------------------------- the values


def test_objects_that_are_alike_stand_in_the_index_and_others_are_named() -> None:
    """F48: the state of an object that differs by rank is kept for each rank, not the first one's for all."""
    index = read(
        index_of(
            receipt(rank, elements=(4 * rank, 4 * rank + 4), objects={"scheduler": {"lr": 1}, "data": {"at": rank}})
            for rank in range(2)
        )
    )
    assert index.values == {"objects": {"scheduler": {"lr": 1}}}
    assert index.rank_objects == ("data",)


@pytest.mark.parametrize("who", [0, 1])
def test_an_object_that_only_some_ranks_have_belongs_to_them(who: int) -> None:
    ranks = [
        receipt(rank, elements=(4 * rank, 4 * rank + 4), objects={"extra": {"x": 1}} if rank == who else {})
        for rank in range(2)
    ]
    index = read(index_of(ranks))
    assert (index.values, index.rank_objects) == ({"objects": {}}, ("extra",))


@pytest.mark.parametrize("other", [1, 1.0, "true", [True]])
def test_true_is_not_one_where_values_are_compared(other: Any) -> None:
    """JSON tells them apart, Python's == does not."""
    ranks = [
        receipt(rank, elements=(4 * rank, 4 * rank + 4), objects={"part": {"x": value}})
        for rank, value in enumerate((True, other))
    ]
    assert read(index_of(ranks)).rank_objects == ("part",)


def test_the_values_are_those_of_the_first_present_rank() -> None:
    everyone = [
        receipt(rank, 3, elements=elements, absent=(0,), rows=[] if rank == 0 else None, objects={"part": {"x": 1}})
        for rank, elements in enumerate([(0, 0), (0, 4), (4, 8)])
    ]
    assert [one.values is None for one in everyone] == [True, False, True]
    assert read(index_of(everyone)).values == {"objects": {"part": {"x": 1}}}
    assert read(index_of(everyone[1:])).values == {"objects": {"part": {"x": 1}}}
    with pytest.raises(FormatError, match="no receipt has the job's values"):
        index_of([receipt(2, 3, elements=(0, 8), absent=(0,))])


# ----------------------------------------------------------------------------------------------------- the layouts


def test_an_evenly_sharded_tensor_is_one_series_whatever_the_number_of_ranks() -> None:
    for ranks in (2, 16, 300):
        index = read(index_of(even(ranks)))
        assert index.tensors["t0"].series == f"0*{ranks}:0+3@0"
        assert index.chunks("t0")[-1] == Chunk(ranks - 1, 3 * ranks - 3, 3 * ranks, HEADER_BYTES, HEADER_BYTES + 6)


def test_a_tensor_of_no_elements_has_a_chunk() -> None:
    index = read(index_of([receipt(0, 1, rows=[("empty", "F32", (3, 0), 0, 0), ("t", "U8", (), 0, 1)])]))
    assert index.chunks("empty") == [Chunk(0, 0, 0, HEADER_BYTES, HEADER_BYTES)]
    assert index.chunks("t") == [Chunk(0, 0, 1, HEADER_BYTES, HEADER_BYTES + 1)]


def test_a_checkpoint_without_tensors_is_one() -> None:
    index = read(index_of([receipt(0, 2, rows=[]), receipt(1, 2, rows=[])]))
    assert index.tensors == {}


def random_layout(draw: random.Random) -> dict[int, list[Row]]:
    """Tensors cut at random places, the parts given to ranks at random, in a random order within each shard."""
    ranks = draw.randrange(1, 9)
    rows: dict[int, list[Row]] = {rank: [] for rank in range(ranks)}
    for number in range(draw.randrange(1, 12)):
        dtype = draw.choice(sorted(fmt.DTYPE_BYTES))
        shape = tuple(draw.choice([0, 1, 2, 5, 16]) for _ in range(draw.randrange(4)))
        total = fmt.element_count(shape)
        holders = draw.sample(range(ranks), draw.randrange(1, min(ranks, max(total, 1)) + 1))
        cuts = [0, *sorted(draw.sample(range(1, total), len(holders) - 1)), total] if total > 1 else [0, total]
        if draw.random() < 0.5:
            holders.sort()
        for place, rank in enumerate(holders[: len(cuts) - 1]):
            rows[rank].append((f"t{number}", dtype, shape, cuts[place], cuts[place + 1] - cuts[place]))
    for mine in rows.values():
        draw.shuffle(mine)
    return rows


def test_any_layout_comes_back_exactly(seed: int) -> None:
    draw = random.Random(seed)
    for turn in range(200):
        layout = random_layout(draw)
        receipts = [receipt(rank, len(layout), rows=rows) for rank, rows in layout.items()]
        data = index_of(receipts)
        index = read(data)
        found: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in index.tensors}
        for rank, rows in layout.items():
            position = HEADER_BYTES
            for name, dtype, _, start, length, _ in map(full, rows):
                found[name].append((start, rank, length, position))
                position += length * fmt.DTYPE_BYTES[dtype]
        for name, expected in found.items():
            width = fmt.DTYPE_BYTES[index.tensors[name].dtype]
            assert index.chunks(name) == [
                Chunk(rank, start, start + length, first, first + length * width)
                for start, rank, length, first in sorted(expected)
            ], (turn, name)
        assert json.loads(data)["tensors"] == {
            name: {"dtype": one.dtype, "shape": list(one.shape), "series": one.series}
            for name, one in index.tensors.items()
        }


def test_any_change_of_a_layout_is_found_out(seed: int) -> None:
    """Every element once: a part that is dropped, moved, doubled or cut makes no index."""
    draw = random.Random(seed)
    for turn in range(300):
        layout = random_layout(draw)
        rank = draw.choice([rank for rank, rows in layout.items() if rows])
        place = draw.randrange(len(layout[rank]))
        name, dtype, shape, start, length = layout[rank].pop(place)[:5]
        if length == 0:
            continue
        change = draw.choice(["dropped", "moved", "cut", "longer", "doubled"])
        if change == "moved":
            layout[rank].insert(place, (name, dtype, shape, start + draw.choice([-1, 1]) if start else 1, length))
        elif change == "cut":
            layout[rank].insert(place, (name, dtype, shape, start, length - 1))
        elif change == "longer":
            layout[rank].insert(place, (name, dtype, shape, start, length + 1))
        elif change == "doubled":
            layout[rank].insert(place, (name, dtype, shape, start, length))
            layout[len(layout)] = [(name, dtype, shape, start, length)]
        receipts = [receipt(rank, len(layout), rows=rows) for rank, rows in layout.items()]
        if change == "dropped" and not any(name == row[0] for rows in layout.values() for row in rows):
            assert name not in read(index_of(receipts)).tensors, turn
            continue
        with pytest.raises(FormatError, match=rf"{name}: "):
            index_of(receipts)


# ------------------------------------------------------------------------------------------------------- the size


def test_memory_does_not_grow_by_the_chunks_of_more_ranks() -> None:
    """Each more rank costs its line in the table of shards, and not a hundred chunks."""
    peaks = []
    for ranks in (50, 200):
        receipts = [(one, fmt.dump(one)) for one in even(ranks, tensors=100)]
        builder = IndexBuilder(CHECKPOINT)
        tracemalloc.start()
        for one, data in receipts:
            builder.add("receipt", one, data)
        pieces = builder.finish()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(map(len, pieces)) < 12_000 + 200 * ranks
    assert (peaks[1] - peaks[0]) / 150 < 2500


def test_the_index_is_the_same_bytes_whatever_the_receipts_went_through() -> None:
    """W12: any agent may write the index; all write the same."""
    receipts = two(objects={"b": 1, "a": {"z": 1, "y": [2]}})
    again = [fmt.load_receipt("receipt", fmt.dump(one), fmt.Receipt) for one in receipts]
    assert again == receipts
    assert index_of(again) == index_of(receipts)


# ------------------------------------------------------------------------------------------------------- boxes


def box_rows(*boxes: tuple[int, tuple[int, ...]], shape: tuple[int, ...] = (4, 6)) -> list[fmt.Receipt]:
    """A receipt for each box: its first element, and its lengths with what comes before; all of it is there."""
    return [
        receipt(
            rank,
            len(boxes),
            rows=[("t", "F32", shape, first, fmt.element_count(lengths[:-1]) - lengths[-1], lengths)],
        )
        for rank, (first, lengths) in enumerate(boxes)
    ]


QUARTERS = ((0, (2, 3, 0)), (3, (2, 3, 0)), (12, (2, 3, 0)), (15, (2, 3, 0)))


def test_boxes_of_a_mesh_are_one_series() -> None:
    index = read(index_of(box_rows(*QUARTERS)))
    assert index.tensors["t"].series == "0*2x2:0+6~3~12@0#2,3,0"
    found = index.chunks("t")
    assert [(one.rank, one.start, one.stop) for one in found] == [(rank, 0, 6) for rank in range(4)]
    assert [one.box for one in found] == [((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]


def test_a_box_may_be_split_among_its_holders() -> None:
    rows = [(first, lengths, start, length) for first, lengths in QUARTERS for start, length in ((0, 2), (2, 4))]
    index = read(
        index_of(
            receipt(rank, 8, rows=[("t", "F32", (4, 6), first, length, (*lengths[:2], start))])
            for rank, (first, lengths, start, length) in enumerate(rows)
        )
    )
    assert sorted((one.rank, one.start, one.stop) for one in index.chunks("t")) == [
        (rank, start, start + length) for rank, (_, _, start, length) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("boxes", "word"),
    [
        (QUARTERS[:3], "3 boxes are there of a grid of 4"),
        (QUARTERS[:2], "no grid: places 2 and 4 of 4"),
        (QUARTERS[2:], "no grid: places 0 and 2 of 4"),
        ((*QUARTERS, QUARTERS[1]), "of the box at element 3, elements 0 to 6 are written twice"),
        ((*QUARTERS[:3], (15, (2, 2, 0))), "no grid: at 3 one is 2 wide, another 3"),
        ((*QUARTERS[:3], (14, (2, 3, 0))), "no grid: places 3 and 2"),
        ((*QUARTERS[:3], (16, (2, 3, 0))), "lies outside its shape"),
        ((*QUARTERS[:3], (21, (2, 3, 0))), "lies outside its shape"),
        ((*QUARTERS[:3], (24, (2, 3, 0))), "ends at element 25 of 24"),
        ((*QUARTERS[:3], (15, (2, 3, 1))), "of the box at element 15, elements 0 to 1 are missing"),
        ((*QUARTERS[:3], (15, (5, 3, 0))), "lies outside its shape"),
        ((*QUARTERS[:3], (15, (6, 0))), "has a box of 1 dimensions, it has 2"),
        ((*QUARTERS[:3], (15, (2, 3, 6))), "has an empty chunk"),
        (((0, (4, 3, 0)), (3, (2, 3, 0)), (15, (2, 3, 0))), "no grid: at 0 one is 2 wide, another 4"),
    ],
)
def test_boxes_that_are_no_grid_are_refused(boxes: Any, word: str) -> None:
    """Overlapping, outside, missing, doubled, not in line: refused by name."""
    with pytest.raises(FormatError, match=word) as caught:
        index_of(box_rows(*boxes))
    assert "t: " in str(caught.value)


def test_a_tensor_in_ranges_and_boxes_is_refused() -> None:
    rows: list[list[Row]] = [[("t", "F32", (4, 6), 0, 12)], [("t", "F32", (4, 6), 12, 12, (2, 6, 0))]]
    with pytest.raises(FormatError, match="rank 1 has a box of it, ranks before it have not"):
        index_of(receipt(rank, 2, rows=mine) for rank, mine in enumerate(rows))


def test_more_of_a_box_than_it_has_is_refused() -> None:
    with pytest.raises(FormatError, match=r"ends at element 7 of a box of \[2, 3\]"):
        index_of([receipt(0, 1, rows=[("t", "F32", (4, 6), 0, 7, (2, 3, 0))])])


def random_mesh_layout(draw: random.Random) -> list[list[Row]]:
    """Tensors on meshes, split among their holders at random: ranges and boxes, as plans have them."""
    world_size = draw.choice([4, 6, 8, 12])
    shapes = [(a, world_size // a) for a in range(1, world_size + 1) if world_size % a == 0]
    rows: list[list[Row]] = [[] for _ in range(world_size)]
    for number in range(draw.randrange(1, 6)):
        mesh, shape = (
            plain_mesh(draw.choice(shapes)),
            tuple(draw.choice([2, 5, 8]) for _ in range(draw.randrange(1, 4))),
        )
        cuts = random_cuts(draw, mesh, len(shape))
        for rank in range(world_size):
            mine = share(shape, mesh, cuts, rank)
            place, count, total = mine.holders.index(rank), len(mine.holders), mine.box.elements
            start, stop = total * place // count, total * (place + 1) // count
            first = corner(mine.box, shape) + (start if mine.ranges else 0)
            if start < stop:
                box = () if mine.ranges else (*mine.box.lengths, start)
                rows[rank].append((f"t{number}", "U8", shape, first, stop - start, box))
    return rows


def test_any_mesh_comes_back_exactly(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        layout = random_mesh_layout(draw)
        index = read(index_of(receipt(rank, len(layout), rows=rows) for rank, rows in enumerate(layout)))
        found = {
            (chunk.rank, name): (chunk.box, chunk.start, chunk.stop, chunk.first_byte, chunk.last_byte)
            for name in index.tensors
            for chunk in index.chunks(name)
        }
        expected = {}
        for rank, rows in enumerate(layout):
            position = HEADER_BYTES
            for name, _, shape, first, length, box in map(full, rows):
                *lengths, before = box or (0,)
                where = box_at(first, tuple(lengths), shape) if box else None
                start = before if box else first
                expected[rank, name] = (where, start, start + length, position, position + length)
                position += length
        assert found == expected


def test_any_change_of_a_mesh_is_found_out(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        layout = random_mesh_layout(draw)
        rank = draw.choice([rank for rank, rows in enumerate(layout) if rows])
        place = draw.randrange(len(layout[rank]))
        name, dtype, shape, first, length, box = full(layout[rank][place])
        others = [row for rows in layout for row in rows if row[0] == name and row is not layout[rank][place]]
        change = draw.choice(["dropped", "moved", "cut", "other box"])
        if change == "dropped":
            del layout[rank][place]
            if not others:
                continue
        elif change == "moved":
            layout[rank][place] = (name, dtype, shape, first + draw.choice([-1, 1]) if first else 1, length, box)
        elif change == "cut":
            layout[rank][place] = (name, dtype, shape, first, length - 1, box)
        elif box:
            dimension = draw.randrange(len(shape))
            changed = [size + (at == dimension) * draw.choice([-1, 1]) for at, size in enumerate(box[:-1])]
            layout[rank][place] = (name, dtype, shape, first, length, (*changed, box[-1]))
        else:
            continue
        with pytest.raises(FormatError, match=rf"{name}: "):
            index_of(receipt(rank, len(layout), rows=rows) for rank, rows in enumerate(layout))


@pytest.mark.parametrize(
    ("mesh", "cuts", "ranks"),
    [
        ((32, 8), (Cut(0, 8), Cut(0)), 256),
        ((32, 8), (Cut(0), Cut(1)), 256),
        ((4, 32, 2), (None, Cut(0, 2), Cut(0)), 64),
        ((4, 32, 2), (None, Cut(0), Cut(1)), 64),
        ((32, 8), (Cut(0), None), 32),
    ],
)
def test_a_mesh_makes_few_series_whatever_its_size(mesh: tuple[int, ...], cuts: tuple[Any, ...], ranks: int) -> None:
    """FSDP in tensor parallelism, HSDP of it: the index does not grow by the ranks. First holders have it all here."""
    shape, grid = (256, 64), plain_mesh(mesh)
    shares = [share(shape, grid, cuts, rank) for rank in grid.ranks]
    layout: list[list[Row]] = []
    for rank, mine in enumerate(shares):
        box = () if mine.ranges else (*mine.box.lengths, 0)
        row: Row = ("t", "F32", shape, corner(mine.box, shape), mine.box.elements, box)
        layout.append([row] if mine.holders[0] == rank else [])
    index = read(index_of(receipt(rank, len(layout), rows=rows) for rank, rows in enumerate(layout)))
    assert len(index.chunks("t")) == ranks
    assert len(index.tensors["t"].series.split()) == 1

"""The sample sequence: a permutation per epoch, the same at every world size, resumed by a jump.

The F-numbers name failures seen in other projects that the sampler must rule out by construction.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from orchestrator.errors import ConfigError, GateError, StateError
from orchestrator.training.sampler import LENGTH_MAX, SEED_MAX, ResumableSampler, permuted


def make(
    length: int = 1000, global_batch: int = 32, micro_batch: int = 8, seed: int = 7, **world: int
) -> ResumableSampler:
    """A sampler at position 0, rank 0 of 1 unless told otherwise."""
    return ResumableSampler(length, global_batch, micro_batch, seed, **({"rank": 0, "world_size": 1} | world))


def global_batches(length: int, world_size: int, steps: int) -> list[list[int]]:
    """What all ranks together train on at each step, from their micro-batches alone."""
    ranks = [make(length, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = []
    for _ in range(steps):
        batches.append([index for sampler in ranks for micro_batch in sampler for index in micro_batch])
        for sampler in ranks:
            sampler.advance()
    return batches


# --- the permutation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "first"),
    [
        (10, 0, 0, [2, 3, 0, 5, 7, 1, 9, 4, 8, 6]),
        (10, 0, 1, [1, 4, 2, 9, 0, 7, 3, 6, 8, 5]),
        (10, 1, 0, [7, 5, 0, 4, 1, 6, 8, 2, 9, 3]),
        (1000, 7, 3, [809, 302, 778, 903, 474, 880, 490, 65, 864, 766]),
        (1 << 40, SEED_MAX, (1 << 63) - 1, [724391080320, 576260348283, 183623443437, 574572234380, 494188201361]),
    ],
)
def test_golden_permutations_never_change(length: int, seed: int, epoch: int, first: list[int]) -> None:
    """Checkpoints rest on these values: if this fails, the code is wrong, not the test."""
    places = np.arange(len(first), dtype=np.uint64)
    assert permuted(places, length=length, seed=seed, epoch=epoch).tolist() == first


def test_golden_digests_never_change() -> None:
    sampler = make()
    assert sampler.digest() == "200715a9"
    sampler.load_state_dict(sampler.state_dict() | {"position": 992})  # straddles two epochs
    assert sampler.next_global_batch()[:10] == [182, 635, 513, 446, 763, 844, 653, 249, 953, 438]
    assert sampler.digest() == "19100611"


def test_every_length_is_permuted_exactly(seed: int) -> None:
    draw = random.Random(seed)
    for length in [*range(1, 70), *(draw.randrange(70, 20_000) for _ in range(30)), 4**6, 4**6 + 1]:
        places = np.arange(length, dtype=np.uint64)
        indices = permuted(places, length=length, seed=draw.randrange(SEED_MAX), epoch=draw.randrange(1 << 40))
        assert np.array_equal(np.sort(indices), places), length


def test_longest_length_stays_in_range() -> None:
    indices = permuted(np.arange(1000, dtype=np.uint64), length=LENGTH_MAX, seed=1, epoch=0)
    assert len(np.unique(indices)) == 1000
    assert indices.max() < LENGTH_MAX


def test_all_orders_of_a_small_epoch_occur_about_equally_often() -> None:
    places = np.arange(4, dtype=np.uint64)
    orders = Counter(tuple(permuted(places, length=4, seed=1, epoch=epoch).tolist()) for epoch in range(2400))
    assert len(orders) == 24
    assert 60 < min(orders.values()) <= max(orders.values()) < 140  # 100 expected


# --- the stream -----------------------------------------------------------------------------------------------------


def test_f41_no_sample_twice_and_none_left_out_in_an_epoch(seed: int) -> None:
    """F41: two ranks were served the same samples. Here: every sample once per epoch, whatever the world size."""
    draw = random.Random(seed)
    for world_size in (1, 2, 4):
        for length in (draw.randrange(1, 400) for _ in range(6)):
            steps = 3 * length // 32 + 1
            stream = [index for batch in global_batches(length, world_size, steps) for index in batch]
            for first in range(0, len(stream) - length + 1, length):
                assert sorted(stream[first : first + length]) == list(range(length))


def test_stream_is_the_same_at_every_world_size() -> None:
    expected = global_batches(77, 1, steps=12)
    for world_size in make().allowed_world_sizes():
        assert global_batches(77, world_size, steps=12) == expected


def test_next_global_batch_is_what_the_ranks_train_on() -> None:
    sampler = make(77)
    for batch in global_batches(77, 4, steps=10):
        assert sampler.next_global_batch() == batch
        sampler.advance()


def test_epochs_are_shuffled_differently_and_seeds_differ() -> None:
    first, second = global_batches(32, 1, steps=2)
    assert first != second
    assert make(seed=1).next_global_batch() != make(seed=2).next_global_batch()


def test_a_global_batch_may_span_several_epochs() -> None:
    counts = Counter(make(length=5, global_batch=32).next_global_batch())
    assert sorted(counts.values()) == [6, 6, 6, 7, 7]


def test_micro_batches_are_cut_to_size() -> None:
    assert [len(indices) for indices in make(rank=1, world_size=2)] == [8, 8]
    assert make(rank=1, world_size=2).micro_batches_per_step == 2
    assert [len(indices) for indices in make(rank=3, world_size=16)] == [2]
    assert make(rank=3, world_size=16).micro_batches_per_step == 1


def test_iterating_does_not_move_the_position() -> None:
    sampler = make()
    expected = list(sampler)
    for _ in sampler:
        break
    assert list(sampler) == expected
    assert sampler.samples_seen == 0


def test_a_step_under_way_is_not_changed_by_advancing() -> None:
    sampler = make()
    expected = list(sampler)
    step = iter(sampler)
    first = next(step)
    sampler.advance()
    assert [first, *step] == expected


# --- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resume_anywhere_at_any_world_size_goes_on_with_the_same_stream(world_size: int, seed: int) -> None:
    draw = random.Random(seed)
    for length in (draw.randrange(1, 300) for _ in range(5)):
        expected = global_batches(length, 1, steps=12)
        done = draw.randrange(12)
        saved = make(length)
        for _ in range(done):
            saved.advance()
        state = json.loads(json.dumps(saved.state_dict()))
        ranks = [make(length, micro_batch=4, rank=rank, world_size=world_size) for rank in range(world_size)]
        for step in range(done, 12):
            for sampler in ranks:
                sampler.load_state_dict(state) if step == done else sampler.advance()
            assert [index for sampler in ranks for micro in sampler for index in micro] == expected[step]


def test_f40_epoch_is_part_of_the_position() -> None:
    """F40: resumed at step 200 of 125 per epoch, a loader shuffled for epoch 0. Here: the position says epoch 1."""
    sampler = make(length=125 * 32)
    for _ in range(200):
        sampler.advance()
    resumed = make(length=125 * 32)
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.samples_seen, resumed.epoch) == (6400, 1)
    expected = permuted(np.arange(2400, 2432, dtype=np.uint64), length=4000, seed=7, epoch=1)
    assert resumed.next_global_batch() == expected.tolist()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"length": 999}, ("data.length",)),
        ({"global_batch": 64}, ("data.global_batch",)),
        ({"seed": 8}, ("data.seed",)),
        ({"length": 1001, "seed": 8}, ("data.length", "data.seed")),
    ],
)
def test_f46_another_data_set_is_refused_by_name(changes: dict[str, int], parts: tuple[str, ...]) -> None:
    """F46: length, seed or batch changed, and training went on with wrong samples. Here: refused, naming them."""
    sampler = make()
    with pytest.raises(GateError) as caught:
        sampler.load_state_dict(make(**changes).state_dict() | {"position": 64})
    assert caught.value.parts == parts
    assert all(part.removeprefix("data.") in str(caught.value) for part in parts)
    assert sampler.samples_seen == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position", -32),
        ("position", 1 << 63),
        ("position", "32"),
        ("position", 32.0),
        ("position", True),
        ("length", 0),
        ("seed", None),
        ("micro_batch", -1),
        ("workers", 2),
    ],
)
def test_garbage_in_a_state_is_refused_by_name(name: str, value: object) -> None:
    sampler = make()
    with pytest.raises(StateError) as caught:
        sampler.load_state_dict(sampler.state_dict() | {name: value})
    assert caught.value.path == f"data.{name}"


def test_a_field_missing_from_a_state_is_refused_by_name() -> None:
    sampler = make()
    state = {name: value for name, value in sampler.state_dict().items() if name != "position"}
    with pytest.raises(StateError, match=r"data\.position: missing"):
        sampler.load_state_dict(state)


def test_digest_tells_positions_and_seeds_apart() -> None:
    samplers = [make(), make(), make(seed=8), make(length=999)]
    samplers[1].advance()
    assert len({sampler.digest() for sampler in samplers}) == 4
    assert make(rank=1, world_size=4).digest() == make().digest()


# --- worlds ---------------------------------------------------------------------------------------------------------


def test_allowed_world_sizes() -> None:
    assert make().allowed_world_sizes() == (1, 2, 4, 8, 16, 32)
    assert make(global_batch=24, micro_batch=4).allowed_world_sizes() == (1, 2, 3, 6, 8, 12, 24)
    assert make(global_batch=7, micro_batch=7).allowed_world_sizes() == (1, 7)


def test_set_world_changes_the_rank_and_keeps_the_position() -> None:
    sampler = make()
    sampler.advance()
    expected = sampler.next_global_batch()
    sampler.set_world(3, 4)
    assert (sampler.rank, sampler.world_size, sampler.micro_batches_per_step) == (3, 4, 1)
    assert list(sampler) == [expected[24:]]


def test_a_world_that_cannot_share_the_batch_is_refused_with_its_neighbours() -> None:
    sampler = make()
    with pytest.raises(ConfigError, match=r"data\.world_size: 3 ranks .* allowed: 1, 2, 4, 8, 16"):
        sampler.set_world(0, 3)
    with pytest.raises(ConfigError, match=r"the nearest of 134 allowed: 13, 15, 16, 20, 22, 24$"):
        iter(make(global_batch=64 * 30030, micro_batch=7, world_size=17))
    with pytest.raises(ConfigError, match=r"data\.rank"):
        sampler.set_world(4, 4)
    assert (sampler.rank, sampler.world_size) == (0, 1)


def test_rank_and_world_size_come_from_the_environment_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = ResumableSampler(1000, 32, 8, 7)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert (sampler.rank, sampler.world_size) == (1, 2)
    assert (ResumableSampler(1000, 32, 8, 7).rank, ResumableSampler(1000, 32, 8, 7).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK: must be a whole number, got 'first'"):
        ResumableSampler(1000, 32, 8, 7)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make(length=0, global_batch=-1, micro_batch=True, seed=-1)
    named = [problem.partition(":")[0] for problem in caught.value.problems]
    assert named == ["data.length", "data.global_batch", "data.micro_batch", "data.seed"]


# --- streams for data loaders ---------------------------------------------------------------------------------------


def test_stream_goes_on_over_the_following_steps() -> None:
    sampler = make(length=100)
    read_ahead = list(islice(sampler.stream(), 40))
    assert sampler.samples_seen == 0
    expected = []
    for _ in range(10):
        expected += list(sampler)
        sampler.advance()
    assert read_ahead == expected


def test_a_stream_begun_before_a_jump_raises_instead_of_serving_the_old_place() -> None:
    sampler = make()
    stream = sampler.stream()
    old = iter(stream)
    next(old)
    sampler.advance()  # completing a step is no jump
    next(old)
    sampler.load_state_dict(sampler.state_dict() | {"position": 320})
    with pytest.raises(StateError, match=r"data\.stream"):
        next(old)
    assert next(iter(stream)) == next(iter(sampler))  # begun afterwards, it is at the new place
    old = iter(stream)
    sampler.set_world(0, 2)
    with pytest.raises(StateError, match=r"data\.stream"):
        next(old)


class Squares(Dataset[int]):
    """A data set whose sample i is i * i."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index * index


def test_prefetching_loader_workers_do_not_move_the_position() -> None:
    """The position counts completed steps, never batches that a loader has read ahead."""
    sampler = make()
    loader = DataLoader(Squares(), batch_sampler=sampler.stream(), num_workers=2, prefetch_factor=4)
    sampler.load_state_dict(sampler.state_dict() | {"position": 960})  # after the loader is built, as on a resume
    batches = iter(loader)
    for step in range(3):
        assert sampler.samples_seen == 960 + 32 * step
        expected = [[index * index for index in indices] for indices in sampler]
        assert [next(batches).tolist() for _ in range(sampler.micro_batches_per_step)] == expected
        sampler.advance()
    del batches

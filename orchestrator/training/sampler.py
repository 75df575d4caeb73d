"""The sample sequence: which samples each rank trains on at each step, as a pure function of one position.

What it is: one infinite stream of sample indices, the same at every world size. Position p belongs to epoch
p // length and holds index permutation(seed, epoch)[p % length]; the global batch of a step is the positions
[position, position + global_batch), wherever epochs end. So the whole state is one number, the epoch is part
of it, and resuming is a jump, never a replay.

What it is not: a data loader (it reads no data and has no RNG of its own: `random`, numpy and torch are neither
used nor advanced), and not a dataset's length in epochs: nothing is dropped or padded at an epoch's end.

Who calls it: the training script iterates it; `training.session` advances it at each completed optimizer step,
saves and loads its state, and compares `digest` at the resume gate.

The permutation is a keyed Feistel network over the next even number of bits, with cycle walking (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002); its round function is splitmix64's finaliser (Steele,
Lea and Flood, 2014). It takes no memory, whatever the length. ITS OUTPUT MUST NEVER CHANGE: checkpoints rest
on it, and `tests/training/test_sampler.py` holds golden values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import isqrt

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from orchestrator.errors import ConfigError, GateError, StateError

LENGTH_MAX = 1 << 62  # samples; the Feistel domain is then at most 64 bits
GLOBAL_BATCH_MAX = 1 << 32  # samples
POSITION_MAX = (1 << 63) - 1  # samples
SEED_MAX = (1 << 64) - 1
ROUNDS = 8  # part of the format, as is every constant below

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment
_FINGERPRINT = ("length", "global_batch", "seed")  # what decides the stream; the micro-batch only cuts it
_SIZES_SHOWN = 3  # allowed world sizes named on each side of the one refused


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser on each word of an array (arithmetic modulo 2**64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, epoch: int, length: int) -> NDArray[np.uint64]:
    """The ROUNDS keys of one epoch's permutation."""
    root = _mix(np.array([seed], dtype=np.uint64) + _GAMMA)
    root = _mix((root ^ np.uint64(epoch)) + _GAMMA)
    root = _mix((root ^ np.uint64(length)) + _GAMMA)  # so that a digest tells lengths apart, too
    return _mix(root + _GAMMA * np.arange(1, ROUNDS + 1, dtype=np.uint64))


def _encrypt(words: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    """One pass of the balanced Feistel network: a bijection of [0, 4**half_bits)."""
    half, drop = np.uint64(half_bits), np.uint64(64 - half_bits)
    left, right = words >> half, words & np.uint64((1 << half_bits) - 1)
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) >> drop)
    return (left << half) | right


def permuted(places: NDArray[np.uint64], *, length: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """The sample index at each place of an epoch: a permutation of [0, length), evaluated only where asked.

    `places`: uint64, any shape [n], each below `length` (1 to LENGTH_MAX). Returns uint64 of the same shape.
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch, length)
    indices = _encrypt(places, keys, half_bits)
    # A walk along a cycle of the bijection comes back below `length` at the latest where it began; the domain is
    # at most four times the length (of four words for lengths 1 to 4), so it takes under four passes on average.
    outside = indices >= length
    while outside.any():
        indices[outside] = _encrypt(indices[outside], keys, half_bits)
        outside = indices >= length
    return indices


class SampleStream:
    """This rank's micro-batches of the coming steps, without end; made by `ResumableSampler.stream`.

    Give it to `DataLoader(dataset, batch_sampler=...)`. Each `iter()` starts at the sampler's position of that
    moment, so a loader built before the state is restored is right as long as it is iterated afterwards.
    Reading ahead never moves the position. An iterator that the sampler has been moved away from (state loaded,
    world changed) raises StateError at its next read instead of serving samples of the old place.
    """

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        """Start at the sampler's current position; yields list[int] micro-batches."""
        return self._sampler._follow(self._sampler.samples_seen, self._sampler._moves)


class ResumableSampler:
    """Cuts one infinite, seeded sample stream into global batches, and those into ranks and micro-batches.

    Rank r of W trains on positions [p + r*G/W, p + (r+1)*G/W) of the global batch at p, in micro-batches of
    m = min(micro_batch, G/W). W is allowed if it divides G and m divides G/W; `global_batch` stays the same at
    every world size, only the number of micro-batches per step changes.

    Iterating yields the micro-batches of one step and moves nothing; `advance` moves.
    """

    def __init__(
        self,
        length: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`length`: samples in the data set. `global_batch`: samples per optimizer step, all ranks together; may
        exceed `length`. `micro_batch`: most samples per forward pass of a rank. `rank` and `world_size` default
        to the environment's RANK and WORLD_SIZE, else 0 and 1. A world size that does not share the global batch
        equally is refused when the first samples are asked for, so that `attach` can have the job formed anew before.

        Raises ConfigError, which lists every problem.
        """
        problems = [
            *_int_problems("data.length", length, 1, LENGTH_MAX),
            *_int_problems("data.global_batch", global_batch, 1, GLOBAL_BATCH_MAX),
            *_int_problems("data.micro_batch", micro_batch, 1, LENGTH_MAX),
            *_int_problems("data.seed", seed, 0, SEED_MAX),
        ]
        rank = _from_environment("RANK", 0, problems) if rank is None else rank
        world_size = _from_environment("WORLD_SIZE", 1, problems) if world_size is None else world_size
        if problems:
            raise ConfigError(*problems)
        self._length = length
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._seed = seed
        self._position = 0
        self._moves = 0  # counts jumps, so that a stream begun before one can tell
        self._rank, self._world_size = _checked_place(rank, world_size)

    # --- the current step -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches (list[int], sample indices) of the one step at the current position.

        They are fixed when iteration starts; the position stays, so leaving early or iterating twice is harmless.
        """
        return iter(self._micro_batches(self._position))

    def stream(self) -> SampleStream:
        """This step's and all following steps' micro-batches without end, for a prefetching DataLoader."""
        return SampleStream(self)

    def advance(self) -> None:
        """Move on by one global batch: the step is complete. Called by the training session."""
        self._position += self._global_batch

    def next_global_batch(self) -> list[int]:
        """The sample indices of the step at the current position, all ranks, in stream order."""
        indices: list[int] = self._indices(self._position, self._position + self._global_batch).tolist()
        return indices

    def digest(self) -> str:
        """crc32c, 8 hex digits, of `next_global_batch` as little-endian uint64: for the resume gate."""
        indices = self._indices(self._position, self._position + self._global_batch)
        return f"{crc32c(indices.astype('<u8').tobytes()):08x}"

    @property
    def samples_seen(self) -> int:
        """Samples of completed steps, all ranks: the position."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to; the first is 0."""
        return self._position // self._length

    @property
    def micro_batches_per_step(self) -> int:
        """Forward passes of each rank per optimizer step."""
        return self._per_rank // min(self._micro_batch, self._per_rank)

    # --- the world --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share each global batch."""
        return self._world_size

    def allowed_world_sizes(self) -> tuple[int, ...]:
        """All world sizes that keep the global batch, ascending; the last is `global_batch` itself."""
        return tuple(size for size in _divisors(self._global_batch) if self._allows(size))

    def set_world(self, rank: int, world_size: int) -> None:
        """Serve rank `rank` of `world_size` from now on; the position stays.

        Raises ConfigError, naming the allowed sizes nearest to the one asked for.
        """
        world = _checked_place(rank, world_size)
        if not self._allows(world_size):
            raise ConfigError(self._refusal(world_size))
        if world != (self._rank, self._world_size):
            self._rank, self._world_size = world
            self._moves += 1

    # --- the state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """The position (samples of completed steps), and what it is a position in. The same on every rank."""
        return {
            "position": self._position,
            "length": self._length,
            "global_batch": self._global_batch,
            "seed": self._seed,
            "micro_batch": self._micro_batch,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Jump to a saved position; nothing is replayed. Another `micro_batch` or world size is fine.

        Raises StateError if a field is missing, unknown or out of range; GateError, whose `parts` name each
        difference, if length, global batch or seed differ: the position would then mean other samples.
        """
        position = _checked_state(state)
        mine = self.state_dict()
        differing = [name for name in _FINGERPRINT if state[name] != mine[name]]
        if differing:
            raise GateError(
                tuple(f"data.{name}" for name in differing),
                "the data differs from what was saved: "
                + ", ".join(f"{name} was {state[name]}, is {mine[name]}" for name in differing),
            )
        if position != self._position:
            self._position = position
            self._moves += 1

    # --- inside -----------------------------------------------------------------------------------------------

    @property
    def _per_rank(self) -> int:
        """Samples per rank and step. Raises ConfigError if the world size does not allow equal shares."""
        if not self._allows(self._world_size):
            raise ConfigError(self._refusal(self._world_size))
        return self._global_batch // self._world_size

    def _indices(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Sample indices at positions [start, stop), uint64 [stop - start], epoch by epoch."""
        pieces = []
        while start < stop:
            epoch, first = divmod(start, self._length)
            last = min(self._length, first + stop - start)
            places = np.arange(first, last, dtype=np.uint64)
            pieces.append(permuted(places, length=self._length, seed=self._seed, epoch=epoch))
            start += last - first
        return np.concatenate(pieces)

    def _micro_batches(self, position: int) -> list[list[int]]:
        """This rank's micro-batches of the step that starts at `position`."""
        start = position + self._rank * self._per_rank
        indices: list[int] = self._indices(start, start + self._per_rank).tolist()
        size = min(self._micro_batch, self._per_rank)
        return [indices[first : first + size] for first in range(0, len(indices), size)]

    def _follow(self, position: int, moves: int) -> Iterator[list[int]]:
        """Micro-batches from `position` on, as long as the sampler has not jumped since `moves`."""
        while True:
            for indices in self._micro_batches(position):
                if self._moves != moves:
                    raise StateError("data.stream", "the sampler was moved after this iterator began; start another")
                yield indices
            position += self._global_batch

    def _allows(self, world_size: int) -> bool:
        """Whether `world_size` ranks can share the global batch in equal micro-batches."""
        per_rank, rest = divmod(self._global_batch, world_size)
        return rest == 0 and per_rank > 0 and per_rank % min(self._micro_batch, per_rank) == 0

    def _refusal(self, world_size: int) -> str:
        """Why `world_size` is not possible, with the nearest sizes that are."""
        allowed = self.allowed_world_sizes()
        below = [size for size in allowed if size < world_size][-_SIZES_SHOWN:]
        above = [size for size in allowed if size > world_size][:_SIZES_SHOWN]
        near = ", ".join(map(str, below + above))
        which = "allowed" if len(below + above) == len(allowed) else f"the nearest of {len(allowed)} allowed"
        return (
            f"data.world_size: {world_size} ranks cannot share a global batch of {self._global_batch} in "
            f"micro-batches of {self._micro_batch}; {which}: {near}"
        )


def _checked_place(rank: int, world_size: int) -> tuple[int, int]:
    """The pair as it came. Raises ConfigError if it is none."""
    problems = _int_problems("data.world_size", world_size, 1, LENGTH_MAX)
    problems = problems or _int_problems("data.rank", rank, 0, world_size - 1)
    if problems:
        raise ConfigError(*problems)
    return rank, world_size


def _int_problems(path: str, value: object, low: int, high: int) -> list[str]:
    """What is wrong with a whole number that must lie in [low, high]: one message, or none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{path}: must be an int, got {value!r}"]
    if not low <= value <= high:
        return [f"{path}: must be from {low} to {high}, got {value}"]
    return []


def _from_environment(name: str, default: int, problems: list[str]) -> int:
    """The whole number in variable `name`, or the default; adds to `problems` if it is none."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name}: must be a whole number, got {text!r}")
        return default


def _divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [low for low in range(1, isqrt(number) + 1) if number % low == 0]
    return small + [number // low for low in reversed(small) if low * low != number]


def _checked_state(state: Mapping[str, object]) -> int:
    """The position in a saved state, after checking every field. Raises StateError."""
    limits = {
        "position": (0, POSITION_MAX),
        "length": (1, LENGTH_MAX),
        "global_batch": (1, GLOBAL_BATCH_MAX),
        "seed": (0, SEED_MAX),
        "micro_batch": (1, LENGTH_MAX),
    }
    for name in [*limits, *state]:
        if name not in state:
            raise StateError(f"data.{name}", "missing")
        if name not in limits:
            raise StateError(f"data.{name}", "unknown; saved by another release or another sampler")
        for problem in _int_problems(f"data.{name}", state[name], *limits[name]):
            raise StateError(f"data.{name}", problem.partition(": ")[2])
    position = state["position"]
    assert isinstance(position, int)
    return position

"""What is known of a gang's ranks, in values that change cheaply: sets of ranks as bits, columns in blocks. Pure.

A gang may have thousands of ranks, and each of them reports several times for each save. So one report must not copy
or scan what is known of all the others: a column copies one block of it, and what the decisions ask for (the highest
step, the slowest rank, who has attached) is kept beside it. Values all the same: nothing here is changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from orchestrator.core.messages import RankExited
from orchestrator.core.values import Changeable

BLOCK_LENGTH = 64

T = TypeVar("T")
Number = TypeVar("Number", bound=float)


@dataclass(frozen=True, slots=True)
class RankSet:
    """An immutable set of ranks; bit r stands for rank r."""

    bits: int = 0

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet:
        """The given ranks."""
        bits = 0
        for rank in ranks:
            bits |= 1 << rank
        return cls(bits)

    @classmethod
    def below(cls, world_size: int) -> RankSet:
        """All ranks of a gang."""
        return cls((1 << world_size) - 1)

    def plus(self, rank: int) -> RankSet:
        """With one rank more."""
        return RankSet(self.bits | 1 << rank)

    def minus(self, rank: int) -> RankSet:
        """Without one rank."""
        return RankSet(self.bits & ~(1 << rank))

    def __or__(self, other: RankSet) -> RankSet:
        return RankSet(self.bits | other.bits)

    def __and__(self, other: RankSet) -> RankSet:
        return RankSet(self.bits & other.bits)

    def __sub__(self, other: RankSet) -> RankSet:
        return RankSet(self.bits & ~other.bits)

    def __le__(self, other: RankSet) -> bool:
        return not self.bits & ~other.bits

    def __contains__(self, rank: int) -> bool:
        return bool(self.bits >> rank & 1)

    def __bool__(self) -> bool:
        return bool(self.bits)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __iter__(self) -> Iterator[int]:
        """In rising order."""
        bits = self.bits
        while bits:
            lowest = bits & -bits
            yield lowest.bit_length() - 1
            bits ^= lowest


NOBODY = RankSet()


def _blocks(value: T, size: int) -> tuple[tuple[T, ...], ...]:
    whole, rest = divmod(size, BLOCK_LENGTH)
    return ((value,) * BLOCK_LENGTH,) * whole + (((value,) * rest,) if rest else ())


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One value for each rank; `put` copies one block and the list of blocks."""

    blocks: tuple[tuple[T, ...], ...] = ()

    @classmethod
    def filled(cls, value: T, size: int) -> Column[T]:
        """The same value for every rank."""
        return cls(_blocks(value, size))

    def __getitem__(self, rank: int) -> T:
        return self.blocks[rank // BLOCK_LENGTH][rank % BLOCK_LENGTH]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.blocks)

    def put(self, rank: int, value: T) -> Column[T]:
        """With another value for one rank."""
        return Column(_put(self.blocks, rank, value))


@dataclass(frozen=True, slots=True)
class Numbers(Generic[Number]):
    """One number for each rank, and the highest of each block, so that the highest of all is at hand."""

    blocks: tuple[tuple[Number, ...], ...] = ()
    tops: tuple[Number, ...] = ()

    @classmethod
    def filled(cls, value: Number, size: int) -> Numbers[Number]:
        """The same number for every rank."""
        blocks = _blocks(value, size)
        return cls(blocks, (value,) * len(blocks))

    def __getitem__(self, rank: int) -> Number:
        return self.blocks[rank // BLOCK_LENGTH][rank % BLOCK_LENGTH]

    def __iter__(self) -> Iterator[Number]:
        return chain.from_iterable(self.blocks)

    def put(self, rank: int, value: Number) -> Numbers[Number]:
        """With another number for one rank."""
        old = self[rank]
        if old == value:
            return self
        blocks = _put(self.blocks, rank, value)
        number = rank // BLOCK_LENGTH
        top = self.tops[number]
        new = value if value >= top else top if old < top else max(blocks[number])
        tops = self.tops if new == top else (*self.tops[:number], new, *self.tops[number + 1 :])
        return Numbers(blocks, tops)

    @property
    def highest(self) -> Number | None:
        """The highest number; None without any rank."""
        return max(self.tops, default=None)


def _put(blocks: tuple[tuple[T, ...], ...], rank: int, value: T) -> tuple[tuple[T, ...], ...]:
    number, place = divmod(rank, BLOCK_LENGTH)
    block = blocks[number]
    return (*blocks[:number], (*block[:place], value, *block[place + 1 :]), *blocks[number + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What is known of one rank of the present generation, drawn together."""

    attached: bool
    pid: int
    step: int
    step_seconds: float
    slot_bytes: int
    exited: RankExited | None


@dataclass(frozen=True, kw_only=True)
class Ranks(Changeable, Mapping[int, Rank]):
    """All ranks of the present generation. Each method that changes something gives a new value."""

    world_size: int = 0
    base_step: int = 0
    """The step that every rank restored."""
    steps: Numbers[int] = Numbers()
    step_seconds: Numbers[float] = Numbers()
    slot_bytes: Numbers[int] = Numbers()
    unique_bytes: Numbers[int] = Numbers()
    """Of each rank's shard, what no other rank holds."""
    twins: Column[tuple[RankSet, ...]] = Column()
    """Of each rank, the sets of ranks that hold a part of its state alike, but for the set of all."""
    staging_bytes: int = 0
    """Sum of all ranks' slots, one slot each."""
    pids: Column[int] = Column()
    exits: Column[RankExited | None] = Column()
    attached: RankSet = NOBODY
    planned: RankSet = NOBODY
    moved: RankSet = NOBODY
    """Ranks that have completed a step in this generation."""
    busy: RankSet = NOBODY
    """Ranks without a free slot."""
    exited: RankSet = NOBODY
    finished: RankSet = NOBODY
    """Ranks that exited with status 0."""

    @classmethod
    def starting(cls, world_size: int, base_step: int) -> Ranks:
        """A gang before anybody has attached."""
        return cls(
            world_size=world_size,
            base_step=base_step,
            steps=Numbers.filled(base_step, world_size),
            step_seconds=Numbers.filled(0.0, world_size),
            slot_bytes=Numbers.filled(0, world_size),
            unique_bytes=Numbers.filled(0, world_size),
            twins=Column.filled((), world_size),
            pids=Column.filled(0, world_size),
            exits=Column.filled(None, world_size),
        )

    @property
    def everyone(self) -> RankSet:
        """All ranks."""
        return RankSet.below(self.world_size)

    def attach(self, rank: int, *, pid: int, step: int) -> Ranks:
        """A rank has restored its state; in a gang that was taken back that was long ago."""
        ranks = self.reach(rank, max(step, self.steps[rank]))
        return ranks.changed(pids=self.pids.put(rank, pid), attached=self.attached.plus(rank))

    def plan(self, rank: int, *, slot_bytes: int, unique_bytes: int, twins: tuple[RankSet, ...] = ()) -> Ranks:
        """A rank's shard layout is known."""
        return self.changed(
            slot_bytes=self.slot_bytes.put(rank, slot_bytes),
            unique_bytes=self.unique_bytes.put(rank, unique_bytes),
            twins=self.twins.put(rank, twins) if twins else self.twins,
            staging_bytes=self.staging_bytes + slot_bytes - self.slot_bytes[rank],
            planned=self.planned.plus(rank),
        )

    def dispensable(self, going: RankSet) -> RankSet:
        """Those of `going` without which nothing is lost: whatever they hold, somebody who stays holds as well."""
        if self.everyone <= going:
            return NOBODY
        return going - RankSet.of(rank for rank in going if any(twins <= going for twins in self.twins[rank]))

    def reach(self, rank: int, step: int) -> Ranks:
        """A rank is at this step."""
        return self.changed(steps=self.steps.put(rank, step), moved=self._moved(rank, step))

    def progress(self, rank: int, *, step: int, step_seconds: float, free_slots: int) -> Ranks:
        """A rank has published a boundary."""
        return self.changed(
            steps=self.steps.put(rank, step),
            step_seconds=self.step_seconds.put(rank, step_seconds),
            moved=self._moved(rank, step),
            busy=self.busy.minus(rank) if free_slots else self.busy.plus(rank),
        )

    def _moved(self, rank: int, step: int) -> RankSet:
        return self.moved.plus(rank) if step > self.base_step else self.moved.minus(rank)

    def exit(self, event: RankExited) -> Ranks:
        """A rank's worker is gone."""
        return self.changed(
            exits=self.exits.put(event.rank, event),
            exited=self.exited.plus(event.rank),
            finished=self.finished.plus(event.rank) if event.exit_code == 0 else self.finished,
        )

    def known_exits(self) -> list[RankExited]:
        """All exits, by rank."""
        return [event for event in self.exits if event is not None]

    # -- as a mapping, for people and status pages; slow ----------------------------------------------------

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.world_size))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and 0 <= rank < self.world_size

    def __getitem__(self, rank: int) -> Rank:
        if rank not in self:
            raise KeyError(rank)
        return Rank(
            attached=rank in self.attached,
            pid=self.pids[rank],
            step=self.steps[rank],
            step_seconds=self.step_seconds[rank],
            slot_bytes=self.slot_bytes[rank],
            exited=self.exits[rank],
        )


NO_RANKS = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One step, from the first rank that publishes it to the last one; and who was last before."""

    step: int = -1
    since_seconds: float = 0.0
    running: RankSet = NOBODY
    """Ranks that have not published it; nobody: it is over."""
    last: int | None = None
    """The rank that came last, and late."""
    times: int = 0
    """In so many steps in a row."""
    late_seconds: float = 0.0
    """The sum of these times."""
    told: RankSet = NOBODY


NO_RACE = Race()

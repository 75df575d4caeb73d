"""Sweeps, prunes, claims, commits and rollbacks of several runs at once, interleaved at every call of the store.

One actor runs at a time; who goes on after each call is drawn from the seed, so a seed that fails can be replayed.
Actors die at a drawn call, or stand still while others go on. After every write and delete the whole store is judged
by rules of this module's own: what must be restorable is there with all of its files.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint import records, sweeping
from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.generations import Claimant, open_generation, successor
from orchestrator.checkpoint.retention import Keep
from orchestrator.checkpoint.save import commit
from orchestrator.checkpoint.sweeping import Sweeper, delete_shards, retire
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import (
    AlreadyExistsError,
    FencedError,
    NotFoundError,
    OrchestratorError,
    SweepRefusedError,
)
from orchestrator.storage.base import Entry, Piece
from orchestrator.storage.memory import MemoryStore
from tests.checkpoint.shards import metadata, place, stage, upload

WORLD_SIZE = 2
GRACE_SECONDS = 100.0
ACTORS_SECONDS_MAX = 20.0
SEEDS = 50


class Dies(BaseException):
    """An actor's process is killed."""


class AtOnce:
    """An executor that does everything at once, in the caller's thread: the order of calls is the seed's alone."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass


class World:
    """The truth, who may go on, and what must hold."""

    def __init__(self, seed: int, shards: dict[tuple[int, int], bytes]) -> None:
        self.random = random.Random(seed)
        self.truth = MemoryStore()
        self.shards = shards
        self.actors: list[Actor] = []
        self.log: list[str] = []
        self.violations: list[str] = []
        self.committed: set[CheckpointId] = set()
        self.rollbacks = 0
        self.keep_last_min = 1

    # -------------------------------------------------------------------------------------- taking turns

    def go(self) -> None:
        for actor in self.actors:
            actor.thread.start()
        while not self.violations:
            waiting = [actor for actor in self.actors if not actor.over]
            if not waiting:
                break
            awake = [actor for actor in waiting if actor.asleep == 0]
            for actor in waiting:
                actor.asleep = max(0, actor.asleep - 1)
            if awake:
                self.random.choice(awake).take_turn()
        for actor in self.actors:
            if not actor.over:
                actor.doomed = True
                actor.take_turn()

    # -------------------------------------------------------------------------------------------- judging

    def note(self, actor: str, what: str) -> None:
        self.log.append(f"{actor}: {what}")

    def judge(self) -> None:
        """Called after every write and delete."""
        files: dict[CheckpointId, dict[str, int]] = {}
        bases, claims = dict[int, fmt.BaseRecord](), dict[int, fmt.GenerationRecord]()
        for key, data in self.truth._objects.items():
            parsed = fmt.parse_checkpoint_key(key)
            number = fmt.parse_generation_key(key)
            if parsed is not None:
                files.setdefault(parsed[0], {})[parsed[1]] = len(data)
            elif number is not None:
                claims[number] = fmt.load(fmt.GenerationRecord, key, data)
            elif key.endswith(".base.json"):
                base = fmt.load(fmt.BaseRecord, key, data)
                bases[base.generation] = base
        indexes = {}
        for checkpoint, names in files.items():
            if "index.json" in names:
                key = fmt.index_key(checkpoint)
                indexes[checkpoint] = fmt.load_index(key, self.truth._objects[key])
        committed = sorted(one for one, index in indexes.items() if isinstance(index, fmt.Index))
        whole = {one for one in committed if self._is_whole(files[one])}
        for one in committed:
            if fmt.RETIRED not in files[one] and one not in whole:
                self.violations.append(f"{one} lost files without a mark")
        last = bases[max(bases)].id if bases else None
        if last is not None and last not in whole:
            self.violations.append(f"the base {last} of generation {max(bases)} is not whole")
        if committed and not self.rollbacks:
            newest = committed[-1]
            if newest not in whole or (fmt.RETIRED in files[newest] and newest != last):
                self.violations.append(f"the newest committed {newest} cannot be used")
        self.committed |= set(committed)

    def _is_whole(self, names: dict[str, int]) -> bool:
        return sum(name.startswith("shard-") for name in names) == 2 * WORLD_SIZE


class Actor:
    """One process: its own view of the store, a turn for each call."""

    def __init__(self, world: World, name: str, life: Callable[[Actor], None], calls_max: int | None) -> None:
        self.world, self.name, self.life, self.calls_left = world, name, life, calls_max
        self.over = self.doomed = False
        self.asleep = 0
        self._mine, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.store = View(self)

    def take_turn(self) -> None:
        self._mine.release()
        assert self._back.acquire(timeout=ACTORS_SECONDS_MAX)

    def pause(self, *, delicate: bool = False) -> None:
        """Gives the turn back and waits for the next one. A delicate moment is one to stand still at."""
        self._give_back()
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                self.world.note(self.name, "dies")
                raise Dies
        if self.world.random.random() < (0.2 if delicate else 0.01):
            self.asleep = self.world.random.randrange(150)
            self._give_back()

    def _give_back(self) -> None:
        self._back.release()
        self._mine.acquire()
        if self.doomed:
            raise Dies

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self.doomed:
                self.life(self)
        except Dies:
            pass
        except OrchestratorError as error:
            self.world.note(self.name, f"ends: {error}")
        except BaseException as error:
            self.world.violations.append(f"{self.name}: {error!r}")
        self.over = True
        self._back.release()


class View:
    """The store as one actor has it."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._truth = actor, actor.world.truth

    @property
    def url(self) -> str:
        return self._truth.url

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        self._actor.pause(delicate=key.endswith((fmt.RETIRED, ".base.json")))
        try:
            self._truth.create(key, pieces)
        except AlreadyExistsError:
            self._actor.world.note(self._actor.name, f"create {key}: is there")
            raise
        self._actor.world.note(self._actor.name, f"create {key}")
        self._actor.world.judge()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._actor.pause()
        return self._truth.read(key, start, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        self._actor.pause()
        return self._truth.read_into(key, start, buffers)

    def size(self, key: str) -> int:
        self._actor.pause()
        return self._truth.size(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        self._actor.pause(delicate=True)
        return self._truth.entries(prefix)

    def delete(self, key: str) -> None:
        self._actor.pause()
        self._truth.delete(key)
        self._actor.world.note(self._actor.name, f"delete {key}")
        self._actor.world.judge()


# ------------------------------------------------------------------------------------------------- what they do


def run_job(actor: Actor) -> None:
    """A run: generations, each with some saves, a sweep after most; now and then it looks for a successor."""
    world, draw = actor.world, actor.world.random
    who = Claimant(job="job", owner="owner", claimant=actor.name, take_over=True)
    own: int | None = None
    now = [0.0]
    sweeper = Sweeper(actor.store, lambda: now[0])
    keep = Keep(last=draw.choice((1, 1, 2, 3)), every_steps=draw.choice((0, 4)))
    avoid: set[CheckpointId] = set()
    for _ in range(draw.randint(1, 3)):
        before = set(world.committed)
        if before and draw.random() < 0.5:
            avoid.add(max(before))
        opened = open_generation(actor.store, who, own, avoid, 1.0)
        own = opened.generation
        world.note(actor.name, f"opened {own} from {opened.base}")
        if opened.base is None and before and not world.rollbacks:
            raise AssertionError(f"{own} starts afresh, though {before} were committed")
        if opened.base is not None:
            load(actor, own, opened.base)
            if draw.random() < 0.3:
                avoid.add(opened.base)
        step = 0 if opened.base is None else opened.base.step
        for _ in range(draw.randint(0, 4)):
            step += draw.randint(1, 2)
            checkpoint = CheckpointId(generation=own, step=step)
            ranks = range(WORLD_SIZE) if draw.random() < 0.8 else [0]
            for rank in ranks:
                upload(actor.store, place(rank, WORLD_SIZE, (), checkpoint), world.shards[rank, step % 8])
            if len(ranks) == WORLD_SIZE and draw.random() < 0.9:
                commit(actor.store, checkpoint)
            now[0] += draw.choice((0.0, GRACE_SECONDS))
            if draw.random() < 0.8:
                try:
                    sweeper.sweep(own, keep, (), GRACE_SECONDS)
                except (SweepRefusedError, FencedError) as error:
                    world.note(actor.name, f"sweep: {error}")
            if draw.random() < 0.5 and successor(actor.store, who, own) is not None:
                return


def load(actor: Actor, generation: int, base: CheckpointId) -> None:
    """Workers read the base; it may only go away under them if another generation is there."""
    try:
        for rank in range(WORLD_SIZE):
            actor.store.read(fmt.receipt_key(base, rank, WORLD_SIZE))
            actor.store.read(fmt.shard_key(base, rank, WORLD_SIZE))
    except NotFoundError:
        claims = survey(actor.world.truth).generations
        if max(claims) == generation:
            raise AssertionError(f"generation {generation} lost its base {base}") from None
        raise


def prune(actor: Actor) -> None:
    """As `orchestrator checkpoints prune`."""
    keep = Keep(last=actor.world.random.randint(1, 2))
    for _ in range(3):
        catalog = survey(actor.store)
        generation = max(catalog.generations, default=0)
        try:
            going = retire(actor.store, catalog, generation, keep)
            half = [one.id for one in catalog.entries if one.standing is Standing.RETIRED and one.size_bytes]
            delete_shards(actor.store, generation, [*half, *going])
        except (SweepRefusedError, FencedError) as error:
            actor.world.note(actor.name, f"prune: {error}")


def roll_back(actor: Actor) -> None:
    """A person goes back to an older checkpoint, and starts the job again."""
    for _ in range(actor.world.random.randint(1, 6)):
        actor.pause()
    catalog = survey(actor.store)
    usable = [entry.id for entry in catalog.entries if entry.standing is Standing.COMMITTED]
    if not usable:
        return
    number = max(catalog.generations) + 1
    record = fmt.GenerationRecord(
        version=1,
        job="job",
        generation=number,
        owner="owner",
        claimant="a person",
        wall_seconds=1.0,
        rollback_to=actor.world.random.choice(usable).step,
    )
    actor.world.rollbacks += 1
    actor.store.create(fmt.generation_key(number), [fmt.dump(record)])
    run_job(actor)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], bytes]:
    folder = tmp_path_factory.mktemp("shards")
    return {
        (rank, step): stage(
            folder,
            {"w": torch.arange(8, dtype=torch.float32) + step},
            place(rank, WORLD_SIZE),
            meta=metadata(gate={"step": step, "lr": "0", "data": None, "rng": "0"}),
        )
        for rank in range(WORLD_SIZE)
        for step in range(8)
    }


def disaster(seed: int, shards: dict[tuple[int, int], bytes]) -> World:
    world = World(seed, shards)
    draw = world.random
    lives: list[Callable[[Actor], None]] = [run_job, run_job]
    lives += draw.choices([run_job, run_job, prune, roll_back], k=draw.randint(0, 4))
    for number, life in enumerate(lives):
        calls_max = draw.randrange(20, 400) if draw.random() < 0.4 else None
        actor = Actor(world, f"{life.__name__}-{number}", life, calls_max)
        actor.asleep = draw.randrange(500) * (number > 0)
        world.actors.append(actor)
    world.go()
    return world


@pytest.mark.parametrize("tenth", range(10))
def test_what_must_be_restorable_is_whole_at_every_moment(
    tenth: int, shards: dict[tuple[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (records, sweeping):
        monkeypatch.setattr(module, "ThreadPoolExecutor", AtOnce)
    for seed in range(tenth * SEEDS // 10, (tenth + 1) * SEEDS // 10):
        world = disaster(seed, shards)
        assert not world.violations, f"seed {seed}: {world.violations}\n" + "\n".join(world.log[-60:])

"""Generations on the store: claim, roll forward, base, end. The agent's side; blocking; no torch.

Order (must): claim → roll forward → write the base → all ranks load exactly that. A claim takes exactly own + 1;
only a starting process may claim the highest + 1, and only under the same owner id or after an end record.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import (
    Catalog,
    Standing,
    checkpoint_files,
    claimed,
    read_generations,
    rollback_bound,
    survey,
)
from orchestrator.checkpoint.records import SMALL_BYTES_MAX, read_record
from orchestrator.checkpoint.rollback import rollback_target
from orchestrator.checkpoint.save import commit_draft, draft_if_whole
from orchestrator.core.messages import CheckpointId, Outcome
from orchestrator.errors import (
    AlreadyExistsError,
    FencedError,
    FormatError,
    NotFoundError,
    RefusedError,
    StoreError,
    VersionError,
)
from orchestrator.storage.arguments import is_probe
from orchestrator.storage.base import ObjectStore

OWN_CLAIMS_MAX = 16  # claims of our own earlier attempts that may be skipped; more means that something is wrong


class JobOverError(RefusedError):
    """The job has ended before; `outcome` says how."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """Who claims: the job's name, what may start it again (owner), this supervisor process (claimant)."""

    job: str
    owner: str
    claimant: str
    take_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a generation's record will say."""

    who: Claimant
    wall_seconds: float
    rollback_to: int | None = None
    rollback_through: int | None = None
    """The highest generation that counted when the rollback was asked for; set where `rollback_to` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An opened generation."""

    generation: int
    base: CheckpointId | None
    rolled_forward: tuple[CheckpointId, ...]
    skipped: tuple[str, ...]


def open_generation(
    store: ObjectStore,
    who: Claimant,
    own: int | None,
    avoid: Collection[CheckpointId],
    wall_seconds: float,
    *,
    rollback_to: int | None = None,
) -> Opened:
    """Claim, roll forward, choose and write the base. `rollback_to`: no generation so far counts beyond that step.

    Raises FencedError, JobOverError, FormatError (nothing readable to start from), RollbackError, StoreError.
    """
    highest = may_start(store, who) if own is None else own
    if rollback_to is not None:
        _target(store, rollback_to)
    claim = _claim_of(who, wall_seconds, rollback_to, highest)
    number = _claim_after(store, claim, highest) if own is None else _claim_next(store, claim, own)
    while (opened := _open(store, number, avoid)) is None:  # another attempt of this very process was faster
        number = _claim_next(store, claim, number)
    return opened


def _claim_of(who: Claimant, wall_seconds: float, rollback_to: int | None, highest: int) -> Claim:
    through = None if rollback_to is None else highest
    return Claim(who=who, wall_seconds=wall_seconds, rollback_to=rollback_to, rollback_through=through)


def _open(store: ObjectStore, number: int, avoid: Collection[CheckpointId]) -> Opened | None:
    """What follows a claim; None if the generation has a base already."""
    rolled = roll_forward(store)
    catalog = survey(store)
    for entry in catalog.entries:
        if entry.standing is Standing.NEWER_FORMAT:
            raise VersionError(fmt.folder_key(entry.id), f"{entry.problem}; an older checkpoint would lose work")
    chosen = catalog.newest(avoid)
    skipped = _skipped(catalog, chosen.id if chosen else None, avoid)
    if chosen is None:
        skipped += _deleted(catalog)
    if chosen is None and skipped:
        raise FormatError(
            "checkpoints/",
            "none of the committed checkpoints can be used, and starting afresh would lose them: " + "; ".join(skipped),
        )
    base = chosen.id if chosen else None
    try:
        _create_base(store, number, base)
    except AlreadyExistsError:
        return None
    return Opened(generation=number, base=base, rolled_forward=rolled, skipped=skipped)


def _create_base(store: ObjectStore, generation: int, base: CheckpointId | None) -> None:
    record = fmt.BaseRecord(
        version=fmt.FORMAT_VERSION,
        generation=generation,
        checkpoint_generation=base.generation if base else None,
        checkpoint_step=base.step if base else None,
    )
    store.create(fmt.base_key(generation), [fmt.dump(record)])


def _skipped(catalog: Catalog, chosen: CheckpointId | None, avoid: Collection[CheckpointId]) -> tuple[str, ...]:
    """Committed checkpoints newer than the chosen one that are passed over, with the reason."""
    newer = [entry for entry in catalog.entries if chosen is None or entry.id > chosen]
    damaged = [f"{entry.id}: {entry.problem}" for entry in newer if entry.standing is Standing.DAMAGED]
    quarantined = [f"{entry.id}: was found bad" for entry in newer if entry.standing is Standing.QUARANTINED]
    avoided = [
        f"{entry.id}: avoided: a worker could not read it, or starts from it kept failing"
        for entry in newer
        if entry.id in avoid
    ]
    return tuple(damaged + quarantined + avoided)


def _deleted(catalog: Catalog) -> tuple[str, ...]:
    """Of what a rollback left: what was retired. With these gone, the job would begin at step 0 without a word."""
    return tuple(
        f"{entry.id}: was retired" + (", and is not deleted yet" if entry.size_bytes else "")
        for entry in catalog.entries
        if entry.standing is Standing.RETIRED
        and 0 < entry.id.step <= rollback_bound(catalog.generations, entry.id.generation)
    )


def may_start(store: ObjectStore, who: Claimant) -> int:
    """The highest generation, 0 if there is none, where this claimant may claim the next one. Writes nothing.

    Raises FencedError, JobOverError, FormatError, StoreError.
    """
    generations = claims_of(store, who.job)
    if not generations:
        return 0
    highest = max(generations)
    record = generations[highest]
    end = read_end(store, highest)
    if end is not None and end.outcome is Outcome.DONE and not who.take_over:
        raise JobOverError(
            Outcome.DONE,
            f"the job {who.job!r} is done: {end.reason}; `orchestrator run --take-over` trains on from its last "
            "checkpoint, another name begins anew",
        )
    if end is not None and end.outcome is Outcome.CANCELLED and record.owner == who.owner and not who.take_over:
        raise JobOverError(
            Outcome.CANCELLED, f"the job {who.job!r} was cancelled: {end.reason}; --take-over starts it again"
        )
    if end is None and record.owner != who.owner and not who.take_over:
        raise FencedError(
            f"the job {who.job!r} at {store.url} belongs to owner {record.owner}, which has not ended it "
            f"(generation {highest}); if that run is dead for certain, use --take-over"
        )
    return highest


def claims_of(store: ObjectStore, job: str) -> dict[int, fmt.GenerationRecord]:
    """All claims by number. Raises FencedError if the folder is another job's, or holds what is no job's."""
    generations = read_generations(store)
    if not generations:
        foreign = next((entry for entry in store.entries("") if not is_probe(entry.key)), None)
        if foreign is None:
            return {}
        generations = read_generations(store)
        if not generations:  # else somebody has made the first claim since we looked
            raise FencedError(
                f"{store.url} holds {foreign.key}, which is not of a job of this project; choose another folder"
            )
    record = generations[max(generations)]
    if record.job != job:
        raise FencedError(f"{store.url} belongs to the job {record.job!r}, not to {job!r}; choose another folder")
    return generations


def _claim_next(store: ObjectStore, claim: Claim, own: int) -> int:
    """own + 1.

    Raises StoreError if our own last claim is gone (this is not the store that we wrote to), FencedError.
    """
    if own > 0 and not _is_ours(store, claim.who, own):
        key = fmt.generation_key(own)
        if not _exists(store, key):
            raise StoreError(key, f"our own claim is gone: {store.url} was renamed, unmounted or emptied")
        raise FencedError(_taken_over(read_claim(store, own)))
    return _claim_after(store, claim, own)


def _claim_after(store: ObjectStore, claim: Claim, own: int) -> int:
    """The first number after `own` that is free, or that this very process took in an attempt of which nothing came."""
    for number in range(own + 1, own + 1 + OWN_CLAIMS_MAX):
        try:
            return _claim(store, claim, number)
        except FencedError:
            if not _is_ours(store, claim.who, number):
                raise
            unused = not _exists(store, fmt.base_key(number)) and not _exists(store, fmt.generation_key(number + 1))
            there = read_claim(store, number)
            is_same = (there.rollback_to, there.rollback_through) == (claim.rollback_to, claim.rollback_through)
            if unused and is_same:
                return number  # without a base no worker was ever launched in it
    raise FencedError(f"{OWN_CLAIMS_MAX} generations after {own} were claimed by this process without being used")


def successor(store: ObjectStore, who: Claimant, generation: int) -> str | None:
    """What another run that has claimed a generation above this one has done to ours; None if there is no such run.

    One listing as long as `generation` is the highest. Raises StoreError, FormatError.
    """
    highest = max(claimed(store), default=generation)
    if highest <= generation:
        return None
    record = read_claim(store, highest)
    return None if record.claimant == who.claimant else _taken_over(record)


def _taken_over(record: fmt.GenerationRecord) -> str:
    """For people: who goes on with the job, and what is to be done here. Nothing, as a rule."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.wall_seconds))
    return (
        f"another run has taken over the job {record.job!r}: generation {record.generation} was claimed by owner "
        f"{record.owner} at {when}, and goes on from the newest checkpoint; this run stops, and nothing is to be done "
        "here. Start it again, with --take-over, only if that other run is dead for certain"
    )


def read_claim(store: ObjectStore, number: int) -> fmt.GenerationRecord:
    """The claim of a generation. Raises NotFoundError, StoreError, FormatError."""
    key = fmt.generation_key(number)
    return fmt.load(fmt.GenerationRecord, key, read_record(store, key, SMALL_BYTES_MAX))


def _is_ours(store: ObjectStore, who: Claimant, number: int) -> bool:
    try:
        return read_claim(store, number).claimant == who.claimant
    except NotFoundError:
        return False


def _exists(store: ObjectStore, key: str) -> bool:
    try:
        store.size(key)
    except NotFoundError:
        return False
    return True


def _claim(store: ObjectStore, claim: Claim, number: int) -> int:
    record = fmt.GenerationRecord(
        version=fmt.FORMAT_VERSION,
        job=claim.who.job,
        generation=number,
        owner=claim.who.owner,
        claimant=claim.who.claimant,
        wall_seconds=claim.wall_seconds,
        rollback_to=claim.rollback_to,
        rollback_through=claim.rollback_through,
    )
    try:
        store.create(fmt.generation_key(number), [fmt.dump(record)])
    except AlreadyExistsError as error:
        raise FencedError(_taken_over(read_claim(store, number))) from error
    return number


def roll_forward(store: ObjectStore) -> tuple[CheckpointId, ...]:
    """Commit every undecided checkpoint whose receipts are all there and whose shards have the right sizes."""
    generations = read_generations(store)
    done: list[CheckpointId] = []
    for checkpoint, files in sorted(checkpoint_files(store).items()):
        bounded = checkpoint.step > rollback_bound(generations, checkpoint.generation)
        if bounded or files.keys() & {fmt.INDEX, fmt.RETIRED, fmt.QUARANTINE}:
            continue
        try:
            draft = draft_if_whole(store, checkpoint)
        except VersionError:  # left to the release that knows it
            continue
        if draft is not None and commit_draft(store, checkpoint, draft):
            done.append(checkpoint)
    return tuple(done)


def _target(store: ObjectStore, step: int) -> CheckpointId:
    """The checkpoint that a claim with this step leads to. What is whole is committed first, as it will be after it.

    The number to be claimed has to be known before: of two rollbacks at once the later one would not see the other's.
    """
    roll_forward(store)
    return rollback_target(survey(store), step)


def roll_back(store: ObjectStore, who: Claimant, step: int, by: str, wall_seconds: float) -> CheckpointId:
    """Where no supervisor runs: a generation that only bounds the earlier ones, and has ended. Whoever starts goes on.

    Returns the checkpoint that the next start loads. A job that is done or cancelled can be started again after it.
    Raises RollbackError, FencedError (the job belongs to another owner, and has not ended), FormatError, StoreError.
    """
    try:
        highest = may_start(store, who)
    except JobOverError:  # a person has thought better of it
        highest = may_start(store, replace(who, take_over=True))
    target = _target(store, step)
    _claim_after(store, _claim_of(who, wall_seconds, step, highest), highest)
    record_end(store, who, Outcome.DRAINED, f"rolled back to step {step} by {by}", wall_seconds)
    return target


def fruitless_runs(store: ObjectStore, owner: str) -> int:
    """How many of an owner's runs have ended since the newest committed checkpoint was begun.

    A run that has claimed nothing is not known to the store. Raises StoreError, FormatError.
    """
    catalog = survey(store)
    newest = catalog.newest()
    since = 0 if newest is None else newest.id.generation
    later = [number for number, claim in catalog.generations.items() if number > since and claim.owner == owner]
    return sum(read_end(store, number) is not None for number in later)


def newest_committed(store: ObjectStore) -> CheckpointId | None:
    """The newest committed checkpoint. Raises StoreError, FormatError."""
    newest = survey(store).newest()
    return None if newest is None else newest.id


def read_base(store: ObjectStore, generation: int) -> fmt.BaseRecord | None:
    """The base record of a generation, if it is there already."""
    key = fmt.base_key(generation)
    try:
        return fmt.load(fmt.BaseRecord, key, read_record(store, key, SMALL_BYTES_MAX))
    except NotFoundError:
        return None


def read_end(store: ObjectStore, generation: int) -> fmt.EndRecord | None:
    """The end record of a generation, if there is one."""
    key = fmt.end_key(generation)
    try:
        return fmt.load(fmt.EndRecord, key, read_record(store, key, SMALL_BYTES_MAX))
    except NotFoundError:
        return None


def record_end(store: ObjectStore, who: Claimant, outcome: Outcome, reason: str, wall_seconds: float) -> None:
    """Write the end record of the highest generation that this very supervisor process has claimed, if it has any.

    That may be one more than it knows of, if the answer to its last claim was lost. A record that is there stands.
    Raises FencedError, and writes nothing, if another run has claimed a higher one: how ours ended means nothing.
    """
    claims = read_generations(store)
    ours = [number for number, record in claims.items() if record.claimant == who.claimant]
    if not ours:
        return
    generation = max(ours)
    if generation != max(claims):
        raise FencedError(_taken_over(claims[max(claims)]))
    record = fmt.EndRecord(
        version=fmt.FORMAT_VERSION, generation=generation, outcome=outcome, reason=reason, wall_seconds=wall_seconds
    )
    with contextlib.suppress(AlreadyExistsError):
        store.create(fmt.end_key(generation), [fmt.dump(record)])

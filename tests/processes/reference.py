"""What an uninterrupted training came to, and the comparison of a job's store and of its live state with that.

Problems are returned as sentences, never raised: one soak shows all of them. Used by `tests.processes.kill_times`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crc32c import crc32c

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.catalog import Catalog, CatalogEntry, Standing, survey
from orchestrator.checkpoint.digest import combine
from orchestrator.checkpoint.reader import RankState, read_committed, read_rank_state, verify
from orchestrator.checkpoint.records import LARGE_BYTES_MAX, read_record
from orchestrator.cli.demo_analysis import tensor_digests
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import FormatError, NotFoundError, OrchestratorError
from orchestrator.storage.base import ObjectStore

KEPT = 3
"""Committed checkpoints that stay whole; older ones are retired once they have been compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One rank's whole state at one step, as the training script digested it."""

    generation: int
    step: int
    rank: int
    tensors: Mapping[str, str]
    values: Mapping[str, Any]


def read_entries(folder: Path, known: set[Path]) -> Iterator[Entry]:
    """The entries of a ledger that are not known yet."""
    for path in sorted(folder.glob("generation-*.json")):
        if path not in known:
            known.add(path)
            yield Entry(**json.loads(path.read_text()))


class Reference:
    """The uninterrupted run: each rank's state at each step that can be saved."""

    def __init__(self, ledger: Path) -> None:
        self._entries = {(entry.step, entry.rank): entry for entry in read_entries(ledger, set())}
        self.world_size = 1 + max(rank for _, rank in self._entries)

    def problem_of_entry(self, entry: Entry) -> str | None:
        """What is wrong with a rank's live state, or None."""
        true = self._entries.get((entry.step, entry.rank))
        where = f"the live state of rank {entry.rank} at step {entry.step} in generation {entry.generation}"
        if true is None:
            return f"{where}: the uninterrupted run has no such entry"
        wrong = _differences(entry.tensors, true.tensors) + _differences(entry.values, true.values)
        return f"{where} differs: {wrong}" if wrong else None

    def problem_of_checkpoint(self, store: ObjectStore, index: fmt.Index) -> str | None:
        """Load every tensor and value of a checkpoint and compare them to the last bit."""
        true = [self._entries.get((index.step, rank)) for rank in range(self.world_size)]
        if index.world_size != self.world_size or None in true:
            return f"{index.id} of {index.world_size} ranks: no uninterrupted run has saved that"
        entries = [entry for entry in true if entry is not None]
        tensors = {name: digest for entry in entries for name, digest in entry.tensors.items()}
        wrong = _differences(tensor_digests(store, index), tensors)
        shards = {shard.rank: shard for shard in index.shards}
        for entry in entries:
            wrong += _differences(_values(read_rank_state(store, index, shards[entry.rank])), entry.values)
        return f"{index.id} differs from the uninterrupted run: {wrong}" if wrong else None


def _differences(found: Mapping[str, Any], true: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {found.get(name)}, not {true.get(name)}"
        for name in sorted(found.keys() | true.keys())
        if found.get(name) != true.get(name)
    ]


def _values(state: RankState) -> dict[str, Any]:
    """What the ledger has of values that are no tensors, out of one rank's part of a checkpoint."""
    data, scheduler = (dict(state.objects[name]["items"]) for name in ("data", "scheduler"))
    generators = state.rank_values["rng"]
    return {
        "position": data["position"],
        "last_epoch": scheduler["last_epoch"],
        "lr": scheduler["_last_lr"],
        "python": _digest_json(generators["python"]),
        "numpy": _digest_json(generators["numpy"]),
    }


def _digest_json(text: str) -> str:
    return f"{crc32c(json.dumps(json.loads(text), sort_keys=True).encode()):08x}"


# ------------------------------------------------------------------------------------------------ the store


@dataclass(kw_only=True)
class StoreCheck:
    """Compares one job's store and ledger with the reference, again and again; remembers what it has seen."""

    reference: Reference
    store: ObjectStore
    ledger: Path
    newest: CheckpointId | None = None
    entries: int = 0
    _compared: set[CheckpointId] = field(default_factory=set)
    _known_entries: set[Path] = field(default_factory=set)
    _known_keys: set[str] = field(default_factory=set)
    _known_bases: set[int] = field(default_factory=set)
    _bounds: dict[int, CheckpointId] = field(default_factory=dict)
    """Generation that was the highest → the newest committed checkpoint then: later ones may not load an older one."""

    def problems(self) -> list[str]:
        """What is wrong at this instant; also takes note of the newest committed checkpoint."""
        catalog = survey(self.store)
        found = [*self._damage(catalog), *self._newest(catalog), *self._uncommitted(catalog), *self._bases(catalog)]
        for entry in catalog.entries:
            if entry.standing is Standing.COMMITTED and entry.id not in self._compared:
                found.extend(self._compare(entry.id))
        return found + self._live_state()

    def _damage(self, catalog: Catalog) -> Iterator[str]:
        fine = (Standing.COMMITTED, Standing.ABANDONED, Standing.UNDECIDED, Standing.RETIRED)
        for entry in catalog.entries:
            if entry.standing not in fine:
                yield f"{entry.id} is {entry.standing}: {entry.problem}"

    def _newest(self, catalog: Catalog) -> Iterator[str]:
        """The newest committed checkpoint is loaded whole each time, and is never an older one than before."""
        entry = catalog.newest()
        if entry is None:
            if self.newest is not None:
                yield f"no checkpoint can be loaded any more; {self.newest} could"
            return
        if self.newest is not None and entry.id < self.newest:
            yield f"the newest committed checkpoint is {entry.id}; it was {self.newest}"
        self.newest = entry.id
        yield from self._compare(entry.id)

    def _compare(self, checkpoint: CheckpointId) -> Iterator[str]:
        self._compared.add(checkpoint)
        try:
            index = read_committed(self.store, checkpoint)
            yield from (problem for _, problem in verify(self.store, index) if problem)
            problem = self.reference.problem_of_checkpoint(self.store, index)
        except OrchestratorError as error:
            problem = f"{checkpoint} cannot be loaded: {error}"
        if problem is not None:
            yield problem

    def _uncommitted(self, catalog: Catalog) -> Iterator[str]:
        """What has no committed index cannot be loaded; every object that can be seen is whole."""
        for entry in catalog.entries:
            if entry.standing in (Standing.ABANDONED, Standing.UNDECIDED) and self._loads(entry):
                if entry.standing is Standing.ABANDONED:
                    yield f"{entry.id} is abandoned and can be loaded all the same"
                yield from self._compare(entry.id)  # an undecided one may have been committed since the survey
        sizes = {entry.key: entry.size_bytes for entry in self.store.entries("")}
        for key in sizes.keys() - self._known_keys:
            self._known_keys.add(key)
            parsed = fmt.parse_checkpoint_key(key)
            if parsed is not None and parsed[1].startswith("shard-") and key.endswith(".json"):
                yield from self._receipt(key, sizes)
            elif "/.tmp-" in key:
                yield f"{key} is listed"

    def _loads(self, entry: CatalogEntry) -> bool:
        try:
            read_committed(self.store, entry.id)
        except (NotFoundError, FormatError):
            return False
        return True

    def _receipt(self, key: str, sizes: Mapping[str, int]) -> Iterator[str]:
        """A receipt says that its shard is durable: it must be there, with these bytes."""
        try:
            receipt = fmt.load_receipt(key, read_record(self.store, key, LARGE_BYTES_MAX), fmt.Receipt)
        except OrchestratorError as error:
            yield f"{key} cannot be read: {error}"
            return
        blocks = fmt.unpack_blocks(key, receipt.blocks, receipt.size_bytes)
        if sizes.get(key.removesuffix("json") + "safetensors") != receipt.size_bytes:
            yield f"{key}: its shard is not there whole"
        if combine(list(blocks), receipt.size_bytes) != receipt.crc32c:
            yield f"{key}: its digests do not fit together"

    def _bases(self, catalog: Catalog) -> Iterator[str]:
        """Every generation loads a committed checkpoint, and none older than what was committed before it."""
        for base in self._bases_there():
            if base.generation in self._known_bases:
                continue
            self._known_bases.add(base.generation)
            if base.id is not None:
                try:
                    read_committed(self.store, base.id)
                except OrchestratorError as error:
                    yield f"generation {base.generation} loads {base.id}: {error}"
            for generation, newest in self._bounds.items():
                if base.generation > generation and (base.id is None or base.id < newest):
                    yield f"generation {base.generation} loads {base.id}, but {newest} was committed before"
        if self.newest is not None:
            self._bounds = {max(catalog.generations, default=0): self.newest}

    def _bases_there(self) -> Iterator[fmt.BaseRecord]:
        for entry in self.store.entries("generations/"):
            if entry.key.endswith(".base.json"):
                yield fmt.load(fmt.BaseRecord, entry.key, self.store.read(entry.key))

    def _live_state(self) -> list[str]:
        found = []
        for entry in read_entries(self.ledger, self._known_entries):
            self.entries += 1
            problem = self.reference.problem_of_entry(entry)
            if problem is not None:
                found.append(problem)
        return found

    def retire_old(self) -> None:
        """Free the disk as a deleter would: the marker first, then the shards; never the newest ones, nor a base."""
        bases = {base.id for base in self._bases_there()}
        committed = [entry.id for entry in survey(self.store).entries if entry.standing is Standing.COMMITTED]
        for checkpoint in committed[KEPT:]:
            if checkpoint in self._compared and checkpoint not in bases:
                folder = fmt.folder_key(checkpoint)
                self.store.create(f"{folder}/retired.json", [b"{}"])
                for entry in list(self.store.entries(f"{folder}/shard-")):
                    self.store.delete(entry.key)

"""A committed checkpoint opened for reading tensor by tensor, without a job: for evaluation, export and looking around.

Only the blocks that a tensor, or some rows of it, need are read, and every one is verified. Read-only, and no process
group is needed. `orchestrator.open_checkpoint` is this module's; training restores through `checkpoint.restore`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property

import torch

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.boxes import Box
from orchestrator.checkpoint.catalog import Catalog, Standing, survey
from orchestrator.checkpoint.layout import TORCH_DTYPES
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.restore import empty_like, read_parts, read_tensors
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import ConfigError, NotFoundError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import job_url, open_store


def open_checkpoint(url: str, name: str | None = None) -> OpenedCheckpoint:
    """A checkpoint of the job whose folder is at `url`: the newest committed one, or the one of that name.

    Names are as `orchestrator checkpoints list` shows them. Raises NotFoundError if there is none or it is not
    committed, FormatError if its index is damaged, ConfigError for a URL that is none, StoreError.
    """
    return open_in(open_store(url), name)


def open_in(store: ObjectStore, name: str | None = None) -> OpenedCheckpoint:
    """`open_checkpoint` in a store that is open already."""
    catalog = survey(store)
    checkpoint = _newest(store, catalog) if name is None else _named(catalog, name)
    return OpenedCheckpoint(store, read_committed(store, checkpoint))


class OpenedCheckpoint:
    """What one committed checkpoint has. Nothing of its shards is read before a tensor is asked for."""

    def __init__(self, store: ObjectStore, index: fmt.Index) -> None:
        self._store = store
        self._index = index

    def __repr__(self) -> str:
        return f"<checkpoint {self.name} of {self._index.job}: {len(self._index.tensors)} tensors>"

    @property
    def name(self) -> str:
        """Generation and step, as in the name of its folder."""
        return str(self._index.id)

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._index.step

    @property
    def generation(self) -> int:
        """The generation that saved it."""
        return self._index.generation

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self._index.world_size

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All tensors, sorted: `model.…` and `optimizer.…` for instance, after the arguments of `attach`.

        Tied weights have all their names here, as in `state_dict()`, and are stored once: see `second_names`.
        """
        return tuple(sorted({*self._index.tensors, *self._index.second_names}))

    @property
    def second_names(self) -> Mapping[str, str]:
        """Name → the name under which the same tensor is stored; of tied weights, all but the first one."""
        return self._index.second_names

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """By name."""
        return {name: TORCH_DTYPES[self._record(name).dtype] for name in self.names}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By name; of the whole tensors, however they were sharded."""
        return {name: self._record(name).shape for name in self.names}

    def tensor(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A whole tensor, or some of its rows (along its first dimension), in new CPU memory of the saved dtype.

        `rows` has no step; its bounds may count from the end, as always, but must lie within the tensor. Raises
        NotFoundError for a tensor that is not there, ConfigError for such rows, DigestError, StoreError.
        """
        record, stored = self._record(name), self.second_names.get(name, name)
        if rows is None:
            whole = empty_like(record)
            read_tensors(self._store, self._index, {stored: whole})
            return whole
        return self._read_rows(stored, record, _row_range(name, record.shape, rows))

    def _record(self, name: str) -> fmt.TensorRecord:
        record = self._index.tensors.get(self.second_names.get(name, name))
        if record is None:
            raise NotFoundError(name, f"the checkpoint {self.name} has no tensor of this name{self._similar(name)}")
        return record

    def _read_rows(self, name: str, record: fmt.TensorRecord, rows: range) -> torch.Tensor:
        box = Box((rows.start, *(0 for _ in record.shape[1:])), (len(rows), *record.shape[1:]))
        part = torch.empty(box.lengths, dtype=TORCH_DTYPES[record.dtype])
        read_parts(self._store, self._index, [(name, part, box)])
        return part

    def _similar(self, name: str) -> str:
        found = get_close_matches(name, self.names, n=3, cutoff=0.5)
        return f"; similar ones are {', '.join(found)}" if found else ""


def _row_range(name: str, shape: tuple[int, ...], rows: slice) -> range:
    """Raises ConfigError unless the rows are there."""
    if not isinstance(rows, slice):
        raise ConfigError(f"{name}: rows={rows!r:.40} are asked for; they are a slice, as in rows=slice(0, 10)")
    if not shape:
        raise ConfigError(f"{name}: is one number and has no rows")
    asked = f"{'' if rows.start is None else rows.start}:{'' if rows.stop is None else rows.stop}"
    if rows.step not in (None, 1):
        raise ConfigError(f"{name}: rows {asked}:{rows.step} are asked for; only those that follow each other are read")
    count = shape[0]
    start, stop = (
        default if bound is None else bound + count * (bound < 0)
        for bound, default in ((rows.start, 0), (rows.stop, count))
    )
    if not 0 <= start <= stop <= count:
        raise ConfigError(f"{name}: rows {asked} are asked for, it has {count}")
    return range(start, stop)


def _newest(store: ObjectStore, catalog: Catalog) -> CheckpointId:
    entry = catalog.newest()
    if entry is not None:
        return entry.id
    others = ", ".join(f"{one.id} ({one.standing})" for one in catalog.entries)
    why = f", only {others}" if others else _jobs_below(store)
    raise NotFoundError(store.url, f"there is no committed checkpoint{why}")


def _jobs_below(store: ObjectStore) -> str:
    """Where jobs have folders of their own, it is one of those that should be opened."""
    keys = (entry.key.split("/", 2) for entry in store.entries(""))
    jobs = sorted({parts[0] for parts in keys if len(parts) == 3 and parts[1] == "generations"})
    places = ", ".join(shlex.quote(job_url(store.url, job)) for job in jobs[:5])
    return f"; it holds folders of jobs: open {places}" if jobs else ""


def _named(catalog: Catalog, name: str) -> CheckpointId:
    for entry in catalog.entries:
        if str(entry.id) == name:
            if entry.standing is not Standing.COMMITTED:
                why = f": {entry.problem}" if entry.problem else ""
                raise NotFoundError(name, f"is no committed checkpoint, it is {entry.standing}{why}")
            return entry.id
    there = ", ".join(str(entry.id) for entry in catalog.entries[:5]) or "none at all"
    raise NotFoundError(name, f"there is no such checkpoint; the newest are: {there}")

"""`orchestrator checkpoints list | show | verify | prune URL`: what is in a job's folder, straight from the store.

All but `prune` only read, and no running job is needed. Only committed checkpoints are ever called usable; everything
else is listed as what it is. No torch: `verify` compares bytes with the digests in the index.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from orchestrator.cli.terminal import facts, output, print_json, printable, say, size_text, table, talk
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import ConfigError, FormatError, NotFoundError

if TYPE_CHECKING:
    from orchestrator.checkpoint.catalog import Catalog, CatalogEntry
    from orchestrator.checkpoint.format import Index
    from orchestrator.storage.base import ObjectStore

NEWEST = "newest"
UNREADABLE = ("damaged", "of a newer format")
"""Standings of checkpoints that were committed once and cannot be used by this release."""
_ID = re.compile(r"g(\d{8,})-s(\d{10,})\Z")

checkpoints = typer.Typer(rich_markup_mode="rich")

Url = Annotated[str, typer.Argument(metavar="URL", help="The job's folder; with --job: the folder that holds it.")]
JobName = Annotated[str | None, typer.Option("--job", metavar="NAME", help="The job's name, below URL.")]
Which = Annotated[str, typer.Argument(metavar="[ID|newest]", help="A checkpoint as `list` shows it, or the newest.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoints.command("list")
def list_all(url: Url, job: JobName = None, json_output: Json = False) -> None:
    """List all checkpoints, newest first, with where each of them stands."""
    catalog = _survey(open_job(url, job))
    rows = [_as_dict(entry) for entry in catalog.entries]
    if json_output:
        print_json(rows)
    elif rows:
        output().print(
            table(
                ("checkpoint", "step", "standing", "size", "world size", "problem"),
                [
                    (
                        row["id"],
                        row["step"],
                        _styled(row["standing"]),
                        size_text(row["size_bytes"]),
                        row["world_size"],
                        row["problem"],
                    )
                    for row in rows
                ],
            )
        )
    if not rows:
        raise NotFoundError(url, "there is no checkpoint yet")


@checkpoints.command()
def show(
    url: Url,
    which: Which = NEWEST,
    job: JobName = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Name every tensor.")] = False,
    tensor: Annotated[str | None, typer.Option("--tensor", metavar="NAME", help="Where one tensor is.")] = None,
    json_output: Json = False,
) -> None:
    """Show one checkpoint: where it stands, its shards, and on request its tensors, or one of them in detail."""
    store = open_job(url, job)
    entry = _find(_survey(store), which)
    index = _index_of(store, entry)
    if tensor is not None:
        _show_tensor(entry, index, tensor, json_output=json_output)
        return
    if json_output:
        print_json(_as_dict(entry) | ({} if index is None else _index_as_dict(index, tensors=tensors)))
        return
    output().print(facts(_describe(entry, index)))
    if index is not None:
        shards = [(shard.rank, size_text(shard.size_bytes), f"{shard.crc32c:08x}") for shard in index.shards]
        output().print(table(("shard of rank", "size", "crc32c"), shards))
        if tensors:
            output().print(table(("tensor", "type", "shape", "size", "shards"), _tensor_rows(index)))


@checkpoints.command()
def verify(
    url: Url,
    which: Annotated[str | None, typer.Argument(metavar="[ID|newest]", help="The newest if not given.")] = None,
    job: JobName = None,
    every: Annotated[bool, typer.Option("--all", help="Verify all checkpoints.")] = False,
    json_output: Json = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its digests. Exit code 1 if anything is damaged."""
    if every and which is not None:
        raise ConfigError("give a checkpoint or --all, not both")
    store = open_job(url, job)
    catalog = _survey(store)
    entries = list(catalog.entries) if every else [_find(catalog, which or NEWEST, damaged_too=True)]
    if not entries:
        raise NotFoundError(url, "there is no checkpoint yet")
    findings = []
    for entry in entries:
        finding = _verify(store, entry)
        findings.append(finding)
        if not json_output:
            for line in finding.lines():
                sys.stdout.write(printable(line) + "\n")
    if json_output:
        print_json([asdict(finding) | {"ok": finding.ok} for finding in findings])
    _conclude(findings, every=every)


@checkpoints.command()
def prune(
    url: Url,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, metavar="K", help="Keep the K newest committed.")],
    keep_every: Annotated[
        int, typer.Option("--keep-every", min=0, metavar="STEPS", help="Keep the first one of every STEPS as well.")
    ] = 0,
    job: JobName = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
    json_output: Json = False,
) -> None:
    """Delete old checkpoints. Never the newest committed one, nor that from which the job started last.

    Safe beside a running job; `orchestrator run --keep-last K` does the same after each commit.
    """
    from orchestrator.checkpoint.retention import Keep
    from orchestrator.checkpoint.sweeping import delete_shards, fates, retire

    store, keep = open_job(url, job), Keep(last=keep_last, every_steps=keep_every)
    catalog = _survey(store)
    generation = max(catalog.generations, default=0)
    found = fates(store, catalog, generation, keep)
    going = [fate for fate in found if not fate.keep]
    if not dry_run:
        retire(store, catalog, generation, keep)
        with talk().status(f"deleting {len(going)} checkpoints"):
            half_deleted = [one.id for one in catalog.entries if str(one.standing) == "retired" and one.size_bytes]
            delete_shards(store, generation, [*half_deleted, *(fate.id for fate in going)])
    if json_output:
        print_json([asdict(fate) | {"id": str(fate.id)} for fate in found])
    else:
        rows = [(one.id, "keep" if one.keep else "delete", size_text(one.size_bytes), one.reason) for one in found]
        output().print(table(("checkpoint", "", "size", "why"), rows))
    size = size_text(sum(fate.size_bytes for fate in going))
    say(f"{len(going)} of {len(found)} checkpoints, {size}, {'would be' if dry_run else 'are'} deleted")


# --------------------------------------------------------------------------------------------- what is there


def open_job(url: str, job: str | None) -> ObjectStore:
    """The store of one job's folder. Raises ConfigError or NotFoundError if it is not one, with what to do."""
    from orchestrator.storage.opening import PERSON_PATIENCE_SECONDS, job_url, open_store

    store = open_store(url if job is None else job_url(url, job), PERSON_PATIENCE_SECONDS)
    if store.url.startswith("/") and not os.path.isdir(store.url):
        raise NotFoundError(store.url, "there is no such folder")
    if any(True for prefix in ("generations/", "checkpoints/") for _ in store.entries(prefix)):
        return store
    jobs = sorted(
        {
            entry.key.split("/")[0]
            for entry in store.entries("")
            if entry.key.split("/")[1:2] in (["generations"], ["checkpoints"])
        }
    )
    if jobs:
        raise ConfigError(
            f"{store.url} holds the folders of {len(jobs)} jobs; give --job and one of: {', '.join(jobs)}"
        )
    raise NotFoundError(store.url, "is not the folder of a job: there are no generations and no checkpoints in it")


def _survey(store: ObjectStore) -> Catalog:
    from orchestrator.checkpoint.catalog import survey

    return survey(store)


def _find(catalog: Catalog, which: str, *, damaged_too: bool = False) -> CatalogEntry:
    """The checkpoint that is meant; the newest is the newest usable one, or the newest that was ever committed."""
    if which == NEWEST:
        for entry in catalog.entries:
            if _usable(entry) or (damaged_too and str(entry.standing) in UNREADABLE):
                return entry
            if str(entry.standing) in UNREADABLE:
                say(f"passed over, because it is {entry.standing}: {entry.id}: {entry.problem}")
        raise NotFoundError(NEWEST, "there is no committed checkpoint" + _others(catalog))
    match = _ID.match(which)
    if match is None:
        raise ConfigError(
            f"{which!r} is no checkpoint: `checkpoints list` shows them, for instance {_example(catalog)}"
        )
    wanted = CheckpointId(generation=int(match[1]), step=int(match[2]))
    for entry in catalog.entries:
        if entry.id == wanted:
            return entry
    raise NotFoundError(which, "there is no such checkpoint; `checkpoints list` shows those that are there")


def _others(catalog: Catalog) -> str:
    if not catalog.entries:
        return ""
    return ", only " + ", ".join(f"{entry.id} ({entry.standing})" for entry in catalog.entries)


def _example(catalog: Catalog) -> str:
    return str(catalog.entries[0].id) if catalog.entries else str(CheckpointId(generation=1, step=1000))


def _index_of(store: ObjectStore, entry: CatalogEntry) -> Index | None:
    """The index of a checkpoint that was once committed and can be read."""
    from orchestrator.checkpoint.reader import read_committed

    try:
        return read_committed(store, entry.id)
    except (FormatError, NotFoundError):
        return None


def _usable(entry: CatalogEntry) -> bool:
    return str(entry.standing) == "committed"


def _styled(standing: str) -> Text:
    styles = {"committed": "green", "damaged": "red", "quarantined": "red"}
    return Text(standing, style=styles.get(standing, "yellow"))


def _as_dict(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "id": str(entry.id),
        "generation": entry.id.generation,
        "step": entry.id.step,
        "standing": str(entry.standing),
        "usable": _usable(entry),
        "size_bytes": entry.size_bytes,
        "world_size": entry.world_size,
        "problem": entry.problem,
    }


def _index_as_dict(index: Index, *, tensors: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "job": index.job,
        "absent": list(index.absent),
        "tensor_count": len(index.tensors),
        "element_count": _element_count(index),
        "shards": [
            {"rank": shard.rank, "size_bytes": shard.size_bytes, "crc32c": f"{shard.crc32c:08x}"}
            for shard in index.shards
        ],
    }
    if tensors:
        found["tensors"] = {
            name: _tensor_as_dict(index, name) | {"chunks": len(index.chunks(_stored(index, name)))}
            for name in (*index.tensors, *index.second_names)
        }
    return found


def _describe(entry: CatalogEntry, index: Index | None) -> Iterator[tuple[str, object]]:
    yield "checkpoint", entry.id
    yield "step", entry.id.step
    yield "generation", entry.id.generation
    yield "standing", _styled(str(entry.standing))
    if not _usable(entry):
        yield "usable", "no" + (f": {entry.problem}" if entry.problem else "")
    yield "size", size_text(entry.size_bytes)
    if index is not None:
        yield "job", index.job
        yield "world size", index.world_size
        yield "absent ranks", ", ".join(map(str, index.absent)) or "–"
        yield "tensors", f"{len(index.tensors)} with {_element_count(index):,} elements"


def _element_count(index: Index) -> int:
    return sum(prod(tensor.shape) for tensor in index.tensors.values())


def _tensor_rows(index: Index) -> Iterator[tuple[object, ...]]:
    for name in sorted((*index.tensors, *index.second_names)):
        tensor, found = index.tensors[_stored(index, name)], _tensor_as_dict(index, name)
        size = f"as {found['same_as']}" if "same_as" in found else size_text(found["size_bytes"])
        yield name, tensor.dtype, _shape_text(tensor.shape), size, len(found["shards"])


def _stored(index: Index, name: str) -> str:
    """The name under which a tensor is stored; tied weights have others, too."""
    return index.second_names.get(name, name)


def _tensor_as_dict(index: Index, name: str) -> dict[str, Any]:
    from orchestrator.checkpoint.format import DTYPE_BYTES

    stored = _stored(index, name)
    tensor = index.tensors[stored]
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": prod(tensor.shape) * DTYPE_BYTES[tensor.dtype],
        "shards": sorted({chunk.rank for chunk in index.chunks(stored)}),
    } | ({} if stored == name else {"same_as": stored})


def _shape_text(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def _show_tensor(entry: CatalogEntry, index: Index | None, name: str, *, json_output: bool) -> None:
    """One tensor: what it is, and which bytes of which shard file have which of its elements."""
    from orchestrator.checkpoint.format import shard_key

    if index is None:
        raise NotFoundError(str(entry.id), f"it is {entry.standing}: there is no index that names tensors")
    stored = _stored(index, name)
    if stored not in index.tensors:
        raise NotFoundError(name, f"{entry.id} has no tensor of this name; --tensors shows all")
    found, chunks = _tensor_as_dict(index, name), index.chunks(stored)
    files = [shard_key(index.id, chunk.rank, index.world_size).rpartition("/")[2] for chunk in chunks]
    if json_output:
        places = [
            {
                "rank": chunk.rank,
                "file": file,
                "first_element": chunk.start,
                "elements": chunk.stop - chunk.start,
                "first_byte": chunk.first_byte,
                "size_bytes": chunk.last_byte - chunk.first_byte,
            }
            for chunk, file in zip(chunks, files, strict=True)
        ]
        print_json({"checkpoint": str(entry.id), "name": name} | found | {"places": places})
        return
    described = (
        ("tensor", name),
        *([] if stored == name else [("stored as", stored)]),
        ("checkpoint", entry.id),
        ("type", found["dtype"]),
        ("shape", _shape_text(index.tensors[stored].shape)),
        ("elements", f"{prod(found['shape']):,}"),
        ("size", size_text(found["size_bytes"])),
    )
    output().print(facts(described))
    rows = [
        (chunk.start, chunk.stop, file, chunk.first_byte, chunk.last_byte)
        for chunk, file in zip(chunks, files, strict=True)
    ]
    output().print(table(("from element", "to before", "file", "from byte", "to before"), rows))


# ---------------------------------------------------------------------------------------------- verification


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFinding:
    """One shard, read to its end; `problem` is None if every byte is as it was committed."""

    rank: int
    name: str
    size_bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One checkpoint; `problem` is what is wrong with it as a whole."""

    id: str
    standing: str
    verified: bool
    problem: str | None
    shards: list[ShardFinding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether it was read and nothing is wrong with it."""
        return self.verified and self.problem is None and all(shard.problem is None for shard in self.shards)

    @property
    def damaged(self) -> bool:
        """Whether something was read that is not what was committed."""
        return self.standing == "damaged" or (self.verified and not self.ok)

    def lines(self) -> Iterator[str]:
        """A line for each shard."""
        for shard in self.shards:
            verdict = f"ok, {size_text(shard.size_bytes)}" if shard.problem is None else f"DAMAGED: {shard.problem}"
            yield f"{self.id} {shard.name} {verdict}"
        if self.problem is not None or not self.verified:
            reason = f": {self.problem}" if self.problem else ""
            verdict = "DAMAGED" if self.damaged else f"not verified, it is {self.standing}"
            yield f"{self.id} {verdict}{reason}"


def _verify(store: ObjectStore, entry: CatalogEntry) -> Finding:
    """Committed checkpoints, and those that are damaged, are read; of any other kind nothing has to be there.

    First, that the index has every element of every tensor: if not, no shard can make up for it.
    """
    from orchestrator.checkpoint.reader import read_committed

    name, standing = str(entry.id), str(entry.standing)
    if standing not in ("committed", *UNREADABLE):
        return Finding(id=name, standing=standing, verified=False, problem=entry.problem)
    try:
        index = read_committed(store, entry.id)
        for tensor in index.tensors:
            index.chunks(tensor)
    except FormatError as error:
        return Finding(id=name, standing=standing, verified=True, problem=str(error))
    shards = _verify_shards(store, index)
    unexplained = entry.problem if all(shard.problem is None for shard in shards) else None
    return Finding(id=name, standing=standing, verified=True, problem=unexplained, shards=shards)


def _verify_shards(store: ObjectStore, index: Index) -> list[ShardFinding]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from orchestrator.checkpoint.format import shard_key
    from orchestrator.checkpoint.reader import verify_shard

    console = talk()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    total = sum(shard.size_bytes for shard in index.shards)
    findings = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False
    ) as bar:
        task = bar.add_task(str(index.id), total=total)
        for shard in index.shards:
            problem = verify_shard(store, index, shard, lambda count: bar.advance(task, count))
            name = shard_key(index.id, shard.rank, index.world_size).rpartition("/")[2]
            findings.append(ShardFinding(rank=shard.rank, name=name, size_bytes=shard.size_bytes, problem=problem))
    return findings


def _conclude(findings: list[Finding], *, every: bool) -> None:
    """Say the verdict; raise Exit with 1 unless what was asked for is whole."""
    good = [finding for finding in findings if finding.ok]
    bad = [finding for finding in findings if finding.damaged]
    size = sum(shard.size_bytes for finding in good for shard in finding.shards)
    if bad:
        say(f"damaged: {', '.join(finding.id for finding in bad)}; do not resume from it")
    elif good:
        what = f"{len(good)} checkpoints are" if every else f"{good[0].id} is"
        say(f"{what} whole: {size_text(size)} read, every digest matches")
    else:
        say("nothing to verify: no checkpoint here is committed" if every else f"{findings[0].id} is not committed")
    if bad or not good:
        raise typer.Exit(1)

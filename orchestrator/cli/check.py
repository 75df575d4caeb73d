"""`orchestrator check`: are this machine, this store and this staging folder fit for a job? Findings say what to do.

It starts nothing. On the store it writes a small object of a random name and deletes it again (`store_probe`);
torch is not imported, only its version is read.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from orchestrator.cli.terminal import output, print_json, size_text, table
from orchestrator.errors import ConfigError, OrchestratorError

if TYPE_CHECKING:
    from orchestrator.config import Notices
    from orchestrator.preemption.base import Source
    from orchestrator.storage.base import ObjectStore

OK, WARN, FAIL = "ok", "warn", "fail"
STAGING_FREE_BYTES_MIN = 1 << 30
STORE_FREE_BYTES_MIN = 1 << 30
LOOK_SECONDS_MAX = 10.0
PACKAGES = (
    "orchestrator",
    "torch",
    "numpy",
    "aiohttp",
    "pydantic",
    "safetensors",
    "crc32c",
    "boto3",
    "google-cloud-storage",
)
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at; `advice` says what to do about it."""

    what: str
    level: str
    found: str
    advice: str = ""


def check(
    store: Annotated[str | None, typer.Option(metavar="URL", help="The folder or bucket that holds the jobs.")] = None,
    job: Annotated[str | None, typer.Option(metavar="NAME", help="With --store: look into this job's folder.")] = None,
    staging: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder in memory for shards.")] = Path("/dev/shm"),
    notices: Annotated[
        str | None, typer.Option(metavar="WHAT", help="Read each source of notices once, as `run --notices` would.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check versions, cores, clock, state and staging folder, with --store the store, with --notices their sources.

    Exit code 1 on a fail.
    """
    if job is not None and store is None:
        raise ConfigError("--job names a folder of the store: --store URL says which store")
    findings = [*check_machine(), *check_devices(), check_state_folder(), *check_staging(staging.absolute())]
    if store is not None:
        findings += check_store(store, job)
    if notices is not None:
        findings += check_notices(notices)
    if json_output:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [(one.what, Text(one.level, style=_STYLES[one.level]), one.found, one.advice) for one in findings]
        output().print(table(("", "", "found", "what to do"), rows))
    if any(finding.level == FAIL for finding in findings):
        raise typer.Exit(1)


# ----------------------------------------------------------------------------------------------- the machine


def check_machine() -> Iterator[Finding]:
    """Python, packages, cores, clock."""
    version = platform.python_version()
    yield _judge("python", sys.version_info >= (3, 11), version, "use Python 3.11 or newer")
    for name in PACKAGES:
        try:
            yield Finding(what=name, level=OK, found=metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(what=name, level=FAIL, found="is not installed", advice=f"pip install {name}")
    cores = len(os.sched_getaffinity(0))
    yield _judge("cores", cores > 1, f"{cores} for this process", "uploads and training will share one core", WARN)
    yield check_clock()


def check_clock(
    monotonic: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep
) -> Finding:
    """Deadlines go by the monotonic clock: it must move on, and at about the pace of sleeping."""
    first = monotonic()
    pause(0.02)
    passed = monotonic() - first
    return _judge(
        "monotonic clock",
        passed >= 0.01,
        f"moved on by {passed:.3f} s in 0.02 s",
        "this machine's clock stands still or goes back: deadlines cannot be kept here",
    )


def check_devices() -> Iterator[Finding]:
    """NVIDIA devices as their driver sees them, where there are any, and whether its errors can be read."""
    from orchestrator.health.gpu import NoAnswer, condemned_at_first, read_devices
    from orchestrator.health.joining import has_devices
    from orchestrator.health.kernel_log import KERNEL_LOG, KernelLog

    if not has_devices():
        return
    found = read_devices()
    if isinstance(found, NoAnswer):
        yield Finding(what="devices", level=WARN, found=found.words, advice="without it no device is watched")
        return
    wrong = condemned_at_first(found)
    yield _judge("devices", wrong is None, wrong or f"{len(found)} of NVIDIA's", "no job's node joins from here")
    try:
        KernelLog().close()
        log = f"{KERNEL_LOG} can be read: errors of the driver (Xid) are seen"
    except OSError as error:  # usual in containers, and no reason to worry
        log = f"{KERNEL_LOG}: {error.strerror}: of the driver's errors only those that nvidia-smi counts are seen"
    yield Finding(what="kernel log", level=OK, found=log)


def check_state_folder() -> Finding:
    """Verbs find running jobs there, and it keeps a job from running twice."""
    from orchestrator.supervisor.state_folder import state_root

    folder = state_root()
    advice = "make it writable for this user, or set XDG_STATE_HOME to another folder"
    probe = folder / f"probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        return Finding(what="state folder", level=FAIL, found=f"{folder}: {error.strerror}", advice=advice)
    return Finding(what="state folder", level=OK, found=f"{folder} is writable")


# ----------------------------------------------------------------------------------------- the staging folder


def check_staging(folder: Path) -> Iterator[Finding]:
    """There, writable, in memory, private enough, and with room for two slots per rank."""
    other = "name another folder in memory with --staging"
    if not folder.is_dir():
        yield Finding(what="staging folder", level=FAIL, found=f"{folder} is not there or is no folder", advice=other)
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    writable = os.access(folder, os.W_OK | os.X_OK)
    found = f"{folder}, mode {mode:04o}"
    yield _judge("staging folder", writable, found if writable else f"{found}, is not writable", other)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        advice = f"others may remove files there: chmod +t {folder}"
        yield Finding(what="staging mode", level=WARN, found=f"{mode:04o}: writable for all, not sticky", advice=advice)
    kind = file_system_of(folder)
    yield _judge(
        "staging in memory", kind in ("tmpfs", "ramfs"), kind, "saving will wait for this disk; use /dev/shm", WARN
    )
    free = shutil.disk_usage(folder).free
    yield _judge(
        "staging free",
        free >= STAGING_FREE_BYTES_MIN,
        size_text(free),
        "two shards per rank have to fit; enlarge it (mount -o remount,size=…) or free memory",
        WARN,
    )


def file_system_of(folder: Path) -> str:
    """The type of the file system that a folder is on; "unknown" where the kernel does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    path = folder.resolve()
    best, kind = -1, "unknown"
    for line in lines:
        fields = line.split(" ")
        point = Path(fields[1].replace("\\040", " "))
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


# -------------------------------------------------------------------------------------------------- the store


def check_store(url: str, job: str | None = None) -> list[Finding]:
    """Writable, create-if-absent really exclusive, reads back, free space; with a job: its folder is no other's."""
    from orchestrator.cli.store_probe import PATIENCE_SECONDS
    from orchestrator.storage.opening import job_url, open_store

    store = open_store(url if job is None else job_url(url, job), PATIENCE_SECONDS)
    root = Path(store.url) if store.url.startswith("/") else None
    missing = [] if root is None else [path for path in (root, *root.parents) if not os.path.exists(path)]
    findings = list(_probe(store, job))
    if missing and findings[0].level == OK:
        findings.append(Finding(what="store folder", level=OK, found="is not there yet; the first run makes it"))
    if root is not None and findings[0].level == OK:
        findings.append(_store_space(root))
    for path in missing:
        _remove_if_empty(path)
    return findings


def _probe(store: ObjectStore, job: str | None) -> Iterator[Finding]:
    from orchestrator.checkpoint.generations import claims_of
    from orchestrator.cli.store_probe import probe

    try:
        found = probe(store) if job is None else probe(store, lambda: claims_of(store, job))
    except OrchestratorError as error:  # what is there is not this job's, or not readable: nothing was written
        advice = "jobs need a folder of their own: another --job, or another --store"
        yield Finding(what="store", level=FAIL, found=str(error), advice=advice)
        return
    words = found.problem or "writes once, and reads back"
    yield _judge("store", not found.problem, f"{found.url}: {words}", found.advice)
    if found.left_key:
        advice = "jobs work without that; such probes stay until somebody deletes them"
        yield Finding(what="store deletes", level=WARN, found=f"may not delete {found.left_key}", advice=advice)


def _store_space(root: Path) -> Finding:
    folder = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    advice = "make room: a job keeps several checkpoints"
    return _judge("store free", free >= STORE_FREE_BYTES_MIN, size_text(free), advice, WARN)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


# ------------------------------------------------------------------------------------------------ notices


def check_notices(text: str) -> list[Finding]:
    """Each source, read once; with auto, the cloud that this machine is on. Raises ConfigError."""
    from orchestrator.config import parse_notices

    try:
        chosen = parse_notices(text)
    except ValueError as error:
        raise ConfigError(f"--notices: {error}") from error
    return asyncio.run(_read_sources(chosen))


async def _read_sources(chosen: Notices) -> list[Finding]:
    from orchestrator.clock import SystemClock
    from orchestrator.preemption.clouds import Clouds

    clouds, findings = Clouds(SystemClock(), chosen.addresses), []
    try:
        names = [name for name in chosen.names if name not in ("auto", "none")]
        if "auto" in chosen.names:
            cloud = await clouds.find()
            at = chosen.addresses.get("auto")
            found = f"this machine is on {cloud}" if at is None else f"{at} answers as {cloud}"
            found = "no cloud is found: signals only" if cloud is None else found
            findings.append(Finding(what="notices", level=OK, found=found))
            names += [cloud] if cloud is not None and cloud not in names else []
        for name in names:
            findings += [await _read_source(source) for source in clouds.sources_of(name)]
    finally:
        await clouds.close()
    return findings


async def _read_source(source: Source) -> Finding:
    advice = "a notice would be missed; in a container the metadata service may be a hop too far away"
    try:
        async with asyncio.timeout(LOOK_SECONDS_MAX):
            reading = await source.look()
    except TimeoutError:
        return Finding(what=source.name, level=FAIL, found=f"no answer in {LOOK_SECONDS_MAX:.0f} s", advice=advice)
    except OrchestratorError as error:
        return Finding(what=source.name, level=FAIL, found=str(error), advice=advice)
    if reading.problems:
        return Finding(what=source.name, level=FAIL, found=reading.problems[0], advice=advice)
    stands = ", ".join(f"{found.kind}: {found.words}" for found in reading.found)
    advice = "a job that starts here leaves soon" if stands else ""
    return Finding(
        what=source.name, level=WARN if stands else OK, found=stands or "nothing is announced", advice=advice
    )


def _judge(what: str, good: bool, found: str, advice: str, otherwise: str = FAIL) -> Finding:
    return Finding(what=what, level=OK if good else otherwise, found=found, advice="" if good else advice)

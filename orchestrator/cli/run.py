"""`orchestrator run … -- COMMAND`: train on local nodes to the end, from the newest checkpoint if there is one.

Here: flags and file become one configuration, what can be checked is checked before anything starts, signals become
requests, and the end becomes a sentence and an exit code. What it is not: it decides nothing about the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from orchestrator.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from orchestrator.config import JobConfig
    from orchestrator.core.messages import Finish
    from orchestrator.supervisor.local_job import LocalJob, LocalJobOptions
    from orchestrator.supervisor.loop import Supervisor
    from orchestrator.telemetry import EventRecord, Sink

CONTEXT = {"allow_interspersed_args": False}
"""Everything after the first word of the command belongs to the command, with or without `--`."""
DEFAULT_FILE = Path("orchestrator.toml")


def run(
    *,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The training command, the same on every rank.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings; ./orchestrator.toml if it is there.")
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="NAME", help="The job's name; its folder in the store.")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Folder or bucket that holds the jobs' folders; tried first.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Waits below MIN nodes, asks for no more than MAX.")
    ] = None,
    workers_per_node: Annotated[
        str | None, typer.Option(metavar="N", help="Training processes per node, usually one per GPU.")
    ] = None,
    save_every: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Steps between checkpoints; 0: only on notice and at the end.")
    ] = None,
    keep_last: Annotated[
        str | None, typer.Option(metavar="K", help="Delete all but the K newest checkpoints; not given: delete none.")
    ] = None,
    keep_every: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Besides, keep the first checkpoint of every STEPS for good.")
    ] = None,
    grace_seconds: Annotated[
        str | None, typer.Option(metavar="S", help="Time that a signal, or a notice without a time, leaves.")
    ] = None,
    notices: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT", help="auto, none, or clouds, webhook, file:/path, with commas; rehearsals: CLOUD@URL."
        ),
    ] = None,
    max_failures: Annotated[
        str | None, typer.Option(metavar="N", help="Failures from one checkpoint before an older one, or the end.")
    ] = None,
    staging: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder in memory for staged shards; /dev/shm if not given.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where nodes come from: local, slurm or kubernetes.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Kubernetes: the pods' template (YAML): image, resources.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Kubernetes: where the TrainingJob is made.")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Slurm: an option of sbatch, as --gres=gpu:8; several.")
    ] = None,
    srun: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Slurm: an option of srun for each node; several.")
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Start a job that a dead owner left, that was cancelled, or is done."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started; start nothing.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    json_events: Annotated[bool, typer.Option("--json-events", help="Events as JSON lines.")] = False,
) -> None:
    """Train to the end, through losses of workers and nodes. Run the same command again to resume.

    Flags beat the file. Relative paths begin at the present folder.

    Workers print on standard output, events go to standard error.

    Ctrl-C or SIGTERM saves and ends (exit code 75); a second Ctrl-C ends without saving.
    """
    talk = Talk(as_json=json_events)
    given = {
        "command": tuple(command) if command else None,
        "job": job,
        "store": store,
        "nodes": nodes,
        "workers_per_node": workers_per_node,
        "save_every": save_every,
        "keep_last": keep_last,
        "keep_every": keep_every,
        "grace_seconds": grace_seconds,
        "notices": notices,
        "max_failures": max_failures,
        "staging": staging,
        "scheduler": scheduler,
        "sbatch": tuple(sbatch) if sbatch else None,
        "srun": tuple(srun) if srun else None,
        "template": template,
        "namespace": namespace,
    }
    if json_output and not dry_run:
        raise ConfigError("--json belongs to --dry-run; events as JSON lines come with --json-events")
    settings = configuration(config, given, talk)
    if settings.scheduler != "kubernetes" and (template is not None or namespace is not None):
        raise ConfigError("--template and --namespace are for --scheduler kubernetes")
    if settings.scheduler == "slurm":
        from orchestrator.cli import slurm

        raise typer.Exit(slurm.run(settings, slurm.Asked(given=given, config=config, dry_run=dry_run), take_over, talk))
    if settings.scheduler == "kubernetes":
        from orchestrator.cli import kubernetes

        raise typer.Exit(kubernetes.run(settings, take_over=take_over, dry_run=dry_run, as_json=json_output, talk=talk))
    check_before_start(settings)
    if dry_run:
        _print_plan(settings, as_json=json_output)
        talk.say("nothing was started")
        return
    raise typer.Exit(_run_locally(settings, take_over, talk))


# ------------------------------------------------------------------------------------- before anything starts


def configuration(file: Path | None, given: Mapping[str, Any], talk: Talk) -> JobConfig:
    """Flags over file, paths made absolute. Raises ConfigError with every problem."""
    from orchestrator.config import load_config

    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
        talk.say(f"settings come from {file}")
    try:
        settings = load_config(file, given)
    except ConfigError as error:
        raise ConfigError(*(_named_as_flag(problem, file, given) for problem in error.problems)) from error
    url = plain_store_url(settings.store)
    return settings.model_copy(update={"store": url, "staging": str(Path(settings.staging).expanduser().absolute())})


def plain_store_url(store: str) -> str:
    """One name for one folder: the lock on this machine goes by it. Raises ConfigError."""
    from orchestrator.storage.opening import open_store

    url = open_store(store).url
    return str(Path(url).resolve()) if url.startswith("/") else url


def _named_as_flag(problem: str, file: Path | None, given: Mapping[str, Any]) -> str:
    """A problem of a value that was given as a flag names the flag and not the file."""
    text = problem if file is None else problem.removeprefix(f"{file}: ")
    name, colon, rest = text.partition(":")
    if not colon or name not in given or name == "command" or (file is not None and given[name] is None):
        return problem
    return f"--{name.replace('_', '-')}:{rest}"


def check_before_start(settings: JobConfig) -> None:
    """Raises ConfigError with everything that would make the start fail for certain."""
    problems = [*_command_problems(settings.command[0]), *_staging_problems(Path(settings.staging))]
    if problems:
        raise ConfigError(*problems)


def _command_problems(program: str) -> Iterator[str]:
    if shutil.which(program) is not None:
        return
    if Path(program).is_dir():
        yield f"command: {program!r} is a folder"
    elif "/" in program and Path(program).exists():
        yield f"command: {program!r} is not executable; chmod +x it, or give its interpreter first (python {program})"
    elif "/" in program:
        yield f"command: there is no file {program!r}"
    else:
        yield f"command: there is no program {program!r} on the PATH"


def _staging_problems(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"staging: {folder} is not there or is no folder; name a folder in memory with --staging"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"staging: {folder} is not writable for this user; name another folder in memory with --staging"


# ------------------------------------------------------------------------------------------------ the dry run


def _print_plan(settings: JobConfig, *, as_json: bool) -> None:
    from orchestrator.cli.terminal import facts, output, print_json, size_text
    from orchestrator.core.wording import counted

    found = plan(settings)
    if as_json:
        print_json(found)
        return
    rows = [
        ("job", found["job"]),
        ("its folder", found["job_url"]),
        ("scheduler", found["scheduler"]),
        ("nodes", f"{found['nodes_min']} to {found['nodes_max']}"),
        ("workers per node", found["workers_per_node"]),
        ("world size", f"{found['world_size_min']} to {found['world_size_max']}"),
        ("command", " ".join(found["command"])),
        (
            "save every",
            counted(found["save_every"], "step") if found["save_every"] else "on notice and at the end only",
        ),
        ("notices", f"signals, and {found['notices']}" if found["notices"] != "none" else "signals only"),
        ("keep", _kept(found["keep_last"], found["keep_every"])),
        ("variables", " ".join(found["variables"])),
        ("staging folder", f"{found['staging']} ({size_text(found['staging_free_bytes'])} free)"),
    ]
    output().print(facts(rows))


def _kept(last: int, every: int) -> str:
    if last == 0:
        return "all checkpoints"
    return f"the newest {last}" + (f", and the first of every {every} steps" if every else "")


def plan(settings: JobConfig) -> dict[str, Any]:
    """What would be started."""
    from orchestrator.storage.opening import job_url

    return {
        "job": settings.job,
        "job_url": job_url(settings.store, settings.job),
        "scheduler": settings.scheduler,
        "nodes_min": settings.nodes_min,
        "nodes_max": settings.nodes_max,
        "workers_per_node": settings.workers_per_node,
        "world_size_min": settings.nodes_min * settings.workers_per_node,
        "world_size_max": settings.nodes_max * settings.workers_per_node,
        "command": list(settings.command),
        "save_every": settings.save_every,
        "keep_last": settings.keep_last,
        "keep_every": settings.keep_every,
        "grace_seconds": settings.grace_seconds,
        "notices": settings.notices,
        "max_failures": settings.max_failures,
        "variables": list(VARIABLES),
        "staging": settings.staging,
        "staging_free_bytes": shutil.disk_usage(settings.staging).free,
    }


VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "ORCHESTRATOR_JOB",
    "ORCHESTRATOR_GENERATION",
    "ORCHESTRATOR_LAUNCH",
)
"""Environment variables that every worker gets, as from torchrun and two of ours more."""


# ---------------------------------------------------------------------------------------------------- the run


def _run_locally(settings: JobConfig, take_over: bool, talk: Talk) -> int:
    from orchestrator.storage.opening import job_url
    from orchestrator.supervisor.local_job import LocalJob, LocalJobOptions

    options = LocalJobOptions(
        job_url=job_url(settings.store, settings.job), take_over=take_over, sinks=(talk.event_sink(time.monotonic()),)
    )
    job = LocalJob(settings, options)
    job.acquire()
    try:
        check_store_before_start(job, options, settings.job, talk)
    except BaseException:
        job.state.release()
        raise
    try:
        finish = asyncio.run(_supervise(job, talk))
    except asyncio.CancelledError:
        talk.last(int(ExitCode.FAILED), "ended at once by Ctrl-C; what was being saved may be lost")
        return int(ExitCode.FAILED)
    talk.last(finish.exit_code, last_words(job, job.logs, finish))
    return finish.exit_code


def check_store_before_start(job: LocalJob, options: LocalJobOptions, name: str, talk: Talk) -> None:
    """Raises FencedError, ConfigError. A gang that still runs needs its supervisor whatever the store does now."""
    from orchestrator.checkpoint.generations import Claimant
    from orchestrator.cli.store_probe import require_fit

    if job.takes_back:
        return
    who = Claimant(job=name, owner=job.owner, claimant="", take_over=options.take_over)
    told = require_fit(options.job_url, who)
    if told:
        talk.say(told)


async def _supervise(job: LocalJob, talk: Talk) -> Finish:
    running = asyncio.current_task()
    assert running is not None
    signals = Signals(job, running, talk)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and shells' background jobs want it
            loop.add_signal_handler(number, signals.on_signal, number)
    return await job.run()


class HasSupervisor(Protocol):
    """A job that is being run."""

    @property
    def supervisor(self) -> Supervisor | None:
        """Once there is one."""
        ...


class Signals:
    """Turns signals into requests: drain, then cancel, then an end at once. Only Ctrl-C goes beyond the first."""

    def __init__(self, job: HasSupervisor, running: asyncio.Task[Any], talk: Talk) -> None:
        self._job = job
        self._running = running
        self._talk = talk
        self._stage = 0

    def on_signal(self, number: int) -> None:
        """Called by the event loop, never in the middle of anything."""
        from orchestrator.core.messages import Request, Requested

        supervisor = self._job.supervisor
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if supervisor is None or (self._stage > 0 and number != signal.SIGINT):
            return
        self._stage += 1
        if self._stage == 1:
            self._talk.say(f"{name}: saving, then ending; Ctrl-C ends without saving")
            supervisor.drain(name)
        elif self._stage == 2:
            self._talk.say("Ctrl-C again: ending without another save; once more ends at once")
            supervisor.submit(Requested(request=Request.CANCEL, by="a second Ctrl-C"))
        elif self._stage == 3:  # more of them must not keep the nodes from being ended
            self._running.cancel()


def last_words(job: HasSupervisor, logs: Path, finish: Finish) -> str:
    """How it ended, and what to do."""
    from orchestrator.core.messages import Outcome

    supervisor = job.supervisor
    ending = supervisor.job.ending if supervisor is not None else None
    newest = supervisor.job.newest_committed if supervisor is not None else None
    if ending is not None and ending.outcome is Outcome.DRAINED:
        where = f"resumes from checkpoint {newest}" if newest else "starts from the beginning, nothing was saved"
        return f"{finish.reason}; the same command {where}"
    if ending is not None and ending.outcome is Outcome.CANCELLED:
        return f"{finish.reason}; the same command with --take-over starts the job again"
    if ending is not None and ending.outcome is Outcome.FAILED:
        return f"{finish.reason}; the workers' output is in {logs}"
    return finish.reason


class Talk:
    """Lines on standard error, for people or as JSON. A terminal that has gone away must not end the training."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, text: str) -> None:
        """Something that is not an event of the job."""
        self._write(json.dumps({"kind": "said", "reason": text}) if self._as_json else text)

    def last(self, exit_code: int, text: str) -> None:
        """The last line: how it ended, and what to do."""
        ended = {"kind": "run ended", "reason": text, "exit_code": exit_code}
        self._write(json.dumps(ended) if self._as_json else f"{text} (exit code {exit_code})")

    def event_sink(self, start_seconds: float) -> Sink:
        """Writes each event."""
        from orchestrator.telemetry import text_sink

        as_text = text_sink(sys.stderr, start_seconds)

        def write(record: EventRecord) -> None:
            with contextlib.suppress(OSError):
                if self._as_json:
                    self._write(json.dumps(record.as_dict()))
                else:
                    as_text(record)

        return write

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

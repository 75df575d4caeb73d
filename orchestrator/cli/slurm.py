"""`orchestrator run --scheduler slurm`: submits itself; inside an allocation it supervises. No verb of its own.

A person's own batch script ends with the same command (`deploy/slurm/train.sbatch`): it finds itself inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError, ExitCode, OrchestratorError, SchedulerError

if TYPE_CHECKING:
    from orchestrator.cli.run import Talk
    from orchestrator.config import JobConfig
    from orchestrator.core.messages import Finish
    from orchestrator.schedulers.slurm.commands import SlurmCommands
    from orchestrator.supervisor.slurm_job import Allocation, SlurmJob
    from orchestrator.supervisor.state_folder import StateFolder

ONLY_OUTSIDE = ("command", "store", "scheduler", "sbatch")
"""Settings that are said otherwise, or mean nothing, inside."""


WAKE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""As `--signal=B:USR1@…` sends them: Slurm knows why."""
REQUEUE_SECONDS_MAX = 600.0
"""For how long a controller that is away is asked again."""
PASSING_SECONDS = 0.2
REQUEUE_AGAIN_SECONDS = 5.0
TOTALS = {"--gpus": "SLURM_GPUS", "--gpus-per-task": "SLURM_GPUS_PER_TASK"}
"""Of sbatch, and how the batch step is told: Slurm measures each step by them, and refuses one on a single host."""
PER_NODE_ADVICE = "agents are started host by host; say --gres=gpu:N or --gpus-per-node=N"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, to be said again in the batch script."""

    given: Mapping[str, Any]
    config: Path | None
    dry_run: bool


def run(settings: JobConfig, asked: Asked, take_over: bool, talk: Talk) -> int:
    """Submit, or supervise if this is the batch step (or a shell of an interactive allocation). The exit code."""
    from orchestrator.schedulers.slurm.commands import SlurmCommands
    from orchestrator.supervisor.slurm_job import in_allocation

    commands = SlurmCommands()
    if in_allocation() and not asked.dry_run:
        return _supervise(_of_array(settings, os.environ), commands, take_over, talk)
    return _submit(settings, asked, commands, take_over, talk)


def _of_array(settings: JobConfig, environment: Mapping[str, str]) -> JobConfig:
    """Each task of a job array is a job of its own, with its number behind the name."""
    task = environment.get("SLURM_ARRAY_TASK_ID")
    return settings if task is None else settings.model_copy(update={"job": f"{settings.job}-{task}"})


# ------------------------------------------------------------------------------------------------- submitting


def _is_total(option: str) -> bool:
    return _name(option) in (*TOTALS, "-G")


def _name(option: str) -> str:
    return "-G" if option.startswith("-G") else re.split("[= ]", option, maxsplit=1)[0]


def _submit(settings: JobConfig, asked: Asked, commands: SlurmCommands, take_over: bool, talk: Talk) -> int:
    from orchestrator.schedulers.slurm.submission import FIXED_OPTIONS, asked_limit_seconds, render, too_short
    from orchestrator.storage.opening import job_url
    from orchestrator.supervisor.state_folder import StateFolder

    fixed = sorted({_name(option) for option in settings.sbatch} & set(FIXED_OPTIONS))
    if fixed:
        raise ConfigError(f"sbatch: {', '.join(fixed)} cannot be given: the job's own settings say so")
    totals = sorted({_name(option) for option in settings.sbatch if _is_total(option)})
    if totals:
        raise ConfigError(f"sbatch: {', '.join(totals)} cannot be given: {PER_NODE_ADVICE}")
    short = too_short(asked_limit_seconds(settings.sbatch), settings.grace_seconds)
    if short is not None:
        raise ConfigError(f"sbatch: {short}")
    state = StateFolder(settings.job, job_url(settings.store, settings.job))
    log = state.path / "slurm-%j.log"
    script = render(
        job=settings.job,
        nodes_min=settings.nodes_min,
        nodes_max=settings.nodes_max,
        log=str(log),
        options=settings.sbatch,
        command=inner_command(settings, asked, take_over=take_over),
    )
    for line in _findings(settings, commands, state.save_seconds()):
        talk.say(line)
    if asked.dry_run:
        sys.stdout.write(script)
        talk.say("nothing was submitted")
        return 0
    job_id = _submit_script(script, state, commands)
    state.note_slurm_job(job_id)
    own = any(_name(option) in ("--output", "-o") for option in settings.sbatch)
    where = "where --output says" if own else f"to {str(log).replace('%j', job_id)}"
    talk.say(
        f"submitted as Slurm's job {job_id}: its output goes {where}; "
        f"`orchestrator status {settings.job}` shows it once it runs"
    )
    return 0


def _submit_script(script: str, state: StateFolder, commands: SlurmCommands) -> str:
    """Slurm's id of the job. Its output may come at once: the folder is there first, and goes if nothing came of it."""
    is_new = not state.path.exists()
    state.make()
    try:
        job_id = commands.submit(script)
        if not job_id:
            raise SchedulerError("sbatch has submitted nothing")  # as with --test-only
    except SchedulerError:
        if is_new:
            state.forget()
        raise
    return job_id


def inner_command(settings: JobConfig, asked: Asked, *, take_over: bool) -> tuple[str, ...]:
    """What the batch script runs: the same settings, whatever its folder."""
    words = [sys.executable, "-m", "orchestrator", "run", "--scheduler=slurm", f"--store={settings.store}"]
    if asked.config is not None or Path("orchestrator.toml").exists():
        words.append(f"--config={(asked.config or Path('orchestrator.toml')).absolute()}")
    for name, value in asked.given.items():
        if value is not None and name not in ONLY_OUTSIDE:
            flag = f"--{name.replace('_', '-')}"
            words += [f"{flag}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    if take_over:
        words.append("--take-over")
    return (*words, "--", *settings.command)


def _findings(settings: JobConfig, commands: SlurmCommands, save_seconds: float | None) -> list[str]:
    """What this cluster costs. If it cannot be asked, the submission says so itself."""
    from orchestrator.schedulers.slurm.submission import inspect

    try:
        name = _partition(settings.sbatch) or commands.default_partition()
        if name is None:
            return []
        cluster, partition = commands.settings(), commands.partition(name)
        found = inspect(cluster, partition, save_every=settings.save_every, save_seconds=save_seconds)
    except SchedulerError:
        return []
    return [f"{'warning' if one.loses else 'note'}: {one.words}; {one.remedy}" for one in found]


def _partition(options: tuple[str, ...]) -> str | None:
    for option in options:
        for prefix in ("--partition=", "-p"):
            if option.startswith(prefix):
                return option.removeprefix(prefix).strip().split(",")[0]
    return None


# ------------------------------------------------------------------------------------------------ supervising


def _supervise(settings: JobConfig, commands: SlurmCommands, take_over: bool, talk: Talk) -> int:
    from orchestrator.cli.run import last_words
    from orchestrator.storage.opening import job_url
    from orchestrator.supervisor.slurm_job import SlurmJob, read_allocation

    _ignore_wake_signals()
    given = [option for option, variable in TOTALS.items() if variable in os.environ]
    if given:
        raise ConfigError(f"this job was submitted with {', '.join(given)}, which cannot be: {PER_NODE_ADVICE}")
    place, url = read_allocation(commands), job_url(settings.store, settings.job)
    _check_limit(settings, place, commands)
    take_over = _check_store(settings, place, commands, url, take_over, talk)
    job = SlurmJob(
        settings,
        place,
        job_url=url,
        commands=commands,
        take_over=take_over,
        sinks=(talk.event_sink(time.monotonic()),),
    )
    try:
        finish = asyncio.run(_run(job, talk))
    except asyncio.CancelledError:
        talk.last(int(ExitCode.FAILED), "ended at once by Ctrl-C; what was being saved may be lost")
        return int(ExitCode.FAILED)
    talk.last(finish.exit_code, last_words(job, job.logs, finish))
    if finish.exit_code == ExitCode.RESUMABLE and job.departure is not None and job.departure.comes_again:
        fruitless = _fruitless(job.state, place, url)
        _requeue(place, commands, talk, fruitless=fruitless, fruitless_max=settings.max_failures)
    return finish.exit_code


def _check_limit(settings: JobConfig, place: Allocation, commands: SlurmCommands) -> None:
    """A limit that leaves no time would have the job requeued again and again. Raises ConfigError."""
    from orchestrator.schedulers.slurm.submission import too_short

    with contextlib.suppress(SchedulerError):  # the watch looks again and again
        record = commands.job(place.reference)
        if record is None or record.preempted or record.ends_at_seconds is None:
            return
        short = too_short(record.ends_at_seconds - time.time(), settings.grace_seconds)
        if short is not None:
            raise ConfigError(short)


def _check_store(
    settings: JobConfig, place: Allocation, commands: SlurmCommands, url: str, take_over: bool, talk: Talk
) -> bool:
    """Whether to take the job over: also from one of Slurm's jobs that has ended without a word. Raises FencedError."""
    from orchestrator.checkpoint.generations import Claimant, claims_of, read_end
    from orchestrator.cli.store_probe import require_fit
    from orchestrator.storage.opening import PERSON_PATIENCE_SECONDS, open_store
    from orchestrator.supervisor.slurm_job import is_over

    with contextlib.suppress(OrchestratorError):  # whatever is wrong, the probe says it
        store = open_store(url, PERSON_PATIENCE_SECONDS)
        claims = claims_of(store, settings.job)
        if take_over and took_over_before({claim.owner for claim in claims.values()}, place.owner, os.environ):
            take_over = False
        before = claims[max(claims)].owner if claims else place.owner
        unfinished = before != place.owner and read_end(store, max(claims)) is None
        if unfinished and not take_over and is_over(commands, before, place.cluster):
            talk.say(f"the run {before} has ended without a word, says Slurm: its job is gone on with")
            take_over = True
    told = require_fit(url, Claimant(job=settings.job, owner=place.owner, claimant="", take_over=take_over))
    if told:
        talk.say(told)
    return take_over


def took_over_before(owners: Collection[str], owner: str, environment: Mapping[str, str]) -> bool:
    """Whether a requeued job has used its `--take-over`, which still stands in its script.

    Used again, it would take the job from whoever has gone on with it, or start one that was cancelled or is done.
    """
    return environment.get("SLURM_RESTART_COUNT", "0") != "0" and owner in owners


async def _run(job: SlurmJob, talk: Talk) -> Finish:
    from orchestrator.cli.run import Signals

    running = asyncio.current_task()
    assert running is not None
    signals, loop = Signals(job, running, talk), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, signals.on_signal, number)
    for number in WAKE_SIGNALS:
        loop.add_signal_handler(number, job.wake)
    try:
        return await job.run()
    finally:
        for number in WAKE_SIGNALS:
            loop.remove_signal_handler(number)
        _ignore_wake_signals()


def _ignore_wake_signals() -> None:
    """Before and after the run they would end this process: a job that has saved would not be requeued."""
    for number in WAKE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _requeue(place: Allocation, commands: SlurmCommands, talk: Talk, *, fruitless: int, fruitless_max: int) -> None:
    """The very last: Slurm ends this process for it. A controller that is away is waited for."""
    from orchestrator.schedulers.slurm.submission import PASSING_STATES, judge_requeue

    until, said = time.monotonic() + REQUEUE_SECONDS_MAX, False
    while True:
        try:
            record = commands.job(place.reference)
            if record is not None and record.state in PASSING_STATES and time.monotonic() < until:
                time.sleep(PASSING_SECONDS)
                continue
            decided = judge_requeue(record, fruitless=fruitless, fruitless_max=fruitless_max)
            if decided.wanted:
                commands.requeue(place.reference)
            talk.say(f"{'requeued' if decided.wanted else 'not requeued'}: {decided.reason}")
            return
        except SchedulerError as error:
            if time.monotonic() >= until:
                talk.say(f"not requeued: {error}")
                return
            if not said:
                talk.say(f"not requeued yet, trying on: {error}")
            said = True
        time.sleep(REQUEUE_AGAIN_SECONDS)


def _fruitless(state: StateFolder, place: Allocation, url: str) -> int:
    """Runs in a row that have committed nothing. Where nobody can say, this one has."""
    from orchestrator.checkpoint.generations import fruitless_runs, newest_committed
    from orchestrator.storage.opening import PERSON_PATIENCE_SECONDS, open_store

    counts = [0]
    with contextlib.suppress(OrchestratorError):  # a store that is away now is no reason not to come again
        store = open_store(url, PERSON_PATIENCE_SECONDS)
        newest = newest_committed(store)
        counts.append(fruitless_runs(store, place.owner))
        counts.append(state.count_fruitless(place.owner, None if newest is None else str(newest)))
    return max(counts)

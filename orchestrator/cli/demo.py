"""`orchestrator demo`: a small training loses a machine, shrinks, grows back, has a worker killed, and ends exactly.

Three runs of examples/gpt/train.py on local nodes: the uninterrupted reference, the main one, and one that is killed
and resumed at the same world size. Checkpoints go to a folder or, with --store, to any store, and are read back from
there. It checks itself and exits 1 if a check fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.format import Index
from orchestrator.checkpoint.reader import read_committed, verify
from orchestrator.cli import demo_analysis as analysis
from orchestrator.cli.report_page import (
    SAMPLES_FACT,
    SUMMARY_HEADERS,
    SUMMARY_TEXT_COLUMNS,
    Check,
    Report,
    render,
    summary_rows,
)
from orchestrator.cli.store_probe import require_writable
from orchestrator.config import JobConfig
from orchestrator.core.job import Phase
from orchestrator.core.messages import Finish
from orchestrator.core.wording import counted
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import job_url, open_store
from orchestrator.supervisor.local_job import LocalJob, LocalJobOptions
from orchestrator.supervisor.loop import Supervisor
from orchestrator.telemetry import EventRecord

EXAMPLE = Path("examples/gpt/train.py")
GLOBAL_BATCH = 32
RUN_SECONDS_MAX = 900.0
PLAIN_WIDTH = 120  # characters, where the output is no terminal

Scenario = Callable[[Supervisor, "Plan"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The demo's numbers."""

    steps: int
    nodes: int
    workers_per_node: int
    save_every: int
    deadline_seconds: float
    output: Path
    store: str | None = None
    """Where this demo's jobs keep their checkpoints; None: below the output folder."""

    def store_of(self, run: str) -> str:
        """The store of one run."""
        return str(self.output / "runs" / run / "store") if self.store is None else self.store


@dataclass(kw_only=True)
class RunResult:
    """What one run left."""

    name: str
    store: ObjectStore
    start_seconds: float
    records: list[EventRecord] = field(default_factory=list)
    log: analysis.TrainingLog | None = None
    wall_seconds: float = 0.0
    step_seconds: float = 0.0


class Screen:
    """One line for each event; below them, on a terminal, the runs' live progress."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.progress = Progress(
            TextColumn("{task.description:<30}"),
            BarColumn(bar_width=20),
            TextColumn("step {task.completed:>4.0f} of {task.total:.0f}  {task.fields[state]:<20}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, run: TaskID, step: int, state: str) -> None:
        """How far a run is."""
        self.progress.update(run, completed=step, state=state)

    def line(self, text: str) -> None:
        """Print one event's line above the progress."""
        if self._console.is_terminal:
            self._console.print(Text(text), overflow="ellipsis", no_wrap=True)
        else:
            self._console.file.write(text + "\n")
            self._console.file.flush()


def demo(
    steps: Annotated[int, typer.Option(min=60, max=100_000, help="Optimizer steps of each run.")] = 120,
    nodes: Annotated[int, typer.Option(min=2, max=8, help="Local nodes.")] = 2,
    workers_per_node: Annotated[int, typer.Option(min=1, max=8, help="Workers per node.")] = 2,
    save_every: Annotated[int, typer.Option(min=5, help="Steps between checkpoints.")] = 20,
    deadline_seconds: Annotated[float, typer.Option(min=5, help="Notice before the node goes (seconds).")] = 20.0,
    output: Annotated[Path, typer.Option(help="Folder for what the runs leave; an earlier demo is removed.")] = Path(
        "demo-output"
    ),
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Keep the checkpoints there and not in the output folder; nothing is removed."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Train a small GPT through a preemption, a shrink, a growth and a kill, and check that nothing was lost."""
    plan = Plan(
        steps=steps,
        nodes=nodes,
        workers_per_node=workers_per_node,
        save_every=save_every,
        deadline_seconds=deadline_seconds,
        output=output.absolute(),
        store=None if store is None else job_url(store, f"demo-{secrets.token_hex(4)}"),  # no earlier demo's
    )
    _prepare(plan)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else PLAIN_WIDTH)
    started = time.monotonic()
    with Screen(console) as screen:
        results = [
            _run(plan, "reference", "1 uninterrupted", _watch_only, screen),
            _run(plan, "main", "2 notice, shrink, grow, kill", _main_scenario, screen),
            _run(plan, "killed", "3 killed, same world size", _kill_scenario, screen),
        ]
    report = _report(plan, results, time.monotonic() - started)
    page = plan.output / "report.html"
    page.write_text(render(report))
    if json_file is not None:
        json_file.write_text(json.dumps(_figures(report, results), indent=2) + "\n")
    _show(console, report, page)
    if not all(check.passed for check in report.checks):
        raise typer.Exit(1)


def _prepare(plan: Plan) -> None:
    if not EXAMPLE.exists():
        raise ConfigError(f"{EXAMPLE} is not here: run the demo in the project's folder")
    if plan.store is not None:
        require_writable(plan.store)
    marker = plan.output / "report.html"
    if plan.output.exists() and any(plan.output.iterdir()) and not (marker.exists() or (plan.output / "runs").exists()):
        raise ConfigError(f"{plan.output} holds other files than a demo's; name another folder with --output")
    shutil.rmtree(plan.output / "runs", ignore_errors=True)
    marker.unlink(missing_ok=True)
    (plan.output / "runs").mkdir(parents=True)


# ------------------------------------------------------------------------------------------------- the runs


def _run(plan: Plan, name: str, title: str, scenario: Scenario, screen: Screen) -> RunResult:
    """One run to its end. Raises OrchestratorError if it does not end well."""
    folder = plan.output / "runs" / name
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(EXAMPLE.absolute()),
        *("--steps", str(plan.steps), "--global-batch", str(GLOBAL_BATCH), "--log", str(folder / "log")),
    ]
    config = JobConfig(
        job=f"demo-{name}",
        store=plan.store_of(name),
        command=tuple(command),
        nodes=f"1:{plan.nodes}",
        workers_per_node=plan.workers_per_node,
        save_every=plan.save_every,
        reform_seconds=0.5,
        replacement_seconds=4.0,
        notices="none",
    )
    url = job_url(config.store, config.job)
    result = RunResult(name=name, store=open_store(url), start_seconds=time.monotonic())
    task = screen.progress.add_task(title, total=plan.steps, state="starting")

    def show(record: EventRecord) -> None:
        result.records.append(record)
        screen.line(f"{name:<9} {record.line(result.start_seconds)}")

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    job = LocalJob(config, LocalJobOptions(job_url=url, take_over=True, echo_output=False, sinks=(show,)))
    job.acquire()
    finish = asyncio.run(_ended_by_signals(_play(job, plan, scenario, partial(screen.show, task), result)))
    screen.progress.update(task, state="done" if finish.exit_code == 0 else "failed")
    if finish.exit_code != 0:
        raise OrchestratorError(
            f"the {name} run ended with status {finish.exit_code}: {finish.reason}; logs: {job.logs}"
        )
    result.wall_seconds = time.monotonic() - result.start_seconds
    result.log = analysis.read_training_log(folder / "log")
    return result


async def _ended_by_signals(playing: Coroutine[Any, Any, Finish]) -> Finish:
    """Raises OrchestratorError after SIGTERM or SIGHUP, when what was started is gone. Ctrl-C does it by itself."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(playing)
    came: list[str] = []

    def end(number: signal.Signals) -> None:
        came.append(number.name)
        if len(came) == 1:  # a second one would cut ending the nodes short
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if came:
            raise OrchestratorError(f"ended by {came[0]}; nothing of the demo runs any more") from None
        raise


async def _play(
    job: LocalJob, plan: Plan, scenario: Scenario, show: Callable[[int, str], None], result: RunResult
) -> Finish:
    """Run the job and the scenario beside it."""
    running = asyncio.create_task(job.run())
    while job.supervisor is None:
        await asyncio.sleep(0.01)
    supervisor = job.supervisor
    acting: asyncio.Task[None] = asyncio.create_task(scenario(supervisor, plan))
    until = time.monotonic() + RUN_SECONDS_MAX
    try:
        while not running.done():
            state = supervisor.job
            size = state.gang.world_size if state.gang else 0
            show(state.highest_step, f"{state.phase}, {counted(size, 'rank')}")
            if state.highest_step:
                result.step_seconds = state.step_seconds
            if time.monotonic() > until:
                raise OrchestratorError(f"the run did not end within {RUN_SECONDS_MAX:.0f} s")
            await asyncio.wait({running}, timeout=0.1)
    finally:
        acting.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})  # until the nodes are gone
    with contextlib.suppress(asyncio.CancelledError):
        await acting  # a scenario that failed is a bug of the demo, and is raised here
    show(supervisor.job.highest_step, "ended")
    return running.result()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def _training(supervisor: Supervisor, step: int, world_size: int) -> bool:
    job = supervisor.job
    return (
        job.phase is Phase.RUNNING
        and job.gang is not None
        and job.gang.world_size == world_size
        and job.lowest_step >= step
        and not job.awaiting_first_step
    )


async def _watch_only(supervisor: Supervisor, plan: Plan) -> None:
    """The reference: nothing happens to it."""


async def _main_scenario(supervisor: Supervisor, plan: Plan) -> None:
    """A notice at a quarter; when the job has grown back, a kill half-way between two saves."""
    full = plan.nodes * plan.workers_per_node
    await _until(lambda: _training(supervisor, plan.steps // 4 + 3, full))
    assert supervisor.job.gang is not None
    supervisor.rehearse_notice(supervisor.job.gang.nodes[-1], plan.deadline_seconds)
    generation = supervisor.job.gang.generation
    await _until(
        lambda: (
            supervisor.job.gang is not None
            and supervisor.job.gang.generation >= generation + 2
            and _training(supervisor, 0, full)
        )
    )
    await _kill_between_saves(supervisor, plan, full)


async def _kill_scenario(supervisor: Supervisor, plan: Plan) -> None:
    """A kill at half of the steps, nodes stay."""
    full = plan.nodes * plan.workers_per_node
    await _until(lambda: _training(supervisor, plan.steps // 2, full))
    await _kill_between_saves(supervisor, plan, full)


async def _kill_between_saves(supervisor: Supervisor, plan: Plan, world_size: int) -> None:
    """SIGKILL to the highest rank once a few steps are done since the newest committed checkpoint."""

    def due() -> bool:
        job = supervisor.job
        committed = job.newest_committed
        if committed is None:
            return False
        return _training(supervisor, min(committed.step + plan.save_every // 3, plan.steps - 3), world_size)

    await _until(due)
    victim = max(supervisor.job.ranks)
    os.kill(supervisor.job.ranks[victim].pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- the outcome


def _report(plan: Plan, results: list[RunResult], seconds: float) -> Report:
    reference, main, killed = results
    assert reference.log is not None
    assert main.log is not None
    assert killed.log is not None
    full = plan.nodes * plan.workers_per_node
    spans = analysis.generation_spans(main.records, main.start_seconds)
    shrunk = full - plan.workers_per_node
    samples = plan.steps * GLOBAL_BATCH
    stops = analysis.interruptions(main.records, main.start_seconds, main.step_seconds)
    checks = [
        analysis.check_deadline(main.records),
        analysis.check_world_sizes(spans, [full, shrunk, full, full]),
        analysis.check_causes(stops),
        *analysis.check_stream(main.log, reference.log, samples),
        analysis.check_losses(main.log, reference.log),
        analysis.check_identical(_last_digests(killed), _last_digests(reference)),
        _check_checkpoints(results),
    ]
    return Report(
        title="A job that survives",
        subtitle=f"{plan.nodes} local nodes with {counted(plan.workers_per_node, 'worker')} each, {plan.steps} steps",
        events=analysis.timeline(main.records, main.start_seconds),
        generations=spans,
        losses=main.log.losses,
        reference_losses=reference.log.losses,
        interruptions=stops,
        checks=tuple(checks),
        facts=(
            ("three runs took", f"{seconds:.0f} s"),
            (SAMPLES_FACT, "0" if checks[3].passed and checks[4].passed else "some"),
            ("a step took", f"{reference.step_seconds:.3f} s"),
            *(() if plan.store is None else (("checkpoints are in", plan.store),)),
        ),
    )


def _last_digests(result: RunResult) -> dict[str, str]:
    index = _newest(result)
    return {} if index is None else analysis.tensor_digests(result.store, index)


def _newest(result: RunResult) -> Index | None:
    entry = survey(result.store).newest()
    return None if entry is None else read_committed(result.store, entry.id)


def _check_checkpoints(results: list[RunResult]) -> Check:
    """Every committed checkpoint of every run reads back with the right digests."""
    count, problems = 0, []
    for result in results:
        for entry in survey(result.store).entries:
            if entry.standing is Standing.COMMITTED:
                count += 1
                index = read_committed(result.store, entry.id)
                problems += [problem for _, problem in verify(result.store, index) if problem]
    detail = f"{count} committed checkpoints read back" + (f"; {problems[0]}" if problems else "")
    return Check(name="every committed checkpoint verifies", passed=count > 0 and not problems, detail=detail)


def _figures(report: Report, results: list[RunResult]) -> dict[str, object]:
    return {
        "interruptions": [asdict(row) for row in report.interruptions],
        "checks": [asdict(check) for check in report.checks],
        "facts": dict(report.facts),
        "runs": [
            {"name": result.name, "seconds": result.wall_seconds, "step_seconds": result.step_seconds}
            for result in results
        ],
        "generations": [asdict(span) for span in report.generations],
    }


def _show(console: Console, report: Report, page: Path) -> None:
    table = Table(title="What the interruptions cost")
    for column, header in enumerate(SUMMARY_HEADERS):
        words = column in SUMMARY_TEXT_COLUMNS
        table.add_column(header, justify="left" if words else "right", no_wrap=words)
    for row in summary_rows(report.interruptions):
        table.add_row(*row)
    console.print(table)
    for check in report.checks:
        mark = "[green]✓[/green]" if check.passed else "[red]✗ FAILED[/red]"
        console.print(f"{mark} {check.name}: {check.detail}")
    console.print("  ".join(f"{label} {value}" for label, value in report.facts))
    console.print(f"page: {page}")

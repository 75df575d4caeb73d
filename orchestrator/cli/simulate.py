"""`orchestrator simulate --trace FILE`: what a spot trace would have left of a job's time, and what it went into.

Here: options become a scenario, and the comparison becomes a table, a chart, JSON or a page. What it is not: it
simulates nothing (`orchestrator.simulation` does), and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.terminal import output, print_json, say, table, talk
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.simulation.comparison import Row, Theory
    from orchestrator.simulation.scenario import Scenario
    from orchestrator.simulation.traces import Trace

SECONDS_MAX = 86_400.0
SHARDS_MAX = 20_000_000
"""Shards that one replay may save, all told: a minute or so for each million."""
CHART_COLUMNS = 72
BLOCKS = " ▁▂▃▄▅▆▇█"


def simulate(
    *,
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Lines `ms,add|remove,node`, or `date, time, nodes` (which node goes is then assumed)."
        ),
    ],
    nodes: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="As in `run`; MAX nodes at most are used. Default: 1 to the most there."),
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(metavar="S", help="One training step on MAX nodes; on n nodes it takes MAX/n times that.")
    ] = 1.0,
    save_every: Annotated[
        str,
        typer.Option(
            metavar="STEPS|auto", help="Between periodic saves. auto: Young's interval, 0: only when a node will go."
        ),
    ] = "auto",
    state_bytes: Annotated[
        float, typer.Option(metavar="BYTES", help="The whole state; 1e11 is about 7 billion parameters with Adam.")
    ] = 100e9,
    bandwidth: Annotated[
        float, typer.Option(metavar="BYTES", help="From one node to the store, per second (10 Gbit/s network: 1e9).")
    ] = 1e9,
    stall_seconds: Annotated[
        float, typer.Option(metavar="S", help="Training stands still so long per save (about 4 GB copied in memory).")
    ] = 0.5,
    restart_seconds: Annotated[
        float, typer.Option(metavar="S", help="From the launch of the workers to their first step, reading included.")
    ] = 10.0,
    notice_seconds: Annotated[
        float, typer.Option(metavar="S", help="Every loss is announced so long before (AWS: 120, others: 30); 0: none.")
    ] = 120.0,
    replacement_seconds: Annotated[
        float, typer.Option(metavar="S", help="From a node's being there to its agent's connecting.")
    ] = 0.0,
    periodic_stall_seconds: Annotated[
        float,
        typer.Option(
            metavar="S", help="To compare with: one save's stall (published for DCP's asynchronous save, 7B)."
        ),
    ] = 6.3,
    periodic_restart_seconds: Annotated[
        float, typer.Option(metavar="S", help="To compare with: a restart of the whole job.")
    ] = 120.0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with charts.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a spot trace against this job's own policies, and say where the machines' time goes.

    Goodput is useful node-seconds over those available. docs/simulate.md explains rows, columns and assumptions.
    """
    from orchestrator.simulation.comparison import compare, theory
    from orchestrator.simulation.scenario import Scenario
    from orchestrator.simulation.traces import read_trace

    found = read_trace(trace)
    numbers = {
        "step-seconds": step_seconds,
        "stall-seconds": stall_seconds,
        "restart-seconds": restart_seconds,
        "notice-seconds": notice_seconds,
        "replacement-seconds": replacement_seconds,
        "periodic-stall-seconds": periodic_stall_seconds,
        "periodic-restart-seconds": periodic_restart_seconds,
        "state-bytes": state_bytes,
        "bandwidth": bandwidth,
    }
    low, high = _checked(found, nodes, numbers)
    every = _steps(save_every)
    scenario = Scenario(
        nodes_min=low,
        nodes_max=high,
        step_seconds=step_seconds,
        save_every_steps=every or 0,
        state_bytes=round(state_bytes),
        bandwidth_bytes_per_second=bandwidth,
        stall_seconds=stall_seconds,
        restart_seconds=restart_seconds,
        notice_seconds=notice_seconds,
        replacement_seconds=replacement_seconds,
    )
    _check_amount(found, scenario, every)
    with _progress() as on_progress:
        rows = compare(
            found,
            scenario,
            save_every=every,
            periodic_stall_seconds=periodic_stall_seconds,
            periodic_restart_seconds=periodic_restart_seconds,
            on_progress=on_progress,
        )
    known = theory(found, scenario, periodic_stall_seconds)
    if html is not None:
        _write_page(html, found, scenario, rows, known)
    if json_output:
        print_json(as_dict(found, scenario, rows, known))
    else:
        _print(found, scenario, rows, known)


# ---------------------------------------------------------------------------------------------------- options


def _checked(trace: Trace, nodes: str | None, numbers: dict[str, float]) -> tuple[int, int]:
    """MIN and MAX. Raises ConfigError with every problem."""
    from orchestrator.config import parse_nodes
    from orchestrator.simulation.traces import NODES_MAX

    problems = [
        f"--{name}: needs a number from 0 to {most:g}, got {value:g}"
        for name, value in numbers.items()
        if not 0 <= value <= (most := 1e18 if name in ("state-bytes", "bandwidth") else SECONDS_MAX)
    ]
    problems += [
        f"--{name}: must be at least {least:g}, got {numbers[name]:g}"
        for name, least in (("step-seconds", 1e-4), ("bandwidth", 1.0))
        if 0 <= numbers[name] < least
    ]
    low, high = 1, trace.peak_nodes
    try:
        low, high = (1, trace.peak_nodes) if nodes is None else parse_nodes(nodes)
        if not 1 <= low <= high <= NODES_MAX:
            problems.append(f"--nodes: needs 1 <= MIN <= MAX <= {NODES_MAX}, got {low}:{high}")
    except ValueError as error:
        problems.append(f"--nodes: {error}")
    if problems:
        raise ConfigError(*problems)
    return low, high


def _steps(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ConfigError(f"--save-every: needs a whole number of steps, or auto, got {text!r}")
    return int(text)


def _check_amount(trace: Trace, scenario: Scenario, save_every: int | None) -> None:
    """Refuse what would take hours. Raises ConfigError."""
    from dataclasses import replace

    from orchestrator.simulation.comparison import save_every_steps

    every = save_every if save_every is not None else save_every_steps(trace, replace(scenario, notice_seconds=0.0))
    shards = trace.duration_us / 1e6 / (max(every, 1) * scenario.step_seconds) * scenario.nodes_max if every else 0
    if shards > SHARDS_MAX:
        raise ConfigError(
            f"--save-every: a save every {every} steps of {scenario.step_seconds:g} s makes {shards:.2g} shards, more "
            f"than the {SHARDS_MAX:.2g} that are simulated; give a larger number of steps"
        )


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar for each replay on a terminal; nothing elsewhere."""
    console = talk()
    if not console.is_terminal:
        yield lambda _name, _share: None
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, share: float) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=1.0)
            bar.update(tasks[name], completed=share)

        yield show


# ---------------------------------------------------------------------------------------------------- output


def as_dict(trace: Trace, scenario: Scenario, rows: Sequence[Row], known: Theory) -> dict[str, Any]:
    """All figures, for programs. Shares of one row sum to 1."""
    from dataclasses import asdict

    return {
        "trace": {
            "name": trace.name,
            "duration_seconds": trace.duration_us / 1e6,
            "peak_nodes": trace.peak_nodes,
            "available_node_seconds": trace.node_us(scenario.nodes_max) / 1e6,
            "losses": trace.losses,
            "loss_instants": trace.loss_instants,
        },
        "scenario": {name: value for name, value in asdict(scenario).items() if name != "save_every_steps"},
        "theory": asdict(known),
        "rows": [_row_dict(row) for row in rows],
    }


def _row_dict(row: Row) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": row.name,
        "goodput": row.goodput,
        "bound": row.bound,
        "save_interval_seconds": row.interval_seconds,
        "remark": row.remark,
    }
    if row.outcome is not None:
        facts |= {
            "wall_goodput": row.outcome.wall_goodput,
            "causes": {str(cause): row.outcome.share(cause) for cause in row.outcome.node_us},
            "node_seconds": {str(cause): us / 1e6 for cause, us in row.outcome.node_us.items()},
            "interruptions": dict(row.outcome.interruptions),
            "restarts": row.outcome.restarts,
            "saves": row.outcome.saves,
            "lost_seconds_per_interruption": row.outcome.lost_seconds_per_interruption,
            "stopped": row.outcome.stopped,
        }
    return facts


HEADERS = (
    "",
    "goodput",
    "of its bound",
    "saving",
    "redone",
    "restarting",
    "waiting",
    "announced",
    "spare",
    "interruptions",
    "lost each (s)",
    "restarts",
    "saves",
    "by the clock",
)


def cells(row: Row) -> tuple[str | None, ...]:
    """One line under HEADERS. The causes' percentages and the goodput's add up to 100.00."""
    from orchestrator.simulation.goodput import Cause

    outcome = row.outcome
    if outcome is None:
        return (row.name, f"{row.goodput:.2%}", *([None] * (len(HEADERS) - 2)))
    shares = dict(zip(Cause, percentages([outcome.node_us[cause] for cause in Cause]), strict=True))
    lost = outcome.lost_seconds_per_interruption
    return (
        row.name,
        f"{shares[Cause.USEFUL]:.2f}%",
        f"{row.goodput / row.bound:.3f}" if row.bound else None,
        *(f"{shares[cause]:.2f}%" for cause in Cause if cause is not Cause.USEFUL),
        str(sum(outcome.interruptions.values())),
        None if lost is None else f"{lost:.1f}",
        str(outcome.restarts),
        str(outcome.saves),
        f"{outcome.wall_goodput:.2%}",
    )


def percentages(parts: Sequence[int]) -> list[float]:
    """Each part's percentage in hundredths, rounded so that they add up to 100 (largest remainders first)."""
    whole = sum(parts)
    if not whole:
        return [0.0] * len(parts)
    floors = [part * 10_000 // whole for part in parts]
    remainders = sorted(range(len(parts)), key=lambda index: -(parts[index] * 10_000 % whole))
    for index in remainders[: 10_000 - sum(floors)]:
        floors[index] += 1
    return [value / 100 for value in floors]


def sparkline(values: Sequence[float], most: float) -> str:
    """One block per value; `most` is a full one."""
    if most <= 0:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, math.ceil(value / most * (len(BLOCKS) - 1) - 1e-9))] for value in values)


def _print(trace: Trace, scenario: Scenario, rows: Sequence[Row], known: Theory) -> None:
    from orchestrator.simulation.goodput import over_time

    console = output()
    for line in summary(trace, scenario, known):
        console.print(line, soft_wrap=True)
    lines = list(zip(HEADERS, *(cells(row) for row in rows), strict=True))
    console.print(table(lines[0], lines[1:]))
    for row in rows:
        console.print(f"  {row.name}: {row.remark}", soft_wrap=True)
    outcome = rows[0].outcome
    assert outcome is not None
    available, training, goodput = over_time(outcome, CHART_COLUMNS)
    console.print(f"\n{rows[0].name}, {trace.duration_us / 3.6e9:.1f} h from left to right")
    for name, values, most, unit in (
        ("nodes there", available, float(scenario.nodes_max), f"of {scenario.nodes_max}"),
        ("nodes training", training, float(scenario.nodes_max), f"of {scenario.nodes_max}"),
        ("goodput", goodput, 1.0, "of 100 %"),
    ):
        console.print(f"{name:>14} │{sparkline(values, most)}│ {unit}", soft_wrap=True)
    best = next((row for row in rows if row.name.startswith("periodic")), None)
    if best is not None:
        say(f"{(rows[0].goodput - best.goodput) * 100:+.1f} points of goodput over periodic restarts")


def summary(trace: Trace, scenario: Scenario, known: Theory) -> list[str]:
    """The trace and the formulas in sentences."""
    hours, peak = trace.duration_us / 3.6e9, trace.peak_nodes
    mean = trace.node_us(scenario.nodes_max) / trace.duration_us
    lines = [
        f"{trace.name}: {hours:.1f} h, {peak} nodes at most, {mean:.1f} usable on average, {trace.losses} lost at "
        f"{trace.loss_instants} instants",
    ]
    if known.mean_seconds_between_losses is not None:
        lines.append(
            f"a loss every {known.mean_seconds_between_losses:.0f} s (M); best interval between saves without notice: "
            f"{known.young_seconds:.0f} s (Young), {known.daly_seconds:.0f} s (Daly); with periodic restarts "
            f"{known.periodic_young_seconds:.0f} s (Young), {known.periodic_daly_seconds:.0f} s (Daly)"
        )
    return lines


def _write_page(file: Path, trace: Trace, scenario: Scenario, rows: Sequence[Row], known: Theory) -> None:
    from orchestrator.cli.simulate_page import render

    try:
        file.write_text(render(trace, scenario, rows, known), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {file}: {error.strerror}") from error
    say(f"wrote {file}")
